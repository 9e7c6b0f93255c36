"""Tree attention in Triton: against a brute force, the reference, and bit for bit itself in other company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from foredraft.infer.kv_pool import KVPool
from foredraft.infer.step_plan import Row, StepPlan, StepShape, cut_pieces, plan_prefill, plan_step
from foredraft.kernels import tree_attention_ref, tree_attention_triton
from foredraft.kernels.tree_batch import Scoring, TreeBatch

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@dataclass(frozen=True)
class Case:
    """Sequences of so many committed positions with so many suffix nodes, and the sizes of one layer."""

    committed: tuple[int, ...]
    nodes: tuple[int, ...]
    rows: tuple[int, ...]  # of each sequence: its last nodes, or its last positions where it has none
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    page_size: int = 64
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    lanes: int = 8
    is_static: bool = False


CASES = {
    "S1-C0-X1-one-token": Case((0,), (1,), (1,)),
    "S1-C700-X256-whole-suffix": Case((700,), (256,), (8,), kv_heads=1),
    "S2-C130,577-X9,70-ragged": Case((130, 577), (9, 70), (3, 5), page_size=16),
    "S2-C64,63-committed-rows": Case((64, 63), (0, 0), (1, 1), page_size=256),
    "D80-G3": Case((90,), (7,), (7,), heads=6, key_dim=80, value_dim=80),
    "D96-E64-G7-window": Case((200,), (5,), (5,), heads=7, kv_heads=1, key_dim=96, window=70),
    "D128-softcap-sinks": Case((130,), (4,), (4,), key_dim=128, value_dim=128, softcap=20.0, has_sinks=True),
    "D256-window1": Case((70,), (3,), (3,), kv_heads=4, key_dim=256, value_dim=256, window=1),
    "C1100-window600-static": Case((1100,), (6,), (6,), window=600, is_static=True),
}
# float32 sums in another order; half precision rounds weights and outputs to 2^-11 and 2^-8 of themselves
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def build_rows(pool: KVPool, case: Case) -> list[Row]:
    """Committed positions, a random tree each, and the rows of one step."""
    generator = np.random.default_rng(len(case.committed) + sum(case.nodes))
    rows = []
    for committed, nodes, count in zip(case.committed, case.nodes, case.rows, strict=True):
        seq = pool.begin()
        pool.extend(seq, committed)
        if nodes == 0:
            rows += [Row(seq, 0, position=committed - 1 - place) for place in range(count)]
            continue
        parents = [None, *(-1 - int(generator.integers(max(0, i - 3), i)) for i in range(1, nodes))]
        rows += [Row(seq, 0, node) for node in pool.append(seq, parents).nodes[-count:]]
    return rows


def to_batch(plan: StepPlan, page_size: int, device: str) -> TreeBatch:
    """The plan as tensors."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return TreeBatch(
        write_slots_R=tensor(plan.write_slots),
        row_seq_R=tensor(plan.row_seq),
        row_lane_R=tensor(plan.row_lane),
        row_position_R=tensor(plan.positions.astype(np.int32)),
        row_prefix_R=tensor(plan.row_prefix),
        row_ancestors_RW=tensor(plan.row_ancestors),
        lane_rows_SL=tensor(plan.lane_rows),
        num_shared_S=tensor(plan.num_shared),
        pages_SP=tensor(plan.pages),
        suffix_slots_SX=tensor(plan.suffix_slots),
        page_size=page_size,
        is_prefill=plan.is_prefill,
    )


