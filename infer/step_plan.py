"""From rows and the KV pool's bookkeeping to the arrays of one model step. NumPy only.

The layout is that of `kernels/tree_attention_ref.py`; `foredraft.infer.paged_model` makes tensors of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foredraft.infer.kv_pool import KVPool

SPLIT = 64  # that of the kernel, whose file cannot be imported without torch
SCRATCH_SLOT = 0


class Row(NamedTuple):
    """One token to run: a node of the suffix, or (node None) a position of the committed prefix."""

    seq: int
    token: int
    node: int | None = None
    position: int | None = None  # of a committed row; None: the row is appended to the prefix


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Arrays of one step. `num_rows` of the bucket's rows are real, they come first."""

    num_rows: int
    tokens: np.ndarray  # int64 [R]
    positions: np.ndarray  # int64 [R]
    write_slots: np.ndarray  # int64 [R]
    item_slots: np.ndarray  # int64 [I, 64]
    item_seq: np.ndarray  # int64 [I]
    item_start: np.ndarray  # int64 [I]
    tail_mask: np.ndarray  # bool [J, 1 or L, 64]
    lane_rows: np.ndarray  # int64 [S, L]
    row_lane: np.ndarray  # int64 [R]
    part_items: np.ndarray  # int64 [R, P]
    part_missing: np.ndarray  # bool [R, P]

    @property
    def lane_positions(self) -> np.ndarray:
        """int64 [S, L]: absolute position of each lane's row."""
        return self.positions[self.lane_rows]


def plan_step(pool: KVPool, rows: Sequence[Row], row_bucket: int, num_lanes: int) -> StepPlan:
    """Plan a packed step: rows of one or more sequences, at most `num_lanes` of each.

    Args:
        pool: bookkeeping; every row's slot is allocated already.
        rows: 1..row_bucket rows.
        row_bucket: static number of rows R; the rest is padding that writes to scratch.
        num_lanes: static number of row places of a sequence L; part of the numerical identity of a step.

    Raises:
        ValueError: more rows than the bucket or than lanes of a sequence.
    """
    if not 0 < len(rows) <= row_bucket:
        raise ValueError(f"a step takes 1..{row_bucket} rows, got {len(rows)}")
    rows_of_seq: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        rows_of_seq.setdefault(row.seq, []).append(index)
    crowded = max(len(indices) for indices in rows_of_seq.values())
    if crowded > num_lanes:
        raise ValueError(f"a step takes at most {num_lanes} rows of one sequence, got {crowded}")
    keys = [sequence_keys(pool, seq, [rows[i] for i in indices]) for seq, indices in rows_of_seq.items()]
    packer = Packer(row_bucket, num_lanes, len(rows_of_seq), sum(len(part.shared) for part in keys))
    for seq_index, (part, indices) in enumerate(zip(keys, rows_of_seq.values(), strict=True)):
        packer.add_sequence(seq_index, part, [(i, rows[i].token) for i in indices])
    return packer.plan(len(rows))


@dataclass(frozen=True, slots=True)
class SequenceKeys:
    """Keys of one sequence's rows: whole splits that all of them see, then each row's own ragged tail."""

    shared: np.ndarray  # slots int64 [F, 64]
    tails: list[np.ndarray]  # slots of each row from position 64 F on, its own last


def sequence_keys(pool: KVPool, seq: int, rows: Sequence[Row]) -> SequenceKeys:
    """Slots of the keys that rows of one sequence see, in logical order."""
    prefix = pool.prefix_slots(seq)
    placed = [row_slots(pool, prefix, row) for row in rows]
    num_shared = min(num_settled for num_settled, _ in placed) // SPLIT
    tails = [np.concatenate([prefix[num_shared * SPLIT : settled], path]) for settled, path in placed]
    return SequenceKeys(prefix[: num_shared * SPLIT].reshape(-1, SPLIT), tails)


