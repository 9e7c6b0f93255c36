"""Drafters and predictors by name: a folder here, or a repository on the Hub in its cached folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError

# repositories may hold the same weights in other formats, which nothing here reads
PATTERNS = ["model*.safetensors", "draft_vocab.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]


def local_folder(source: str | Path, what: str = "drafter") -> Path:
    """The folder (or file) of a drafter or predictor.

    Args:
        source: a path, or a Hub id, with `@revision` where it is not the main branch. A repository is fetched
            once a process, so that all that is read of it is of one commit.
        what: for messages.

    Raises:
        ValueError: neither a path nor a repository that can be read.
    """
    if Path(source).exists():
        return Path(source)
    try:
        return _snapshot(str(source))
    except HFValidationError:
        reason = "there is no such path, and it is no Hub id"
    # an OSError where the Hub refuses, or where it is offline and nothing is cached
    except (HTTPError, OSError) as error:
        reason = brief(error)
    raise ValueError(f"no {what} at {str(source)!r}: expected a folder or a Hub id ({reason})")


def brief(error: BaseException) -> str:
    """What an error of the Hub says in a line, without the hints that follow."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = " ".join([line for line in lines if line and not line.startswith("For more info")][:2])
    own = getattr(error, "server_message", None)
    return (told if not own or own in told else f"{told}: {own}") or type(error).__name__


@cache
def _snapshot(source: str) -> Path:
    repository, _, revision = source.partition("@")
    return Path(snapshot_download(repository, revision=revision or None, allow_patterns=PATTERNS))
