"""Files and folders that appear whole or not at all, whatever interrupts the writing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; renamed to `path` on success, deleted on any error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` to fill; becomes `path` on success, is deleted on any error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    replaced = path.with_name(f".{path.name}.{os.getpid()}.replaced")
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        # a folder cannot be renamed onto another one: for an instant there is none
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
