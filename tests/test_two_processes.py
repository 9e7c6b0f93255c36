"""The whole chain by the command line, and its last two stages again on two processes: nothing changes.

The first two stages on two processes are in test_collect.py and test_drafter_training.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foredraft.infer.outcome_records import OutcomeRecords
from foredraft.infer.predictor import read_predictor_card
from foredraft.train.outcome_log import OutcomeLog

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = REPOSITORY / "recipes"
CLI = [sys.executable, "-m", "foredraft.infer.cli"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
# the predictor says nothing of processes: the second one is to be there, and to write nothing
COUNTED = (
    "import sys; from accelerate import PartialState; from foredraft.train import predictor; "
    "write = predictor.write; "
    "predictor.write = lambda *given: (print('written by', PartialState().process_index, 'of', "
    "PartialState().num_processes), write(*given)); sys.exit(predictor.main(sys.argv[1:]))"
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def chain(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with log, drafter, outcomes and predictor, made by the smoke recipes on every fifth prompt."""
    folder = tmp_path_factory.mktemp("chain")
    lines = (RECIPES / "demo_prompts.jsonl").read_text().splitlines()
    (folder / "prompts.jsonl").write_text("\n".join(lines[::5]) + "\n")
    shards = ["--prompts", str(folder / "prompts.jsonl"), "--prompts_per_shard", "16"]
    stages = {
        "log": ["log", "--target", str(tiny_target), *shards],
        "drafter": ["train-drafter", "--target", str(tiny_target), "--log", str(folder / "log")],
        "outcomes": ["outcomes", "--log", str(folder / "log"), "--drafter", str(folder / "drafter")],
        "predictor": ["train-predictor", "--outcomes", str(folder / "outcomes")],
    }
    for name, (command, *flags) in stages.items():
        recipe = str(RECIPES / f"smoke_{name}.yaml")
        run(*CLI, command, "--config", recipe, *flags, "--out", str(folder / name))
    return folder


def assert_same_records(first: OutcomeRecords, second: OutcomeRecords) -> None:
    for item in fields(OutcomeRecords):
        assert np.array_equal(getattr(first, item.name), getattr(second, item.name)), item.name


def test_the_smoke_recipes_make_a_predictor(chain: Path) -> None:
    manifest = json.loads((chain / "outcomes" / "manifest.json").read_text())
    assert manifest["reserved_fraction"] > 0.0
    assert len(manifest["shards"]) == 3
    card = read_predictor_card(chain / "predictor")
    assert card.drafter_sha256 == manifest["drafter_sha256"]
    assert min(card.calibration["prompts"].values()) > 1
    assert card.calibration["heldout"]["log_loss"]["predictor"] > 0.0


def test_outcomes_of_two_processes_are_those_of_one(chain: Path, tmp_path: Path) -> None:
    flags = ["--log", str(chain / "log"), "--drafter", str(chain / "drafter"), "--out", str(tmp_path / "two")]
    recipe = str(RECIPES / "smoke_outcomes.yaml")
    result = run(*LAUNCH, "-m", "foredraft.train.outcomes", "--config", recipe, *flags)
    assert "3 of 3 shards made now by 2 processes" in result.stderr
    one, two = OutcomeLog.open(chain / "outcomes"), OutcomeLog.open(tmp_path / "two")
    for part in ("train", "reserved", "heldout"):
        assert_same_records(one.records(part), two.records(part))
    assert_same_records(one.rounds(), two.rounds())


def test_a_predictor_of_two_processes_is_that_of_one(chain: Path, tmp_path: Path) -> None:
    flags = ["--outcomes", str(chain / "outcomes"), "--out", str(tmp_path / "two")]
    recipe = str(RECIPES / "smoke_predictor.yaml")
    (tmp_path / "counted.py").write_text(COUNTED)
    result = run(*LAUNCH, str(tmp_path / "counted.py"), "--config", recipe, *flags)
    assert result.stdout.count("written by") == 1
    assert "written by 0 of 2" in result.stdout
    first, second = (
        load_file(folder / "model.safetensors") for folder in (chain / "predictor", tmp_path / "two")
    )
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    cards = [read_predictor_card(folder) for folder in (chain / "predictor", tmp_path / "two")]
    assert cards[0].calibration == cards[1].calibration
