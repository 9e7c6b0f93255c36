"""How programs share a row over the vocabulary, and what they do with their parts."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_V = 1024
MAX_SLICES = 16  # of a row; eight rows then fill the multiprocessors of an H100


def slices(num_columns: int) -> tuple[int, int]:
    """How many programs share a row, and the columns of each: whole blocks."""
    num_blocks = triton.cdiv(num_columns, BLOCK_V)
    blocks_each = triton.cdiv(num_blocks, MAX_SLICES)
    return triton.cdiv(num_blocks, blocks_each), blocks_each * BLOCK_V


@triton.jit
def best_of(score_V, token_V, score, token):
    """The best of what was found so far and a block of later tokens; ties go to the lowest."""
    top = tl.max(score_V, 0)
    first = tl.min(tl.where(score_V == top, token_V, 2147483647), 0)
    return tl.maximum(top, score), tl.where(top > score, first, token)


@triton.jit
def ordered(value):
    """int32 in the order of float32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The float32 value of `ordered`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def draw_of(table_ptr, row):
    """(seed, position, choice, temperature) of a row of `draws.draw_table`."""
    table_ptr += row * 8
    seed = tl.load(table_ptr)
    position = tl.load(table_ptr + 1).to(tl.int32)
    choice = tl.load(table_ptr + 2).to(tl.int32)
    return seed, position, choice, float_of(table_ptr + 4)


@triton.jit
def float_of(pointer):
    """A float32 field of the table, which holds its bits."""
    return tl.load(pointer).to(tl.int32).to(tl.float32, bitcast=True)
