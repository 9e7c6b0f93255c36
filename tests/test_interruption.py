"""Every stage against what long runs meet: killed, terminated, interrupted, a full disk.

After each accident the same command again ends well, with the result of a run that nothing disturbed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft.infer import atomic
from foredraft.infer.cli import main
from foredraft.infer.drafter_card import read_drafter_card
from foredraft.infer.predictor import read_predictor_card
from foredraft.train.log_rows import LogRow
from foredraft.train.outcome_log import OutcomeLog
from foredraft.train.shard_folder import ShardFolder
from foredraft.train.target_log import TargetLog

NUM_SHARDS = 12
ArgvOf = Callable[..., list[str]]
SameWeights = Callable[[Path, Path], None]
STOPS = pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGKILL],
        pytest.param([signal.SIGTERM, signal.SIGINT, signal.SIGKILL], marks=pytest.mark.slow),
    ],
    ids=["kill", "terminate-interrupt-kill"],
)
CLI = ("-m", "foredraft.infer.cli")
# a signal in place of the first, second, ... flush to disk
STOPPED_WHILE_WRITING = """
import os, sys
from foredraft.infer.cli import main
from foredraft.infer import atomic

def stop(path, sync=atomic._sync):
    sync(path) if next(turns) else os.kill(os.getpid(), int(sys.argv[1]))

turns = iter([True] * int(sys.argv[2]) + [False] * 99)
atomic._sync = stop
sys.exit(main(sys.argv[3:]))
"""


def begin(*argv: str) -> subprocess.Popen[str]:
    """Python as a process of its own."""
    return subprocess.Popen(
        [sys.executable, *argv],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # a shell that runs the tests in the background has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def stop(argv: list[str], number: signal.Signals, is_time: Callable[[], bool]) -> tuple[int, str]:
    """Begin a command, send it a signal as soon as it is time; returns exit code and messages."""
    process, deadline = begin(*CLI, *argv), time.monotonic() + 120
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


def is_clear(folder: Path) -> bool:
    """Whether nothing half-written lies in a folder or beside it."""
    left = [path for path in folder.parent.rglob("*") if path.suffix in (".part", ".replaced")]
    return not left


def check_code(code: int, messages: str, number: signal.Signals) -> None:
    """An interrupted command says so, others end by the signal, or as a shell tells of it."""
    if number == signal.SIGINT:
        assert (code, messages.splitlines()[-1]) == (130, "foredraft: interrupted")
    else:
        assert code in (-number, 128 + number), messages


def check_stop(argv: list[str], out: Path, number: signal.Signals) -> None:
    """Stop a stage that writes shards when it has written two more; they are whole, and stay as they are."""
    before = shards_in(out)
    check_code(*stop(argv, number, lambda: len(shards_in(out)) >= len(before) + 2), number)
    assert number != signal.SIGINT or is_clear(out)
    after = shards_in(out)
    assert len(before) + 2 <= len(after) < NUM_SHARDS, "it was in the middle"
    assert before.items() <= after.items()


def finish_after_stops(
    argv: list[str], out: Path, kind: type[ShardFolder[Any]], numbers: list[signal.Signals]
) -> ShardFolder[Any]:
    """Stop a stage several times, then let it finish: what was finished stays as it is."""
    for number in numbers:
        check_stop(argv, out, number)
    before = shards_in(out)
    assert main(argv) == 0
    found = kind.open(out)
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in found.shard_paths}.items()
    assert is_clear(out)
    return found


@STOPS
def test_a_log_survives_stops(
    undisturbed: Path, argv_of: ArgvOf, tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    out = tmp_path / "log"
    found = finish_after_stops(argv_of("log", out), out, TargetLog, numbers)
    expected = TargetLog.open(undisturbed / "log")
    assert_same_rows(list(found.rows()), list(expected.rows()))
    # later stages know their input by these hashes
    assert found.manifest.shards == expected.manifest.shards


@STOPS
def test_outcomes_survive_stops(
    undisturbed: Path,
    argv_of: ArgvOf,
    tmp_path: Path,
    numbers: list[signal.Signals],
    assert_same_records: Callable[[OutcomeLog, OutcomeLog], None],
) -> None:
    out = tmp_path / "outcomes"
    found = finish_after_stops(argv_of("outcomes", out), out, OutcomeLog, numbers)
    expected = OutcomeLog.open(undisturbed / "outcomes")
    assert_same_records(found, expected)
    assert found.manifest.shards == expected.manifest.shards


def newest_step(out: Path) -> int:
    """Step of the newest checkpoint."""
    steps = [int(path.name.rpartition("-")[2]) for path in Path(f"{out}.training").glob("checkpoint-*")]
    return max(steps, default=0)


def curve_of(folder: Path) -> list[dict[str, Any]]:
    """What a drafter's training reported."""
    card = read_drafter_card(folder)
    assert card is not None
    return card.training["curve"]


