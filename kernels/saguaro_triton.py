"""The law of a guess and its draw on the device; see saguaro_ref.py.

torch.topk (a radix selection on a GPU) reads the kept logits and leaves rows of m tokens, sorted; a program
a row does the rest in registers: softmax, scaling, noise of m tokens, arg-max. Bytes that must move: 4 C a
row.

Shape letters: as in the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from foredraft.kernels.compile_case import CompileCase
from foredraft.kernels.coupled_sample_ref import check_rows
from foredraft.kernels.coupled_sample_triton import thresholds_of
from foredraft.kernels.draws import Draw, draw_table
from foredraft.kernels.penalties import penalise
from foredraft.kernels.philox_ref import DRAFT_ROLE
from foredraft.kernels.philox_triton import bits_of, gumbel
from foredraft.kernels.rejection_verify_ref import NO_GUESS
from foredraft.kernels.saguaro_ref import Drafted
from foredraft.kernels.vocab_slices import draw_of

MAX_WIDTH = 1024  # tokens of a law that one program holds


@triton.jit
def _draw_kernel(
    values_ptr,  # fp32 [N, m], kept logits, greatest first
    ids_ptr,  # int64 [N, m]; what is not kept becomes NO_GUESS
    table_ptr,  # int64 [N, 8], see draws.draw_table
    tokens_ptr,  # int64 [N]
    probs_ptr,  # fp32 [N, m]
    width,
    fan_out,
    factor,
    role: tl.constexpr,
    no_guess: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rank_M = tl.arange(0, BLOCK_M)
    is_rank_M = rank_M < width
    place_M = row * width + rank_M
    value_M = tl.load(values_ptr + place_M, mask=is_rank_M, other=-float("inf"))
    id_M = tl.load(ids_ptr + place_M, mask=is_rank_M, other=0)
    seed, position, choice, temperature = draw_of(table_ptr, row)
    per_temperature = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
    weight_M = tl.exp((value_M - tl.max(value_M, 0)) * per_temperature)
    weight_M = tl.where(temperature > 0.0, weight_M, (rank_M == 0).to(tl.float32))
    weight_M = weight_M / tl.sum(weight_M, 0)
    weight_M = tl.where(rank_M < fan_out, factor * weight_M, weight_M)
    prob_M = weight_M / tl.sum(weight_M, 0)

    noise_M = gumbel(bits_of(id_M.to(tl.int32), seed, position, choice, role))
    score_M = tl.where(prob_M > 0.0, tl.log(prob_M) + noise_M, -float("inf"))
    best = tl.min(tl.where(score_M == tl.max(score_M, 0), rank_M, BLOCK_M), 0)
    tl.store(tokens_ptr + row, tl.sum(tl.where(rank_M == best, id_M, 0), 0))
    tl.store(probs_ptr + place_M, prob_M, mask=is_rank_M)
    tl.store(ids_ptr + place_M, tl.where(prob_M > 0.0, id_M, no_guess), mask=is_rank_M)


def saguaro(
    logits_NC: torch.Tensor,
    draws: Sequence[Draw],
    num_kept: int,
    fan_out: int,
    factor: float,
    token_ids_C: torch.Tensor | None = None,
) -> Drafted:
    """Draw a guess from every row. Arguments and errors: `saguaro_ref.saguaro`; m is at most MAX_WIDTH."""
    check_rows(logits_NC, draws)
    width = min(num_kept, logits_NC.shape[1])
    if width > MAX_WIDTH:
        raise ValueError(f"num_kept must be at most {MAX_WIDTH}, got {num_kept}")
    table_N8 = draw_table(draws, logits_NC.device)
    logits_NC = penalise(logits_NC, draws, token_ids_C)
    threshold_N = thresholds_of(logits_NC, draws, table_N8)
    best = logits_NC.masked_fill(logits_NC < threshold_N[:, None], -torch.inf).topk(width, -1)
    ids_Nm = best.indices if token_ids_C is None else token_ids_C[best.indices]
    tokens_N = ids_Nm.new_empty(len(draws))
    probs_Nm = torch.empty_like(best.values)
    _draw_kernel[(len(draws),)](
        best.values,
        ids_Nm,
        table_N8,
        tokens_N,
        probs_Nm,
        width,
        fan_out,
        factor,
        role=DRAFT_ROLE,
        no_guess=NO_GUESS,
        BLOCK_M=triton.next_power_of_2(width),
        num_warps=1 if width <= 128 else 4,
    )
    return Drafted(tokens_N, ids_Nm, probs_Nm)


def compile_cases() -> list[CompileCase]:
    """Rows of 64 tokens, and the largest."""
    pointers = {"values_ptr": "*fp32", "ids_ptr": "*i64", "table_ptr": "*i64", "tokens_ptr": "*i64"}
    pointers |= {"probs_ptr": "*fp32"}
    numbers = {"width": "i32", "fan_out": "i32", "factor": "fp32"}
    cases = []
    for width, num_warps in ((64, 1), (MAX_WIDTH, 4)):
        constants = {"role": DRAFT_ROLE, "no_guess": NO_GUESS, "BLOCK_M": width}
        cases.append(
            CompileCase(
                name=f"saguaro/draw m{width}",
                kernel=_draw_kernel,
                signature=pointers | numbers | dict.fromkeys(constants, "constexpr"),
                constants=constants,
                num_warps=num_warps,
                aligned=tuple(pointers),
            )
        )
    return cases
