"""The draft vocabulary: which target tokens a drafter can propose.

Its head is the costly part of a small drafter; most responses use few of the target's tokens.

Shape letters: V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from foredraft.kernels.distill_loss_ref import OUTSIDE
from foredraft.train.log_rows import LogRow

DRAFT_VOCAB_FILE = "draft_vocab.safetensors"


def expected_counts(rows: Iterable[LogRow], vocab_size: int) -> np.ndarray:
    """How often the target would say each token at temperature 1 on the logged prefixes, float64 [V].

    The teacher's probabilities are summed, since a token that is often second best is worth having; a log of
    tokens only counts these.
    """
    counts_V = np.zeros(vocab_size)
    for row in rows:
        if row.topk_ids.shape[1]:
            probs_TK = np.exp(row.topk_logprobs.astype(np.float64))
            np.add.at(counts_V, row.topk_ids.reshape(-1), probs_TK.reshape(-1))
        else:
            np.add.at(counts_V, row.response_ids, 1.0)
    return counts_V


def choose_draft_vocab(counts_V: np.ndarray, size: int, always: Iterable[int]) -> np.ndarray:
    """Target ids of the draft vocabulary in rising order, int64 [D]; exactly `size` of them.

    Args:
        counts_V: from `expected_counts`.
        size: D; at most V.
        always: ids to keep whatever their count: special tokens, EOS.

    Raises:
        ValueError: the size does not hold what must be kept, or exceeds the vocabulary.
    """
    kept = np.unique(np.fromiter(always, np.int64))
    if not len(kept) <= size <= len(counts_V):
        raise ValueError(
            f"draft_vocab_size must be in {len(kept)}..{len(counts_V)} "
            f"(special tokens .. the target's vocabulary), got {size}"
        )
    order = np.argsort(-counts_V, kind="stable")  # tokens never seen follow in order of their id
    others = order[~np.isin(order, kept)][: size - len(kept)]
    return np.sort(np.concatenate([kept, others]))


def invert(d2t_D: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Draft id of every target id, int64 [V]; OUTSIDE where the draft vocabulary lacks it."""
    t2d_V = torch.full((vocab_size,), OUTSIDE, dtype=torch.int64, device=d2t_D.device)
    t2d_V[d2t_D] = torch.arange(len(d2t_D), device=d2t_D.device)
    return t2d_V


def vocab_sha256(d2t_D: torch.Tensor) -> str:
    """Hash of a draft vocabulary."""
    return hashlib.sha256(d2t_D.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def save_draft_vocab(folder: Path, d2t_D: torch.Tensor) -> None:
    """Write the draft vocabulary with its hash into an artifact folder."""
    save_file({"d2t": d2t_D.cpu().contiguous()}, folder / DRAFT_VOCAB_FILE, {"sha256": vocab_sha256(d2t_D)})
