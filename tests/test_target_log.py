"""Rows, shards and manifest of a target log on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from foredraft.infer.atomic import atomic_file, atomic_folder
from foredraft.infer.identity import TargetIdentity
from foredraft.train.log_rows import LogRow, read_rows, write_rows
from foredraft.train.shard_folder import MANIFEST_FILE
from foredraft.train.target_log import LogManifest, TargetLog

TARGET = TargetIdentity(id="target", revision=None, weights_sha256="a" * 64)


def make_row(number: int, length: int, num_kept: int, split: str = "train") -> LogRow:
    generator = np.random.default_rng(number)
    return LogRow(
        request_id=f"{number:032x}",
        prompt_ids=generator.integers(0, 300, 3 + number).astype(np.int32),
        response_ids=generator.integers(0, 300, length).astype(np.int32),
        first_position=3 + number,
        seed=2**64 - 1 - number,
        choice=0,
        temperature=0.7,
        top_k=0,
        top_p=0.95,
        min_p=0.0,
        repetition_penalty=1.1,
        topk_ids=generator.integers(0, 300, (length, num_kept)).astype(np.int32),
        topk_logprobs=-generator.random((length, num_kept)).astype(np.float16),
        tail_mass=generator.random(length).astype(np.float32),
        finish_reason="stop",
        split=split,
    )


def make_manifest(**changes: object) -> LogManifest:
    settings: dict[str, object] = {
        "target": TARGET,
        "tokenizer_sha256": "b" * 64,
        "chat_template_sha256": None,
        "top_k_logprobs": 4,
        "recipe": {"max_new_tokens": 8, "out": "x"},
        "prompts_sha256": "c" * 64,
        "num_shards": 3,
    }
    return LogManifest(**(settings | changes))


def write_log(folder: Path) -> TargetLog:
    log = TargetLog.start(folder, make_manifest())
    for index in range(3):
        split = "heldout" if index == 1 else "train"
        log.write_shard(index, [make_row(10 * index + i, 1 + i, 4, split) for i in range(3)])
    log.gather()
    return log


def assert_same_row(found: LogRow, expected: LogRow) -> None:
    for name, value in asdict(expected).items():
        if isinstance(value, np.ndarray):
            assert getattr(found, name).dtype == value.dtype, name
            np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)
        else:
            assert getattr(found, name) == value, name


@pytest.mark.parametrize("num_kept", [0, 1, 5])
def test_rows_survive_the_file(tmp_path: Path, num_kept: int) -> None:
    rows = [make_row(number, length, num_kept) for number, length in enumerate([1, 7, 2])]
    write_rows(tmp_path / "x.parquet", rows, num_kept)
    for found, expected in zip(read_rows(tmp_path / "x.parquet"), rows, strict=True):
        assert_same_row(found, expected)


def test_columns_are_the_published_ones(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.parquet", [make_row(0, 2, 4)], 4)
    schema = pq.read_schema(tmp_path / "x.parquet")
    assert set(schema.names) == {
        *("request_id", "prompt_ids", "response_ids", "first_position", "seed", "choice", "temperature"),
        *("top_k", "top_p", "min_p", "repetition_penalty", "topk_ids", "topk_logprobs", "tail_mass"),
        *("finish_reason", "split", "source"),
    }
    assert str(schema.field("seed").type) == "uint64"
    assert "fixed_size_list<element: halffloat>[4]" in str(schema.field("topk_logprobs").type)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.parquet", [make_row(0, 2, 4)], 4)
    table = pq.read_table(tmp_path / "x.parquet").drop_columns(["seed"])
    pq.write_table(table, tmp_path / "y.parquet")
    with pytest.raises(ValueError, match=r"y\.parquet is not a target log shard: columns seed are missing"):
        read_rows(tmp_path / "y.parquet")


def test_a_finished_log_reads_back(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    log = TargetLog.open(tmp_path / "log")
    assert [row.request_id for row in log.rows("heldout")] == [f"{number:032x}" for number in (10, 11, 12)]
    assert len(list(log.rows())) == 9
    assert log.num_tokens == 3 * (1 + 2 + 3)
    manifest = json.loads((tmp_path / "log" / MANIFEST_FILE).read_text())
    assert manifest["schema"] == 1
    assert manifest["target"]["weights_sha256"] == "a" * 64
    assert [shard["rows"] for shard in manifest["shards"]] == [3, 3, 3]
    assert not list((tmp_path / "log").glob("shard-*.json")), "entries have moved into the manifest"


def test_damaged_and_missing_shards_are_named(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log")
    (log.folder / log.shard_name(0)).unlink()
    content = bytearray((log.folder / log.shard_name(2)).read_bytes())
    content[len(content) // 2] ^= 1
    (log.folder / log.shard_name(2)).write_bytes(content)
    message = r"2 of 3 shards missing or damaged: shard-00000-of-00003\.parquet, shard-00002-.*foredraft log"
    with pytest.raises(ValueError, match=message):
        TargetLog.open(tmp_path / "log")
    resumed = TargetLog.start(tmp_path / "log", make_manifest())
    assert resumed.bad_shards() == [0, 2]


def test_shards_without_a_manifest_entry_count(tmp_path: Path) -> None:
    log = TargetLog.start(tmp_path, make_manifest())
    log.write_shard(1, [make_row(1, 2, 4)])
    (tmp_path / ".shard-00002-of-00003.parquet.123.part").write_text("left by a killed run")
    again = TargetLog.start(tmp_path, make_manifest())
    assert again.bad_shards() == [0, 2]
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target": replace(TARGET, weights_sha256="d" * 64)},
            "is a target log of target target",
        ),
        ({"recipe": {"max_new_tokens": 9, "out": "x"}}, r"other settings \(max_new_tokens\)"),
        ({"prompts_sha256": "d" * 64, "num_shards": 4}, r"other settings \(prompts, num_shards\)"),
        ({"tokenizer_sha256": "d" * 64}, r"other settings \(tokenizer\)"),
    ],
    ids=["target", "recipe", "prompts", "tokenizer"],
)
def test_another_log_in_the_folder_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    TargetLog.start(tmp_path, make_manifest())
    with pytest.raises(ValueError, match=message):
        TargetLog.start(tmp_path, make_manifest(**changes))


def test_free_keys_may_change(tmp_path: Path) -> None:
    TargetLog.start(tmp_path, make_manifest())
    other = make_manifest(recipe={"max_new_tokens": 8, "out": "y"})
    assert TargetLog.start(tmp_path, other, ["out"]).manifest.recipe["out"] == "x"


def test_no_log_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a target log: no manifest\.json"):
        TargetLog.open(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text('{"schema": 2}')
    with pytest.raises(ValueError, match="schema 1 expected, found 2"):
        TargetLog.open(tmp_path)


def test_atomic_file_leaves_the_old_one_on_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_atomic_folder_replaces_or_leaves(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with atomic_folder(path) as temporary:
        (temporary / "a").write_text("1")
    with pytest.raises(KeyboardInterrupt), atomic_folder(path) as temporary:
        (temporary / "b").write_text("half")
        raise KeyboardInterrupt
    assert [entry.name for entry in path.iterdir()] == ["a"]
    with atomic_folder(path) as temporary:
        (temporary / "c").write_text("2")
    assert [entry.name for entry in path.iterdir()] == ["c"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
