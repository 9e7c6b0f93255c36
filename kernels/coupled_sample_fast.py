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

from foredraft.kernels.coupled_sample_ref import check_rows, rows_by_filters, scores_of_group
from foredraft.kernels.draws import Draw, Filters
from foredraft.kernels.penalties import penalise
from foredraft.kernels.philox_ref import COUPLED_ROLE, gumbel_of

BLOCK = 32
TOP_WIDTH = 256  # most nuclei fit; the rows of others are done again over the whole vocabulary


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
    top = top_columns(logits_NC, TOP_WIDTH)
    num_kept_N = _num_kept(top.logits_NW, logits_NC, filters).tolist()
    columns_N = torch.empty(len(draws), dtype=torch.int64)
    others = []
    for row, num_kept in enumerate(num_kept_N):
        # columns as probable as the last top one may follow it
        if num_kept >= min(TOP_WIDTH, logits_NC.shape[1]):
            others.append(row)
            continue
        columns_K = top.columns_NW[row, :num_kept]
        tokens_K = columns_K if token_ids_C is None else token_ids_C[columns_K]
        noise_K = gumbel_of(draws[row], COUPLED_ROLE, tokens_K.numpy())
        scores_K = torch.add(top.logits_NW[row, :num_kept], noise_K, alpha=filters.temperature)
        # equal scores go to the lowest column
        columns_N[row] = columns_K[scores_K == scores_K.max()].min()
    if others:
        scores_NC = scores_of_group(logits_NC[others], [draws[row] for row in others], token_ids_C)
        columns_N[others] = scores_NC.argmax(-1)
    return columns_N


def _num_kept(top_NW: torch.Tensor, logits_NC: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Number of top columns that the filters keep, int64 [N]; W where more may be kept."""
    width = top_NW.shape[1]
    kept_NW = torch.ones_like(top_NW, dtype=torch.bool)
    total_NC = logits_NC
    if filters.top_k:
        if filters.top_k >= width:
            return kept_NW.sum(-1)
        kept_NW &= top_NW >= top_NW[:, filters.top_k - 1 : filters.top_k]
        total_NC = top_NW.masked_fill(~kept_NW, -torch.inf)
    if filters.top_p < 1.0:
        log_mass_N1 = torch.logsumexp(total_NC / filters.temperature, -1, keepdim=True)
        mass_NW = (top_NW / filters.temperature - log_mass_N1).exp().cumsum(-1)
        num_N1 = 1 + (mass_NW[:, :-1] < filters.top_p).sum(-1, keepdim=True)
        kept_NW &= top_NW >= top_NW.gather(-1, num_N1 - 1)
    if filters.min_p:
        kept_NW &= top_NW >= top_NW[:, :1] + filters.temperature * math.log(filters.min_p)
    return kept_NW.sum(-1)
