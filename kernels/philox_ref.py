"""Philox 4x32-10 bits and the Gumbel noise of coupled sampling, in NumPy.

The noise of a token is a function of (seed, position, choice, token) alone, so target and drafter see the
same noise without talking, and one row serves every tree node at that position (Gumbel coupling: Daliri,
Musco, Suresh, arXiv 2408.07978).

    bits = Philox4x32-10(key = seed, counter = (token // 4, position, choice, role))[token % 4]
    v = min((float32(bits) + 0.5) * 2^-32, 1 - 2^-24)
    g = -log(-log1p(-v))

The role is 0; rejection verification (rejection_verify_ref.py) draws from other streams by other roles:

    0  coupled noise    1  U, from token 0    2  g of the target's own draw    3  g of the drafter's

Generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from foredraft.kernels.draws import Draw

COUPLED_ROLE, ACCEPT_ROLE, RESIDUAL_ROLE, DRAFT_ROLE = 0, 1, 2, 3
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
LOW_WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)
LARGEST_V = np.float32(1.0 - 2.0**-24)


def philox4x32(key: int, counter_N4: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox 4x32.

    Args:
        key: unsigned 64-bit integer; its low word is the first key word.
        counter_N4: uint32 [N, 4].

    Returns:
        uint32 [N, 4].
    """
    c0, c1, c2, c3 = (np.ascontiguousarray(counter_N4[:, i]).astype(np.uint64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = (product_1 >> WORD_BITS) ^ c1 ^ np.uint64(k0)
        c2 = (product_0 >> WORD_BITS) ^ c3 ^ np.uint64(k1)
        c1, c3 = product_1 & LOW_WORD, product_0 & LOW_WORD
        k0, k1 = (k0 + WEYL_0) & 0xFFFFFFFF, (k1 + WEYL_1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def gumbel(bits: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise float32 from uint32 bits of any shape; finite for all 2^32 values."""
    v = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), LARGEST_V)
    return -np.log(-np.log1p(-v))


def gumbel_row(seed: int, position: int, choice: int, vocab_size: int) -> np.ndarray:
    """Noise of every token at one position.

    Args:
        seed: unsigned 64-bit seed of the request.
        position: absolute index in the sequence of the token being chosen.
        choice: index of the completion where several share a seed.
        vocab_size: V, size of the target's vocabulary.

    Returns:
        float32 [V].
    """
    num_blocks = -(-vocab_size // 4)
    counter_N4 = np.zeros((num_blocks, 4), dtype=np.uint32)
    counter_N4[:, 0] = np.arange(num_blocks, dtype=np.uint32)
    counter_N4[:, 1] = position
    counter_N4[:, 2] = choice
    return gumbel(philox4x32(seed, counter_N4).reshape(-1)[:vocab_size])


def bits_of(draw: Draw, role: int, token_ids: np.ndarray) -> np.ndarray:
    """Bits uint32 of any tokens int64 [K] in one role."""
    counter_K4 = np.zeros((len(token_ids), 4), np.uint32)
    counter_K4[:, 0], counter_K4[:, 1:] = token_ids // 4, (draw.position, draw.choice, role)
    return np.take_along_axis(philox4x32(draw.seed, counter_K4), (token_ids % 4)[:, None], axis=1)[:, 0]


def gumbel_of(draw: Draw, role: int, token_ids: np.ndarray) -> torch.Tensor:
    """Gumbel noise float32 of tokens int64 [K] in one role."""
    return torch.from_numpy(gumbel(bits_of(draw, role, token_ids)))


def uniform(draw: Draw) -> float:
    """U of one place: a multiple of 2^-24 in [0, 1)."""
    return float(bits_of(draw, ACCEPT_ROLE, np.zeros(1, np.int64))[0] >> 8) * 2.0**-24
