"""What every row of one step sees: pages of its sequence's prefix, and ancestors in its speculative suffix.

Bookkeeping of fixed shapes, made once a step and shared by all layers. There is no mask of context size: a
row carries 64-bit words, in which bit i of word w says that node 64 w + i of its sequence's suffix is an
ancestor of the row's token, or the token itself. Nodes are in order of depth along every path (parents before
children), so the n-th set bit is the n-th token of the row's path.

Shape letters: R rows of the bucket, S sequences, L lanes (row places of a sequence), P pages, X nodes of a
suffix, W = X / 64 words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

SPLIT = 64  # keys are reduced in splits of this many positions, aligned to absolute position
NO_ROW = -1


@dataclass(frozen=True, slots=True)
class Scoring:
    """What one layer does between the product of query and key and the softmax."""

    scale: float  # factor of the product, usually D ** -0.5
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap) (Gemma 2)
    window: int | None = None  # a row sees its last `window` positions, its own included


@dataclass
class TreeBatch:
    """Rows of one step and their keys. Built by `foredraft.infer.step_plan`.

    A row's keys in logical order: positions 0 .. row_prefix - 1 of its sequence, then its ancestors by depth,
    itself last where it is a node: row_position + 1 keys in all. A row of padding has no keys (row_prefix 0,
    no ancestors), and an attention output of 0.
    """

    write_slots_R: torch.Tensor  # int64, slot of each row's own key and value; of padding: scratch
    row_seq_R: torch.Tensor  # int32
    row_lane_R: torch.Tensor  # int32
    row_position_R: torch.Tensor  # int32, absolute position of the row's token; 0 of padding
    row_prefix_R: torch.Tensor  # int32, committed positions that the row sees
    row_ancestors_RW: torch.Tensor  # int64 words
    lane_rows_SL: torch.Tensor  # int32, row in each lane, NO_ROW where empty
    num_shared_S: torch.Tensor  # int32, whole splits of the prefix that all rows of a sequence see
    pages_SP: torch.Tensor  # int32, pages of the prefix in order; any page beyond
    suffix_slots_SX: torch.Tensor  # int32, slots of the suffix's nodes; any slot beyond
    page_size: int
    is_prefill: bool = False  # the rows of a place are consecutive committed positions within one split
    derived: dict[Any, Any] = field(default_factory=dict)  # what an implementation makes of it, once a step

    @property
    def max_positions(self) -> int:
        """No row has more keys: bounds the work of a launch without a look at the device."""
        return self.pages_SP.shape[1] * self.page_size + self.suffix_slots_SX.shape[1]
