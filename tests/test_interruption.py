"""Every stage against what long runs meet: killed, interrupted, damaged files, another target, a full disk.

After each accident the same command again ends well, with the result of a run that nothing disturbed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foredraft.infer.cli import main
from foredraft.infer.outcome_records import OutcomeRecords
from foredraft.train.log_rows import LogRow
from foredraft.train.outcome_log import OutcomeLog
from foredraft.train.target_log import TargetLog

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
NUM_SHARDS = 12


class Stages:
    """Command lines of the stages; the input of each is the undisturbed result of the one before."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self.target = folder, target

    def argv(self, name: str, out: Path, **changes: object) -> list[str]:
        """Arguments of `foredraft` that make the stage's result in `out`."""
        given: dict[str, dict[str, object]] = {
            "log": {
                "target": self.target,
                "prompts": self.folder / "prompts.jsonl",
                "prompts_per_shard": 4,
                "max_new_tokens": 24,
                "rows": 8,
            },
            "drafter": {
                "target": self.target,
                "log": self.folder / "log",
                "epochs": 8,
                "batch_tokens": 512,
                "save_every": 4,
                "eval_every": 10,
                "reserved_fraction": 0.4,
            },
            "outcomes": {"log": self.folder / "log", "drafter": self.folder / "drafter"},
            "predictor": {"outcomes": self.folder / "outcomes"},
        }
        command = {"drafter": "train-drafter", "predictor": "train-predictor"}.get(name, name)
        flags = [part for key, value in (given[name] | changes).items() for part in (f"--{key}", str(value))]
        return [command, "--config", str(RECIPES / f"smoke_{name}.yaml"), "--out", str(out), *flags]


@pytest.fixture(scope="module")
def stages(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Undisturbed results of all four stages in `stages.folder`: log, drafter, outcomes, predictor."""
    folder = tmp_path_factory.mktemp("undisturbed")
    lines = [
        {"prompt": f"word {n * n}", "split": "train" if n % 4 else "heldout"} for n in range(4 * NUM_SHARDS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stages = Stages(folder, tiny_target)
    for name in ("log", "drafter", "outcomes", "predictor"):
        assert main(stages.argv(name, folder / name)) == 0
    return stages


def begin(argv: list[str]) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "foredraft.infer.cli", *argv],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # a shell that runs the tests in the background has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def stop(argv: list[str], number: signal.Signals, is_time: Callable[[], bool]) -> tuple[int, str]:
    """Begin a command, send it a signal as soon as it is time; returns exit code and messages."""
    process, deadline = begin(argv), time.monotonic() + 120
    try:
        while not is_time():
            assert process.poll() is None, "too late: " + process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        process.send_signal(number)
        messages = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    return process.returncode, messages


def shards_in(folder: Path) -> dict[str, int]:
    """Time of change of every shard that has its entry."""
    return {
        path.name: path.stat().st_mtime_ns
        for path in folder.glob("shard-*.parquet")
        if path.with_suffix(".json").exists()
    }


def assert_same_rows(first: list[LogRow], second: list[LogRow]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for name, value in asdict(one).items():
            assert np.array_equal(value, getattr(other, name)), name


def assert_same_records(first: OutcomeRecords, second: OutcomeRecords) -> None:
    for item in fields(OutcomeRecords):
        assert np.array_equal(getattr(first, item.name), getattr(second, item.name)), item.name


def assert_same_weights(first: Path, second: Path) -> None:
    one, other = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert one.keys() == other.keys()
    assert all(value.dtype == torch.float32 for value in one.values())
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def is_clear(folder: Path) -> bool:
    """Whether nothing half-written lies in a folder or beside it."""
    left = [path for path in folder.parent.rglob("*") if path.suffix in (".part", ".replaced")]
    return not left


def check_stop(argv: list[str], out: Path, number: signal.Signals) -> None:
    """Stop a stage that writes shards when it has written two more; they are whole, and stay as they are."""
    before = shards_in(out)
    code, messages = stop(argv, number, lambda: len(shards_in(out)) >= len(before) + 2)
    expected = -signal.SIGKILL if number == signal.SIGKILL else 130
    assert code == expected, messages
    if number == signal.SIGINT:
        assert messages.endswith("foredraft: interrupted\n")
        assert is_clear(out)
    after = shards_in(out)
    assert len(before) + 2 <= len(after) < NUM_SHARDS, "it was in the middle"
    assert before.items() <= after.items()


def test_a_log_survives_interrupt_and_kill(stages: Stages, tmp_path: Path) -> None:
    out = tmp_path / "log"
    argv = stages.argv("log", out)
    check_stop(argv, out, signal.SIGINT)
    check_stop(argv, out, signal.SIGKILL)
    before = shards_in(out)
    assert main(argv) == 0
    log = TargetLog.open(out)
    times = {path.name: path.stat().st_mtime_ns for path in log.shard_paths}
    assert before.items() <= times.items()
    expected = TargetLog.open(stages.folder / "log")
    assert_same_rows(list(log.rows()), list(expected.rows()))
    # later stages know their input by these hashes
    assert log.manifest.shards == expected.manifest.shards
    assert is_clear(out)


def test_outcomes_survive_a_kill(stages: Stages, tmp_path: Path) -> None:
    out = tmp_path / "outcomes"
    argv = stages.argv("outcomes", out)
    check_stop(argv, out, signal.SIGKILL)
    before = shards_in(out)
    assert main(argv) == 0
    found, expected = OutcomeLog.open(out), OutcomeLog.open(stages.folder / "outcomes")
    times = {path.name: path.stat().st_mtime_ns for path in found.shard_paths}
    assert before.items() <= times.items()
    for part in ("train", "reserved", "heldout"):
        assert_same_records(found.records(part), expected.records(part))
    assert_same_records(found.rounds(), expected.rounds())
    # later stages know their input by these hashes
    assert found.manifest.shards == expected.manifest.shards
    assert is_clear(out)


def newest_step(out: Path) -> int:
    """Step of the newest checkpoint."""
    steps = [int(path.name.rpartition("-")[2]) for path in Path(f"{out}.training").glob("checkpoint-*")]
    return max(steps, default=0)


def test_a_drafter_survives_interrupt_and_kill(stages: Stages, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    argv = stages.argv("drafter", out)
    code, messages = stop(argv, signal.SIGINT, lambda: newest_step(out) >= 4)
    assert (code, messages.splitlines()[-1]) == (130, "foredraft: interrupted")
    step = newest_step(out)
    assert not out.exists()
    code, messages = stop(argv, signal.SIGKILL, lambda: newest_step(out) >= step + 4)
    assert code == -signal.SIGKILL, messages
    assert not out.exists()
    assert main(argv) == 0
    assert_same_weights(out, stages.folder / "drafter")
    found, expected = (
        json.loads((folder / "foredraft.json").read_text()) for folder in (out, stages.folder / "drafter")
    )
    assert found["training"]["curve"] == expected["training"]["curve"]
    assert not Path(f"{out}.training").exists()
    assert is_clear(out)
