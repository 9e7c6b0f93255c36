"""The steps of the pinned pipeline that touch only tokens seen before: sparse edits of logits.

    z > 0:  z / repetition_penalty,   else  z * repetition_penalty     tokens of prompt and output
    z - presence_penalty - frequency_penalty * count                   tokens of the output, count times there
    z + bias                                                           tokens of logit_bias

Repetition penalty: Keskar et al., arXiv 1909.05858. Presence, frequency and bias: OpenAI's API. A row edits
as many logits as it has distinct tokens, so this is a gather and a scatter on any device and reads no row
of V.

Shape letters: N rows, C columns of the head, E edits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from foredraft.kernels.host_copy import to_device

if TYPE_CHECKING:
    from foredraft.kernels.draws import Draw

NO_COLUMN = -1


def penalise(
    logits_NC: torch.Tensor, draws: Sequence[Draw], token_ids_C: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits after the penalties of every row; the tensor itself where there are none.

    Args:
        logits_NC: float32 [N, C].
        draws: one a row.
        token_ids_C: int64 target id of every column; None: columns are target ids.
    """
    edits = [
        (row, *_edits_of(draw, logits_NC.shape[1], token_ids_C))
        for row, draw in enumerate(draws)
        if draw.is_penalised
    ]
    if not edits:
        return logits_NC
    rows_E = np.concatenate([np.full(len(columns), row, np.int64) for row, columns, _, _ in edits])
    columns_E, factors_E, shifts_E = (np.concatenate([edit[part] for edit in edits]) for part in (1, 2, 3))
    places_2E = to_device(np.stack([rows_E, columns_E]), logits_NC.device)
    rows, columns = places_2E[0], places_2E[1]
    factor, shift = to_device(np.stack([factors_E, shifts_E]), logits_NC.device)
    old = logits_NC[rows, columns]
    new = torch.where(old > 0, old / factor, old * factor) + shift
    return logits_NC.index_put((rows, columns), new)


def _edits_of(
    draw: Draw, num_columns: int, token_ids_C: torch.Tensor | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns int64, factors float32 and shifts float32 of one row, each column once."""
    filters = draw.filters
    prompt, output = np.asarray(draw.prompt, np.int64), np.asarray(draw.output, np.int64)
    bias = dict(filters.logit_bias)
    biased = np.fromiter(bias.keys(), np.int64, len(bias))
    tokens = np.unique(np.concatenate([prompt, output, biased]))
    counts = np.bincount(np.searchsorted(tokens, output), minlength=len(tokens))
    is_seen = counts > 0
    is_seen[np.searchsorted(tokens, prompt)] = True
    shifts = -filters.presence_penalty * (counts > 0) - filters.frequency_penalty * counts
    shifts[np.searchsorted(tokens, biased)] += np.fromiter(bias.values(), np.float64, len(bias))
    factors = np.where(is_seen, filters.repetition_penalty, 1.0)
    columns = tokens
    if token_ids_C is not None:
        column_of = columns_of(token_ids_C)
        columns = np.where(
            tokens < len(column_of), column_of[np.minimum(tokens, len(column_of) - 1)], NO_COLUMN
        )
    is_there = (columns >= 0) & (columns < num_columns)
    return (
        columns[is_there],
        factors[is_there].astype(np.float32),
        shifts[is_there].astype(np.float32),
    )


@functools.lru_cache(maxsize=8)
def columns_of(token_ids_C: torch.Tensor) -> np.ndarray:
    """Column of every target id up to the greatest, int64; NO_COLUMN where the head lacks it."""
    ids_C = token_ids_C.cpu().numpy()
    columns = np.full(int(ids_C.max()) + 1, NO_COLUMN, np.int64)
    columns[ids_C] = np.arange(len(ids_C))
    return columns
