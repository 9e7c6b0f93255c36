"""The least time of every operation on a chip: bytes that must move, operations that must be done.

    seconds >= max(bytes / bandwidth, flops / peak),   fraction = that bound / measured seconds

Each tensor is counted once: what a kernel reads again is its own affair. Derivations: kernels/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What one call must do at least."""

    num_bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Chip:
    """Peaks of one GPU, dense, from its maker's data sheet."""

    bytes_per_second: float
    half_flops: float  # of bfloat16 and float16 matrix products, accumulated in float32
    float_flops: float  # of float32 without tensor cores


CHIPS = {
    "A100": Chip(2.04e12, 312e12, 19.5e12),  # SXM, 80 GB
    "H100": Chip(3.35e12, 989e12, 67e12),  # SXM
    "H200": Chip(4.8e12, 989e12, 67e12),
    "B200": Chip(8.0e12, 2250e12, 80e12),
    "MI300X": Chip(5.3e12, 1307e12, 163.4e12),
}


def chip_of(device_name: str) -> Chip | None:
    """The chip whose name a driver's device name contains; None for others."""
    return next((chip for name, chip in CHIPS.items() if name in device_name), None)


def least_seconds(work: Work, chip: Chip, *, is_half: bool = True) -> float:
    """The bound of one call."""
    peak = chip.half_flops if is_half else chip.float_flops
    return max(work.num_bytes / chip.bytes_per_second, work.flops / peak)


def fraction(seconds: float, work: Work, chip: Chip, *, is_half: bool = True) -> float:
    """Share of the bound that a measured time reaches; 1 is the limit."""
    return least_seconds(work, chip, is_half=is_half) / seconds


def tree_attention(
    *, rows: int, heads: int, kv_heads: int, dim: int, context: int, nodes: int, item_bytes: int
) -> Work:
    """One layer of one sequence: the prefix and the suffix once, whatever the number of rows."""
    cache = 2 * (context + nodes) * kv_heads * dim
    packed = 2 * rows * heads * dim  # queries in, outputs out
    return Work((cache + packed) * item_bytes, 4.0 * rows * heads * (context + nodes) * dim)


def kv_write(*, rows: int, kv_heads: int, dim: int, item_bytes: int) -> Work:
    """Keys and values of the rows: read, and written."""
    return Work(4 * rows * kv_heads * dim * item_bytes)


def kv_commit(*, tokens: int, layers: int, kv_heads: int, dim: int, item_bytes: int) -> Work:
    """Keys and values of the moved tokens in all layers: read, and written."""
    return Work(4 * tokens * layers * kv_heads * dim * item_bytes)


def coupled_sample(*, rows: int, vocab: int) -> Work:
    """The logits once; a Philox block is ten rounds of ten operations for four tokens, Gumbel about 20."""
    return Work(4 * rows * vocab, (25.0 + 20.0) * rows * vocab)


def top_candidates(*, rows: int, columns: int, fan_out: int) -> Work:
    """The logits once, 16 bytes a candidate; operations as in sampling, and two exponentials."""
    return Work(4 * rows * columns + 16 * rows * fan_out, (25.0 + 20.0 + 10.0) * rows * columns)


def verify_walk(*, sequences: int, guesses: int) -> Work:
    """Three int64 a guess in, one out."""
    return Work(8 * sequences * (4 * guesses + 3))


def rejection_verify(*, sequences: int, guesses: int, vocab: int, law_width: int) -> Work:
    """The logits of all places once and of the last one again; 12 bytes a token of a law."""
    return Work(sequences * (4 * vocab * (guesses + 2) + 12 * guesses * law_width))


def distill_loss(*, tokens: int, hidden: int, draft_vocab: int, item_bytes: int, is_chunked: bool) -> Work:
    """Forward and backward: three products, four where logits are made again; weight and gradient once."""
    products = 4 if is_chunked else 3
    weights = 3 * draft_vocab * hidden  # read twice, gradient written
    states = 3 * tokens * hidden
    return Work((weights + states) * item_bytes, 2.0 * products * tokens * hidden * draft_vocab)
