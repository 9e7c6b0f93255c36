"""Tree attention on a GPU: the prefix is read once for all branches, every row adds its own path.

A *split* is 64 keys at a multiple of 64 of absolute position, a *span* SPAN splits. A row's result is one
fixed function of its keys in logical order: inside a span an online softmax takes the splits one by one,

    m' = max(m, max s),  l' = l 2^(m - m') + sum 2^(s - m'),  a' = a 2^(m - m') + 2^(s - m') V

and spans are merged in order by the same formula. Who computes a part is another matter:

0. `resolve_kernel`, once a step: the set bits of every row's ancestor words become slots in order of depth.
1. `shared_kernel`, a program for each (sequence, key-value head, span, block of lanes): whole splits of the
   prefix that all rows of the sequence see (DeFT, arXiv 2404.00242). The queries of all lanes and of the
   heads that share keys fill one tile of BLOCK_M rows: each key is loaded once. It leaves (m, l, a) behind.
2. `rows_kernel`, a program for each (row, key-value head): takes up the spans' states in order, continues the
   last one with the row's own splits (rest of the prefix, then the ancestors), normalises.

The step of a split is one function with one tile shape for both kernels, an empty part changes nothing
(factor 2^0 = 1, summand 0), and nothing is ordered by who else is there. So a row's bits depend neither on
its neighbours nor on what is committed and what is still in the tree.

Shape letters: R rows, S sequences, L lanes, X nodes of a suffix, H query heads, K key-value heads, G = H / K,
N slots, D and E dimensions of key and value, P spans.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foredraft.kernels.dot_triton import dot
from foredraft.kernels.tree_batch import SPLIT

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # stands for -inf where m - m' must stay defined
KEYS = tl.constexpr(SPLIT)
NO_POSITION = tl.constexpr((1 << 31) - 1)  # of an empty lane: its reach begins after all keys


@triton.jit
def resolve_kernel(
    row_seq,  # int32 [R]
    row_prefix,  # int32 [R]
    row_ancestors,  # int64 [R, NUM_NODES / 64]
    suffix_slots,  # int32 [S, NUM_NODES]
    path_slots,  # int32 [R, NUM_NODES], written: slots of the row's path in order of depth
    num_keys,  # int32 [R], written
    NUM_NODES: tl.constexpr,
    NODES_PAD: tl.constexpr,
):
    """Slots of the ancestors of one row in order of depth, and how many keys it has in all."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES_PAD)
    is_node = node < NUM_NODES
    word = tl.load(row_ancestors + row * (NUM_NODES // 64) + node // 64, mask=is_node, other=0)
    is_ancestor = ((word >> (node % 64).to(tl.int64)) & 1).to(tl.int32)
    # nodes come after their parents, so the rank among set bits is the depth
    rank = tl.cumsum(is_ancestor, 0) - is_ancestor
    seq = tl.load(row_seq + row).to(tl.int64)
    slot = tl.load(suffix_slots + seq * NUM_NODES + node, mask=is_node, other=0)
    tl.store(path_slots + row * NUM_NODES + rank, slot, mask=is_ancestor == 1)
    tl.store(num_keys + row, tl.load(row_prefix + row) + tl.sum(is_ancestor, 0))


@triton.jit
def _absorb_split(
    query,  # [BLOCK_M, D_PAD]
    key,  # [KEYS, D_PAD]
    value,  # [KEYS, E_PAD]
    is_seen,  # bool [BLOCK_M, KEYS]
    peak,  # float32 [BLOCK_M], in units of log 2
    mass,  # float32 [BLOCK_M]
    acc,  # float32 [BLOCK_M, E_PAD]
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
):
    """State of the online softmax after one more split."""
    scores = dot(query, tl.trans(key), tl.zeros([query.shape[0], KEYS], tl.float32)) * scale
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * (scores / softcap))))  # tanh
    scores = tl.where(is_seen, scores * LOG2E, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    factor = tl.exp2(peak - new_peak)
    mass = mass * factor + tl.sum(weights, 1)
    acc = dot(weights.to(value.dtype), value, acc * factor[:, None])
    return new_peak, mass, acc


@triton.jit
def shared_kernel(
    query,  # [R, H, D]
    pool_key,  # [N, K, D]
    pool_value,  # [N, K, E]
    lane_rows,  # int32 [S, L], -1 where empty
    num_shared,  # int32 [S], splits
    pages,  # int32 [S, num_pages]
    row_position,  # int32 [R]
    peaks,  # float32 [P, R, H], written
    masses,  # float32 [P, R, H], written
    accs,  # float32 [P, R, H, E], written
    stride_row,
    stride_head,
    num_rows,
    num_pages,
    scale,
    softcap,
    window,
    NUM_LANES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Part of a softmax over one span of whole splits that all lanes of one sequence see."""
    seq = (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    span = tl.program_id(1)
    end = tl.minimum((span + 1) * SPAN, tl.load(num_shared + seq))

    place = tl.arange(0, BLOCK_M)
    lane = tl.program_id(2) * (BLOCK_M // GROUP) + place // GROUP
    head = kv_head * GROUP + place % GROUP
    is_lane = (place < BLOCK_M // GROUP * GROUP) & (lane < NUM_LANES)
    row = tl.load(lane_rows + seq * NUM_LANES + lane, mask=is_lane, other=-1).to(tl.int64)
    is_live = row >= 0
    position = tl.load(row_position + row, mask=is_live, other=NO_POSITION)
    first_seen = position - window + 1
    # a split before the reach of all rows would change nothing
    start = tl.maximum(span * SPAN, tl.min(first_seen, 0) // KEYS)
    if start < end:
        d, e, offset = tl.arange(0, D_PAD), tl.arange(0, E_PAD), tl.arange(0, KEYS)
        tile = tl.load(
            query + (row * stride_row + head * stride_head)[:, None] + d[None, :],
            mask=is_live[:, None] & (d < D)[None, :],
            other=0.0,
        )
        peak = tl.full([BLOCK_M], LOWEST, tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, E_PAD], tl.float32)
        for split in range(start, end):
            key_position = split * KEYS + offset
            page = tl.load(pages + seq * num_pages + key_position // PAGE).to(tl.int64)
            entry = (page * PAGE + key_position % PAGE) * NUM_KV_HEADS + kv_head
            key = tl.load(pool_key + entry[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
            value = tl.load(pool_value + entry[:, None] * E + e[None, :], mask=(e < E)[None, :], other=0.0)
            is_seen = key_position[None, :] >= first_seen[:, None]
            peak, mass, acc = _absorb_split(
                tile, key, value, is_seen, peak, mass, acc, scale, softcap, HAS_SOFTCAP
            )
        state = (span * num_rows + row) * (NUM_KV_HEADS * GROUP) + head
        tl.store(peaks + state, peak, mask=is_live)
        tl.store(masses + state, mass, mask=is_live)
        tl.store(accs + state[:, None] * E + e[None, :], acc, mask=is_live[:, None] & (e < E)[None, :])


@triton.jit
def rows_kernel(
    query,  # [R, H, D]
    pool_key,  # [N, K, D]
    pool_value,  # [N, K, E]
    row_seq,  # int32 [R]
    row_prefix,  # int32 [R]
    num_keys,  # int32 [R]
    path_slots,  # int32 [R, NUM_NODES]
    num_shared,  # int32 [S], splits
    pages,  # int32 [S, num_pages]
    sinks,  # float32 [H]; read with HAS_SINKS
    peaks,  # float32 [P, R, H]
    masses,  # float32 [P, R, H]
    accs,  # float32 [P, R, H, E]
    output,  # [R, H, E], written
    stride_row,
    stride_head,
    num_rows,
    num_pages,
    scale,
    softcap,
    window,
    NUM_NODES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Output of one row: its own splits after the shared ones, then all parts in their fixed order."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    seq = tl.load(row_seq + row).to(tl.int64)
    end, prefix = tl.load(num_keys + row), tl.load(row_prefix + row)
    # a row without keys is padding: nobody has left a state for it
    shared = tl.where(end > 0, tl.load(num_shared + seq), 0)
    num_splits = tl.cdiv(end, KEYS)
    first_seen = tl.maximum(end - window, 0)

    place = tl.arange(0, BLOCK_M)
    is_head = place < GROUP
    head = kv_head * GROUP + place
    d, e, offset = tl.arange(0, D_PAD), tl.arange(0, E_PAD), tl.arange(0, KEYS)
    tile = tl.load(
        query + row * stride_row + (head * stride_head)[:, None] + d[None, :],
        mask=is_head[:, None] & (d < D)[None, :],
        other=0.0,
    )
    total_peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total_mass = tl.zeros([BLOCK_M], tl.float32)
    total_acc = tl.zeros([BLOCK_M, E_PAD], tl.float32)
    for span in range(first_seen // (SPAN * KEYS), tl.cdiv(num_splits, SPAN)):
        # a state was left where shared splits of the span are within the row's reach
        num_done = tl.minimum((span + 1) * SPAN, shared)
        has_state = place < tl.where(num_done > tl.maximum(span * SPAN, first_seen // KEYS), GROUP, 0)
        state = (span * num_rows + row) * (NUM_KV_HEADS * GROUP) + head
        peak = tl.load(peaks + state, mask=has_state, other=LOWEST)
        mass = tl.load(masses + state, mask=has_state, other=0.0)
        acc = tl.load(
            accs + state[:, None] * E + e[None, :],
            mask=has_state[:, None] & (e < E)[None, :],
            other=0.0,
        )
        own = tl.maximum(tl.maximum(span * SPAN, shared), first_seen // KEYS)
        for split in range(own, tl.minimum((span + 1) * SPAN, num_splits)):
            key_position = split * KEYS + offset
            in_prefix = key_position < prefix
            page = tl.load(pages + seq * num_pages + key_position // PAGE, mask=in_prefix, other=0).to(
                tl.int64
            )
            in_path = (key_position >= prefix) & (key_position < end)
            path_slot = tl.load(
                path_slots + row * NUM_NODES + key_position - prefix, mask=in_path, other=0
            ).to(tl.int64)
            slot = tl.where(in_prefix, page * PAGE + key_position % PAGE, path_slot)
            entry = slot * NUM_KV_HEADS + kv_head
            key = tl.load(pool_key + entry[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
            value = tl.load(pool_value + entry[:, None] * E + e[None, :], mask=(e < E)[None, :], other=0.0)
            is_seen = (key_position < end) & (key_position >= first_seen)
            peak, mass, acc = _absorb_split(
                tile, key, value, is_seen[None, :], peak, mass, acc, scale, softcap, HAS_SOFTCAP
            )
        new_peak = tl.maximum(total_peak, peak)
        before, now = tl.exp2(total_peak - new_peak), tl.exp2(peak - new_peak)
        total_mass = total_mass * before + mass * now
        total_acc = total_acc * before[:, None] + acc * now[:, None]
        total_peak = new_peak

    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0) * LOG2E
        new_peak = tl.maximum(total_peak, sink)
        before = tl.exp2(total_peak - new_peak)
        total_mass = total_mass * before + tl.exp2(sink - new_peak)
        total_acc = total_acc * before[:, None]
    result = total_acc / tl.maximum(total_mass, 1.1754944e-38)[:, None]
    place_out = (row * (NUM_KV_HEADS * GROUP) + head)[:, None] * E + e[None, :]
    tl.store(output + place_out, result.to(output.dtype.element_ty), mask=is_head[:, None] & (e < E)[None, :])
