"""Rejection verification of chains on the device, without a look from the host; see rejection_verify_ref.py.

1. `_partial_laws_kernel`  one pass over the logits of all places: of every slice of V the greatest kept
                           logit, its lowest token and the sum of exp((z - greatest) / T).
2. `_accept_kernel`        a program a chain: p(x_i) = exp((z_i - greatest) / T) / sum from the slices' parts,
                           q(x_i) and U_i, until the first rejection.
3. `_residual_kernel`      of the one place where the chain ends, slice by slice: the best token by
                           log (p - q)+ + g and by log p + g, and the mass of (p - q)+.
4. `_settle_kernel`        the best of the slices' parts; by p where the mass is rounding noise.

Penalties and filters come first, as in coupled_sample_triton.py. Bytes that must move: 4 V (M + 1) a chain
(every place once, the last one once more), with a dense law 4 V more.

Shape letters: as in the reference; P slices of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from foredraft.kernels.compile_case import CompileCase
from foredraft.kernels.coupled_sample_triton import thresholds_of
from foredraft.kernels.draws import Draw, draw_table
from foredraft.kernels.penalties import penalise
from foredraft.kernels.philox_ref import ACCEPT_ROLE, RESIDUAL_ROLE
from foredraft.kernels.philox_triton import bits_of, gumbel, uniform
from foredraft.kernels.rejection_verify_ref import (
    NO_RESIDUAL,
    DraftLaw,
    Settled,
    check_chains,
)
from foredraft.kernels.vocab_slices import BLOCK_V, MAX_SLICES, best_of, draw_of, slices

ALL_ACCEPTED, FROM_LAW, FROM_ONE_HOT = 0, 1, 2  # how a chain ended


@triton.jit
def _partial_laws_kernel(
    logits_ptr,  # fp32 [N, V]
    table_ptr,  # int64 [N, 8], see draws.draw_table
    threshold_ptr,  # fp32 [N], least kept logit
    greatest_ptr,  # fp32 [N, P]
    token_ptr,  # int32 [N, P], of the greatest logit
    sum_ptr,  # fp32 [N, P]
    vocab_size,
    slice_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * slice_size
    _, _, _, temperature = draw_of(table_ptr, row)
    threshold = tl.load(threshold_ptr + row)
    per_temperature = tl.where(temperature > 0.0, 1.0 / temperature, 1.0)
    logits_ptr += row * vocab_size

    greatest, token, total = -float("inf"), vocab_size, 0.0
    for first in range(start, tl.minimum(start + slice_size, vocab_size), BLOCK):
        token_V = first + tl.arange(0, BLOCK)
        z_V = tl.load(logits_ptr + token_V, mask=token_V < vocab_size, other=-float("inf"))
        z_V = tl.where(z_V >= threshold, z_V, -float("inf"))
        top = tl.max(z_V, 0)
        best = tl.min(tl.where(z_V == top, token_V, vocab_size), 0)
        token = tl.where(top > greatest, best, token)
        new = tl.maximum(greatest, top)
        # a slice without kept tokens must not make NaN of -inf - -inf
        base = tl.where(new > -float("inf"), new, 0.0)
        rest = tl.exp((greatest - base) * per_temperature) * total
        total = rest + tl.sum(tl.exp((z_V - base) * per_temperature), 0)
        greatest = new
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(greatest_ptr + place, greatest)
    tl.store(token_ptr + place, token)
    tl.store(sum_ptr + place, total)


@triton.jit
def _law_of(greatest_ptr, token_ptr, sum_ptr, temperature, row, num_slices, BLOCK_P: tl.constexpr):
    """(greatest logit, its lowest token, sum) of a whole row from its slices."""
    slice_P = tl.arange(0, BLOCK_P)
    is_slice_P = slice_P < num_slices
    greatest_P = tl.load(greatest_ptr + row * num_slices + slice_P, mask=is_slice_P, other=-float("inf"))
    token_P = tl.load(token_ptr + row * num_slices + slice_P, mask=is_slice_P, other=0)
    sum_P = tl.load(sum_ptr + row * num_slices + slice_P, mask=is_slice_P, other=0.0)
    greatest = tl.max(greatest_P, 0)
    token = tl.min(tl.where(is_slice_P & (greatest_P == greatest), token_P, 2147483647), 0)
    per_temperature = tl.where(temperature > 0.0, 1.0 / temperature, 1.0)
    total = tl.sum(tl.exp((greatest_P - greatest) * per_temperature) * sum_P, 0)
    return greatest, token, total


@triton.jit
def _prob_of(z_V, token_V, threshold, temperature, greatest, best, total):
    """p of tokens with logits z."""
    per_temperature = tl.where(temperature > 0.0, 1.0 / temperature, 1.0)
    sampled_V = tl.where(z_V >= threshold, tl.exp((z_V - greatest) * per_temperature) / total, 0.0)
    return tl.where(temperature > 0.0, sampled_V, (token_V == best).to(tl.float32))


@triton.jit
def _accept_kernel(
    logits_ptr,  # fp32 [S, M, V]
    table_ptr,  # int64 [S, M, 8], see draws.draw_table
    threshold_ptr,  # fp32 [S, M]
    greatest_ptr,  # fp32 [S, M, P]
    token_ptr,  # int32 [S, M, P]
    sum_ptr,  # fp32 [S, M, P]
    guesses_ptr,  # int64 [S, K]
    probs_ptr,  # fp32 [S, K, m]
    ids_ptr,  # int64 [S, K, m]; not read of a dense law
    num_accepted_ptr,  # int64 [S]
    end_ptr,  # int32 [S], how the chain ended
    num_guesses,
    vocab_size,
    width,
    num_slices,
    role: tl.constexpr,
    all_accepted: tl.constexpr,
    from_law: tl.constexpr,
    from_one_hot: tl.constexpr,
    IS_DENSE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    column_M = tl.arange(0, BLOCK_M)
    num_accepted = 0
    end = -1
    while end < 0:
        guess = tl.load(
            guesses_ptr + sequence * num_guesses + num_accepted, mask=num_accepted < num_guesses, other=-1
        )
        if guess < 0:
            end = all_accepted
        else:
            row = sequence * (num_guesses + 1) + num_accepted
            seed, position, choice, temperature = draw_of(table_ptr, row)
            greatest, best, total = _law_of(
                greatest_ptr, token_ptr, sum_ptr, temperature, row, num_slices, BLOCK_P
            )
            z = tl.load(logits_ptr + row * vocab_size + guess)
            threshold = tl.load(threshold_ptr + row)
            p = _prob_of(z, guess, threshold, temperature, greatest, best, total)
            law = (sequence * num_guesses + num_accepted) * width
            if IS_DENSE:
                q = tl.load(probs_ptr + law + guess)
            else:
                is_column_M = column_M < width
                id_M = tl.load(ids_ptr + law + column_M, mask=is_column_M, other=-1)
                probs_M = tl.load(probs_ptr + law + column_M, mask=is_column_M, other=0.0)
                q = tl.sum(tl.where(id_M == guess, probs_M, 0.0), 0)
            is_one_hot = q == 0.0
            q = tl.where(is_one_hot, 1.0, q)
            u = uniform(seed, position, choice, role)
            if u * q < p:
                num_accepted += 1
            else:
                end = tl.where(is_one_hot, from_one_hot, from_law)
    tl.store(num_accepted_ptr + sequence, num_accepted)
    tl.store(end_ptr + sequence, end)


@triton.jit
def _residual_kernel(
    logits_ptr,  # fp32 [S, M, V]
    table_ptr,  # int64 [S, M, 8], see draws.draw_table
    threshold_ptr,  # fp32 [S, M]
    greatest_ptr,  # fp32 [S, M, P]
    token_ptr,  # int32 [S, M, P]
    sum_ptr,  # fp32 [S, M, P]
    guesses_ptr,  # int64 [S, K]
    probs_ptr,  # fp32 [S, K, m]
    ids_ptr,  # int64 [S, K, m]
    num_accepted_ptr,  # int64 [S]
    end_ptr,  # int32 [S]
    scores_ptr,  # fp32 [S, 2, P]: best of the residual, best of p
    tokens_ptr,  # int32 [S, 2, P]
    mass_ptr,  # fp32 [S, P], of the residual
    num_guesses,
    vocab_size,
    width,
    slice_size,
    role: tl.constexpr,
    from_law: tl.constexpr,
    from_one_hot: tl.constexpr,
    IS_DENSE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    num_slices = tl.num_programs(1)
    num_accepted = tl.load(num_accepted_ptr + sequence)
    end = tl.load(end_ptr + sequence)
    row = sequence * (num_guesses + 1) + num_accepted
    seed, position, choice, temperature = draw_of(table_ptr, row)
    threshold = tl.load(threshold_ptr + row)
    greatest, best, total = _law_of(greatest_ptr, token_ptr, sum_ptr, temperature, row, num_slices, BLOCK_P)
    guess = tl.load(
        guesses_ptr + sequence * num_guesses + num_accepted, mask=num_accepted < num_guesses, other=-1
    )
    law = (sequence * num_guesses + num_accepted) * width

    score, token, p_score, p_token = -float("inf"), vocab_size, -float("inf"), vocab_size
    mass = 0.0
    start = tl.program_id(1) * slice_size
    for first in range(start, tl.minimum(start + slice_size, vocab_size), BLOCK):
        token_V = first + tl.arange(0, BLOCK)
        is_token_V = token_V < vocab_size
        z_V = tl.load(logits_ptr + row * vocab_size + token_V, mask=is_token_V, other=-float("inf"))
        p_V = _prob_of(z_V, token_V, threshold, temperature, greatest, best, total)
        p_V = tl.where(is_token_V, p_V, 0.0)
        q_V = tl.zeros([BLOCK], tl.float32)
        if end == from_one_hot:
            q_V = (token_V == guess).to(tl.float32)
        elif end == from_law:
            if IS_DENSE:
                q_V = tl.load(probs_ptr + law + token_V, mask=is_token_V, other=0.0)
            else:
                for column in range(width):
                    is_it_V = token_V == tl.load(ids_ptr + law + column)
                    q_V += tl.where(is_it_V, tl.load(probs_ptr + law + column), 0.0)
        residual_V = tl.maximum(p_V - q_V, 0.0)
        noise_V = gumbel(bits_of(token_V, seed, position, choice, role))
        mass += tl.sum(residual_V, 0)
        score, token = best_of(tl.log(residual_V) + noise_V, token_V, score, token)
        p_score, p_token = best_of(tl.log(p_V) + noise_V, token_V, p_score, p_token)
    place = sequence * 2 * num_slices + tl.program_id(1)
    tl.store(scores_ptr + place, score)
    tl.store(tokens_ptr + place, token)
    tl.store(scores_ptr + place + num_slices, p_score)
    tl.store(tokens_ptr + place + num_slices, p_token)
    tl.store(mass_ptr + sequence * num_slices + tl.program_id(1), mass)


@triton.jit
def _settle_kernel(
    scores_ptr,  # fp32 [S, 2, P]: best of the residual, best of p
    tokens_ptr,  # int32 [S, 2, P]
    mass_ptr,  # fp32 [S, P], of the residual
    bonus_ptr,  # int64 [S]
    num_slices,
    no_residual: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    slice_P = tl.arange(0, BLOCK_P)
    is_slice_P = slice_P < num_slices
    mass = tl.sum(tl.load(mass_ptr + sequence * num_slices + slice_P, mask=is_slice_P, other=0.0), 0)
    place_P = (sequence * 2 + tl.where(mass > no_residual, 0, 1)) * num_slices + slice_P
    score_P = tl.load(scores_ptr + place_P, mask=is_slice_P, other=-float("inf"))
    token_P = tl.load(tokens_ptr + place_P, mask=is_slice_P, other=2147483647)
    is_best_P = score_P == tl.max(score_P, 0)
    tl.store(bonus_ptr + sequence, tl.min(tl.where(is_best_P, token_P, 2147483647), 0).to(tl.int64))


def rejection_verify(
    logits_SMV: torch.Tensor, tokens_SK: torch.Tensor, law: DraftLaw, draws: Sequence[Draw]
) -> Settled:
    """Accept or reject the guesses of every chain. Arguments and errors: `rejection_verify_ref`."""
    check_chains(logits_SMV, tokens_SK, law, draws)
    num_sequences, num_places, vocab_size = logits_SMV.shape
    num_guesses, width = num_places - 1, law.probs_SKm.shape[-1]
    num_slices, slice_size = slices(vocab_size)
    table_N8 = draw_table(draws, logits_SMV.device)
    logits_NV = penalise(logits_SMV.view(-1, vocab_size), draws)
    rows = (logits_NV, table_N8, thresholds_of(logits_NV, draws, table_N8))
    greatest_NP = torch.empty(len(draws), num_slices, dtype=torch.float32, device=logits_SMV.device)
    token_NP = torch.empty_like(greatest_NP, dtype=torch.int32)
    sum_NP = torch.empty_like(greatest_NP)
    num_accepted_S = tokens_SK.new_empty(num_sequences)
    bonus_S = torch.empty_like(num_accepted_S)
    end_S = torch.empty_like(num_accepted_S, dtype=torch.int32)
    scores_S2P = greatest_NP.new_empty(num_sequences, 2, num_slices)
    tokens_S2P = torch.empty_like(scores_S2P, dtype=torch.int32)
    mass_SP = greatest_NP.new_empty(num_sequences, num_slices)
    # of a dense law no ids are read
    ids_SKm = tokens_SK if law.ids_SKm is None else law.ids_SKm
    laws = (*rows, greatest_NP, token_NP, sum_NP, tokens_SK, law.probs_SKm, ids_SKm, num_accepted_S, end_S)
    kinds = {"from_law": FROM_LAW, "from_one_hot": FROM_ONE_HOT, "IS_DENSE": law.ids_SKm is None}
    blocks = {"BLOCK_P": triton.next_power_of_2(num_slices)}

    _partial_laws_kernel[(len(draws), num_slices)](
        *rows, greatest_NP, token_NP, sum_NP, vocab_size, slice_size, BLOCK=BLOCK_V
    )
    _accept_kernel[(num_sequences,)](
        *laws,
        num_guesses,
        vocab_size,
        width,
        num_slices,
        role=ACCEPT_ROLE,
        all_accepted=ALL_ACCEPTED,
        **kinds,
        **blocks,
        BLOCK_M=1 if law.ids_SKm is None else triton.next_power_of_2(max(1, width)),
        num_warps=1,
    )
    _residual_kernel[(num_sequences, num_slices)](
        *laws,
        scores_S2P,
        tokens_S2P,
        mass_SP,
        num_guesses,
        vocab_size,
        width,
        slice_size,
        role=RESIDUAL_ROLE,
        **kinds,
        **blocks,
        BLOCK=BLOCK_V,
    )
    _settle_kernel[(num_sequences,)](
        scores_S2P, tokens_S2P, mass_SP, bonus_S, num_slices, no_residual=NO_RESIDUAL, **blocks, num_warps=1
    )
    return Settled(num_accepted_S, bonus_S)


def compile_cases() -> list[CompileCase]:
    """A chain of the default bucket with rows of 64 tokens, without guesses, and with a dense law."""
    num_slices = {"num_slices": "i32"}
    row = {"logits_ptr": "*fp32", "table_ptr": "*i64", "threshold_ptr": "*fp32"}
    parts = {"greatest_ptr": "*fp32", "token_ptr": "*i32", "sum_ptr": "*fp32"}
    sizes = {"num_guesses": "i32", "vocab_size": "i32", "width": "i32"}
    chain = {"guesses_ptr": "*i64", "probs_ptr": "*fp32", "ids_ptr": "*i64"}
    ends = {"num_accepted_ptr": "*i64", "end_ptr": "*i32"}
    found = {"scores_ptr": "*fp32", "tokens_ptr": "*i32", "mass_ptr": "*fp32"}
    law = {**row, **parts, **chain, **ends}
    kinds = {"from_law": FROM_LAW, "from_one_hot": FROM_ONE_HOT, "BLOCK_P": MAX_SLICES}
    accept = {**kinds, "role": ACCEPT_ROLE, "all_accepted": ALL_ACCEPTED}
    residual = {**kinds, "role": RESIDUAL_ROLE, "BLOCK": BLOCK_V}
    settle = {"no_residual": NO_RESIDUAL, "BLOCK_P": MAX_SLICES}
    slices = {"vocab_size": "i32", "slice_size": "i32"}
    cases = [
        _case("laws", _partial_laws_kernel, {**row, **parts, **slices}, {"BLOCK": BLOCK_V}),
        _case("settle", _settle_kernel, {**found, "bonus_ptr": "*i64", **num_slices}, settle, num_warps=1),
    ]
    for name, is_dense, width in (("m64", False, 64), ("dense", True, 1)):
        kind = {"IS_DENSE": is_dense}
        columns = {**kind, "BLOCK_M": width}
        cases += [
            _case(f"accept {name}", _accept_kernel, law | sizes | num_slices, accept | columns, num_warps=1),
            _case(f"residual {name}", _residual_kernel, law | found | sizes | slices, residual | kind),
        ]
    return cases


def _case(
    name: str, kernel: Any, arguments: dict[str, str], constants: dict[str, Any], num_warps: int = 4
) -> CompileCase:
    return CompileCase(
        name=f"rejection_verify/{name}",
        kernel=kernel,
        signature={
            parameter: "constexpr" if parameter in constants else arguments[parameter]
            for parameter in kernel.arg_names
        },
        constants=constants,
        num_warps=num_warps,
        aligned=tuple(parameter for parameter in arguments if parameter.endswith("_ptr")),
    )
