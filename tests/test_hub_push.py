"""Pushing to the Hub and loading from it, with failures, against a local server that speaks its calls."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import close_session

from foredraft.infer import hub as hub_module
from foredraft.infer.drafter_card import read_drafter_card
from foredraft.infer.drafters import load_drafter
from foredraft.infer.hub import local_folder
from foredraft.infer.params import EngineConfig
from foredraft.train import hub_push
from foredraft.train.hub_push import Destination, push_folder

SERVER = runpy.run_path(str(Path(__file__).with_name("hub_server.py")))
Hub = Any  # of hub_server.py
REPO = "someone/tiny-drafter"


@pytest.fixture(scope="module")
def drafter(make_artifact: Callable[..., Path]) -> Path:
    """A drafter with a draft vocabulary and a README.md."""
    folder = make_artifact()
    metadata = "license: mit\nlibrary_name: transformers\ntags: [x]"
    (folder / "README.md").write_text(f"---\n{metadata}\n---\n\n# Card\n")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty Hub that this process talks to, logged in, with a cache of its own."""
    with SERVER["run_hub"]() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub_push, "RETRY_SECONDS", (0.01, 0.01))
        monkeypatch.setenv("HF_TOKEN", SERVER["TOKEN"])
        hub_module._snapshot.cache_clear()
        yield running
        hub_module._snapshot.cache_clear()
        close_session()
        assert not running.unexpected


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def pushed(hub: Hub, repository: str = REPO, revision: str = "main") -> dict[str, bytes]:
    """What the Hub holds, without its own .gitattributes."""
    return {path: content for path, content in hub.files(repository, revision).items() if path[0] != "."}


def commits_of(hub: Hub) -> int:
    return sum("/commit/" in call for call in hub.calls)


def push(drafter: Path, **settings: Any) -> str:
    return push_folder(drafter, REPO, Destination(REPO, **settings), "message")


def test_the_repository_equals_the_folder(hub: Hub, drafter: Path) -> None:
    url = push(drafter)
    assert pushed(hub) == content_of(drafter)
    assert url == f"{hub.endpoint}/{REPO}/commit/{hub.repositories[REPO].branches['main']}"
    assert not hub.repositories[REPO].is_private
    assert commits_of(hub) == 1
    assert {call.split("/")[-1] for call in hub.calls if call.startswith("PUT")} == hub.blobs.keys()
    push(drafter)
    assert commits_of(hub) == 1, "nothing has changed"


def test_a_later_version_replaces_the_files_in_one_commit(hub: Hub, drafter: Path, tmp_path: Path) -> None:
    push(drafter)
    sharded = shutil.copytree(drafter, tmp_path / "sharded")
    weights = (sharded / "model.safetensors").rename(sharded / "model-00001-of-00001.safetensors")
    hub.repositories[REPO].commits[hub.repositories[REPO].branches["main"]]["mine.txt"] = b"of the owner"
    push(sharded)
    assert pushed(hub) == content_of(sharded) | {"mine.txt": b"of the owner"}
    assert "model.safetensors" not in pushed(hub)
    assert weights.name in pushed(hub)
    assert commits_of(hub) == 2


def test_private_and_branch(hub: Hub, drafter: Path) -> None:
    push(drafter, is_private=True, revision="v0.2")
    assert hub.repositories[REPO].is_private
    assert pushed(hub, revision="v0.2") == content_of(drafter)
    assert pushed(hub) == {}
    push(drafter, is_private=True, revision="v0.2")
    push(drafter, is_private=True)
    assert pushed(hub) == content_of(drafter)


def test_a_public_repository_is_not_filled_where_a_private_one_is_meant(hub: Hub, drafter: Path) -> None:
    push(drafter)
    other = replace(Destination(REPO), is_private=True)
    with pytest.raises(ValueError, match="exists and is public; make it private or leave out --private"):
        push_folder(drafter, REPO, other, "message")
    assert commits_of(hub) == 1


