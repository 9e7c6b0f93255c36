"""Writing keys and values: Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from foredraft.kernels import kv_write_ref, kv_write_triton

# (slots, rows, heads, key dimension, value dimension); one production size, one odd size
SIZES = {"N4096-R8-K8-D128": (4096, 8, 8, 128, 128), "N77-R5-K3-D80-E48": (77, 5, 3, 80, 48)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_equals_reference(size: str, dtype: torch.dtype, kernel_device: str) -> None:
    num_slots, num_rows, heads, key_dim, value_dim = SIZES[size]
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(kernel_device)

    slots = torch.randperm(num_slots, generator=generator)[:num_rows].to(kernel_device)
    # as transformers hands them over: heads before rows
    key, value = (randn(heads, num_rows, dim).transpose(0, 1) for dim in (key_dim, value_dim))
    pools = [randn(num_slots, heads, key_dim), randn(num_slots, heads, value_dim)]
    expected = [pool.clone() for pool in pools]
    kv_write_triton.kv_write(*pools, slots, key, value)
    kv_write_ref.kv_write(*expected, slots, key, value)
    assert all(torch.equal(found, wanted) for found, wanted in zip(pools, expected, strict=True))


def test_strides_are_checked(kernel_device: str) -> None:
    pool, rows = torch.zeros(8, 2, 16, device=kernel_device), torch.zeros(3, 2, 16, device=kernel_device)
    slots = torch.arange(3, device=kernel_device)
    with pytest.raises(ValueError, match="contiguous pools"):
        kv_write_triton.kv_write(pool.transpose(0, 1), pool, slots, rows, rows)
    with pytest.raises(ValueError, match="last dimension"):
        kv_write_triton.kv_write(pool, pool, slots, rows.transpose(1, 2), rows)
