"""Coupled sampling: the pinned logits pipeline and the arg-max over perturbed scores, in plain float32 torch.

    repetition penalty -> temperature -> top-k -> top-p -> min-p,   score = z + T * g over the kept tokens,
    x = argmax score

By the Gumbel-max theorem x is an exact sample of softmax(z / T) over the kept tokens. Every filter keeps the
tokens whose logit reaches a threshold of its row, so no full sort is needed and equal logits share their
fate. Masks equal those of transformers' logits processors (up to ties at a threshold, which transformers
breaks by sort order).

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

FIRST_NUCLEUS_WIDTH = 256


class Filters(Protocol):
    """The sampling fields that the pipeline reads; `foredraft.infer.params.SamplingParams` has them."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...


def penalise_repetition(logits_RV: torch.Tensor, seen_RV: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divide positive logits of seen tokens by `penalty`, multiply negative ones (Keskar et al., 1909.05858).

    Args:
        logits_RV: float32 [R, V].
        seen_RV: bool [R, V], tokens of prompt, output and the row's own path.
        penalty: > 0; above 1 discourages repetition.
    """
    penalised_RV = torch.where(logits_RV > 0, logits_RV / penalty, logits_RV * penalty)
    return torch.where(seen_RV, penalised_RV, logits_RV)


def nucleus_threshold(logits_RV: torch.Tensor, top_p: float, temperature: float) -> torch.Tensor:
    """Least logit [R] of the smallest set of most probable tokens whose mass reaches `top_p`.

    The sorted part grows until it holds the nucleus of every row: a confident row never pays for a full sort.
    """
    vocab_size = logits_RV.shape[-1]
    log_mass_R1 = torch.logsumexp(logits_RV / temperature, -1, keepdim=True)
    width = min(FIRST_NUCLEUS_WIDTH, vocab_size)
    while True:
        top_RW = logits_RV.topk(width, -1).values
        mass_RW = (top_RW / temperature - log_mass_R1).exp().cumsum(-1)
        if width == vocab_size or bool((mass_RW[:, -1] >= top_p).all()):
            break
        width = min(4 * width, vocab_size)
    # a token is kept while the mass before it is below top_p: the first one always is
    num_kept_R = 1 + (mass_RW[:, :-1] < top_p).sum(-1)
    return top_RW.gather(-1, num_kept_R[:, None] - 1).squeeze(-1)


def keep_threshold(logits_RV: torch.Tensor, filters: Filters) -> torch.Tensor | None:
    """Least kept logit of every row, float32 [R]; None where no filter is on."""
    vocab_size = logits_RV.shape[-1]
    threshold_R = None
    if 0 < filters.top_k < vocab_size:
        threshold_R = logits_RV.topk(filters.top_k, -1).values[:, -1]
        logits_RV = logits_RV.masked_fill(logits_RV < threshold_R[:, None], -torch.inf)
    if filters.top_p < 1.0:
        threshold_R = nucleus_threshold(logits_RV, filters.top_p, filters.temperature)
    if filters.min_p > 0.0:
        least_R = logits_RV.amax(-1) + filters.temperature * math.log(filters.min_p)
        threshold_R = least_R if threshold_R is None else torch.maximum(threshold_R, least_R)
    return threshold_R


def perturbed_scores(
    logits_RV: torch.Tensor, filters: Filters, noise_RV: torch.Tensor | None, seen_RV: torch.Tensor | None
) -> torch.Tensor:
    """Scores whose arg-max is the chosen token.

    Args:
        logits_RV: raw logits, float32 [R, V].
        filters: temperature, top_k, top_p, min_p and repetition_penalty.
        noise_RV: Gumbel noise float32 [R, V] of every row's position; needed where temperature > 0.
        seen_RV: bool [R, V]; needed where repetition_penalty is not 1.

    Returns:
        float32 [R, V]; -inf where a filter removed the token. At temperature 0 the (penalised) logits.
    """
    if filters.repetition_penalty != 1.0:
        assert seen_RV is not None, "a repetition penalty needs the tokens seen"
        logits_RV = penalise_repetition(logits_RV, seen_RV, filters.repetition_penalty)
    if filters.temperature == 0.0:
        return logits_RV
    assert noise_RV is not None, "sampling needs noise"
    scores_RV = torch.add(logits_RV, noise_RV, alpha=filters.temperature)
    threshold_R = keep_threshold(logits_RV, filters)
    if threshold_R is not None:
        scores_RV = scores_RV.masked_fill(logits_RV < threshold_R[:, None], -torch.inf)
    return scores_RV


def coupled_argmax(
    logits_RV: torch.Tensor, filters: Filters, noise_RV: torch.Tensor | None, seen_RV: torch.Tensor | None
) -> torch.Tensor:
    """The chosen token of every row, int64 [R]; ties go to the lowest id. Arguments: `perturbed_scores`."""
    return perturbed_scores(logits_RV, filters, noise_RV, seen_RV).argmax(-1)
