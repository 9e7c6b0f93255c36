"""Coupled sampling: the pinned logits pipeline and the arg-max over perturbed scores, in plain float32 torch.

    penalties and biases -> temperature -> top-k -> top-p -> min-p,   score = z + T * g over the kept tokens,
    x = argmax score

By the Gumbel-max theorem x is an exact sample of softmax(z / T) over the kept tokens. Every filter keeps the
tokens whose logit reaches a threshold of its row, so no full sort is needed and equal logits share their
fate. Masks equal those of transformers' logits processors (up to ties at a threshold, which transformers
breaks by sort order).

Shape letters: N rows, C columns of the head (of a full one: V, the vocabulary).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from foredraft.kernels.draws import Draw, Filters
from foredraft.kernels.penalties import penalise
from foredraft.kernels.philox_ref import gumbel_row

FIRST_NUCLEUS_WIDTH = 256
NOISE_ROWS = 128  # rows of noise that are kept: some requests' blocks and the trees below them


def coupled_sample(
    logits_NC: torch.Tensor, draws: Sequence[Draw], token_ids_C: torch.Tensor | None = None
) -> torch.Tensor:
    """The chosen token of every row, int64 [N]; ties go to the lowest column.

    Args:
        logits_NC: raw logits, float32, contiguous.
        draws: one a row.
        token_ids_C: int64 target id of every column; None: columns are target ids.

    Raises:
        ValueError: not a draw a row, or logits of another type or layout.
    """
    check_rows(logits_NC, draws)
    columns_N = perturbed_scores(logits_NC, draws, token_ids_C).argmax(-1)
    return columns_N if token_ids_C is None else token_ids_C[columns_N]


def perturbed_scores(
    logits_NC: torch.Tensor, draws: Sequence[Draw], token_ids_C: torch.Tensor | None = None
) -> torch.Tensor:
    """Scores whose arg-max is the chosen column, float32 [N, C]; -inf where a filter removed the token.

    At temperature 0 the (penalised) logits. Arguments: `coupled_sample`.
    """
    logits_NC = penalise(logits_NC, draws, token_ids_C)
    groups = rows_by_filters(draws)
    if len(groups) == 1:
        return scores_of_group(logits_NC, draws, token_ids_C)
    scores_NC = torch.empty_like(logits_NC)
    for rows in groups:
        scores_NC[rows] = scores_of_group(logits_NC[rows], [draws[row] for row in rows], token_ids_C)
    return scores_NC


def scores_of_group(
    logits_NC: torch.Tensor, draws: Sequence[Draw], token_ids_C: torch.Tensor | None
) -> torch.Tensor:
    """`perturbed_scores` of penalised rows with the same filters."""
    filters = draws[0].filters
    if filters.temperature == 0.0:
        return logits_NC
    rows = [
        perturbed_row(logits_C, draw, token_ids_C) for logits_C, draw in zip(logits_NC, draws, strict=True)
    ]
    scores_NC = torch.stack(rows)
    threshold_N = keep_threshold(logits_NC, filters)
    if threshold_N is not None:
        scores_NC.masked_fill_(logits_NC < threshold_N[:, None], -torch.inf)
    return scores_NC


def perturbed_row(logits_C: torch.Tensor, draw: Draw, token_ids_C: torch.Tensor | None) -> torch.Tensor:
    """Scores of a penalised row before any filter, float32 [C]; the temperature is positive."""
    noise_C = _noise_row(draw, len(logits_C), token_ids_C).to(logits_C.device)
    return torch.add(logits_C, noise_C, alpha=draw.filters.temperature)


def rows_by_filters(draws: Sequence[Draw]) -> list[list[int]]:
    """Rows with the same temperature and filters, together."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, draw in enumerate(draws):
        filters = draw.filters
        key = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def keep_threshold(logits_NC: torch.Tensor, filters: Filters) -> torch.Tensor | None:
    """Least kept logit of every row, float32 [N]; None where no filter is on."""
    num_columns = logits_NC.shape[-1]
    threshold_N = None
    if 0 < filters.top_k < num_columns:
        threshold_N = logits_NC.topk(filters.top_k, -1).values[:, -1]
        logits_NC = logits_NC.masked_fill(logits_NC < threshold_N[:, None], -torch.inf)
    if filters.top_p < 1.0:
        threshold_N = nucleus_threshold(logits_NC, filters.top_p, filters.temperature)
    if filters.min_p > 0.0:
        least_N = logits_NC.amax(-1) + filters.temperature * math.log(filters.min_p)
        threshold_N = least_N if threshold_N is None else torch.maximum(threshold_N, least_N)
    return threshold_N


def nucleus_threshold(logits_NC: torch.Tensor, top_p: float, temperature: float) -> torch.Tensor:
    """Least logit [N] of the smallest set of most probable tokens whose mass reaches `top_p`.

    The sorted part grows until it holds the nucleus of every row: a confident row never pays for a full sort.
    """
    num_columns = logits_NC.shape[-1]
    log_mass_N1 = torch.logsumexp(logits_NC / temperature, -1, keepdim=True)
    width = min(FIRST_NUCLEUS_WIDTH, num_columns)
    while True:
        top_NW = logits_NC.topk(width, -1).values
        mass_NW = (top_NW / temperature - log_mass_N1).exp().cumsum(-1)
        if width == num_columns or bool((mass_NW[:, -1] >= top_p).all()):
            break
        width = min(4 * width, num_columns)
    # a token is kept while the mass before it is below top_p: the first one always is
    num_kept_N = 1 + (mass_NW[:, :-1] < top_p).sum(-1)
    return top_NW.gather(-1, num_kept_N[:, None] - 1).squeeze(-1)


def _noise_row(draw: Draw, num_columns: int, token_ids_C: torch.Tensor | None) -> torch.Tensor:
    """Noise of every column at one position, float32 [C]: shared by all rows there."""
    return _kept_noise_row(draw.seed, draw.position, draw.choice, num_columns, token_ids_C)


@functools.lru_cache(maxsize=NOISE_ROWS)
def _kept_noise_row(
    seed: int, position: int, choice: int, num_columns: int, token_ids_C: torch.Tensor | None
) -> torch.Tensor:
    if token_ids_C is None:
        return torch.from_numpy(gumbel_row(seed, position, choice, num_columns))
    ids_C = token_ids_C.cpu()
    return torch.from_numpy(gumbel_row(seed, position, choice, int(ids_C.max()) + 1))[ids_C]


def check_rows(logits_NC: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Raise ValueError unless there is a draw a row of contiguous float32 logits."""
    if len(draws) != len(logits_NC):
        raise ValueError(f"expected a draw a row, {len(logits_NC)}, got {len(draws)}")
    if logits_NC.dtype != torch.float32 or not logits_NC.is_contiguous():
        raise ValueError(
            f"logits_NC must be contiguous float32, got {logits_NC.dtype} of strides {logits_NC.stride()}; "
            "use .float().contiguous()"
        )