@STOPS
def test_a_drafter_survives_stops(
    undisturbed: Path,
    argv_of: ArgvOf,
    tmp_path: Path,
    numbers: list[signal.Signals],
    assert_same_weights: SameWeights,
) -> None:
    out = tmp_path / "drafter"
    argv = argv_of("drafter", out)
    for number in numbers:
        later = newest_step(out) + 4
        check_code(*stop(argv, number, lambda later=later: newest_step(out) >= later), number)
        assert later <= newest_step(out)
        assert not out.exists()
    assert main(argv) == 0
    assert_same_weights(out, undisturbed / "drafter")
    assert curve_of(out) == curve_of(undisturbed / "drafter")
    assert not Path(f"{out}.training").exists()
    assert is_clear(out)


def stop_while_writing(argv: list[str], out: Path, number: signal.Signals, num_flushed: int) -> None:
    """Stop a command that has flushed so many files or folders to disk, while it writes the next folder."""
    process = begin("-c", STOPPED_WHILE_WRITING, str(int(number)), str(num_flushed), *argv)
    check_code(process.wait(120), process.communicate()[1], number)
    assert is_clear(out) == (number == signal.SIGINT)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["kill", "interrupt"]
)
def test_a_predictor_survives_a_stop_while_it_is_written(
    undisturbed: Path,
    argv_of: ArgvOf,
    tmp_path: Path,
    number: signal.Signals,
    assert_same_weights: SameWeights,
) -> None:
    out = tmp_path / "predictor"
    shutil.copytree(undisturbed / "predictor", out)
    argv = argv_of("predictor", out, hidden_size=16, overwrite="true")
    stop_while_writing(argv, out, number, 0)
    assert_same_weights(out, undisturbed / "predictor")
    assert main(argv) == 0
    assert read_predictor_card(out).hidden_size == 16
    assert is_clear(out)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
def test_a_checkpoint_survives_a_stop_while_the_next_is_written(
    undisturbed: Path,
    argv_of: ArgvOf,
    tmp_path: Path,
    number: signal.Signals,
    assert_same_weights: SameWeights,
) -> None:
    out = tmp_path / "drafter"
    argv = argv_of("drafter", out)
    # four files, and the folder they are in
    stop_while_writing(argv, out, number, 5 + 2)
    assert newest_step(out) == 4
    assert main(argv) == 0
    assert_same_weights(out, undisturbed / "drafter")
    assert is_clear(out)


