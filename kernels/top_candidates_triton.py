"""The F best perturbed scores of every row in one pass over its logits; definitions: top_candidates_ref.py.

1. `_slice_kernel`   a program holds BLOCK columns of a row: maximum, sum of exponentials and their weighted
                     sum of the raw logits, the first two of the scores, F rounds of "take the greatest away".
2. `_merge_kernel`   a program a row joins the slices' sums and takes the F best of their candidates.

A candidate is one integer, the score's ordered bits above the column's complement: the greatest is the best
score, of equal ones the lowest column. Bytes that must move: 4 C a row; the candidates of a slice are 8 F.

Shape letters: N rows, C columns, P slices of a row, F candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from foredraft.kernels.compile_case import CompileCase
from foredraft.kernels.coupled_sample_triton import coupled_scores, thresholds_of
from foredraft.kernels.draws import Draw, draw_table
from foredraft.kernels.penalties import penalise
from foredraft.kernels.philox_ref import COUPLED_ROLE
from foredraft.kernels.top_candidates_ref import NO_TOKEN, TopCandidates, check_candidates
from foredraft.kernels.vocab_slices import draw_of, ordered, value_of

BLOCK_C = 2048
TAKEN = tl.constexpr(-(2**63))
NUM_SUMS = tl.constexpr(
    5
)  # of a slice: greatest z, sum e, sum (z - greatest) e, greatest score, sum e of scores


@triton.jit
def _slice_kernel(
    raw_ptr,  # fp32 [N, C]
    logits_ptr,  # fp32 [N, C], penalised; the same tensor where no row has a penalty
    table_ptr,  # int64 [N, 8], see draws.draw_table
    threshold_ptr,  # fp32 [N]
    ids_ptr,  # int64 [C]; not read without HAS_IDS
    sums_ptr,  # fp32 [N, P, NUM_SUMS]
    keys_ptr,  # int64 [N, P, F]
    num_columns,
    fan_out,
    role: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column_C = first + tl.arange(0, BLOCK)
    is_column_C = column_C < num_columns
    raw_C = tl.load(raw_ptr + row * num_columns + column_C, mask=is_column_C, other=-float("inf"))
    z_C = tl.load(logits_ptr + row * num_columns + column_C, mask=is_column_C, other=-float("inf"))
    seed, position, choice, temperature = draw_of(table_ptr, row)
    threshold = tl.load(threshold_ptr + row)
    score_C = coupled_scores(
        z_C, first, threshold, seed, position, choice, temperature, ids_ptr, num_columns, role, HAS_IDS, BLOCK
    )

    place = row * tl.num_programs(1) + tl.program_id(1)
    greatest = tl.max(raw_C, 0)
    # a slice without a finite logit must not make NaN of -inf - -inf
    off_C = tl.where(raw_C > -float("inf"), raw_C - greatest, -float("inf"))
    exp_C = tl.exp(off_C)
    best = tl.max(score_C, 0)
    exp_score_C = tl.exp(tl.where(score_C > -float("inf"), score_C - best, -float("inf")))
    sums_ptr += place * NUM_SUMS
    tl.store(sums_ptr, greatest)
    tl.store(sums_ptr + 1, tl.sum(exp_C, 0))
    tl.store(sums_ptr + 2, tl.sum(tl.where(exp_C > 0.0, off_C * exp_C, 0.0), 0))
    tl.store(sums_ptr + 3, best)
    tl.store(sums_ptr + 4, tl.sum(exp_score_C, 0))

    key_C = _keys(score_C, column_C)
    for place_f in range(fan_out):
        key = tl.max(key_C, 0)
        tl.store(keys_ptr + place * fan_out + place_f, key)
        key_C = tl.where(key_C == key, TAKEN, key_C)


@triton.jit
def _keys(score_C, column_C):
    """int64 in the order of scores, then of falling columns."""
    return (ordered(score_C).to(tl.int64) << 32) + (2147483647 - column_C).to(tl.int64)


@triton.jit
def _joined(greatest_P, total_P):
    """(greatest of all slices, factor of each slice's sum [P])."""
    greatest = tl.max(greatest_P, 0)
    return greatest, tl.where(total_P > 0.0, tl.exp(greatest_P - greatest), 0.0)


@triton.jit
def _merge_kernel(
    raw_ptr,  # fp32 [N, C]
    sums_ptr,  # fp32 [N, P, NUM_SUMS]
    keys_ptr,  # int64 [N, P, F]
    ids_ptr,  # int64 [C]; not read without HAS_IDS
    tokens_ptr,  # int64 [N, F]
    scores_ptr,  # fp32 [N, F]
    log_probs_ptr,  # fp32 [N, F]
    log_sum_exp_ptr,  # fp32 [N]
    entropy_ptr,  # fp32 [N]
    num_columns,
    num_slices,
    fan_out,
    no_token: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_PF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slice_P = tl.arange(0, BLOCK_P)
    is_slice_P = slice_P < num_slices
    sums_P = sums_ptr + (row * num_slices + slice_P) * NUM_SUMS
    greatest_P = tl.load(sums_P, mask=is_slice_P, other=-float("inf"))
    total_P = tl.load(sums_P + 1, mask=is_slice_P, other=0.0)
    weighted_P = tl.load(sums_P + 2, mask=is_slice_P, other=0.0)
    greatest, factor_P = _joined(greatest_P, total_P)
    total = tl.sum(factor_P * total_P, 0)
    shift_P = tl.where(total_P > 0.0, greatest_P - greatest, 0.0)
    weighted = tl.sum(factor_P * (weighted_P + shift_P * total_P), 0)
    log_sum_exp = greatest + tl.log(total)
    tl.store(log_sum_exp_ptr + row, log_sum_exp)
    tl.store(entropy_ptr + row, tl.log(total) - weighted / total)

    best_P = tl.load(sums_P + 3, mask=is_slice_P, other=-float("inf"))
    score_total_P = tl.load(sums_P + 4, mask=is_slice_P, other=0.0)
    best, score_factor_P = _joined(best_P, score_total_P)
    log_scores = best + tl.log(tl.sum(score_factor_P * score_total_P, 0))

    place_PF = tl.arange(0, BLOCK_PF)
    num_keys = num_slices * fan_out
    key_PF = tl.load(keys_ptr + row * num_keys + place_PF, mask=place_PF < num_keys, other=TAKEN)
    for place_f in range(fan_out):
        key = tl.max(key_PF, 0)
        key_PF = tl.where(key_PF == key, TAKEN, key_PF)
        score = value_of((key >> 32).to(tl.int32))
        is_kept = score > -float("inf")
        column = tl.where(is_kept, 2147483647 - (key & 0xFFFFFFFF), 0)
        token = column
        if HAS_IDS:
            token = tl.load(ids_ptr + column)
        raw = tl.load(raw_ptr + row * num_columns + column)
        place = row * fan_out + place_f
        tl.store(tokens_ptr + place, tl.where(is_kept, token, no_token))
        tl.store(scores_ptr + place, tl.where(is_kept, score - log_scores, -float("inf")))
        tl.store(log_probs_ptr + place, tl.where(is_kept, raw - log_sum_exp, -float("inf")))


def top_candidates(
    logits_NC: torch.Tensor, draws: Sequence[Draw], fan_out: int, token_ids_C: torch.Tensor | None = None
) -> TopCandidates:
    """Candidates after every row, ties to the lowest column. Arguments and errors: the reference's."""
    check_candidates(logits_NC, draws, fan_out)
    num_rows, num_columns = logits_NC.shape
    fan_out = min(fan_out, num_columns)
    num_slices = triton.cdiv(num_columns, BLOCK_C)
    table_N8 = draw_table(draws, logits_NC.device)
    penalised_NC = penalise(logits_NC, draws, token_ids_C)
    sums_NP5 = logits_NC.new_empty(num_rows, num_slices, NUM_SUMS.value)
    keys_NPF = torch.empty(num_rows, num_slices, fan_out, dtype=torch.int64, device=logits_NC.device)
    found = TopCandidates(
        token_ids_NF=keys_NPF.new_empty(num_rows, fan_out),
        scores_NF=logits_NC.new_empty(num_rows, fan_out),
        log_probs_NF=logits_NC.new_empty(num_rows, fan_out),
        log_sum_exp_N=logits_NC.new_empty(num_rows),
        entropy_N=logits_NC.new_empty(num_rows),
    )
    ids_C, has_ids = (keys_NPF, False) if token_ids_C is None else (token_ids_C, True)
    _slice_kernel[(num_rows, num_slices)](
        logits_NC,
        penalised_NC,
        table_N8,
        thresholds_of(penalised_NC, draws, table_N8),
        ids_C,
        sums_NP5,
        keys_NPF,
        num_columns,
        fan_out,
        role=COUPLED_ROLE,
        HAS_IDS=has_ids,
        BLOCK=BLOCK_C,
    )
    _merge_kernel[(num_rows,)](
        logits_NC,
        sums_NP5,
        keys_NPF,
        ids_C,
        *found,
        num_columns,
        num_slices,
        fan_out,
        no_token=NO_TOKEN,
        HAS_IDS=has_ids,
        BLOCK_P=triton.next_power_of_2(num_slices),
        BLOCK_PF=triton.next_power_of_2(num_slices * fan_out),
    )
    return found


def compile_cases() -> list[CompileCase]:
    """Sixteen candidates of a whole vocabulary of 49152 and of a reduced one of 16384."""
    rows = {"raw_ptr": "*fp32", "sums_ptr": "*fp32", "keys_ptr": "*i64", "ids_ptr": "*i64"}
    draws = {"logits_ptr": "*fp32", "table_ptr": "*i64", "threshold_ptr": "*fp32"}
    found = {"tokens_ptr": "*i64"} | dict.fromkeys(
        ("scores_ptr", "log_probs_ptr", "log_sum_exp_ptr", "entropy_ptr"), "*fp32"
    )
    sizes = dict.fromkeys(("num_columns", "num_slices", "fan_out"), "i32")
    cases = []
    for num_columns, has_ids in ((49152, False), (16384, True)):
        num_slices = triton.cdiv(num_columns, BLOCK_C)
        constants = {"role": COUPLED_ROLE, "HAS_IDS": has_ids, "BLOCK": BLOCK_C}
        cases.append(
            CompileCase(
                name=f"top_candidates/slice C{num_columns}",
                kernel=_slice_kernel,
                signature=rows
                | draws
                | {"num_columns": "i32", "fan_out": "i32"}
                | dict.fromkeys(constants, "constexpr"),
                constants=constants,
                aligned=(*rows, *draws),
            )
        )
        constants = {
            "no_token": NO_TOKEN,
            "HAS_IDS": has_ids,
            "BLOCK_P": triton.next_power_of_2(num_slices),
            "BLOCK_PF": triton.next_power_of_2(16 * num_slices),
        }
        cases.append(
            CompileCase(
                name=f"top_candidates/merge C{num_columns}",
                kernel=_merge_kernel,
                signature=rows | found | sizes | dict.fromkeys(constants, "constexpr"),
                constants=constants,
                aligned=(*rows, *found),
            )
        )
    return cases
