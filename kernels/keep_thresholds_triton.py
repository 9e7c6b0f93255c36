"""The least logit that a row's filters keep, without a sort; definition: `coupled_sample_ref.keep_threshold`.

Both filters ask for the least t such that the weight of all logits above t stays below a bound: the number of
logits below k (top-k), or their mass below top_p (top-p). The weight falls as t grows, so a search over the
32-bit keys that order floats finds t exactly: every pass over the row weighs 16 keys at once and leaves a
sixteenth of the range, eight passes at most. A row stays in the L2 cache between passes.

A token at the edge of a nucleus may fall on the other side than in the reference, which sums masses in
another order (float32).

Shape letters: N rows, C columns, P pivots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foredraft.kernels.compile_case import CompileCase
from foredraft.kernels.vocab_slices import float_of, ordered, value_of

BLOCK_C, NUM_PIVOTS, NUM_WARPS = 512, 16, 8


@triton.jit
def _weights_above(
    logits_ptr,
    pivot_P,
    floor,
    greatest,
    per_temperature,
    num_columns,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Weight float32 [P] of all logits whose key lies above each pivot, of those from `floor` on."""
    weight_CP = tl.zeros([BLOCK, PIVOTS], tl.float32)
    for first in range(0, num_columns, BLOCK):
        column_C = first + tl.arange(0, BLOCK)
        z_C = tl.load(logits_ptr + column_C, mask=column_C < num_columns, other=-float("inf"))
        if IS_MASS:
            own_C = tl.where(z_C >= floor, tl.exp((z_C - greatest) * per_temperature), 0.0)
        else:
            own_C = tl.full([BLOCK], 1.0, tl.float32)
        key_C = ordered(z_C).to(tl.int64)
        weight_CP += tl.where(key_C[:, None] > pivot_P[None, :], own_C[:, None], 0.0)
    return tl.sum(weight_CP, 0)


@triton.jit
def _least_key(
    logits_ptr,
    low,
    high,
    bound,
    floor,
    greatest,
    per_temperature,
    num_columns,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The least key in low..high above which the weight stays below `bound`; it does so above `high`."""
    place_P = tl.arange(0, PIVOTS).to(tl.int64)
    while low < high:
        step = (high - low + PIVOTS - 1) // PIVOTS
        pivot_P = tl.minimum(low + place_P * step, high)
        weight_P = _weights_above(
            logits_ptr, pivot_P, floor, greatest, per_temperature, num_columns, IS_MASS, BLOCK, PIVOTS
        )
        # weights fall along the pivots: the first ones are too heavy
        is_heavy_P = weight_P >= bound
        high = tl.min(tl.where(is_heavy_P, high, pivot_P), 0)
        low = tl.max(tl.where(is_heavy_P, pivot_P + 1, low), 0)
    return low


@triton.jit
def _thresholds_kernel(
    logits_ptr,  # fp32 [N, C], penalised
    table_ptr,  # int64 [N, 8], see draws.draw_table
    threshold_ptr,  # fp32 [N]
    num_columns,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    table_ptr += row * 8
    top_k = tl.load(table_ptr + 3)
    temperature, top_p, min_p = float_of(table_ptr + 4), float_of(table_ptr + 5), float_of(table_ptr + 6)
    logits_ptr += row * num_columns
    has_top_k = (top_k > 0) & (top_k < num_columns)
    threshold = -float("inf")
    if (temperature > 0.0) & (has_top_k | (top_p < 1.0) | (min_p > 0.0)):
        per_temperature = 1.0 / temperature
        greatest_C = tl.full([BLOCK], -float("inf"), tl.float32)
        for first in range(0, num_columns, BLOCK):
            column_C = first + tl.arange(0, BLOCK)
            z_C = tl.load(logits_ptr + column_C, mask=column_C < num_columns, other=-float("inf"))
            greatest_C = tl.maximum(greatest_C, z_C)
        greatest = tl.max(greatest_C, 0)
        least = ordered(threshold).to(tl.int64)
        most = ordered(greatest).to(tl.int64)
        if has_top_k:
            bound = top_k.to(tl.float32)
            key = _least_key(
                logits_ptr,
                least,
                most,
                bound,
                threshold,
                greatest,
                per_temperature,
                num_columns,
                False,
                BLOCK,
                PIVOTS,
            )
            threshold = value_of(key.to(tl.int32))
        if top_p < 1.0:
            below = tl.zeros([PIVOTS], tl.int64) + (least - 1)
            total = tl.max(
                _weights_above(
                    logits_ptr, below, threshold, greatest, per_temperature, num_columns, True, BLOCK, PIVOTS
                ),
                0,
            )
            key = _least_key(
                logits_ptr,
                least,
                most,
                top_p * total,
                threshold,
                greatest,
                per_temperature,
                num_columns,
                True,
                BLOCK,
                PIVOTS,
            )
            threshold = tl.maximum(threshold, value_of(key.to(tl.int32)))
        if min_p > 0.0:
            threshold = tl.maximum(threshold, greatest + temperature * tl.log(min_p))
    tl.store(threshold_ptr + row, threshold)


def keep_thresholds(logits_NC: torch.Tensor, table_N8: torch.Tensor) -> torch.Tensor:
    """Least kept logit of every row, float32 [N]; -inf where no filter is on.

    Args:
        logits_NC: penalised, float32, contiguous.
        table_N8: from `draws.draw_table`.
    """
    threshold_N = logits_NC.new_empty(len(logits_NC))
    _thresholds_kernel[(len(logits_NC),)](
        logits_NC,
        table_N8,
        threshold_N,
        logits_NC.shape[1],
        BLOCK=BLOCK_C,
        PIVOTS=NUM_PIVOTS,
        num_warps=NUM_WARPS,
    )
    return threshold_N


def compile_cases() -> list[CompileCase]:
    """One: it depends on nothing."""
    constants = {"BLOCK": BLOCK_C, "PIVOTS": NUM_PIVOTS}
    signature = {"logits_ptr": "*fp32", "table_ptr": "*i64", "threshold_ptr": "*fp32", "num_columns": "i32"}
    return [
        CompileCase(
            name="coupled_sample/thresholds",
            kernel=_thresholds_kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constants=constants,
            num_warps=NUM_WARPS,
            aligned=("logits_ptr", "table_ptr", "threshold_ptr"),
        )
    ]
