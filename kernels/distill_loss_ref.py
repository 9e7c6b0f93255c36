"""Distillation losses per position, from hidden states and the head's weight, in plain float32 torch.

A log keeps the teacher's K most probable tokens and the mass of all others, so every loss compares two coarse
distributions: one column for each kept token i, and one bucket o, the *tail*, for all others. With logits
z = softcap(scale (W h + b)) over the draft vocabulary, the student's coarse logits are

    c_i = z_i   for a kept token,      c_o = log sum_j exp z_j   over all tokens that are not kept,

and log q = log_softmax(c). This is the whole of the work that grows with the vocabulary; its derivative is

    dc_i / dz_i = 1,      dc_o / dz_j = exp(z_j - c_o),

so the tail is scaled as a whole and its shape is left alone. The losses are functions of [N, K + 1] numbers.
With p the teacher's probabilities, p_o its tail and r the part of p_o that the draft vocabulary can reach:

    forward_kl         sum_i p_i log(p_i / q_i) + p_o log(p_o / q_o)
    reverse_kl         sum_i q_i log(q_i / p_i) + q_o log(q_o / max(p_o, TAIL_FLOOR))
    total_variation    1 - overlap,   overlap = sum_i min(p_i, q_i) + min(r, q_o)
    lk                 -log overlap,  with max(r, TAIL_FLOOR) for r
    cross_entropy      -log q_t       of the logged token t, kept or not

Merging tokens into a bucket can only bring two distributions closer, so both divergences are lower bounds of
those between the whole distributions, and the overlap is an upper bound; where the kept tokens cover the
vocabulary they are equal. The overlap is the chance that speculative sampling accepts a guess drawn from q
(Leviathan et al., arXiv:2211.17192). Its logarithm as a loss is from arXiv:2602.23881; both divergences and
the total variation between drafter and target are compared in DistillSpec, arXiv:2310.08461.

A kept token outside the draft vocabulary cannot be learned. Its mass belongs to the tail of both divergences
and never overlaps (r = p_o - outside); a logged token outside has cross-entropy 0. `Teacher.outside_N` says
how much that is, so that it can be counted.

Shape letters: N positions, H hidden size, D draft vocabulary, K kept teacher tokens, V target vocabulary,
C = columns of the coarse distribution without the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn.functional import linear

OUTSIDE = -1
TAIL_FLOOR = 1e-6  # a smaller tail is rounding of the logged half-precision log-probabilities
FAR = -1e30  # log 0: 0 * FAR is 0, and so is its derivative
TINY = torch.finfo(torch.float32).tiny


class Head(NamedTuple):
    """From hidden states to logits over the draft vocabulary: softcap * tanh(scale (W h + b) / softcap)."""

    weight_DH: torch.Tensor  # any float type
    bias_D: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Logits [N, D] in the type of hidden states and weight."""
        return scale_logits(linear(hidden_NH, self.weight_DH, self.bias_D), self.scale, self.softcap)


class Teacher(NamedTuple):
    """The teacher's distribution over draft ids, and the logged token."""

    ids_NK: torch.Tensor  # int64 draft ids, OUTSIDE where the draft vocabulary lacks the token
    probs_NK: torch.Tensor  # float32, 0 where OUTSIDE
    tail_N: torch.Tensor  # float32, mass of all other tokens; sums to 1 with probs_NK
    outside_N: torch.Tensor  # float32, part of tail_N: kept tokens outside; K = 0: 1 where token_N is outside
    token_N: torch.Tensor  # int64 draft id of the logged token, or OUTSIDE


class Coarse(NamedTuple):
    """The student's log-probabilities; FAR for kept tokens outside the draft vocabulary and an empty tail."""

    kept_NK: torch.Tensor
    tail_N: torch.Tensor
    token_N: torch.Tensor  # of the logged token; 0 where it is OUTSIDE


