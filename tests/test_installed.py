"""From an installed wheel, as a user would: export a drafter, push it, decode with it by its Hub id."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft.infer.engine import Engine
from foredraft.infer.params import EngineConfig, SamplingParams

SERVER = runpy.run_path(str(Path(__file__).with_name("hub_server.py")))
REPO = "someone/tiny-drafter"
TOP = {"positions": 100, "top1": 0.5, "top2": 0.6, "top4": 0.7, "top8": 0.8, "top16": 0.9}
MEASURED = {"heldout": {"0": {**TOP, "k": 4, "tokens_per_verify": 1.75}}}
LOG = {
    "prompts_sha256": "ab" * 32,
    "responses": 20,
    "tokens": 400,
    "top_k_logprobs": 16,
    "max_new_tokens": 20,
}
GROUP = {
    "responses": 1,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
SETTINGS = {"draft_vocab_size": 300, "max_length": 64, "learning_rate": 0.001, "reserved_fraction": 0.0}
TRAINING = {
    "recipe": {**SETTINGS, "init": {"source": "target"}},
    "losses": {"forward_kl": 1.0},
    "log": {**LOG, "groups": [GROUP]},
    "tokens": 400, "steps": 10, "seconds": 1.5, "processes": 1, "versions": {"torch": "2"}, "git": None,
}  # fmt: skip

Foredraft = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def drafter(make_artifact: Callable[..., Path]) -> Path:
    """A drafter artifact with a draft vocabulary and figures."""
    return make_artifact(training=TRAINING, measured=MEASURED)


@pytest.fixture(scope="module")
def foredraft(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Foredraft:
    """Run the installed command in an empty folder."""
    folder = tmp_path_factory.mktemp("site")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    assert (folder / "foredraft" / "model_cards" / "drafter.md").is_file()

    def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # the checkout must not be found first
        settings = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"} | environment
        command = [sys.executable, "-P", str(folder / "bin" / "foredraft"), *argv]
        return subprocess.run(
            command, cwd=folder, env=settings, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def export_flags(drafter: Path, out: Path) -> list[str]:
    flags = {"drafter": drafter, "out": out, "name": REPO, "base_model": "someone/tiny", "license": "mit"}
    return ["export", *(f"--{key}={value}" for key, value in flags.items()), "--language=[en]"]


def test_help_lists_recipe_and_push(foredraft: Foredraft) -> None:
    result = foredraft("export", "--help")
    assert result.returncode == 0, result.stderr
    for flag in ("--drafter", "--predictor", "--push-to-hub", "--private", "--revision"):
        assert flag in result.stdout
    assert "export" in foredraft("--help").stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--private"], "--private and --revision belong to --push-to-hub REPO"),
        (["--push-to-hub", "two words"], "--push-to-hub expects a Hub id such as name/repository"),
        (["--push-to-hub"], "argument --push-to-hub: expected one argument"),
        (["--push"], "unknown option --push"),
    ],
    ids=["alone", "name", "empty", "unknown"],
)
def test_bad_flags_are_told_before_anything_is_written(
    foredraft: Foredraft, drafter: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    result = foredraft(*export_flags(drafter, tmp_path / "out"), *flags)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def network_of(hub: Any, home: Path) -> dict[str, str]:
    """The environment in which the command sees a Hub, logged in."""
    return {
        "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_TOKEN": SERVER["TOKEN"],
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip


def generate(foredraft: Foredraft, target: Path, *flags: str, **environment: str) -> dict[str, Any]:
    request = ["--target", str(target), "--prompt", "the garden", "--temperature", "1", "--seed", "3"]
    settings = ["--max-new-tokens", "16", "--threads", "1", "--json"]
    result = foredraft("generate", *request, *settings, *flags, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def plain(tiny_target: Path) -> str:
    """What the target says alone."""
    params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=3)
    with Engine.from_pretrained(str(tiny_target), mode="plain", config=EngineConfig(threads=1)) as engine:
        return engine.generate(["the garden"], params)[0].text


def test_export_push_and_generate_by_hub_id(
    foredraft: Foredraft, drafter: Path, tiny_target: Path, tmp_path: Path, plain: str
) -> None:
    out = tmp_path / "out"
    flags = [*export_flags(drafter, out), "--push-to-hub", REPO]
    with SERVER["run_hub"]() as hub:
        network = network_of(hub, tmp_path / "home")
        refused = foredraft(*flags, **(network | {"HF_TOKEN": "hf_wrong"}))
        assert refused.returncode == 2, refused.stderr
        assert "the Hub does not accept the token: run `hf auth login` or set HF_TOKEN" in refused.stderr
        assert (out / "drafter" / "README.md").is_file()
        pushed = foredraft(*flags, **network)
        assert pushed.returncode == 0, pushed.stderr
        assert "complete already" in pushed.stderr
        assert pushed.stdout.startswith(f"{hub.endpoint}/{REPO}/commit/")
        files = {path.name: path.read_bytes() for path in (out / "drafter").iterdir()}
        assert {name: data for name, data in hub.files(REPO).items() if name[0] != "."} == files
        drafted = generate(foredraft, tiny_target, "--drafter", REPO, "--mode", "sync", **network)
        assert not hub.unexpected
    assert drafted["text"] == plain
    assert drafted["stats"]["tokens_per_verify"] > 1


@pytest.mark.slow
def test_the_draft_server_loads_by_hub_id_and_the_cache_serves_when_the_hub_is_gone(
    foredraft: Foredraft, drafter: Path, tiny_target: Path, tmp_path: Path, plain: str
) -> None:
    with SERVER["run_hub"]() as hub:
        network = network_of(hub, tmp_path / "home")
        flags = [*export_flags(drafter, tmp_path / "out"), "--push-to-hub", REPO, "--revision", "v1"]
        assert foredraft(*flags, **network).returncode == 0
        settings = ("--drafter", f"{REPO}@v1", "--mode", "async", "--lockstep", "3", "--on-miss", "wait")
        drafted = generate(foredraft, tiny_target, *settings, **network)
        hub.fail("GET", "", 503)
        again = generate(foredraft, tiny_target, *settings, **network)
        assert not hub.unexpected
    assert drafted["text"] == again["text"] == plain
    assert drafted["stats"]["hits"] == again["stats"]["hits"] > 0
