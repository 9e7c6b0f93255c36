"""Writing the keys and values of a step into the pool on a GPU: one program a row, both tensors.

Shape letters: N slots of the pool, R rows, K key-value heads, D and E dimensions of key and value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foredraft.kernels.compile_case import CompileCase


@triton.jit
def _write_kernel(
    pool_key,  # [N, K, D], written
    pool_value,  # [N, K, E], written
    slots,  # int64 [R]
    key,  # [R, K, D]
    value,  # [R, K, E]
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    place = tl.arange(0, KEY_PAD)
    source = key + row * stride_key_row + (place // D) * stride_key_head + place % D
    entry = tl.load(source, mask=place < K * D, other=0.0)
    tl.store(pool_key + slot * (K * D) + place, entry, mask=place < K * D)
    place = tl.arange(0, VALUE_PAD)
    source = value + row * stride_value_row + (place // E) * stride_value_head + place % E
    entry = tl.load(source, mask=place < K * E, other=0.0)
    tl.store(pool_value + slot * (K * E) + place, entry, mask=place < K * E)


def kv_write(
    pool_key_NKD: torch.Tensor,
    pool_value_NKE: torch.Tensor,
    slots_R: torch.Tensor,
    key_RKD: torch.Tensor,
    value_RKE: torch.Tensor,
) -> None:
    """As `foredraft.kernels.kv_write_ref.kv_write`.

    Raises:
        ValueError: a pool that is not contiguous, or rows whose last dimension is not.
    """
    if not (pool_key_NKD.is_contiguous() and pool_value_NKE.is_contiguous()):
        raise ValueError(
            f"expected contiguous pools, found strides {pool_key_NKD.stride()} and {pool_value_NKE.stride()}"
        )
    if key_RKD.stride(2) != 1 or value_RKE.stride(2) != 1:
        raise ValueError(
            "expected rows whose last dimension is contiguous, found strides "
            f"{key_RKD.stride()} and {value_RKE.stride()}"
        )
    num_heads, key_dim = key_RKD.shape[1:]
    _write_kernel[(slots_R.shape[0],)](
        pool_key_NKD,
        pool_value_NKE,
        slots_R,
        key_RKD,
        value_RKE,
        *key_RKD.stride()[:2],
        *value_RKE.stride()[:2],
        **_sizes(num_heads, key_dim, value_RKE.shape[2]),
    )


def _sizes(num_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    return {
        "K": num_heads,
        "D": key_dim,
        "E": value_dim,
        "KEY_PAD": triton.next_power_of_2(num_heads * key_dim),
        "VALUE_PAD": triton.next_power_of_2(num_heads * value_dim),
    }


def compile_cases() -> list[CompileCase]:
    """Both halves of a row at once, 8 heads of 128 in bfloat16."""
    signature = dict.fromkeys(("pool_key", "pool_value", "key", "value"), "*bf16") | {"slots": "*i64"}
    strides = [name for name in _write_kernel.arg_names if name.startswith("stride")]
    return [
        CompileCase(
            "kv_write/bf16 K8 D128",
            _write_kernel,
            signature | dict.fromkeys(strides, "i32"),
            _sizes(8, 128, 128),
        )
    ]
