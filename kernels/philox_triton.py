"""Philox bits and Gumbel noise inside kernels; definitions: philox_ref.py.

Bits equal the reference's; noise is within 4 ulp of it (of 1, where it is smaller than 1): the same formula
in float32, with the device's logarithm.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position, choice, role: tl.constexpr):
    """U in [0, 1) of one place, a multiple of 2^-24: the upper bits of word 0 of token 0."""
    zero = tl.zeros([1], tl.int32)
    bits, _, _, _ = tl.philox(seed, zero, zero + position, zero + choice, zero + role)
    return tl.sum((bits >> 8).to(tl.float32) * 5.9604644775390625e-08, 0)


@triton.jit
def gumbel(bits):
    """Gumbel noise of bits; log1p by Kahan's formula, exact to a few ulp where v is small."""
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    u = 1.0 - v
    log1p = tl.where(u == 1.0, -v, tl.log(u) * (v / (1.0 - u)))
    return -tl.log(-log1p)


@triton.jit
def bits_of(token_V, seed, position, choice, role: tl.constexpr):
    """Bits of any tokens int32 [V]: a Philox block each, of which one word is used."""
    zero_V = token_V * 0
    a, b, c, d = tl.philox(seed, token_V // 4, zero_V + position, zero_V + choice, zero_V + role)
    word_V = token_V % 4
    return tl.where(word_V < 2, tl.where(word_V == 0, a, b), tl.where(word_V == 2, c, d))


@triton.jit
def bits_from(first, seed, position, choice, role: tl.constexpr, BLOCK: tl.constexpr):
    """Bits of BLOCK tokens from `first` on, a multiple of 4: four words of every Philox block."""
    block_B = first // 4 + tl.arange(0, BLOCK // 4)
    zero_B = block_B * 0
    a, b, c, d = tl.philox(seed, block_B, zero_B + position, zero_B + choice, zero_B + role)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
