"""What a full disk and a killed run do to files and folders that are to appear whole or not at all.

Interruption by an exception is in test_target_log.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import SafetensorError

from foredraft.infer.atomic import atomic_file, atomic_folder


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "drafter"
    for name in (".drafter.123.replaced", ".drafter.123.part", ".drafter.old.123.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    with (
        pytest.raises(OSError, match=rf"No space left on device: '{path}/content'"),
        atomic_folder(path) as new,
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(new / "content"))
    assert (path / "content").read_text() == ".drafter.123.replaced"
    # the other one is of a folder `drafter.old`
    assert {entry.name for entry in tmp_path.iterdir()} == {"drafter", ".drafter.old.123.part"}


def save_tensors(path: Path) -> None:
    # safetensors writes to a file of its own first
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def save_table(path: Path) -> None:
    pq.write_table(pa.table({"number": np.random.default_rng(0).random(100_000)}), path)


def save_text(path: Path) -> None:
    path.write_text("x" * 100_000)


@pytest.mark.parametrize("save", [save_tensors, save_table, save_text])
def test_every_writer_names_the_file(tmp_path: Path, save: Callable[[Path], None]) -> None:
    path = tmp_path / "result"
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'$"), atomic_file(path) as part:
        part.symlink_to("/dev/full")
        save(part)
    assert list(tmp_path.iterdir()) == []
