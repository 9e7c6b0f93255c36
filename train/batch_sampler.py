"""Coupled choice of tokens for many sequences at once, each with its own seed and position.

The tokens are those of `infer/sampler.py`. Where a filter keeps few tokens, noise is drawn for these only: a
row of noise over a large vocabulary costs more than the row's share of the model's step.

Shape letters: R rows, V vocabulary, W most probable tokens of a row, B blocks of 32 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from foredraft.infer.params import SamplingParams
from foredraft.kernels.coupled_sample_ref import keep_threshold, penalise_repetition
from foredraft.kernels.philox_ref import gumbel, gumbel_row, philox4x32

BLOCK = 32
TOP_WIDTH = 256  # most nuclei fit; the rows of others are done again over the whole vocabulary


class Top(NamedTuple):
    """The most probable tokens of every row in falling order of logits."""

    logits_RW: torch.Tensor  # float32
    ids_RW: torch.Tensor  # int64


def top_tokens(logits_RV: torch.Tensor, width: int) -> Top:
    """`torch.topk` for a width far below V: only blocks with the greatest maxima can hold the top tokens."""
    num_rows, vocab_size = logits_RV.shape
    num_blocks = vocab_size // BLOCK
    if num_blocks <= 2 * width:
        return Top(*logits_RV.topk(min(width, vocab_size), -1))
    blocks_RB32 = logits_RV[:, : num_blocks * BLOCK].view(num_rows, num_blocks, BLOCK)
    best_RW = blocks_RB32.amax(-1).topk(width, -1).indices
    ids = best_RW[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits_RV.device)
    rest = torch.arange(num_blocks * BLOCK, vocab_size, device=logits_RV.device).expand(num_rows, -1)
    ids = torch.cat([ids.view(num_rows, -1), rest], 1)
    logits_RW, places_RW = logits_RV.gather(1, ids).topk(width, -1)
    return Top(logits_RW, ids.gather(1, places_RW))


def choose_tokens(
    logits_RV: torch.Tensor,
    top: Top,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    seen: Sequence[Sequence[int]],
) -> list[int]:
    """The target's token of every row.

    Args:
        logits_RV: raw logits float32 [R, V].
        top: their `top_tokens`, at least one wide.
        params: of every row, with a seed where the temperature is positive.
        positions: absolute position of the token being chosen.
        seen: token ids of prompt and response so far; read only with a repetition penalty.
    """
    rows_of_filters: dict[tuple[float, int, float, float, float], list[int]] = {}
    for row, p in enumerate(params):
        key = (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty)
        rows_of_filters.setdefault(key, []).append(row)
    chosen = [-1] * len(params)
    for rows in rows_of_filters.values():
        shared = params[rows[0]]
        if shared.repetition_penalty == 1.0:
            rows = _choose_from_top(rows, top, logits_RV, params, positions, chosen)
        if not rows:
            continue
        part_RV = logits_RV[rows]
        if shared.repetition_penalty != 1.0:
            seen_RV = _seen_mask([seen[row] for row in rows], part_RV)
            part_RV = penalise_repetition(part_RV, seen_RV, shared.repetition_penalty)
        tokens = _choose_from_all(part_RV, [params[row] for row in rows], [positions[row] for row in rows])
        for row, token in zip(rows, tokens, strict=True):
            chosen[row] = token
    return chosen


def _choose_from_top(
    rows: list[int],
    top: Top,
    logits_RV: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    chosen: list[int],
) -> list[int]:
    """Fill in `chosen` where the kept tokens are among the top ones; returns the other rows."""
    shared = params[rows[0]]
    if shared.temperature == 0.0 or not (shared.top_k or shared.top_p < 1.0 or shared.min_p):
        return rows
    num_kept_R = _num_kept(top.logits_RW[rows], logits_RV[rows], shared).tolist()
    logits_RW, ids_RW = top.logits_RW[rows].cpu(), top.ids_RW[rows].cpu().numpy()
    others = []
    for index, (row, num_kept) in enumerate(zip(rows, num_kept_R, strict=True)):
        # tokens as probable as the last top one may follow it
        if num_kept >= logits_RW.shape[1]:
            others.append(row)
            continue
        ids = ids_RW[index, :num_kept]
        noise = torch.from_numpy(_noise_of(ids, params[row], positions[row]))
        scores = torch.add(logits_RW[index, :num_kept], noise, alpha=shared.temperature).numpy()
        # equal scores go to the lowest id
        chosen[row] = int(ids[scores == scores.max()].min())
    return others


def _num_kept(top_RW: torch.Tensor, logits_RV: torch.Tensor, shared: SamplingParams) -> torch.Tensor:
    """Number of top tokens that the filters keep, int64 [R]; W where more may be kept."""
    width = top_RW.shape[1]
    kept_RW = torch.ones_like(top_RW, dtype=torch.bool)
    total_RV = logits_RV
    if shared.top_k:
        if shared.top_k >= width:
            return kept_RW.sum(-1)
        kept_RW &= top_RW >= top_RW[:, shared.top_k - 1 : shared.top_k]
        total_RV = top_RW.masked_fill(~kept_RW, -torch.inf)
    if shared.top_p < 1.0:
        log_mass_R1 = torch.logsumexp(total_RV / shared.temperature, -1, keepdim=True)
        mass_RW = (top_RW / shared.temperature - log_mass_R1).exp().cumsum(-1)
        num_R = 1 + (mass_RW[:, :-1] < shared.top_p).sum(-1, keepdim=True)
        kept_RW &= top_RW >= top_RW.gather(-1, num_R - 1)
    if shared.min_p:
        kept_RW &= top_RW >= top_RW[:, :1] + shared.temperature * float(np.log(shared.min_p))
    return kept_RW.sum(-1)


def _choose_from_all(
    logits_RV: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    shared, vocab_size = params[0], logits_RV.shape[1]
    if shared.temperature == 0.0:
        return logits_RV.argmax(-1).tolist()
    places = zip(params, positions, strict=True)
    rows_RV = np.stack([gumbel_row(p.seed or 0, position, p.choice, vocab_size) for p, position in places])
    noise_RV = torch.from_numpy(rows_RV).to(logits_RV.device)
    scores_RV = torch.add(logits_RV, noise_RV, alpha=shared.temperature)
    threshold_R = keep_threshold(logits_RV, shared)
    if threshold_R is not None:
        scores_RV = scores_RV.masked_fill(logits_RV < threshold_R[:, None], -torch.inf)
    return scores_RV.argmax(-1).tolist()


def _noise_of(tokens_C: np.ndarray, params: SamplingParams, position: int) -> np.ndarray:
    """Noise of some tokens at one position, float32 [C]: the entries of `gumbel_row`."""
    counter_C4 = np.zeros((len(tokens_C), 4), np.uint32)
    counter_C4[:, 0] = tokens_C // 4
    counter_C4[:, 1] = position
    counter_C4[:, 2] = params.choice
    bits_C4 = philox4x32(params.seed or 0, counter_C4)
    return gumbel(np.take_along_axis(bits_C4, (tokens_C % 4)[:, None], axis=1)[:, 0])


def _seen_mask(seen: Sequence[Sequence[int]], logits_RV: torch.Tensor) -> torch.Tensor:
    mask_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
    for row, tokens in enumerate(seen):
        mask_RV[row, torch.tensor(tokens)] = True
    return mask_RV