@pytest.mark.parametrize(
    ("method", "pattern", "status"),
    [
        ("POST", "/api/repos/create", 500),
        ("POST", "/preupload/", 503),
        ("PUT", "/lfs/", 500),
        ("POST", "/commit/", 500),
        ("POST", "/branch/", 429),
    ],
    ids=["create", "preupload", "upload", "commit", "branch"],
)
def test_what_fails_once_is_tried_again(
    hub: Hub, drafter: Path, method: str, pattern: str, status: int
) -> None:
    hub.fail(method, pattern, status, times=1)
    push(drafter, revision="next")
    assert pushed(hub, revision="next") == content_of(drafter)
    assert not hub.failures[0].times


@pytest.mark.parametrize(
    ("method", "pattern", "status", "message"),
    [
        ("POST", "/api/repos/create", 401, "the Hub does not accept the token: run `hf auth login`"),
        ("POST", "/api/repos/create", 403, f"the token may not write to {REPO}: use one with write access"),
        ("POST", "/api/repos/create", 500, "the Hub failed 3 times: try later .*500"),
        ("POST", "/commit/", 403, f"the token may not write to {REPO}"),
        ("POST", "/commit/", 500, "the Hub failed 3 times: try later .*500"),
        ("POST", "/commit/", 409, r"409 Conflict.* injected 409\. "),
        ("POST", "/api/validate-yaml", 400, "Invalid metadata in README.md"),
    ],
    ids=["token", "create-403", "create-500", "commit-403", "commit-500", "commit-409", "metadata"],
)
def test_failures_are_told_and_leave_the_folder(
    hub: Hub, drafter: Path, method: str, pattern: str, status: int, message: str
) -> None:
    before = content_of(drafter)
    hub.fail(method, pattern, status)
    with pytest.raises(ValueError, match=message) as error:
        push(drafter)
    text = str(error.value)
    assert text.startswith(f"pushing {drafter} to {REPO} at {hub.endpoint} failed: ")
    assert text.endswith("The folder is complete; the same command pushes it again")
    assert "\n" not in text
    assert content_of(drafter) == before
    assert REPO not in hub.repositories or pushed(hub) == {}, "half a version is there"
    hub.failures.clear()
    push(drafter)
    assert pushed(hub) == before


def test_a_bad_token_and_no_token(
    hub: Hub, drafter: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match="the Hub does not accept the token: run `hf auth login`"):
        push(drafter)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="there is no token: run `hf auth login` or set HF_TOKEN"):
        push(drafter)
    assert not hub.repositories


def test_a_hub_that_is_not_there(hub: Hub, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"the Hub is not reached: check the network .*refused"):
        push(drafter)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set; unset it"):
        push(drafter)


@pytest.mark.parametrize("name", ["", "two words", "a/b/c", "a/b--c"])
def test_bad_repositories_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="--push-to-hub expects a Hub id such as name/repository"):
        Destination(name)


def test_a_pushed_drafter_loads_by_its_id(hub: Hub, drafter: Path) -> None:
    push(drafter)
    push(drafter, revision="v1")
    for source in (REPO, f"{REPO}@v1"):
        assert read_drafter_card(source) == read_drafter_card(drafter)
        loaded = load_drafter(source, EngineConfig(dtype="float32"))
        assert (loaded.max_depth, len(loaded.token_ids_C)) == (9, 300)
        assert loaded.model.model.lm_head.weight.shape[0] == 300
    folder = Path(snapshot_download(REPO))
    assert content_of(folder).items() >= content_of(drafter).items()


def test_what_is_not_on_the_hub_is_told(hub: Hub, drafter: Path) -> None:
    with pytest.raises(ValueError, match=r"no drafter at 'someone/nothing': .* Hub id .*404"):
        local_folder("someone/nothing")
    with pytest.raises(ValueError, match=r"no predictor at 'a/b/c': .* it is no Hub id"):
        local_folder("a/b/c", "predictor")
    push(drafter)
    with pytest.raises(ValueError, match=r"no drafter at 'someone/tiny-drafter@v9': .*Revision Not Found"):
        local_folder(f"{REPO}@v9")
