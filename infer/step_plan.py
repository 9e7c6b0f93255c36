"""From rows and the KV pool's bookkeeping to the arrays of one model step. NumPy only.

The layout is that of `kernels/tree_batch.py`; `foredraft.infer.paged_model` makes tensors of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foredraft.infer.kv_pool import KVPool

SPLIT = 64  # that of the kernel, whose file cannot be imported without torch
WORD_BITS = 64
SCRATCH_SLOT = 0
NO_ROW = -1


class Row(NamedTuple):
    """One token to run: a node of the suffix, or (node None) a position of the committed prefix."""

    seq: int
    token: int
    node: int | None = None
    position: int | None = None  # of a committed row; None: the row is appended to the prefix


class Piece(NamedTuple):
    """Consecutive committed positions to run; they do not cross a multiple of 64."""

    seq: int
    start: int  # absolute position of the first
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step that do not follow from its rows."""

    row_bucket: int  # static number of rows R; the rest is padding that writes to scratch
    num_lanes: int  # static number of row places of a sequence L; part of a step's numerical identity
    # sizes of all arrays, for a step that is captured once; 0: as few as the step needs
    num_sequences: int = 0
    num_pages: int = 0
    num_nodes: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Arrays of one step. `num_rows` of the bucket's rows are real, they come first."""

    num_rows: int
    tokens: np.ndarray  # int64 [R]
    positions: np.ndarray  # int64 [R]
    write_slots: np.ndarray  # int64 [R]
    row_seq: np.ndarray  # int32 [R]
    row_lane: np.ndarray  # int32 [R]
    row_prefix: np.ndarray  # int32 [R]
    row_ancestors: np.ndarray  # int64 [R, W]
    lane_rows: np.ndarray  # int32 [S, L]
    num_shared: np.ndarray  # int32 [S]
    pages: np.ndarray  # int32 [S, P]
    suffix_slots: np.ndarray  # int32 [S, X]
    is_prefill: bool = False


def plan_step(pool: KVPool, rows: Sequence[Row], shape: StepShape) -> StepPlan:
    """Plan a packed step: rows of one or more sequences, at most `num_lanes` of each.

    Args:
        pool: bookkeeping; every row's slot is allocated already.
        rows: 1..row_bucket rows.
        shape: static sizes.

    Raises:
        ValueError: more rows than the bucket or than lanes of a sequence.
    """
    if not 0 < len(rows) <= shape.row_bucket:
        raise ValueError(f"a step takes 1..{shape.row_bucket} rows, got {len(rows)}")
    rows_of_seq: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        rows_of_seq.setdefault(row.seq, []).append(index)
    crowded = max(len(indices) for indices in rows_of_seq.values())
    if crowded > shape.num_lanes:
        raise ValueError(f"a step takes at most {shape.num_lanes} rows of one sequence, got {crowded}")
    plan = empty_plan(pool, list(rows_of_seq), len(rows), shape)
    num_words = plan.row_ancestors.shape[1]
    for place, (seq, indices) in enumerate(rows_of_seq.items()):
        prefix = pool.prefix_slots(seq)
        num_settled = len(prefix)  # positions before every row's own path
        plan.lane_rows[place, : len(indices)] = indices
        for lane, index in enumerate(indices):
            row = rows[index]
            plan.tokens[index], plan.row_seq[index], plan.row_lane[index] = row.token, place, lane
            if row.node is None:
                position = len(prefix) - 1 if row.position is None else row.position
                plan.positions[index], plan.row_prefix[index] = position, position + 1
                plan.write_slots[index] = prefix[position]
                num_settled = min(num_settled, position)
            else:
                plan.positions[index] = len(prefix) + pool.depth(seq, row.node)
                plan.row_prefix[index] = len(prefix)
                plan.write_slots[index] = pool.slot(seq, row.node)
                plan.row_ancestors[index] = words(pool.ancestor_bits(seq, row.node), num_words)
        plan.num_shared[place] = num_settled // SPLIT
    return plan


def cut_pieces(seq: int, start: int, token_ids: Sequence[int]) -> list[Piece]:
    """A run of positions in pieces of one split each: their rows share all keys before it."""
    ends = [*range((start // SPLIT + 1) * SPLIT, start + len(token_ids), SPLIT), start + len(token_ids)]
    starts = [start, *ends[:-1]]
    return [
        Piece(seq, first, token_ids[first - start : end - start])
        for first, end in zip(starts, ends, strict=True)
    ]


def plan_prefill(pool: KVPool, pieces: Sequence[Piece], shape: StepShape) -> StepPlan:
    """Plan a packed prefill step: committed positions of one or more sequences, a place for each piece.

    Args:
        pool: bookkeeping; the positions are in the committed prefixes already.
        pieces: from `cut_pieces`; at most R tokens in all.
        shape: static sizes; L = 64.
    """
    num_rows = sum(len(piece.token_ids) for piece in pieces)
    plan = empty_plan(pool, [piece.seq for piece in pieces], num_rows, shape, is_prefill=True)
    first = 0
    for place, (seq, start, token_ids) in enumerate(pieces):
        size = len(token_ids)
        rows = slice(first, first + size)
        plan.tokens[rows] = token_ids
        plan.positions[rows] = np.arange(start, start + size)
        plan.write_slots[rows] = pool.prefix_slots(seq)[start : start + size]
        plan.row_seq[rows], plan.row_lane[rows] = place, np.arange(size)
        plan.row_prefix[rows] = plan.positions[rows] + 1
        plan.lane_rows[place, :size] = np.arange(first, first + size)
        plan.num_shared[place] = start // SPLIT
        first += size
    return plan


def empty_plan(
    pool: KVPool, seqs: Sequence[int], num_rows: int, shape: StepShape, *, is_prefill: bool = False
) -> StepPlan:
    """A plan of padding rows that knows the pages and suffixes of its sequences."""
    suffixes = [pool.suffix_slots(seq) for seq in seqs]
    num_nodes = shape.num_nodes or max(map(len, suffixes))
    num_words = max(1, -(-num_nodes // WORD_BITS))
    pages = [pool.pages(seq) for seq in seqs]
    num_pages = shape.num_pages or max(1, *map(len, pages))
    num_sequences = shape.num_sequences or len(seqs)
    plan = StepPlan(
        num_rows=num_rows,
        tokens=np.zeros(shape.row_bucket, np.int64),
        positions=np.zeros(shape.row_bucket, np.int64),
        write_slots=np.full(shape.row_bucket, SCRATCH_SLOT, np.int64),
        row_seq=np.zeros(shape.row_bucket, np.int32),
        row_lane=np.zeros(shape.row_bucket, np.int32),
        row_prefix=np.zeros(shape.row_bucket, np.int32),
        row_ancestors=np.zeros((shape.row_bucket, num_words), np.int64),
        lane_rows=np.full((num_sequences, shape.num_lanes), NO_ROW, np.int32),
        num_shared=np.zeros(num_sequences, np.int32),
        pages=np.zeros((num_sequences, num_pages), np.int32),
        suffix_slots=np.full((num_sequences, num_words * WORD_BITS), SCRATCH_SLOT, np.int32),
        is_prefill=is_prefill,
    )
    for place, (own_pages, slots) in enumerate(zip(pages, suffixes, strict=True)):
        plan.pages[place, : len(own_pages)] = own_pages
        plan.suffix_slots[place, : len(slots)] = slots
    return plan


def words(bits: int, num_words: int) -> np.ndarray:
    """The low bits of an integer as int64 words, the lowest first."""
    return np.frombuffer(bits.to_bytes(num_words * WORD_BITS // 8, "little"), np.int64)
