"""Files and folders that appear whole or not at all, whatever interrupts the writing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foredraft.infer.config import naming


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; renamed to `path` on success, deleted on any error.

    Raises:
        OSError: the disk is full, or the like; names `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming(path, temporary):
            yield temporary
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` to fill; becomes `path` on success, is deleted on any error.

    Raises:
        OSError: the disk is full, or the like; names `path`, or the file in it.
    """
    _clean(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming(path, temporary):
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.rglob("*"):
                _sync(file)
            # a folder cannot be renamed onto another one: for an instant there is none
            if path.exists():
                path.rename(temporary.with_suffix(".replaced"))
            temporary.rename(path)
            _sync(path.parent)
    finally:
        _clean(path)


def _clean(path: Path) -> None:
    """Delete what this run or a killed one left of a folder; old content that nothing replaced comes back."""
    name = re.compile(rf"\.{re.escape(path.name)}\.\d+\.(part|replaced)")
    for left in [left for left in path.parent.glob(".*") if name.fullmatch(left.name)]:
        if left.suffix == ".replaced" and not path.exists():
            left.rename(path)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
