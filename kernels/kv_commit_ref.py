"""Compacting committed paths into place, in plain torch.

Shape letters: B layers' keys and values, N slots of the pool, K key-value heads, D head dimension, M moves.
"""

from __future__ import annotations

import torch


def kv_commit(pool_BNKD: torch.Tensor, source_M: torch.Tensor, destination_M: torch.Tensor) -> None:
    """Copy M slots of every layer in place; all are read before any is written.

    Args:
        pool_BNKD: keys and values.
        source_M: int64 slots.
        destination_M: int64 slots, distinct; a source may be another move's destination.
    """
    pool_BNKD.index_copy_(1, destination_M, pool_BNKD.index_select(1, source_M))