def make_layer(
    case: Case, num_slots: int, num_rows: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Query [R, H, D], keys [N, K, D], values [N, K, E] and sinks [H]."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    query_RHD = randn(case.heads, num_rows, case.key_dim).transpose(0, 1)  # as transformers hands it over
    keys, values = (
        randn(num_slots, case.kv_heads, case.key_dim),
        randn(num_slots, case.kv_heads, case.value_dim),
    )
    return query_RHD, keys, values, randn(case.heads) if case.has_sinks else None


def slots_of(pool: KVPool, row: Row) -> np.ndarray:
    """Slots of a row's keys in logical order."""
    prefix = pool.prefix_slots(row.seq)
    if row.node is not None:
        return np.concatenate([prefix, pool.path_slots(row.seq, row.node)])
    return prefix[: (len(prefix) - 1 if row.position is None else row.position) + 1].copy()


def brute_force(
    query_HD: torch.Tensor,
    keys_TKD: torch.Tensor,
    values_TKE: torch.Tensor,
    case: Case,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one row in float64, [H, E]."""
    group = case.heads // case.kv_heads
    keys_THD, values_THE = (tensor.double().repeat_interleave(group, 1) for tensor in (keys_TKD, values_TKE))
    scores_HT = torch.einsum("hd,thd->ht", query_HD.double(), keys_THD) * case.key_dim**-0.5
    if case.softcap is not None:
        scores_HT = case.softcap * torch.tanh(scores_HT / case.softcap)
    if case.window is not None:
        scores_HT[:, : max(0, scores_HT.shape[1] - case.window)] = -torch.inf
    extra_H1 = torch.empty(case.heads, 0) if sinks_H is None else sinks_H.double()[:, None]
    weights_HT = torch.cat([scores_HT, extra_H1.to(scores_HT)], 1).softmax(-1)[:, : scores_HT.shape[1]]
    return torch.einsum("ht,the->he", weights_HT, values_THE)


def shape_of(case: Case, num_pages: int) -> StepShape:
    if case.is_static:
        return StepShape(8, case.lanes, num_sequences=3, num_pages=num_pages, num_nodes=256)
    return StepShape(8, case.lanes)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_brute_force_and_reference(name: str, dtype: torch.dtype, kernel_device: str) -> None:
    case = CASES[name]
    pool = KVPool(4000 // case.page_size, case.page_size)
    rows = build_rows(pool, case)
    plan = plan_step(pool, rows, shape_of(case, pool.num_pages))
    batch = to_batch(plan, case.page_size, kernel_device)
    query_RHD, keys, values, sinks_H = make_layer(
        case, pool.num_pages * case.page_size, 8, dtype, kernel_device
    )
    scoring = Scoring(case.key_dim**-0.5, case.softcap, case.window)
    output_RHE = tree_attention_triton.tree_attention(query_RHD, keys, values, batch, scoring, sinks_H)
    reference_RHE = tree_attention_ref.tree_attention(
        query_RHD, keys, values, replace(batch, derived={}), scoring, sinks_H
    )
    tolerance = TOLERANCES[dtype]
    assert output_RHE.dtype == dtype
    for index, row in enumerate(rows):
        slots = torch.from_numpy(slots_of(pool, row)).to(kernel_device)
        expected_HE = brute_force(query_RHD[index], keys[slots], values[slots], case, sinks_H)
        torch.testing.assert_close(output_RHE[index].double(), expected_HE, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(reference_RHE[index].double(), expected_HE, atol=tolerance, rtol=tolerance)
    assert not output_RHE[len(rows) :].any(), "rows of padding have no keys"


def test_a_packed_prefill_equals_brute_force(kernel_device: str) -> None:
    """Pieces of three sequences: from a position within a split, over a whole one, and a short prompt."""
    case = Case((0,), (0,), (0,), heads=3, kv_heads=1, key_dim=64)
    pool = KVPool(12, 64)
    pieces = []
    for start, size in ((70, 70), (0, 64), (0, 5)):
        seq = pool.begin()
        pool.extend(seq, start + size)
        pieces += cut_pieces(seq, start, [0] * size)
    assert [len(piece.token_ids) for piece in pieces] == [58, 12, 64, 5]
    plan = plan_prefill(pool, pieces, StepShape(192, 64, num_sequences=6))
    batch = to_batch(plan, 64, kernel_device)
    query_RHD, keys, values, _ = make_layer(case, 768, 192, torch.float32, kernel_device)
    for window in (None, 20):
        scoring = Scoring(case.key_dim**-0.5, window=window)
        for module in (tree_attention_triton, tree_attention_ref):
            derived_anew = replace(batch, derived={})
            output_RHE = module.tree_attention(query_RHD, keys, values, derived_anew, scoring)
            row = 0
            for seq, start, token_ids in pieces:
                for position in range(start, start + len(token_ids)):
                    seen = pool.prefix_slots(seq)[max(0, position + 1 - (window or 1000)) : position + 1]
                    slots = torch.tensor(np.array(seen), device=kernel_device)
                    expected_HE = brute_force(query_RHD[row], keys[slots], values[slots], case, None)
                    torch.testing.assert_close(output_RHE[row].double(), expected_HE, atol=2e-5, rtol=0)
                    row += 1


def outputs(
    pool: KVPool,
    rows: Sequence[Row],
    contents: dict[int, int],
    dtype: torch.dtype,
    device: str,
    window: int | None,
) -> torch.Tensor:
    """Attention of rows whose pool holds, by slot, the key and value of a numbered token; [R, H, E]."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = 2000
    token_keys, token_values = torch.randn(2, num_tokens, 2, 64, generator=generator)
    query = torch.randn(num_tokens, 6, 64, generator=generator)
    keys, values = torch.randn(2, pool.num_pages * pool.page_size, 2, 64, generator=generator)
    for slot, token in contents.items():
        keys[slot], values[slot] = token_keys[token], token_values[token]
    plan = plan_step(pool, rows, StepShape(8, 8))
    batch = to_batch(plan, pool.page_size, device)
    query_RHD = query[torch.tensor([row.token for row in rows] + [0] * (8 - len(rows)))]
    layer = (tensor.to(dtype).to(device) for tensor in (query_RHD, keys, values))
    return tree_attention_triton.tree_attention(*layer, batch, Scoring(0.125, window=window))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_neighbours_lanes_or_commits(
    dtype: torch.dtype, window: int | None, kernel_device: str
) -> None:
    """The last token of one text: committed and alone, or deep in a tree with decoys and other sequences."""
    length = 530  # the text; the tree hangs across the border of a span
    expected = None
    for committed, num_decoys, lane_first in [
        (530, 0, True),
        (505, 3, True),
        (512, 6, False),
        (449, 5, False),
    ]:
        pool = KVPool(40, 32)
        seq, other = pool.begin(), pool.begin()
        contents = dict(zip(pool.extend(seq, committed).tolist(), range(committed), strict=True))
        contents |= dict(zip(pool.extend(other, 77).tolist(), range(900, 977), strict=True))
        if committed == length:
            rows = [Row(seq, length - 1, position=length - 1)]
        else:
            path = pool.append(seq, [None, *(-1 - i for i in range(length - committed - 1))]).nodes
            contents |= {pool.slot(seq, n): committed + i for i, n in enumerate(path)}
            decoys = pool.append(seq, [None, *path[: num_decoys - 1]]).nodes
            contents |= {pool.slot(seq, n): 1000 + i for i, n in enumerate(decoys)}
            own, others = (
                Row(seq, length - 1, path[-1]),
                [Row(seq, 1000 + i, n) for i, n in enumerate(decoys)],
            )
            rows = [own, *others] if lane_first else [*others, own]
            rows.insert(1, Row(other, 976, position=76))
        output_RHE = outputs(pool, rows, contents, dtype, kernel_device, window)
        found_HE = output_RHE[next(i for i, row in enumerate(rows) if row.token == length - 1)]
        expected = found_HE if expected is None else expected
        assert torch.equal(found_HE, expected), f"{committed} positions committed"


def test_a_pool_of_other_strides_is_refused(kernel_device: str) -> None:
    pool = KVPool(4, 64)
    seq = pool.begin()
    pool.extend(seq, 3)
    batch = to_batch(plan_step(pool, [Row(seq, 0)], StepShape(8, 8)), 64, kernel_device)
    query_RHD, keys, values, _ = make_layer(Case((3,), (0,), (1,)), 256, 8, torch.float32, kernel_device)
    with pytest.raises(ValueError, match="contiguous pools"):
        tree_attention_triton.tree_attention(query_RHD, keys.transpose(0, 1), values, batch, Scoring(0.125))
