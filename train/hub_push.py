"""Folders to the Hub: repository, branch, and all files in one commit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from foredraft.infer.hub import brief

RETRY_SECONDS = (1.0, 4.0)  # pauses before another try
TRANSIENT = (408, 429, 500, 502, 503, 504)
MAIN = "main"
STALE_SUFFIXES = (".safetensors", ".safetensors.index.json")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where folders go on the Hub."""

    repository: str  # of the drafter; that of its predictor has `-predictor` behind it
    is_private: bool = False  # repositories are created private, and public ones are refused
    revision: str = MAIN  # branch; made where it is missing

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.repository)
        except HFValidationError as error:
            raise ValueError(f"--push-to-hub expects a Hub id such as name/repository: {error}") from None

    @property
    def predictor_repository(self) -> str:
        """Hub id of the predictor."""
        return f"{self.repository}-predictor"


def push_folder(folder: Path, repository: str, destination: Destination, message: str) -> str:
    """Make a repository hold the files of a folder.

    All files go up in one commit, so that nobody loads half of two versions; it deletes weights of an earlier
    version that the folder no longer has. Whatever fails can be repeated.

    Args:
        folder: with a README.md.
        repository: Hub id; created where it is missing.
        destination: visibility and branch.
        message: of the commit.

    Returns:
        URL of the commit.

    Raises:
        ValueError: no token, a token that is not accepted or may not write there, a public repository where a
            private one was asked for, a Hub that is not reached or fails. The folder stays as it is.
    """
    api = HfApi()
    try:
        if get_token() is None:
            raise ValueError("there is no token: run `hf auth login` or set HF_TOKEN")
        _with_retries(lambda: _prepare(api, repository, destination))
        return _with_retries(lambda: _commit(api, folder, repository, destination.revision, message))
    # HTTPError of httpx or httpx2, whichever the Hub's client uses; RuntimeError wraps those of large files
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error.__cause__, HTTPError):
            raise
        raise ValueError(
            f"pushing {folder} to {repository} at {api.endpoint} failed: {_explain(error, repository)}. "
            "The folder is complete; the same command pushes it again"
        ) from error


def _prepare(api: HfApi, repository: str, destination: Destination) -> None:
    """Have the repository and the branch. Raises ValueError if the repository is public and must not be."""
    api.create_repo(repository, private=destination.is_private or None, exist_ok=True)
    if destination.is_private and not api.repo_info(repository).private:
        raise ValueError("the repository exists and is public; make it private or leave out --private")
    if destination.revision != MAIN:
        api.create_branch(repository, branch=destination.revision, exist_ok=True)


def _commit(api: HfApi, folder: Path, repository: str, revision: str, message: str) -> str:
    """Commit all files of a folder; the URL of the commit, or of the last one where nothing has changed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    paths = {path.relative_to(folder).as_posix(): path for path in files}
    found = api.list_repo_files(repository, revision=revision)
    stale = [name for name in found if name.endswith(STALE_SUFFIXES) and name not in paths]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in paths.items()),
        *(CommitOperationDelete(path_in_repo=name) for name in stale),
    ]
    commit = api.create_commit(repository, operations, commit_message=message, revision=revision)
    return str(commit.commit_url)


def _with_retries(action: Callable[[], T]) -> T:
    """Do what can be repeated, again where the Hub or the way to it failed for the moment."""
    for pause in RETRY_SECONDS:
        try:
            return action()
        except (HTTPError, RuntimeError) as error:
            if not _is_transient(error):
                raise
            print(f"foredraft: {brief(error)}; trying again in {pause:g} s", file=sys.stderr)
        time.sleep(pause)
    return action()


def _is_transient(error: BaseException | None) -> bool:
    """Whether it may go away by itself: no answer at all, or one that says so."""
    if isinstance(error, RuntimeError):
        error = error.__cause__
    return isinstance(error, HTTPError) and _status(error) in (None, *TRANSIENT)


def _status(error: BaseException | None) -> int | None:
    """Status of the answer that an error is about; None where there was no answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _explain(error: BaseException, repository: str) -> str:
    """What happened, and what to do."""
    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    if isinstance(cause, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it"
    told = brief(cause or error)
    match _status(cause):
        case 401:
            return f"the Hub does not accept the token: run `hf auth login` or set HF_TOKEN ({told})"
        case 403:
            return f"the token may not write to {repository}: use one with write access ({told})"
        case status if status in TRANSIENT:
            return f"the Hub failed {len(RETRY_SECONDS) + 1} times: try later ({told})"
        case None if isinstance(cause, HTTPError):
            return f"the Hub is not reached: check the network and HF_ENDPOINT ({told})"
    return told
