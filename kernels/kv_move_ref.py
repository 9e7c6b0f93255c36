"""Writing keys and values into the pool and moving committed paths into place, in plain torch."""

from __future__ import annotations

import torch


def kv_write(pool_NKD: torch.Tensor, slots_R: torch.Tensor, rows_RKD: torch.Tensor) -> None:
    """Write one key (or value) a row to its slot, in place. Rows of padding share scratch slots."""
    pool_NKD.index_copy_(0, slots_R, rows_RKD)


def kv_move(pool_BNKD: torch.Tensor, source_M: torch.Tensor, destination_M: torch.Tensor) -> None:
    """Copy M slots of every layer in place; all are read before any is written.

    Args:
        pool_BNKD: [B, N, K, D], B layers' keys and values.
        source_M: int64 slots.
        destination_M: int64 slots, distinct.
    """
    pool_BNKD.index_copy_(1, destination_M, pool_BNKD.index_select(1, source_M))
