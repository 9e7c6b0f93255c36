"""Writing the keys and values of a step into the pool, in plain torch.

Shape letters: N slots of the pool, R rows, K key-value heads, D and E dimensions of key and value.
"""

from __future__ import annotations

import torch


def kv_write(
    pool_key_NKD: torch.Tensor,
    pool_value_NKE: torch.Tensor,
    slots_R: torch.Tensor,
    key_RKD: torch.Tensor,
    value_RKE: torch.Tensor,
) -> None:
    """Write one key and one value a row to its slot, in place.

    Args:
        pool_key_NKD: keys of one layer.
        pool_value_NKE: values of one layer.
        slots_R: int64; rows of padding share scratch slots, which of them is left there is undefined.
        key_RKD: in the pool's dtype.
        value_RKE: in the pool's dtype.
    """
    pool_key_NKD.index_copy_(0, slots_R, key_RKD)
    pool_value_NKE.index_copy_(0, slots_R, value_RKE)
