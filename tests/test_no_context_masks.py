"""What a step tells attention grows with its rows or with the context, never with their product."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from foredraft.infer.kv_pool import KVPool
from foredraft.infer.step_plan import Row, StepShape, plan_step
from foredraft.kernels import tree_attention_ref, tree_attention_triton
from foredraft.kernels.tree_batch import Scoring, TreeBatch

CONTEXT, NUM_ROWS, PAGE = 8000, 16, 64


@pytest.mark.parametrize("window", [None, 2000])
@pytest.mark.parametrize(
    "attention", [tree_attention_ref.tree_attention, tree_attention_triton.tree_attention]
)
def test_no_tensor_has_rows_times_context_elements(attention: object, window: int | None) -> None:
    pool = KVPool(CONTEXT // PAGE + 8, PAGE)
    seq = pool.begin()
    pool.extend(seq, CONTEXT)
    nodes = pool.append(seq, [None] * NUM_ROWS).nodes
    plan = plan_step(pool, [Row(seq, 0, node) for node in nodes], StepShape(NUM_ROWS, NUM_ROWS))
    tensors = {
        "write_slots_R": plan.write_slots,
        "row_seq_R": plan.row_seq,
        "row_lane_R": plan.row_lane,
        "row_position_R": plan.positions.astype(np.int32),
        "row_prefix_R": plan.row_prefix,
        "row_ancestors_RW": plan.row_ancestors,
        "lane_rows_SL": plan.lane_rows,
        "num_shared_S": plan.num_shared,
        "pages_SP": plan.pages,
        "suffix_slots_SX": plan.suffix_slots,
    }
    batch = TreeBatch(**{name: torch.from_numpy(a) for name, a in tensors.items()}, page_size=PAGE)
    keys = torch.zeros(pool.num_pages * PAGE, 1, 16)
    attention(torch.zeros(NUM_ROWS, 1, 16), keys, keys, batch, Scoring(0.25, window=window))
    assert batch.derived, "the step has derived what it needs"
    for made in batch.derived.values():
        parts = made if isinstance(made, tuple) else [getattr(made, item.name) for item in fields(made)]
        sizes = [part.numel() for part in parts if part.dtype != torch.float32]
        assert max(sizes, default=0) < NUM_ROWS * CONTEXT // 4
