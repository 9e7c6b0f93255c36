"""Coupled verification of blocks on the device; see verify_walk_ref.py.

One program walks one block, which it holds in registers: a step of the walk compares all N guesses with
(current, chosen token) at once. Parents come before their children, so the index of the current guess grows
and a walk has at most N steps; of equal siblings the first is taken. It reads 8 (3 N + 1) bytes and writes
8 (N + 2) a sequence: the launch is all it costs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foredraft.kernels.compile_case import CompileCase
from foredraft.kernels.verify_walk_ref import NO_GUESS, ROOT, Walked, check_blocks


@triton.jit
def _walk_kernel(
    tokens_ptr,  # int64 [S, N]
    parents_ptr,  # int64 [S, N]
    chosen_ptr,  # int64 [S, N + 1]
    num_accepted_ptr,  # int64 [S]
    path_ptr,  # int64 [S, N]
    bonus_ptr,  # int64 [S]
    num_guesses,
    no_guess: tl.constexpr,
    root: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    guess_N = tl.arange(0, BLOCK_N)
    is_guess_N = guess_N < num_guesses
    first = sequence * num_guesses
    # a parent that nothing can equal stands for padding
    tokens_N = tl.load(tokens_ptr + first + guess_N, mask=is_guess_N, other=0)
    parents_N = tl.load(parents_ptr + first + guess_N, mask=is_guess_N, other=root - 1)
    chosen_ptr += sequence * (num_guesses + 1)

    path_N = tl.full([BLOCK_N], no_guess, tl.int64)
    num_accepted = 0
    chosen = tl.load(chosen_ptr)
    current = tl.min(tl.where((parents_N == root) & (tokens_N == chosen), guess_N, BLOCK_N), 0)
    while current < BLOCK_N:
        path_N = tl.where(guess_N == num_accepted, current, path_N)
        num_accepted += 1
        chosen = tl.load(chosen_ptr + current + 1)
        is_child_N = (parents_N == current) & (tokens_N == chosen)
        current = tl.min(tl.where(is_child_N & (guess_N > current), guess_N, BLOCK_N), 0)

    tl.store(path_ptr + first + guess_N, path_N, mask=is_guess_N)
    tl.store(num_accepted_ptr + sequence, num_accepted)
    tl.store(bonus_ptr + sequence, chosen)


def verify_walk(tokens_SN: torch.Tensor, parents_SN: torch.Tensor, chosen_SM: torch.Tensor) -> Walked:
    """Walk down every block. Arguments and errors: `verify_walk_ref.verify_walk`."""
    check_blocks(tokens_SN, parents_SN, chosen_SM)
    num_sequences, num_guesses = tokens_SN.shape
    num_accepted_S = tokens_SN.new_empty(num_sequences)
    path_SN = torch.empty_like(tokens_SN)
    bonus_S = tokens_SN.new_empty(num_sequences)
    _walk_kernel[(num_sequences,)](
        tokens_SN,
        parents_SN,
        chosen_SM,
        num_accepted_S,
        path_SN,
        bonus_S,
        num_guesses,
        no_guess=NO_GUESS,
        root=ROOT,
        BLOCK_N=triton.next_power_of_2(max(1, num_guesses)),
        num_warps=1,
    )
    return Walked(num_accepted_S, path_SN, bonus_S)


def compile_cases() -> list[CompileCase]:
    """The default bucket's seven guesses, and the largest block."""
    pointers = ("tokens_ptr", "parents_ptr", "chosen_ptr", "num_accepted_ptr", "path_ptr", "bonus_ptr")
    constants = {"no_guess": NO_GUESS, "root": ROOT}
    signature = dict.fromkeys(pointers, "*i64") | {"num_guesses": "i32"}
    return [
        CompileCase(
            name=f"verify_walk/N{num_guesses}",
            kernel=_walk_kernel,
            signature=signature | dict.fromkeys([*constants, "BLOCK_N"], "constexpr"),
            constants=constants | {"BLOCK_N": triton.next_power_of_2(num_guesses)},
            num_warps=1,
            aligned=pointers,
        )
        for num_guesses in (7, 255)
    ]
