"""What states of the target cost, before anything starts: bytes on the disk, or seconds of the target.

They are stored with the log (`hidden_layers` of its recipe), or made anew in every epoch of training by
running the target (`states: target` of the drafter's). One token of three layers, each 4096
wide, is 24 KiB.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

MAX_SHARE_OF_DISK = 0.8  # of what is free
PROBE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Costs of the states of some tokens."""

    num_tokens: int
    width: int  # numbers of one token

    @property
    def num_bytes(self) -> int:
        """On the disk, as bfloat16."""
        return 2 * self.num_tokens * self.width

    def stored(self, folder: Path) -> str:
        """What storing costs in a folder.

        Raises:
            ValueError: it would fill the disk.
        """
        free = shutil.disk_usage(existing(folder)).free
        if self.num_bytes > MAX_SHARE_OF_DISK * free:
            raise ValueError(
                f"states of at most {self.num_tokens:,} tokens need {sized(self.num_bytes)} in {folder}, "
                f"where {sized(free)} are free; log fewer or shorter responses, fewer hidden_layers, or none "
                "and train with `states: target`, which runs the target again instead"
            )
        seconds = self.num_bytes / write_rate(existing(folder))
        return (
            f"states stored: at most {self.num_tokens:,} tokens, {sized(self.num_bytes)} of {sized(free)} "
            f"free, {seconds:.0f} s of writing"
        )

    def run(self, tokens_per_second: float, epochs: float) -> str:
        """What running the target costs in training."""
        seconds = epochs * self.num_tokens / tokens_per_second
        return (
            f"states from the target: {self.num_tokens:,} tokens, {epochs:g} times at "
            f"{tokens_per_second:,.0f} tokens/s: {seconds:,.0f} s in all; stored with the log they were "
            f"{sized(self.num_bytes)}"
        )


def sized(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above that is there."""
    folder = folder.resolve()
    return folder if folder.is_dir() else existing(folder.parent)


def write_rate(folder: Path) -> float:
    """Bytes a second of a short write to a folder."""
    path = folder / ".foredraft-write-rate"
    started = time.perf_counter()
    try:
        path.write_bytes(bytes(PROBE_BYTES))
    finally:
        path.unlink(missing_ok=True)
    return PROBE_BYTES / max(1e-6, time.perf_counter() - started)