def map_teacher(
    topk_ids_NK: torch.Tensor,
    topk_logprobs_NK: torch.Tensor,
    token_ids_N: torch.Tensor,
    t2d_V: torch.Tensor | None,
) -> Teacher:
    """Teacher over the draft vocabulary from what was logged.

    Args:
        topk_ids_NK: target ids, integer [N, K], distinct in a row; K = 0 in a log of tokens only.
        topk_logprobs_NK: their log-probabilities, any float type [N, K].
        token_ids_N: target ids of the logged tokens, integer [N].
        t2d_V: int64 [V], draft id of every target id or OUTSIDE; None: the draft vocabulary is the target's.
    """
    probs_NK = topk_logprobs_NK.float().exp()
    # half precision may carry the sum past 1 by a rounding
    probs_NK = probs_NK / probs_NK.sum(-1, keepdim=True).clamp(min=1.0)
    ids_NK, token_N = topk_ids_NK.long(), token_ids_N.long()
    if t2d_V is not None:
        ids_NK, token_N = t2d_V[ids_NK], t2d_V[token_N]
    kept_NK = torch.where(ids_NK != OUTSIDE, probs_NK, 0.0)
    is_log_of_tokens = ids_NK.shape[1] == 0
    outside_N = (token_N == OUTSIDE).float() if is_log_of_tokens else (probs_NK - kept_NK).sum(-1)
    return Teacher(ids_NK, kept_NK, (1.0 - kept_NK.sum(-1)).clamp(min=0.0), outside_N, token_N)


