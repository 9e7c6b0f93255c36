"""Distillation losses per position, in plain float32 torch.

A log keeps the teacher's k most probable tokens and the mass of all others. With p_i the teacher's
probabilities of the kept tokens, p_o = 1 - sum p_i its tail, q = softmax(z) the student over the draft
vocabulary and q_o the student's mass outside the kept tokens, the loss is the divergence between the two
coarse distributions:

    L = sum_i p_i log(p_i / q_i) + p_o log(p_o / q_o)

    dL/dz_i = q_i - p_i               for a kept token
    dL/dz_j = q_j (1 - p_o / q_o)     for any other: the tail is scaled as a whole, its shape is left alone

It is a lower bound of KL(p || q) and equals it where k covers the vocabulary. A kept token outside the draft
vocabulary cannot be learned: its mass moves to the tail, and is reported so that it can be counted.

Shape letters: N positions, D draft vocabulary, K kept teacher tokens, V target vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

OUTSIDE = -1


class Teacher(NamedTuple):
    """The teacher's distribution over draft ids."""

    ids_NK: torch.Tensor  # int64 draft ids, OUTSIDE where the draft vocabulary lacks the token
    probs_NK: torch.Tensor  # float32, 0 where OUTSIDE
    tail_N: torch.Tensor  # float32, mass of all other tokens; sums to 1 with probs_NK
    outside_N: torch.Tensor  # float32, part of tail_N: kept tokens outside the draft vocabulary


def map_teacher(
    topk_ids_NK: torch.Tensor, topk_logprobs_NK: torch.Tensor, t2d_V: torch.Tensor | None
) -> Teacher:
    """Teacher over the draft vocabulary from logged top-k log-probabilities.

    Args:
        topk_ids_NK: target ids, integer [N, K], distinct in a row.
        topk_logprobs_NK: their log-probabilities, any float type [N, K].
        t2d_V: int64 [V], draft id of every target id or OUTSIDE; None: the draft vocabulary is the target's.
    """
    probs_NK = topk_logprobs_NK.float().exp()
    # half precision may carry the sum past 1 by a rounding
    probs_NK = probs_NK / probs_NK.sum(-1, keepdim=True).clamp(min=1.0)
    ids_NK = topk_ids_NK.long() if t2d_V is None else t2d_V[topk_ids_NK.long()]
    inside_NK = ids_NK != OUTSIDE
    kept_NK = torch.where(inside_NK, probs_NK, 0.0)
    outside_N = (probs_NK - kept_NK).sum(-1)
    return Teacher(ids_NK, kept_NK, (1.0 - kept_NK.sum(-1)).clamp(min=0.0), outside_N)


def distill_loss(logits_ND: torch.Tensor, teacher: Teacher) -> torch.Tensor:
    """KL of the teacher's kept tokens and tail bucket against the student's.

    Args:
        logits_ND: student logits over the draft vocabulary, any float type [N, D].
        teacher: from `map_teacher`.

    Returns:
        float32 [N], each >= 0 up to rounding.
    """
    logits_ND = logits_ND.float()
    inside_NK = teacher.ids_NK != OUTSIDE
    slots_NK = teacher.ids_NK.clamp(min=0)
    log_total_N = logits_ND.logsumexp(-1)
    log_q_NK = logits_ND.gather(-1, slots_NK) - log_total_N[:, None]

    # one more column takes the writes of OUTSIDE tokens, which must not mask draft id 0
    num_draft = logits_ND.shape[-1]
    columns_NK = torch.where(inside_NK, slots_NK, num_draft)
    is_kept_ND = torch.zeros(len(logits_ND), num_draft + 1, dtype=torch.bool, device=logits_ND.device)
    is_kept_ND = is_kept_ND.scatter_(-1, columns_NK, True)[:, :num_draft]
    log_q_tail_N = logits_ND.masked_fill(is_kept_ND, -torch.inf).logsumexp(-1) - log_total_N

    kept_N = torch.where(inside_NK, _divergence(teacher.probs_NK, log_q_NK), 0.0).sum(-1)
    # where the kept tokens are the whole draft vocabulary the student has no tail to compare
    has_tail_N = torch.isfinite(log_q_tail_N)
    tail_N = _divergence(teacher.tail_N, torch.where(has_tail_N, log_q_tail_N, 0.0))
    return kept_N + torch.where(has_tail_N, tail_N, 0.0)


def token_loss(logits_ND: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
    """Cross-entropy on the logged token, for logs without a teacher distribution.

    Args:
        logits_ND: student logits, any float type [N, D].
        ids_N: draft id of the token, int64 [N]; OUTSIDE gives a loss of 0.

    Returns:
        float32 [N].
    """
    return torch.nn.functional.cross_entropy(logits_ND.float(), ids_N, reduction="none", ignore_index=OUTSIDE)


def _divergence(probs: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """p log(p / q) element by element, 0 where p = 0."""
    return torch.special.xlogy(probs, probs) - probs * log_q