class Packer:
    """Collects the items of a step: first the shared splits of all sequences, then the tails of all rows."""

    def __init__(self, row_bucket: int, num_lanes: int, num_sequences: int, num_shared: int) -> None:
        """num_shared: shared splits of all sequences; the tails' items come after them."""
        self.first_tail = num_shared
        self.tokens, self.positions, self.write_slots, self.row_lane = (
            np.full(row_bucket, SCRATCH_SLOT, dtype=np.int64) for _ in range(4)
        )
        self.lane_rows = np.empty((num_sequences, num_lanes), dtype=np.int64)
        self.parts: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * row_bucket  # items of each row
        self.shared: list[tuple[np.ndarray, int, int]] = []  # slots, sequence, absolute position of the first
        self.tails: list[tuple[np.ndarray, int, int]] = []

    def add_sequence(self, seq_index: int, keys: SequenceKeys, rows: Sequence[tuple[int, int]]) -> None:
        """Add one sequence's rows, each (index in the bucket, token)."""
        first_shared, num_shared = len(self.shared), len(keys.shared)
        self.shared.extend((slots, seq_index, SPLIT * i) for i, slots in enumerate(keys.shared))
        self.lane_rows[seq_index] = rows[0][0]
        for lane, ((index, token), tail) in enumerate(zip(rows, keys.tails, strict=True)):
            self.lane_rows[seq_index, lane] = index
            self.row_lane[index] = lane
            self.tokens[index] = token
            self.positions[index] = SPLIT * num_shared + len(tail) - 1
            self.write_slots[index] = tail[-1]
            own = self.first_tail + len(self.tails)
            self.tails.extend(
                (tail[start : start + SPLIT], seq_index, SPLIT * num_shared + start)
                for start in range(0, len(tail), SPLIT)
            )
            self.parts[index] = np.concatenate(
                [
                    np.arange(first_shared, first_shared + num_shared),
                    np.arange(own, self.first_tail + len(self.tails)),
                ]
            )

    def plan(self, num_rows: int) -> StepPlan:
        """The arrays of everything added."""
        items = self.shared + self.tails
        item_slots = np.full((len(items), SPLIT), SCRATCH_SLOT, dtype=np.int64)
        is_key = np.zeros((len(items), SPLIT), dtype=bool)
        for index, (slots, _, _) in enumerate(items):
            item_slots[index, : len(slots)] = slots
            is_key[index, : len(slots)] = True
        part_items = np.zeros((len(self.parts), max(map(len, self.parts))), dtype=np.int64)
        part_missing = np.ones(part_items.shape, dtype=bool)
        for index, part in enumerate(self.parts):
            part_items[index, : len(part)] = part
            part_missing[index, : len(part)] = False
        return StepPlan(
            num_rows=num_rows,
            tokens=self.tokens,
            positions=self.positions,
            write_slots=self.write_slots,
            item_slots=item_slots,
            item_seq=np.array([seq for _, seq, _ in items], dtype=np.int64),
            item_start=np.array([start for _, _, start in items], dtype=np.int64),
            tail_mask=is_key[self.first_tail :, None],
            lane_rows=self.lane_rows,
            row_lane=self.row_lane,
            part_items=part_items,
            part_missing=part_missing,
        )


def row_slots(pool: KVPool, prefix: np.ndarray, row: Row) -> tuple[int, np.ndarray]:
    """(committed positions before the row's own path, slots of that path with the row's own last)."""
    if row.node is not None:
        return len(prefix), pool.path_slots(row.seq, row.node)
    position = len(prefix) - 1 if row.position is None else row.position
    return position, prefix[position : position + 1]


def plan_prefill(pool: KVPool, seq: int, token_ids: Sequence[int], chunk: int) -> StepPlan:
    """Plan one chunk of consecutive committed positions, the last `len(token_ids)` of the sequence.

    Args:
        pool: bookkeeping; the positions are in the committed prefix already.
        seq: their sequence.
        token_ids: 1..chunk tokens; they do not cross a multiple of `chunk`.
        chunk: static number of rows, a multiple of 64.
    """
    prefix = pool.prefix_slots(seq)
    end, start = len(prefix), len(prefix) - len(token_ids)
    num_shared = start // SPLIT
    own_slots = np.full(chunk, SCRATCH_SLOT, dtype=np.int64)
    own_slots[: end - num_shared * SPLIT] = prefix[num_shared * SPLIT :]
    tokens, positions, write_slots = (np.zeros(chunk, dtype=np.int64) for _ in range(3))
    tokens[: len(token_ids)] = token_ids
    positions[: len(token_ids)] = np.arange(start, end)
    write_slots[: len(token_ids)] = prefix[start:]
    num_items = num_shared + chunk // SPLIT
    item_start = SPLIT * np.arange(num_items)
    own_positions = item_start[num_shared:, None, None] + np.arange(SPLIT)
    return StepPlan(
        num_rows=len(token_ids),
        tokens=tokens,
        positions=positions,
        write_slots=write_slots,
        item_slots=np.concatenate([prefix[: num_shared * SPLIT], own_slots]).reshape(-1, SPLIT),
        item_seq=np.zeros(num_items, dtype=np.int64),
        item_start=item_start,
        tail_mask=own_positions <= positions[None, :, None],
        lane_rows=np.arange(chunk)[None],
        row_lane=np.arange(chunk),
        part_items=np.broadcast_to(np.arange(num_items), (chunk, num_items)).copy(),
        part_missing=np.zeros((chunk, num_items), dtype=bool),
    )