def scale_logits(logits_ND: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """What some families do between head and logits (Gemma 2, Cohere, Granite)."""
    logits_ND = logits_ND if scale == 1.0 else logits_ND * scale
    return softcap * torch.tanh(logits_ND / softcap) if softcap else logits_ND


def distill_loss(
    hidden_NH: torch.Tensor, head: Head, teacher: Teacher, losses: Mapping[str, float]
) -> torch.Tensor:
    """Weighted sum of losses of every position, differentiable in hidden states, weight and bias.

    Args:
        hidden_NH: any float type [N, H], contiguous.
        head: weight and bias contiguous and of the same type.
        teacher: from `map_teacher`.
        losses: weights by name, some of LOSSES.

    Returns:
        float32 [N].

    Raises:
        ValueError: shapes or types that do not fit, tensors that are not contiguous, names of no loss.
    """
    return loss_by(coarse_logits, hidden_NH, head, teacher, losses)


def coarse_logits(hidden_NH: torch.Tensor, head: Head, ids_NC: torch.Tensor) -> torch.Tensor:
    """Logits of chosen columns, -inf where OUTSIDE; then log sum exp of all others: float32 [N, C + 1]."""
    bias_D = None if head.bias_D is None else head.bias_D.float()
    logits_ND = head._replace(weight_DH=head.weight_DH.float(), bias_D=bias_D).logits(hidden_NH.float())
    num_rows, num_draft = logits_ND.shape
    is_outside_NC = ids_NC == OUTSIDE
    chosen_NC = logits_ND.gather(-1, ids_NC.clamp(min=0)).masked_fill(is_outside_NC, -torch.inf)
    # one more column takes the writes of OUTSIDE tokens, which must not mask draft id 0
    is_chosen_ND = torch.zeros(num_rows, num_draft + 1, dtype=torch.bool, device=ids_NC.device)
    is_chosen_ND = is_chosen_ND.scatter_(-1, ids_NC.masked_fill(is_outside_NC, num_draft), True)[
        :, :num_draft
    ]
    # a bias may rule tokens out by -inf; masked, a tail of such tokens has gradient 0 and not NaN
    rest_N = logits_ND.masked_fill(is_chosen_ND | logits_ND.isneginf(), -torch.inf).logsumexp(-1)
    return torch.cat([chosen_NC, rest_N[:, None]], -1)


def loss_by(
    coarse: Callable[[torch.Tensor, Head, torch.Tensor], torch.Tensor],
    hidden_NH: torch.Tensor,
    head: Head,
    teacher: Teacher,
    losses: Mapping[str, float],
) -> torch.Tensor:
    """`distill_loss` by an implementation of `coarse_logits`, the part in which implementations differ."""
    _check(hidden_NH, head, teacher, losses)
    needs_token = losses.get("cross_entropy", 0.0) != 0.0
    ids_NC = _with_token(teacher) if needs_token else teacher.ids_NK
    log_q_NC = coarse(hidden_NH, head, ids_NC).log_softmax(-1).clamp(min=FAR)
    is_token_NC = (ids_NC == teacher.token_N[:, None]) & (ids_NC != OUTSIDE)
    chosen_NC, tail_N = log_q_NC[:, :-1], log_q_NC[:, -1]
    log_q = Coarse(
        kept_NK=chosen_NC[:, : teacher.ids_NK.shape[1]],
        tail_N=torch.logaddexp(tail_N, chosen_NC[:, -1]) if needs_token else tail_N,
        token_N=torch.where(is_token_NC, chosen_NC, 0.0).sum(-1),
    )
    total_N = torch.zeros_like(tail_N)
    for name, weight in losses.items():
        if weight != 0.0:
            total_N = total_N + weight * LOSSES[name](log_q, teacher)
    return total_N


def forward_kl(log_q: Coarse, teacher: Teacher) -> torch.Tensor:
    """KL of the teacher from the student [N]; without its tail where the student has none."""
    kept_N = _divergence(teacher.probs_NK, log_q.kept_NK).sum(-1)
    has_tail_N = log_q.tail_N > FAR
    return kept_N + torch.where(has_tail_N, _divergence(teacher.tail_N, log_q.tail_N), 0.0)


def reverse_kl(log_q: Coarse, teacher: Teacher) -> torch.Tensor:
    """KL of the student from the teacher [N]."""
    log_p_NK = teacher.probs_NK.clamp(min=TINY).log()
    log_p_tail_N = teacher.tail_N.clamp(min=TAIL_FLOOR).log()
    kept_N = (log_q.kept_NK.exp() * (log_q.kept_NK - log_p_NK)).sum(-1)
    return kept_N + log_q.tail_N.exp() * (log_q.tail_N - log_p_tail_N)


def total_variation(log_q: Coarse, teacher: Teacher) -> torch.Tensor:
    """1 - overlap [N], half the L1 distance: the share of guesses that speculative sampling refuses."""
    kept_N = torch.minimum(teacher.probs_NK, log_q.kept_NK.exp()).sum(-1)
    return 1.0 - kept_N - torch.minimum(_reachable_tail(teacher), log_q.tail_N.exp())


def lk(log_q: Coarse, teacher: Teacher) -> torch.Tensor:
    """-log overlap [N], summed as logarithms: its gradient does not vanish where the overlap underflows."""
    kept_NK = torch.minimum(teacher.probs_NK.clamp(min=TINY).log(), log_q.kept_NK)
    tail_N = torch.minimum(_reachable_tail(teacher).clamp(min=TAIL_FLOOR).log(), log_q.tail_N)
    return -torch.cat([kept_NK, tail_N[:, None]], -1).logsumexp(-1)


def cross_entropy(log_q: Coarse, teacher: Teacher) -> torch.Tensor:
    """-log q of the logged token [N]; 0 where it is OUTSIDE."""
    return -log_q.token_N


LOSSES: Mapping[str, Callable[[Coarse, Teacher], torch.Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "lk": lk,
    "cross_entropy": cross_entropy,
}


def _divergence(probs: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """p log(p / q) element by element, 0 where p = 0."""
    return torch.special.xlogy(probs, probs) - probs * log_q


def _reachable_tail(teacher: Teacher) -> torch.Tensor:
    return (teacher.tail_N - teacher.outside_N).clamp(min=0.0)


def _with_token(teacher: Teacher) -> torch.Tensor:
    """Kept ids and, where it is not among them, the logged token: int64 [N, K + 1]."""
    is_kept_N = (teacher.ids_NK == teacher.token_N[:, None]).any(-1)
    return torch.cat([teacher.ids_NK, teacher.token_N.masked_fill(is_kept_N, OUTSIDE)[:, None]], -1)


def _check(hidden_NH: torch.Tensor, head: Head, teacher: Teacher, losses: Mapping[str, float]) -> None:
    weight_DH, bias_D = head.weight_DH, head.bias_D
    num_rows, hidden_size = hidden_NH.shape
    if unknown := sorted(losses.keys() - LOSSES.keys()):
        raise ValueError(f"losses must be some of {', '.join(LOSSES)}; got {', '.join(unknown)}")
    if weight_DH.ndim != 2 or weight_DH.shape[1] != hidden_size:
        raise ValueError(f"expected a weight [D, {hidden_size}], got {list(weight_DH.shape)}")
    if bias_D is not None and bias_D.shape != weight_DH.shape[:1]:
        raise ValueError(f"expected a bias {list(weight_DH.shape[:1])}, got {list(bias_D.shape)}")
    if len(teacher.ids_NK) != num_rows:
        raise ValueError(f"expected a teacher of {num_rows} positions, got {len(teacher.ids_NK)}")
    named = {"hidden_NH": hidden_NH, "weight_DH": weight_DH}
    named |= {} if bias_D is None else {"bias_D": bias_D}
    for name, tensor in named.items():
        if tensor.dtype != hidden_NH.dtype:
            raise ValueError(f"{name} must be {hidden_NH.dtype} as hidden_NH is, got {tensor.dtype}")
    for name, tensor in (named | {"teacher.ids_NK": teacher.ids_NK}).items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous: call .contiguous() first")
