"""The two passes of `distill_loss_chunks.py` on a GPU; the matrix products are the vendor's.

A program takes one row of a chunk and goes once over the vocabulary in blocks. It compares no column with
the chosen ids: it takes the chosen logits out first, puts -inf in their places, and back again at the end
(read), or overwrites them by their own gradients at the end (replace). Between such a write and the pass over
the same row stands a barrier. The tail's log-sum-exp is online,

    m' = max(m, max z),   l' = l exp(m - m') + sum exp(z - m'),   c_o = m + log l,

over tail columns only: no subtraction, so it is right however far below a chosen token the tail lies.

A pass reads a chunk of n rows once, and `replace` writes it once: n D b and 2 n D b bytes for logits of b
bytes. The products around them are 2 n D H operations each: one in forward, two or three in backward (one to
make the logits again, for dh, and for dW).

Shape letters: see distill_loss_chunks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import triton
import triton.language as tl

from foredraft.kernels.compile_case import CompileCase
from foredraft.kernels.distill_loss_chunks import Passes, coarse_logits_by
from foredraft.kernels.distill_loss_ref import OUTSIDE, Head, Teacher, loss_by

MAX_BLOCK = 4096  # columns of a block
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32
NUM_WARPS = 8


@triton.jit
def _scaled(x, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    z = x.to(tl.float32) * scale
    if HAS_SOFTCAP:
        z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)  # tanh
    return z


@triton.jit
def _read_kernel(
    logits_ptr,  # any float [n, D], raw; left as it was
    ids_ptr,  # int64 [n, C]
    coarse_ptr,  # fp32 [n, C + 1], written
    num_draft,
    num_columns,
    scale,
    softcap,
    outside: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * num_draft
    coarse_ptr += row * (num_columns + 1)
    column_C = tl.arange(0, BLOCK_C)
    is_column_C = column_C < num_columns
    id_C = tl.load(ids_ptr + row * num_columns + column_C, mask=is_column_C, other=outside)
    is_inside_C = id_C != outside
    chosen_C = tl.load(logits_ptr + id_C, mask=is_inside_C, other=0.0)
    scaled_C = tl.where(is_inside_C, _scaled(chosen_C, scale, softcap, HAS_SOFTCAP), -float("inf"))
    tl.store(coarse_ptr + column_C, scaled_C, mask=is_column_C)
    tl.debug_barrier()
    tl.store(logits_ptr + id_C, tl.full([BLOCK_C], -float("inf"), tl.float32), mask=is_inside_C)
    tl.debug_barrier()

    peak = -float("inf")
    total = 0.0
    for start in range(0, num_draft, BLOCK_D):
        place_D = start + tl.arange(0, BLOCK_D)
        x_D = tl.load(logits_ptr + place_D, mask=place_D < num_draft, other=-float("inf")).to(tl.float32)
        z_D = tl.where(x_D == -float("inf"), x_D, _scaled(x_D, scale, softcap, HAS_SOFTCAP))
        new_peak = tl.maximum(peak, tl.max(z_D, 0))
        # a block of chosen columns alone has no peak, and exp(-inf - -inf) is no number
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(z_D - base), 0)
        peak = new_peak
    tl.store(coarse_ptr + num_columns, peak + tl.log(total))
    tl.debug_barrier()
    tl.store(logits_ptr + id_C, chosen_C, mask=is_inside_C)


@triton.jit
def _replace_kernel(
    logits_ptr,  # any float [n, D], raw; becomes their gradient
    ids_ptr,  # int64 [n, C]
    coarse_ptr,  # fp32 [n, C + 1]
    upstream_ptr,  # fp32 [n, C + 1]
    num_draft,
    num_columns,
    scale,
    softcap,
    outside: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * num_draft
    coarse_ptr += row * (num_columns + 1)
    upstream_ptr += row * (num_columns + 1)
    tail = tl.maximum(tl.load(coarse_ptr + num_columns), LOWEST)  # of a tail of -inf, for exp(-inf - tail)
    upstream = tl.load(upstream_ptr + num_columns) * scale
    for start in range(0, num_draft, BLOCK_D):
        place_D = start + tl.arange(0, BLOCK_D)
        is_place_D = place_D < num_draft
        z_D = _scaled(tl.load(logits_ptr + place_D, mask=is_place_D, other=0.0), scale, softcap, HAS_SOFTCAP)
        # chosen columns may overflow here; they are overwritten
        slope_D = tl.exp(z_D - tail) * upstream
        if HAS_SOFTCAP:
            slope_D *= 1.0 - (z_D / softcap) * (z_D / softcap)
        tl.store(logits_ptr + place_D, slope_D, mask=is_place_D)
    tl.debug_barrier()

    column_C = tl.arange(0, BLOCK_C)
    is_column_C = column_C < num_columns
    id_C = tl.load(ids_ptr + row * num_columns + column_C, mask=is_column_C, other=outside)
    slope_C = tl.load(upstream_ptr + column_C, mask=is_column_C, other=0.0) * scale
    if HAS_SOFTCAP:
        z_C = tl.load(coarse_ptr + column_C, mask=is_column_C, other=0.0)
        slope_C *= 1.0 - (z_C / softcap) * (z_C / softcap)
    tl.store(logits_ptr + id_C, slope_C, mask=id_C != outside)


def distill_loss(
    hidden_NH: torch.Tensor, head: Head, teacher: Teacher, losses: Mapping[str, float]
) -> torch.Tensor:
    """Weighted sum of losses of every position. Arguments and errors: `distill_loss_ref.distill_loss`."""
    return loss_by(partial(coarse_logits_by, Passes(_read, _replace)), hidden_NH, head, teacher, losses)


def _read(logits_nD: torch.Tensor, ids_nC: torch.Tensor, head: Head, coarse_nC: torch.Tensor) -> None:
    num_rows, num_draft = logits_nD.shape
    _read_kernel[(num_rows,)](
        logits_nD,
        ids_nC,
        coarse_nC,
        num_draft,
        ids_nC.shape[1],
        head.scale,
        head.softcap or 1.0,
        **_constants(num_draft, ids_nC.shape[1], bool(head.softcap)),
        num_warps=NUM_WARPS,
    )


def _replace(
    logits_nD: torch.Tensor,
    ids_nC: torch.Tensor,
    head: Head,
    coarse_nC: torch.Tensor,
    upstream_nC: torch.Tensor,
) -> None:
    num_rows, num_draft = logits_nD.shape
    _replace_kernel[(num_rows,)](
        logits_nD,
        ids_nC,
        coarse_nC,
        upstream_nC,
        num_draft,
        ids_nC.shape[1],
        head.scale,
        head.softcap or 1.0,
        **_constants(num_draft, ids_nC.shape[1], bool(head.softcap)),
        num_warps=NUM_WARPS,
    )


def _constants(num_draft: int, num_columns: int, has_softcap: bool) -> dict[str, int | bool]:
    return {
        "outside": OUTSIDE,
        "HAS_SOFTCAP": has_softcap,
        "BLOCK_C": triton.next_power_of_2(max(1, num_columns)),
        "BLOCK_D": min(MAX_BLOCK, triton.next_power_of_2(num_draft)),
    }


def compile_cases() -> list[CompileCase]:
    """A head in bfloat16 or float32, with and without a soft-cap; 33 columns: K = 32 and the logged token."""
    pointers = {"logits_ptr": "", "ids_ptr": "*i64", "coarse_ptr": "*fp32"}
    numbers = {"num_draft": "i32", "num_columns": "i32", "scale": "fp32", "softcap": "fp32"}
    cases = []
    for kernel, more in ((_read_kernel, {}), (_replace_kernel, {"upstream_ptr": "*fp32"})):
        for dtype, has_softcap in (("bf16", False), ("bf16", True), ("fp32", False)):
            constants = _constants(49152, 33, has_softcap)
            signature = pointers | {"logits_ptr": f"*{dtype}"} | more | numbers
            what = kernel.__name__.removeprefix("_").removesuffix("_kernel")
            cases.append(
                CompileCase(
                    name=f"distill_loss/{what} {dtype}" + (" softcap" if has_softcap else ""),
                    kernel=kernel,
                    signature=signature | dict.fromkeys(constants, "constexpr"),
                    constants=constants,
                    num_warps=NUM_WARPS,
                    aligned=("logits_ptr", "ids_ptr", "num_draft"),
                )
            )
    return cases