class SmallDisk:
    """A file system of its own, of which a given number of bytes is free."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def leave(self, size: int) -> None:
        """Fill it up to `size` bytes."""
        filler = self.folder / "filler"
        filler.unlink(missing_ok=True)
        state = os.statvfs(self.folder)
        filler.write_bytes(bytes(max(0, state.f_bavail * state.f_bsize - size)))


class PretendedDisk:
    """The same where nothing can be mounted: what is more than fits is refused when it is flushed."""

    def __init__(self, folder: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.size, self.limit = folder, size, size
        monkeypatch.setattr(atomic, "_sync", self.sync)

    def leave(self, size: int) -> None:
        """Let `size` bytes more fit."""
        self.limit = space_of(self.folder) + size

    def sync(self, path: Path) -> None:
        """What a disk does that learns late that it is full."""
        if self.folder in path.parents and space_of(self.folder) > self.limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.fixture(params=["mounted", "pretended"])
def disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SmallDisk | PretendedDisk]:
    """Eight MiB in memory where the system lets us mount it; a pretended one everywhere."""
    folder, size = tmp_path / "disk", 8 << 20
    folder.mkdir()
    if request.param == "pretended":
        yield PretendedDisk(folder, size, monkeypatch)
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"only the pretended disk is tested: {getattr(error, 'stderr', error)}")
    yield SmallDisk(folder, size)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def space_of(folder: Path) -> int:
    """Bytes that a folder takes, in whole pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def check_full(argv: list[str], named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with one message: what could not be written, and why."""
    capsys.readouterr()
    assert main(argv) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"foredraft: error: {named}")
    assert message.endswith(": No space left on device; make room there and run the same command again")
    assert ".part" not in message


@pytest.mark.parametrize("name", ["log", "outcomes"])
def test_a_full_disk_keeps_finished_shards(
    undisturbed: Path,
    argv_of: ArgvOf,
    disk: SmallDisk | PretendedDisk,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    out, undisturbed = disk.folder / name, undisturbed / name
    argv = argv_of(name, out)
    for room, file in ((0, "manifest.json"), (4096, "recipe.yaml")):
        disk.leave(room)
        check_full(argv, out / file, capsys)
    disk.leave(space_of(undisturbed) // 2)
    check_full(argv, out / "shard-", capsys)
    finished = shards_in(out)
    assert 2 <= len(finished) < NUM_SHARDS
    assert is_clear(out)
    disk.leave(disk.size)
    assert main(argv) == 0
    assert f"{NUM_SHARDS - len(finished)} of {NUM_SHARDS} shards made now" in capsys.readouterr().err
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (out, undisturbed)]
    assert manifests[0]["shards"] == manifests[1]["shards"]
    opened = TargetLog.open(out) if name == "log" else OutcomeLog.open(out)
    assert finished.items() <= {path.name: path.stat().st_mtime_ns for path in opened.shard_paths}.items()


@pytest.mark.parametrize(("save_every", "named"), [(4, "drafter.training/checkpoint-000008"), (0, "drafter")])
def test_a_full_disk_keeps_the_last_checkpoint(
    undisturbed: Path,
    argv_of: ArgvOf,
    disk: SmallDisk | PretendedDisk,
    capsys: pytest.CaptureFixture[str],
    save_every: int,
    named: str,
    assert_same_weights: SameWeights,
) -> None:
    out = disk.folder / "drafter"
    argv = argv_of("drafter", out, save_every=save_every)
    # a checkpoint takes 240 KiB, the drafter 200 KiB
    disk.leave(360 << 10)
    check_full(argv, disk.folder / named, capsys)
    found = newest_step(out)
    assert not out.exists()
    assert is_clear(out)
    disk.leave(disk.size)
    assert main(argv) == 0
    assert found == (save_every or curve_of(out)[-1]["step"])
    assert curve_of(out) == curve_of(undisturbed / "drafter")
    assert_same_weights(out, undisturbed / "drafter")


def test_a_full_disk_keeps_the_old_predictor(
    undisturbed: Path,
    argv_of: ArgvOf,
    disk: SmallDisk | PretendedDisk,
    capsys: pytest.CaptureFixture[str],
    assert_same_weights: SameWeights,
) -> None:
    out = disk.folder / "predictor"
    shutil.copytree(undisturbed / "predictor", out)
    argv = argv_of("predictor", out, hidden_size=16, overwrite="true")
    for room in (0, 8 << 10):
        disk.leave(room)
        check_full(argv, out, capsys)
        assert_same_weights(out, undisturbed / "predictor")
        assert is_clear(out)
    disk.leave(disk.size)
    assert main(argv) == 0
    assert read_predictor_card(out).hidden_size == 16
