"""Coupled sampling on a GPU: one pass over the vocabulary; definitions: coupled_sample_ref.py.

1. penalties         a gather and a scatter of few logits (penalties.py), where a row has any
2. thresholds        keep_thresholds_triton.py, where a row has a filter
3. `_best_kernel`    noise from the Philox counter, score, best of every slice of every row
4. `_choose_kernel`  best of the slices

Noise is never stored. Bytes that must move: 4 C a row (and 4 C more where its logits are edited, which copies
them; a filter's passes stay in the L2 cache).

Shape letters: N rows, C columns, P slices of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from foredraft.kernels.compile_case import CompileCase
from foredraft.kernels.coupled_sample_ref import check_rows
from foredraft.kernels.draws import Draw, draw_table
from foredraft.kernels.keep_thresholds_triton import keep_thresholds
from foredraft.kernels.penalties import penalise
from foredraft.kernels.philox_ref import COUPLED_ROLE
from foredraft.kernels.philox_triton import bits_from, bits_of, gumbel
from foredraft.kernels.vocab_slices import BLOCK_V, MAX_SLICES, best_of, draw_of, slices


@triton.jit
def coupled_scores(
    z_C,
    first,
    threshold,
    seed,
    position,
    choice,
    temperature,
    ids_ptr,
    num_columns,
    role: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Perturbed scores of BLOCK columns from `first` on, a multiple of 4."""
    if temperature > 0.0:
        if HAS_IDS:
            column_C = first + tl.arange(0, BLOCK)
            id_C = tl.load(ids_ptr + column_C, mask=column_C < num_columns, other=0).to(tl.int32)
            bits_C = bits_of(id_C, seed, position, choice, role)
        else:
            bits_C = bits_from(first, seed, position, choice, role, BLOCK)
        z_C = tl.where(z_C >= threshold, z_C + temperature * gumbel(bits_C), -float("inf"))
    return z_C


@triton.jit
def _best_kernel(
    logits_ptr,  # fp32 [N, C], penalised
    table_ptr,  # int64 [N, 8], see draws.draw_table
    threshold_ptr,  # fp32 [N]
    ids_ptr,  # int64 [C]; not read without HAS_IDS
    score_ptr,  # fp32 [N, P]
    column_ptr,  # int32 [N, P]
    num_columns,
    slice_size,
    role: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * slice_size
    seed, position, choice, temperature = draw_of(table_ptr, row)
    threshold = tl.load(threshold_ptr + row)
    logits_ptr += row * num_columns
    score, column = -float("inf"), start
    for first in range(start, tl.minimum(start + slice_size, num_columns), BLOCK):
        column_C = first + tl.arange(0, BLOCK)
        z_C = tl.load(logits_ptr + column_C, mask=column_C < num_columns, other=-float("inf"))
        score_C = coupled_scores(
            z_C,
            first,
            threshold,
            seed,
            position,
            choice,
            temperature,
            ids_ptr,
            num_columns,
            role,
            HAS_IDS,
            BLOCK,
        )
        score, column = best_of(score_C, column_C, score, column)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(score_ptr + place, score)
    tl.store(column_ptr + place, column)


@triton.jit
def _choose_kernel(
    score_ptr,  # fp32 [N, P]
    column_ptr,  # int32 [N, P]
    ids_ptr,  # int64 [C]; not read without HAS_IDS
    token_ptr,  # int64 [N]
    num_slices,
    HAS_IDS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slice_P = tl.arange(0, BLOCK_P)
    is_slice_P = slice_P < num_slices
    score_P = tl.load(score_ptr + row * num_slices + slice_P, mask=is_slice_P, other=-float("inf"))
    column_P = tl.load(column_ptr + row * num_slices + slice_P, mask=is_slice_P, other=2147483647)
    _, column = best_of(score_P, column_P, -float("inf"), tl.min(column_P, 0))
    token = column.to(tl.int64)
    if HAS_IDS:
        token = tl.load(ids_ptr + token)
    tl.store(token_ptr + row, token)


def coupled_sample(
    logits_NC: torch.Tensor, draws: Sequence[Draw], token_ids_C: torch.Tensor | None = None
) -> torch.Tensor:
    """The chosen token of every row. Arguments and errors: `coupled_sample_ref.coupled_sample`."""
    check_rows(logits_NC, draws)
    num_rows, num_columns = logits_NC.shape
    table_N8 = draw_table(draws, logits_NC.device)
    logits_NC = penalise(logits_NC, draws, token_ids_C)
    threshold_N = thresholds_of(logits_NC, draws, table_N8)
    num_slices, slice_size = slices(num_columns)
    score_NP = logits_NC.new_empty(num_rows, num_slices)
    column_NP = torch.empty_like(score_NP, dtype=torch.int32)
    token_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NC.device)
    ids_C, has_ids = (token_N, False) if token_ids_C is None else (token_ids_C, True)
    _best_kernel[(num_rows, num_slices)](
        logits_NC,
        table_N8,
        threshold_N,
        ids_C,
        score_NP,
        column_NP,
        num_columns,
        slice_size,
        role=COUPLED_ROLE,
        HAS_IDS=has_ids,
        BLOCK=BLOCK_V,
    )
    _choose_kernel[(num_rows,)](
        score_NP,
        column_NP,
        ids_C,
        token_N,
        num_slices,
        HAS_IDS=has_ids,
        BLOCK_P=triton.next_power_of_2(num_slices),
        num_warps=1,
    )
    return token_N


def thresholds_of(logits_NC: torch.Tensor, draws: Sequence[Draw], table_N8: torch.Tensor) -> torch.Tensor:
    """`keep_thresholds`, without a launch where no row has a filter."""
    filters = {(draw.filters.top_k, draw.filters.top_p, draw.filters.min_p) for draw in draws}
    if filters <= {(0, 1.0, 0.0)}:
        return logits_NC.new_full((len(logits_NC),), -torch.inf)
    return keep_thresholds(logits_NC, table_N8)


def compile_cases() -> list[CompileCase]:
    """The target's whole vocabulary, and a reduced one."""
    best = {"logits_ptr": "*fp32", "table_ptr": "*i64", "threshold_ptr": "*fp32", "ids_ptr": "*i64"}
    parts = {"score_ptr": "*fp32", "column_ptr": "*i32"}
    choose = parts | {"ids_ptr": "*i64", "token_ptr": "*i64", "num_slices": "i32"}
    cases = []
    for name, has_ids in (("whole", False), ("reduced", True)):
        constants = {"role": COUPLED_ROLE, "HAS_IDS": has_ids, "BLOCK": BLOCK_V}
        signature = best | parts | {"num_columns": "i32", "slice_size": "i32"}
        cases.append(
            CompileCase(
                name=f"coupled_sample/best {name}",
                kernel=_best_kernel,
                signature=signature | dict.fromkeys(constants, "constexpr"),
                constants=constants,
                aligned=(*best, *parts),
            )
        )
        constants = {"HAS_IDS": has_ids, "BLOCK_P": MAX_SLICES}
        cases.append(
            CompileCase(
                name=f"coupled_sample/choose {name}",
                kernel=_choose_kernel,
                signature=choose | dict.fromkeys(constants, "constexpr"),
                constants=constants,
                num_warps=1,
                aligned=(*parts, "ids_ptr", "token_ptr"),
            )
        )
    return cases
