"""Files and folders that appear whole or not at all, whatever interrupts the writing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path, part: Path) -> Iterator[None]:
    """Let errors of the operating system (a full disk) name `path`, which is being written to `part`.

    Raises:
        OSError: in place of one that names no file, or `part`; and in place of the exceptions of libraries
            in Rust (safetensors, tokenizers), which tell the system's error in their text only.
    """
    try:
        yield
    except Exception as error:
        in_text = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else int(in_text[1]) if in_text else None
        if number is None:
            raise
        named = str(getattr(error, "filename", None) or path).replace(str(part), str(path))
        raise OSError(number, os.strerror(number), named) from error


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


def write_text_atomic(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` (UTF-8) to `path`, whose folder is made if missing. Raises as `atomic_file`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


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
