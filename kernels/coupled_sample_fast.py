"""Coupled sampling on the CPU: where filters keep few tokens, noise is drawn for these only.

A row of noise over a large vocabulary costs more than the row's share of a small model's step. The tokens are
those of coupled_sample_ref.py.

Shape letters: N rows, C columns, W most probable columns of a row, B blocks of 32 columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from foredraft.kernels.coupled_sample_ref import check_rows, perturbed_row, rows_by_filters, scores_of_group
from foredraft.kernels.draws import Draw, Filters
from foredraft.kernels.penalties import penalise
from foredraft.kernels.philox_ref import COUPLED_ROLE, gumbel_of

BLOCK = 32
TOP_WIDTHS = (48, 256)  # most nuclei fit in the first; a row that no width holds takes the whole vocabulary
BEST_SCORES = (
    16  # of a wide nucleus: that all of these lie outside is rare, and done as the reference does it
)
ROWS_AT_ONCE = 8  # of the vocabulary's size: their buffer stays in a core's cache


class Top(NamedTuple):
    """The most probable columns of every row in falling order of logits."""

    logits_NW: torch.Tensor  # float32
    columns_NW: torch.Tensor  # int64


def top_columns(logits_NC: torch.Tensor, width: int) -> Top:
    """`torch.topk` for a width far below C: only blocks with the greatest maxima can hold the top columns."""
    num_rows, num_columns = logits_NC.shape
    num_blocks = num_columns // BLOCK
    if num_blocks <= 2 * width:
        return Top(*logits_NC.topk(min(width, num_columns), -1))
    blocks_NB32 = logits_NC[:, : num_blocks * BLOCK].view(num_rows, num_blocks, BLOCK)
    best_NW = blocks_NB32.amax(-1).topk(width, -1).indices
    columns = best_NW[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits_NC.device)
    rest = torch.arange(num_blocks * BLOCK, num_columns, device=logits_NC.device).expand(num_rows, -1)
    columns = torch.cat([columns.view(num_rows, -1), rest], 1)
    logits_NW, places_NW = logits_NC.gather(1, columns).topk(width, -1)
    return Top(logits_NW, columns.gather(1, places_NW))


def coupled_sample(
    logits_NC: torch.Tensor, draws: Sequence[Draw], token_ids_C: torch.Tensor | None = None
) -> torch.Tensor:
    """The chosen token of every row. Arguments and errors: `coupled_sample_ref.coupled_sample`."""
    check_rows(logits_NC, draws)
    logits_NC = penalise(logits_NC, draws, token_ids_C)
    columns_N = torch.empty(len(draws), dtype=torch.int64)
    for rows in rows_by_filters(draws):
        part_NC = logits_NC if len(rows) == len(draws) else logits_NC[rows]
        columns_N[rows] = _choose(part_NC, [draws[row] for row in rows], token_ids_C)
    return columns_N if token_ids_C is None else token_ids_C[columns_N]


def _choose(logits_NC: torch.Tensor, draws: Sequence[Draw], token_ids_C: torch.Tensor | None) -> torch.Tensor:
    """Columns of penalised rows with the same filters, int64 [N]."""
    filters = draws[0].filters
    if filters.temperature == 0.0 or not (filters.top_k or filters.top_p < 1.0 or filters.min_p):
        return scores_of_group(logits_NC, draws, token_ids_C).argmax(-1)
    columns_N = torch.empty(len(draws), dtype=torch.int64)
    log_mass_N = None if filters.top_k or filters.top_p == 1.0 else log_mass(logits_NC, filters.temperature)
    left = list(range(len(draws)))
    for width in TOP_WIDTHS:
        if left:
            part_NC = logits_NC if len(left) == len(draws) else logits_NC[left]
            top = top_columns(part_NC, width)
            mass_N = None if log_mass_N is None else log_mass_N[left]
            num_kept_N = _num_kept(top.logits_NW, mass_N, filters).tolist()
            # columns as probable as the last top one may follow it
            places = [place for place, kept in enumerate(num_kept_N) if kept < min(width, logits_NC.shape[1])]
            for place in places:
                kept = slice(num_kept_N[place])
                logits_K, columns_K = top.logits_NW[place, kept], top.columns_NW[place, kept]
                columns_N[left[place]] = _choose_of(logits_K, columns_K, draws[left[place]], token_ids_C)
            done = set(places)
            left = [row for place, row in enumerate(left) if place not in done]
    for row in left:
        mass = None if log_mass_N is None else log_mass_N[row]
        columns_N[row] = _choose_wide(logits_NC[row], draws[row], mass, token_ids_C)
    return columns_N


def _choose_wide(
    logits_C: torch.Tensor, draw: Draw, log_mass: torch.Tensor | None, token_ids_C: torch.Tensor | None
) -> torch.Tensor:
    """The chosen column of a row whose kept ones are many.

    Without sorting the vocabulary: the best scores of all columns are looked at one after another, and the
    first one that lies in the nucleus is the best one of the nucleus.
    """
    filters = draw.filters
    if log_mass is not None and not filters.min_p:
        best_W = perturbed_row(logits_C, draw, token_ids_C).topk(min(BEST_SCORES, len(logits_C)))
        probs_C = (logits_C / filters.temperature - log_mass).exp_()
        # equal scores go to the lowest column, which topk does not promise
        if best_W.values.unique().numel() == best_W.values.numel():
            for column in best_W.indices:
                if (probs_C * (logits_C > logits_C[column])).sum() < filters.top_p:
                    return column
    return scores_of_group(logits_C[None], [draw], token_ids_C).argmax()


def _choose_of(
    logits_K: torch.Tensor, columns_K: torch.Tensor, draw: Draw, token_ids_C: torch.Tensor | None
) -> torch.Tensor:
    """The chosen one of a row's kept columns."""
    tokens_K = columns_K if token_ids_C is None else token_ids_C[columns_K]
    noise_K = gumbel_of(draw, COUPLED_ROLE, tokens_K.numpy())
    scores_K = torch.add(logits_K, noise_K, alpha=draw.filters.temperature)
    # equal scores go to the lowest column
    return columns_K[scores_K == scores_K.max()].min()


