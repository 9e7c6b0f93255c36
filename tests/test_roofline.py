"""The rooflines against sums done by hand."""

from __future__ import annotations

import pytest

from foredraft.kernels import roofline
from foredraft.kernels.roofline import CHIPS, Work


def test_attention_reads_the_prefix_once() -> None:
    sizes = {"heads": 32, "kv_heads": 8, "dim": 128, "context": 4096, "nodes": 8, "item_bytes": 2}
    one, eight = (roofline.tree_attention(rows=rows, **sizes) for rows in (1, 8))
    # 4104 positions x 8 heads x 128 x key and value x 2 bytes, and 32 x 128 query and output numbers a row
    assert one.num_bytes == 4104 * 8 * 128 * 2 * 2 + 32 * 128 * 2 * 2
    assert eight.num_bytes - one.num_bytes == 7 * 32 * 128 * 2 * 2
    assert eight.flops == 8 * one.flops == 8 * 2 * 2 * 32 * 128 * 4104


def test_an_8b_layer_at_eight_rows_is_bound_by_memory() -> None:
    work = roofline.tree_attention(rows=8, heads=32, kv_heads=8, dim=128, context=4096, nodes=8, item_bytes=2)
    chip = CHIPS["H200"]
    assert roofline.least_seconds(work, chip) == work.num_bytes / chip.bytes_per_second
    assert roofline.fraction(2 * work.num_bytes / 4.8e12, work, chip) == pytest.approx(0.5)


def test_training_is_bound_by_products() -> None:
    work = roofline.distill_loss(tokens=8192, hidden=4096, draft_vocab=32000, item_bytes=2, is_chunked=True)
    assert work.flops == 2 * 4 * 8192 * 4096 * 32000
    assert roofline.least_seconds(work, CHIPS["H100"]) == work.flops / 989e12
    assert roofline.least_seconds(work, CHIPS["H100"], is_half=False) == work.flops / 67e12


def test_the_rest() -> None:
    assert roofline.kv_write(rows=8, kv_heads=8, dim=128, item_bytes=2).num_bytes == 2 * 2 * 8 * 8 * 128 * 2
    moved = roofline.kv_commit(tokens=4, layers=32, kv_heads=8, dim=128, item_bytes=2)
    assert moved.num_bytes == 2 * 2 * 4 * 32 * 8 * 128 * 2
    assert roofline.coupled_sample(rows=8, vocab=49152).num_bytes == 8 * 49152 * 4
    assert roofline.top_candidates(rows=2, columns=100, fan_out=16).num_bytes == 2 * 400 + 2 * 16 * 16
    assert roofline.verify_walk(sequences=1, guesses=7).num_bytes == 8 * (3 * 7 + 1 + 7 + 2)
    law = roofline.rejection_verify(sequences=1, guesses=7, vocab=49152, law_width=64)
    assert law.num_bytes == 9 * 49152 * 4 + 7 * 64 * 12


def test_chips_are_found_by_the_drivers_names() -> None:
    assert roofline.chip_of("NVIDIA H200") is CHIPS["H200"]
    assert roofline.chip_of("NVIDIA H100 80GB HBM3") is CHIPS["H100"]
    assert roofline.chip_of("a toaster") is None
    assert roofline.fraction(1.0, Work(2.04e12), CHIPS["A100"]) == 1.0
