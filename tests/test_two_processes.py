"""The chain of smoke recipes makes a predictor; its last two stages on two processes change nothing.

The first two stages on two processes are in test_collect.py and test_drafter_training.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft.infer.predictor import read_predictor_card
from foredraft.train.outcome_log import OutcomeLog

ArgvOf = Callable[..., list[str]]
Launch = Callable[..., subprocess.CompletedProcess[str]]
# the predictor says nothing of processes: the second one is to be there, and to write nothing
COUNTED = (
    "import sys; from accelerate import PartialState; from foredraft.train import predictor; "
    "write = predictor.write; "
    "predictor.write = lambda *given: (print('written by', PartialState().process_index, 'of', "
    "PartialState().num_processes), write(*given)); sys.exit(predictor.main(sys.argv[1:]))"
)


@pytest.fixture
def assert_same_predictor(assert_same_weights: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """Compare weights and figures."""

    def check(first: Path, second: Path) -> None:
        assert_same_weights(first, second)
        assert read_predictor_card(first).calibration == read_predictor_card(second).calibration

    return check


@pytest.mark.slow
def test_a_chain_of_commands_makes_the_predictor_of_one_process(
    undisturbed: Path,
    argv_of: ArgvOf,
    tmp_path: Path,
    launch_on_cpus: Launch,
    assert_same_predictor: Callable[[Path, Path], None],
) -> None:
    log, drafter, outcomes = (tmp_path / name for name in ("log", "drafter", "outcomes"))
    for argv in (
        argv_of("log", log),
        argv_of("drafter", drafter, log=log),
        argv_of("outcomes", outcomes, log=log, drafter=drafter),
        argv_of("predictor", tmp_path / "predictor", outcomes=outcomes),
    ):
        launch_on_cpus(1, "-m", "foredraft.infer.cli", *argv)
    card = read_predictor_card(tmp_path / "predictor")
    assert card.drafter_sha256 == json.loads((outcomes / "manifest.json").read_text())["drafter_sha256"]
    assert min(card.calibration["prompts"].values()) > 1
    assert_same_predictor(tmp_path / "predictor", undisturbed / "predictor")


def test_outcomes_of_two_processes_are_those_of_one(
    undisturbed: Path,
    argv_of: ArgvOf,
    tmp_path: Path,
    launch_on_cpus: Launch,
    assert_same_records: Callable[[OutcomeLog, OutcomeLog], None],
) -> None:
    _, *flags = argv_of("outcomes", tmp_path / "two")
    result = launch_on_cpus(2, "-m", "foredraft.train.outcomes", *flags)
    assert "12 of 12 shards made now by 2 processes" in result.stderr
    assert_same_records(OutcomeLog.open(undisturbed / "outcomes"), OutcomeLog.open(tmp_path / "two"))


def test_a_predictor_of_two_processes_is_that_of_one(
    undisturbed: Path,
    argv_of: ArgvOf,
    tmp_path: Path,
    launch_on_cpus: Launch,
    assert_same_predictor: Callable[[Path, Path], None],
) -> None:
    _, *flags = argv_of("predictor", tmp_path / "two")
    (tmp_path / "counted.py").write_text(COUNTED)
    result = launch_on_cpus(2, str(tmp_path / "counted.py"), *flags)
    assert result.stdout.count("written by") == 1
    assert "written by 0 of 2" in result.stdout
    assert_same_predictor(tmp_path / "two", undisturbed / "predictor")
