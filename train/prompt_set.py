"""The prompts of a target log: encoded, named by hash, split into train and heldout, without duplicates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from foredraft.infer.identity import sha256_of_json
from foredraft.infer.params import require
from foredraft.infer.prompts import encode, hash_prompt, read_prompts

SPLITS = ("train", "heldout")


@dataclass(frozen=True, slots=True)
class LogPrompt:
    """A prompt to be logged."""

    request_id: str  # hash of its tokens
    token_ids: tuple[int, ...]
    split: str  # train | heldout


def read_log_prompts(
    path: str, tokenizer: PreTrainedTokenizerBase, *, raw: bool, heldout_fraction: float
) -> list[LogPrompt]:
    """Prompts of a JSONL file in order, each once.

    A line's own `split` wins; other prompts are held out by their hash, so that a prompt is on the same side
    in every file.

    Raises:
        ValueError: what `read_prompts` and `encode` refuse, or a `split` that is neither train nor heldout.
    """
    lines = Path(path).read_text(encoding="utf-8-sig").splitlines() if Path(path).is_file() else []
    found: dict[str, LogPrompt] = {}
    for prompt in read_prompts(path):
        token_ids = encode(prompt, tokenizer, raw=raw)
        request_id = hash_prompt(token_ids)
        split = json.loads(lines[prompt.index]).get("split") or split_of(request_id, heldout_fraction)
        require(split in SPLITS, f"{path}, line {prompt.index + 1}: split", "train or heldout", split)
        found.setdefault(request_id, LogPrompt(request_id, tuple(token_ids), split))
    return list(found.values())


def split_of(request_id: str, heldout_fraction: float) -> str:
    """Side of a prompt: its hash decides."""
    return "heldout" if int(request_id[:8], 16) < heldout_fraction * 2**32 else "train"


def prompts_sha256(prompts: Sequence[LogPrompt]) -> str:
    """Hash of a list of prompts with their splits."""
    return sha256_of_json([(prompt.request_id, prompt.split) for prompt in prompts])
