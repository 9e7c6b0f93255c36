"""Which prompts which stage may learn from.

A drafter knows its training prompts by heart, so its confidence there says nothing about new ones: an outcome
predictor learns from prompts that were reserved, and nothing learns from the held-out ones.
"""

from __future__ import annotations

import hashlib
from typing import Literal

Part = Literal["train", "reserved", "heldout"]


def part_of(request_id: str, split: str, reserved_fraction: float) -> Part:
    """The part of a prompt.

    Args:
        request_id: hash of the prompt.
        split: train or heldout, as logged.
        reserved_fraction: of the train prompts, chosen by a hash of their own.
    """
    if split == "heldout":
        return "heldout"
    return "reserved" if fraction_of(request_id, "reserved") < reserved_fraction else "train"


def fraction_of(request_id: str, purpose: str) -> float:
    """A number in [0, 1) from a prompt's hash, independent for every purpose."""
    digest = hashlib.sha256(f"{purpose}/{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**64
