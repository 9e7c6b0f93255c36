"""Moving committed paths: Triton against the reference, with moves that overlap."""

from __future__ import annotations

import pytest
import torch

from foredraft.kernels import kv_commit_ref, kv_commit_triton

MOVES = {
    "M1": ([7], [3]),
    "M5-down-by-one": ([4, 5, 6, 7, 8], [3, 4, 5, 6, 7]),
    "M4-up-by-one": ([4, 5, 6, 7], [5, 6, 7, 8]),
    "M3-cycle": ([1, 2, 3], [2, 3, 1]),
    "M300-page-and-suffix": (list(range(500, 800)), list(range(430, 730))),
    "M0": ([], []),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("shape", [(3, 900, 2, 80), (2, 900, 5, 7)], ids=["B3-K2-D80", "B2-K5-D7"])
def test_equals_reference(shape: tuple[int, ...], name: str, dtype: torch.dtype, kernel_device: str) -> None:
    source, destination = (
        torch.tensor(slots, dtype=torch.int64, device=kernel_device) for slots in MOVES[name]
    )
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(kernel_device)
    expected = pool.clone()
    kv_commit_triton.kv_commit(pool, source, destination)
    kv_commit_ref.kv_commit(expected, source, destination)
    assert torch.equal(pool, expected)


def test_too_many_moves_and_strides_are_refused(kernel_device: str) -> None:
    pool = torch.zeros(2, 2000, 1, 16, device=kernel_device)
    slots = torch.arange(1025, device=kernel_device)
    with pytest.raises(ValueError, match="at most 1024 moves at once, got 1025"):
        kv_commit_triton.kv_commit(pool, slots, slots + 1)
    with pytest.raises(ValueError, match="contiguous pool"):
        kv_commit_triton.kv_commit(pool.transpose(0, 1), slots[:2], slots[2:4])