def log_mass(logits_NC: torch.Tensor, temperature: float) -> torch.Tensor:
    """logsumexp(z / T) of every row, float32 [N]."""
    if temperature == 1.0:
        return logits_NC.logsumexp(-1)
    return torch.cat([(part / temperature).logsumexp(-1) for part in logits_NC.split(ROWS_AT_ONCE)])


def _num_kept(top_NW: torch.Tensor, log_mass_N: torch.Tensor | None, filters: Filters) -> torch.Tensor:
    """Number of top columns that the filters keep, int64 [N]; W where more may be kept.

    The mass is of the tempered rows; None where no nucleus is asked for, or that of the top k is.
    """
    width = top_NW.shape[1]
    kept_NW = torch.ones_like(top_NW, dtype=torch.bool)
    if filters.top_k:
        if filters.top_k >= width:
            return kept_NW.sum(-1)
        kept_NW &= top_NW >= top_NW[:, filters.top_k - 1 : filters.top_k]
        log_mass_N = log_mass(top_NW.masked_fill(~kept_NW, -torch.inf), filters.temperature)
    if filters.top_p < 1.0:
        assert log_mass_N is not None
        mass_NW = (top_NW / filters.temperature - log_mass_N[:, None]).exp().cumsum(-1)
        num_N1 = 1 + (mass_NW[:, :-1] < filters.top_p).sum(-1, keepdim=True)
        kept_NW &= top_NW >= top_NW.gather(-1, num_N1 - 1)
    if filters.min_p:
        kept_NW &= top_NW >= top_NW[:, :1] + filters.temperature * math.log(filters.min_p)
    return kept_NW.sum(-1)
