"""Which software made a result: package versions and the commit of the code."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("foredraft", "torch", "transformers", "accelerate", "numpy", "pyarrow", "safetensors")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide results; packages that are missing are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the checkout that this file belongs to, with `-dirty` where it was changed; else None."""
    path = Path(__file__).resolve()
    # an installed copy may lie in the checkout of another project, which does not track it
    if _git(path.parent, "ls-files", "--error-unmatch", path.name) is None:
        return None
    return _git(path.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
