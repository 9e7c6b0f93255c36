"""Philox bits against the published vectors, Gumbel noise at its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foredraft.kernels.philox_ref import gumbel, gumbel_row, philox4x32

ONES = 0xFFFFFFFF

# known-answer vectors of Random123 (Salmon et al., SC 2011)
VECTORS = [
    pytest.param(0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"),
    pytest.param(
        (ONES << 32) | ONES, (ONES,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"
    ),
    pytest.param(
        (0x299F31D0 << 32) | 0xA4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        id="pi",
    ),
]


@pytest.mark.parametrize(("key", "counter", "expected"), VECTORS)
def test_published_vectors(key: int, counter: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert philox4x32(key, np.array([counter], dtype=np.uint32))[0].tolist() == list(expected)


def test_noise_is_finite_at_both_ends() -> None:
    low, high = gumbel(np.array([0, ONES], dtype=np.uint32))
    assert low == pytest.approx(-math.log(-math.log1p(-(2.0**-33))), abs=1e-5)
    assert high == pytest.approx(-math.log(24 * math.log(2)), abs=1e-6)


def test_row_follows_the_pinned_counter() -> None:
    row = gumbel_row(seed=77, position=12, choice=3, vocab_size=10)
    for token in range(10):
        bits = philox4x32(77, np.array([[token // 4, 12, 3, 0]], dtype=np.uint32))[0, token % 4]
        assert row[token] == gumbel(bits[None])[0]


def test_row_has_gumbel_moments_and_depends_on_every_input() -> None:
    row = gumbel_row(1, 2, 0, 200_000)
    assert row.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert row.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    for other in [(2, 2, 0), (1, 3, 0), (1, 2, 1), (1 + (1 << 32), 2, 0)]:
        assert (gumbel_row(*other, 64) != row[:64]).any()
