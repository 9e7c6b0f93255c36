"""Logs with damaged shards or of another target: the next stage says so, `foredraft log` mends the first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft.infer.cli import main
from foredraft.train.target_log import TargetLog

ArgvOf = Callable[..., list[str]]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_a_damaged_log_shard_is_named_and_made_again(
    undisturbed: Path,
    argv_of: ArgvOf,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    log = tmp_path / "log"
    shutil.copytree(undisturbed / "log", log)
    expected, times = TargetLog.open(log), {path: path.stat().st_mtime_ns for path in log.glob("*.parquet")}
    damage(expected.shard_paths[5])
    for name in ("drafter", "outcomes"):
        assert main(argv_of(name, tmp_path / name, log=log)) == 2
        message = capsys.readouterr().err
        assert f"{log}: 1 of 12 shards missing or damaged: shard-00005-of-00012.parquet" in message
        assert "Run `foredraft log` with the same recipe again: it redoes only these" in message
        assert not (tmp_path / name).exists()
    assert main(argv_of("log", log)) == 0
    assert "1 of 12 shards made now" in capsys.readouterr().err
    changed = [path for path, before in times.items() if path.stat().st_mtime_ns != before]
    assert changed == [expected.shard_paths[5]]
    # the same bytes: what a later stage has begun with this log goes on
    assert TargetLog.open(log).manifest.shards == expected.manifest.shards


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "log",
            "{log} is a target log of target {other}, the recipe's target is {target}; choose another `out`",
        ),
        ("drafter", "target log {log} is of target {other}, the recipe's target is {target}; train for the"),
        ("outcomes", "drafter {drafter} was trained for target {target}, the log is of {other}; replay a"),
    ],
    ids=["log", "drafter", "outcomes"],
)
def test_a_log_of_another_target_is_refused(
    undisturbed: Path,
    argv_of: ArgvOf,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    message: str,
) -> None:
    log = tmp_path / "log"
    shutil.copytree(undisturbed / "log", log)
    manifest = json.loads((log / "manifest.json").read_text())
    target = str(TargetLog.open(log).manifest.target)
    manifest["target"] |= {"id": "other-model", "weights_sha256": "0" * 64}
    (log / "manifest.json").write_text(json.dumps(manifest))
    argv = argv_of("log", log) if name == "log" else argv_of(name, tmp_path / name, log=log)
    assert main(argv) == 2
    named = {"log": log, "target": target, "other": "other-model (weights 000000000000)"}
    assert message.format(**named, drafter=undisturbed / "drafter") in capsys.readouterr().err
    assert not (tmp_path / name / "foredraft.json").exists()
