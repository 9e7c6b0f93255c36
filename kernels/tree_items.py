"""The keys of a step as items of 64, for the reference of tree attention.

An item is one split: 64 keys of one sequence, aligned to absolute position. Whole splits of the committed
prefix are shared by all rows of a sequence. Every row has items of its own for the ragged rest (committed
tail, then its ancestors in depth order); rows of a prefill share that rest too, under a causal mask.

Shape letters: R rows, S sequences, L lanes, I items, J the last ones, which carry a mask, P splits of the
longest row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from foredraft.kernels.tree_batch import NO_ROW, SPLIT, TreeBatch

OFFSETS = np.arange(SPLIT)


@dataclass(frozen=True)
class Items:
    """Items of one step and the rows that add them up."""

    slots_I64: torch.Tensor  # int64, slots of each item's keys in logical order
    seq_I: torch.Tensor  # int64
    start_I: torch.Tensor  # int64, absolute position of each item's first key
    tail_mask_JL64: torch.Tensor  # bool [J, 1 or L, 64], keys that the last J items show
    lane_rows_SL: torch.Tensor  # int64, row in each lane; any row where a lane is empty
    lane_positions_SL: torch.Tensor  # int64, absolute position of each lane's row
    row_lane_R: torch.Tensor  # int64
    part_items_RP: torch.Tensor  # int64, item of each absolute split of each row; any where there is none
    part_missing_RP: torch.Tensor  # bool, where there is none

    def within(self, window: int) -> Items:
        """The same step for a layer that sees the last `window` keys.

        Items out of every lane's reach are left out, those at its edge masked; splits keep their places.
        """
        first_visible_SL = self.lane_positions_SL - window + 1
        in_reach_I = self.start_I + SPLIT > first_visible_SL.amin(1)[self.seq_I]
        first_tail = self.seq_I.numel() - self.tail_mask_JL64.shape[0]
        is_masked_I = self.start_I < first_visible_SL.amax(1)[self.seq_I]
        is_masked_I[first_tail:] = True
        whole, masked = (
            part.nonzero().squeeze(1) for part in (in_reach_I & ~is_masked_I, in_reach_I & is_masked_I)
        )
        key_positions_J164 = self.start_I[masked, None, None] + torch.arange(SPLIT, device=masked.device)
        mask_JL64 = key_positions_J164 >= first_visible_SL[self.seq_I[masked]][:, :, None]
        is_tail = masked >= first_tail
        mask_JL64[is_tail] &= self.tail_mask_JL64[masked[is_tail] - first_tail]
        kept = torch.cat([whole, masked])
        new_index = torch.zeros_like(self.seq_I)
        new_index[kept] = torch.arange(kept.numel(), device=kept.device)
        return replace(
            self,
            slots_I64=self.slots_I64[kept],
            seq_I=self.seq_I[kept],
            start_I=self.start_I[kept],
            tail_mask_JL64=mask_JL64,
            part_items_RP=new_index[self.part_items_RP],
            part_missing_RP=self.part_missing_RP | ~in_reach_I[self.part_items_RP],
        )


def items_of(batch: TreeBatch, window: int | None = None) -> Items:
    """Items of a step, for layers with a sliding window or without; made once a step each."""
    if window not in batch.derived:
        batch.derived[window] = derive_items(batch) if window is None else items_of(batch).within(window)
    return batch.derived[window]


def derive_items(batch: TreeBatch) -> Items:
    """Resolve pages and ancestor words to slots."""
    layout = _Layout(batch)
    shared_seq, shared_start = layout.shared()
    if batch.is_prefill:
        tail_row, tail_start, mask_JL64 = layout.causal_tails()
    else:
        tail_row, tail_start, mask_JL64 = layout.tails()
    arrays = {
        "slots_I64": np.concatenate(
            [layout.prefix_slots(shared_seq, shared_start), layout.row_slots(tail_row, tail_start)]
        ),
        "seq_I": np.concatenate([shared_seq, layout.row_seq[tail_row]]),
        "start_I": np.concatenate([shared_start, tail_start]),
        "tail_mask_JL64": mask_JL64,
        "lane_rows_SL": layout.lane_rows,
        "lane_positions_SL": layout.row_position[layout.lane_rows],
        "row_lane_R": layout.row_lane,
        **layout.parts(shared_seq, tail_row),
    }
    device = batch.row_seq_R.device
    return Items(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


class _Layout:
    """A TreeBatch as NumPy arrays, and which positions and slots its items hold."""

    def __init__(self, batch: TreeBatch) -> None:
        def array(tensor: torch.Tensor) -> np.ndarray:
            return tensor.cpu().numpy().astype(np.int64)

        self.is_prefill = batch.is_prefill
        self.page_size = batch.page_size
        self.row_seq, self.row_lane = array(batch.row_seq_R), array(batch.row_lane_R)
        self.row_position, self.row_prefix = array(batch.row_position_R), array(batch.row_prefix_R)
        self.num_shared, self.pages = array(batch.num_shared_S), array(batch.pages_SP)
        lane_rows = array(batch.lane_rows_SL)
        self.num_lanes = (lane_rows != NO_ROW).sum(1)
        self.lane_rows = np.where(lane_rows == NO_ROW, lane_rows[:, :1].clip(0), lane_rows)
        bits_RX = np.unpackbits(
            batch.row_ancestors_RW.cpu().numpy().view(np.uint8), axis=1, bitorder="little"
        ).astype(bool)
        rows, nodes = bits_RX.nonzero()
        # nodes of a row come in order of depth, so its n-th set bit is the n-th token of its path
        num_ancestors = bits_RX.sum(1)
        ranks = np.arange(len(rows)) - np.repeat(np.cumsum(num_ancestors) - num_ancestors, num_ancestors)
        self.path_slots = np.zeros((len(bits_RX), num_ancestors.max(initial=0) + 1), np.int64)
        self.path_slots[rows, ranks] = array(batch.suffix_slots_SX)[self.row_seq[rows], nodes]
        self.num_keys = self.row_prefix + num_ancestors
        self.num_tails = -(-np.maximum(self.num_keys - SPLIT * self.num_shared[self.row_seq], 0) // SPLIT)

    def shared(self) -> tuple[np.ndarray, np.ndarray]:
        """(sequence, first position) of every shared item."""
        return self._numbered(self.num_shared, np.zeros_like(self.num_shared))

    def tails(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(row, first position, mask [J, 1, 64]) of every item that one row alone sees."""
        rows, starts = self._numbered(self.num_tails, self.num_shared[self.row_seq])
        return rows, starts, (starts[:, None] + OFFSETS < self.num_keys[rows, None])[:, None]

    def causal_tails(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same for a prefill, the rows of whose places see one another's keys: mask [J, L, 64]."""
        places = self.num_lanes.nonzero()[0]
        last_rows = self.lane_rows[places, self.num_lanes[places] - 1]
        starts = SPLIT * self.num_shared[places]
        positions_JL = self.row_position[self.lane_rows[places]]
        return last_rows, starts, starts[:, None, None] + OFFSETS <= positions_JL[:, :, None]

    def _numbered(self, counts: np.ndarray, first_split: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Owner and first position of `counts[owner]` consecutive splits of every owner."""
        owners = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        return owners, SPLIT * (first_split[owners] + nth)

    def prefix_slots(self, seq_I: np.ndarray, start_I: np.ndarray) -> np.ndarray:
        """Slots of items within the prefix, int64 [I, 64]."""
        position_I64 = start_I[:, None] + OFFSETS
        page_I64 = (position_I64 // self.page_size).clip(max=self.pages.shape[1] - 1)
        return self.pages[seq_I[:, None], page_I64] * self.page_size + position_I64 % self.page_size

    def row_slots(self, row_J: np.ndarray, start_J: np.ndarray) -> np.ndarray:
        """Slots of items that go on from the prefix into a row's path; scratch (0) beyond its keys."""
        position_J64 = start_J[:, None] + OFFSETS
        in_prefix_J64 = position_J64 < self.row_prefix[row_J, None]
        depth_J64 = (position_J64 - self.row_prefix[row_J, None]).clip(0, self.path_slots.shape[1] - 1)
        path_J64 = np.where(
            position_J64 < self.num_keys[row_J, None], self.path_slots[row_J[:, None], depth_J64], 0
        )
        return np.where(in_prefix_J64, self.prefix_slots(self.row_seq[row_J], start_J), path_J64)

    def parts(self, shared_seq: np.ndarray, tail_row: np.ndarray) -> dict[str, np.ndarray]:
        """Which items each row adds up, by absolute split."""
        first_tail = len(shared_seq)
        has_keys = self.num_keys > 0
        num_shared = np.where(has_keys, self.num_shared[self.row_seq], 0)
        first_shared = (np.cumsum(self.num_shared) - self.num_shared)[self.row_seq]
        if self.is_prefill:  # one tail a place
            first_own = first_tail + self.row_seq
        else:
            first_own = first_tail + np.cumsum(self.num_tails) - self.num_tails
        num_parts = num_shared + self.num_tails
        split = np.arange(max(1, num_parts.max()))
        items = np.where(
            split < num_shared[:, None],
            first_shared[:, None] + split,
            first_own[:, None] + split - num_shared[:, None],
        )
        missing = split >= num_parts[:, None]
        return {"part_items_RP": np.where(missing, 0, items), "part_missing_RP": missing}
