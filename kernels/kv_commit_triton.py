"""Compacting committed paths into place on a GPU.

A program holds a strip of BLOCK entries of all M moved slots of one layer. It loads all, waits, then stores:
a source may be another move's destination. Moves are padded to a power of two.

Shape letters: B layers' keys and values, N slots of the pool, K key-value heads, D head dimension, M moves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foredraft.kernels.compile_case import CompileCase

TILE = 4096  # entries that a program holds: 32 registers of each of 128 threads
MAX_MOVES = 1024


@triton.jit
def _commit_kernel(
    pool,  # [B, N, ENTRIES], read and written
    sources,  # int64 [M]
    destinations,  # int64 [M]
    num_slots,
    num_moves,
    ENTRIES: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = pool + tl.program_id(0).to(tl.int64) * num_slots * ENTRIES
    move = tl.arange(0, MOVES)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_move = move < num_moves
    source = tl.load(sources + move, mask=is_move, other=0)
    destination = tl.load(destinations + move, mask=is_move, other=0)
    mask = is_move[:, None] & (entry < ENTRIES)[None, :]
    values = tl.load(layer + source[:, None] * ENTRIES + entry[None, :], mask=mask, other=0.0)
    tl.debug_barrier()  # no warp may store before all have loaded
    tl.store(layer + destination[:, None] * ENTRIES + entry[None, :], values, mask=mask)


def kv_commit(pool_BNKD: torch.Tensor, source_M: torch.Tensor, destination_M: torch.Tensor) -> None:
    """As `foredraft.kernels.kv_commit_ref.kv_commit`.

    Raises:
        ValueError: a pool that is not contiguous, or more moves than a program can hold.
    """
    num_moves = source_M.numel()
    if not pool_BNKD.is_contiguous():
        raise ValueError(f"expected a contiguous pool, found strides {pool_BNKD.stride()}")
    if num_moves > MAX_MOVES:
        raise ValueError(f"expected at most {MAX_MOVES} moves at once, got {num_moves}")
    if num_moves == 0:
        return
    num_layers, num_slots, num_heads, dim = pool_BNKD.shape
    sizes = _sizes(num_heads * dim, num_moves)
    _commit_kernel[(num_layers, triton.cdiv(num_heads * dim, sizes["BLOCK"]))](
        pool_BNKD, source_M, destination_M, num_slots, num_moves, **sizes
    )


def _sizes(num_entries: int, num_moves: int) -> dict[str, int]:
    moves = triton.next_power_of_2(num_moves)
    block = min(triton.next_power_of_2(num_entries), TILE // moves)
    return {"ENTRIES": num_entries, "MOVES": moves, "BLOCK": block}


def compile_cases() -> list[CompileCase]:
    """A path of at most 8 tokens, and the largest move: a shared page's copy with a whole suffix."""
    signature = {"pool": "*bf16", "sources": "*i64", "destinations": "*i64", "num_slots": "i32"}
    return [
        CompileCase(
            f"kv_commit/bf16 M{num_moves}",
            _commit_kernel,
            signature | {"num_moves": "i32"},
            _sizes(1024, num_moves),
        )
        for num_moves in (8, 512)
    ]
