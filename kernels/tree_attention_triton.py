"""Launching tree attention on a GPU; the kernels and their mathematics are in `tree_attention_jit.py`.

No launch depends on values on the device, so a step can be captured as a CUDA graph: programs beyond what a
sequence shares end at once. Head dimensions up to 256, groups up to 128 heads.

The states of the spans take 4 (E + 2) bytes for each (span, row, head), written and read once: with 8 lanes
and E = 128 in bfloat16 an eighth of the bytes of the keys and values that a span reads.

A prefill runs through the same kernels, its lanes in blocks: a chunk is a few tiles of queries, so its time
is that of the weights.

Shape letters: R rows, S sequences, L lanes, X nodes of a suffix, H query heads, K key-value heads, N slots, D
and E dimensions of key and value, P spans.
"""

from __future__ import annotations

import torch
import triton

from foredraft.kernels.compile_case import CompileCase
from foredraft.kernels.tree_attention_jit import resolve_kernel, rows_kernel, shared_kernel
from foredraft.kernels.tree_batch import SPLIT, Scoring, TreeBatch

SPAN = 8  # splits; part of the numerical identity
MAX_BLOCK = 64  # rows of a tile of queries, unless one group needs more
NO_WINDOW = 1 << 30
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def tree_attention(
    query_RHD: torch.Tensor,
    pool_key_NKD: torch.Tensor,
    pool_value_NKE: torch.Tensor,
    batch: TreeBatch,
    scoring: Scoring,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `foredraft.kernels.tree_attention_ref.tree_attention`.

    Raises:
        ValueError: a pool that is not contiguous, or a head of a query that is not.
    """
    if not (pool_key_NKD.is_contiguous() and pool_value_NKE.is_contiguous()) or query_RHD.stride(2) != 1:
        raise ValueError(
            "expected contiguous pools and queries whose last dimension is contiguous, found strides "
            f"{pool_key_NKD.stride()}, {pool_value_NKE.stride()} and {query_RHD.stride()}"
        )
    num_rows, num_heads, _ = query_RHD.shape
    num_kv_heads, value_dim = pool_value_NKE.shape[1:]
    num_sequences, num_lanes = batch.lane_rows_SL.shape
    path_slots_RX, num_keys_R = _resolve(batch)
    num_spans = triton.cdiv(batch.pages_SP.shape[1] * batch.page_size, SPAN * SPLIT)
    peaks_PRH, masses_PRH, accs_PRHE = _states(batch, (num_spans, num_rows, num_heads), value_dim)
    sizes = _sizes(num_heads // num_kv_heads, num_lanes, pool_key_NKD.shape, value_dim)
    num_warps = num_warps_of(pool_key_NKD.dtype, sizes["BLOCK_M"])
    shared = {
        "stride_row": query_RHD.stride(0),
        "stride_head": query_RHD.stride(1),
        "num_rows": num_rows,
        "num_pages": batch.pages_SP.shape[1],
        "scale": scoring.scale,
        "softcap": scoring.softcap or 1.0,
        "window": scoring.window or NO_WINDOW,
        "PAGE": batch.page_size,
        "HAS_SOFTCAP": scoring.softcap is not None,
        **sizes,
    }
    lane_blocks = triton.cdiv(num_lanes, sizes["BLOCK_M"] // sizes["GROUP"])
    shared_kernel[(num_sequences * num_kv_heads, num_spans, lane_blocks)](
        query_RHD,
        pool_key_NKD,
        pool_value_NKE,
        batch.lane_rows_SL,
        batch.num_shared_S,
        batch.pages_SP,
        batch.row_position_R,
        peaks_PRH,
        masses_PRH,
        accs_PRHE,
        NUM_LANES=num_lanes,
        num_warps=num_warps,
        **shared,
    )
    output_RHE = torch.empty(num_rows, num_heads, value_dim, dtype=query_RHD.dtype, device=query_RHD.device)
    rows_kernel[(num_rows, num_kv_heads)](
        query_RHD,
        pool_key_NKD,
        pool_value_NKE,
        batch.row_seq_R,
        batch.row_prefix_R,
        num_keys_R,
        path_slots_RX,
        batch.num_shared_S,
        batch.pages_SP,
        masses_PRH if sinks_H is None else sinks_H.float(),
        peaks_PRH,
        masses_PRH,
        accs_PRHE,
        output_RHE,
        NUM_NODES=path_slots_RX.shape[1],
        HAS_SINKS=sinks_H is not None,
        num_warps=num_warps,
        **shared,
    )
    return output_RHE


def num_warps_of(dtype: torch.dtype, block_rows: int) -> int:
    """A large tile, and one of float32, which has no tensor cores, takes the registers of eight warps."""
    return 8 if dtype == torch.float32 or block_rows >= MAX_BLOCK else 4


def _sizes(group: int, num_lanes: int, pool_shape: torch.Size, value_dim: int) -> dict[str, int]:
    """Compile-time sizes; the tile of queries is the same for both kernels."""
    _, num_kv_heads, key_dim = pool_shape
    block = max(16, min(MAX_BLOCK, triton.next_power_of_2(num_lanes * group)))
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "D": key_dim,
        "E": value_dim,
        "D_PAD": max(16, triton.next_power_of_2(key_dim)),
        "E_PAD": max(16, triton.next_power_of_2(value_dim)),
        "BLOCK_M": max(block, triton.next_power_of_2(group)),
        "SPAN": SPAN,
    }


def _resolve(batch: TreeBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of every row's path [R, X] and its number of keys [R], made once a step."""
    if "paths" not in batch.derived:
        num_rows, num_nodes = batch.row_seq_R.shape[0], batch.suffix_slots_SX.shape[1]
        path_slots_RX = torch.empty(num_rows, num_nodes, dtype=torch.int32, device=batch.row_seq_R.device)
        num_keys_R = torch.empty_like(batch.row_prefix_R)
        resolve_kernel[(num_rows,)](
            batch.row_seq_R,
            batch.row_prefix_R,
            batch.row_ancestors_RW,
            batch.suffix_slots_SX,
            path_slots_RX,
            num_keys_R,
            NUM_NODES=num_nodes,
            NODES_PAD=triton.next_power_of_2(num_nodes),
        )
        batch.derived["paths"] = (path_slots_RX, num_keys_R)
    return batch.derived["paths"]


def _states(
    batch: TreeBatch, shape: tuple[int, int, int], value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for the spans' states: layers run one after another and share it."""
    if ("states", shape, value_dim) not in batch.derived:
        settings = {"dtype": torch.float32, "device": batch.row_seq_R.device}
        states = (
            torch.empty(shape, **settings),
            torch.empty(shape, **settings),
            torch.empty(*shape, value_dim, **settings),
        )
        batch.derived["states", shape, value_dim] = states
    return batch.derived["states", shape, value_dim]


ALIGNED = {
    *("query", "pool_key", "pool_value", "output", "peaks", "masses", "accs", "sinks"),
    *("pages", "path_slots", "stride_row", "stride_head"),
}


def compile_cases() -> list[CompileCase]:
    """What an engine launches: decoding buckets of 8 lanes by dtype, head dimension and group."""
    variants = [
        *(("bf16", dim, group, False) for dim, group in ((64, 3), (80, 1), (96, 4), (128, 4), (256, 2))),
        *(("bf16", 256, 2, True), ("fp16", 128, 8, False), ("fp32", 64, 3, False)),
    ]
    cases = [
        CompileCase(
            "tree_attention/resolve",
            resolve_kernel,
            {name: "*i64" if name == "row_ancestors" else "*i32" for name in resolve_kernel.arg_names[:6]},
            {"NUM_NODES": 256, "NODES_PAD": 256},
        )
    ]
    for dtype, dim, group, has_softcap in variants:
        sizes = _sizes(group, 8, torch.Size((0, 8, dim)), dim)
        flags = {"PAGE": 64, "HAS_SOFTCAP": has_softcap, **sizes}
        for name, kernel, own in (
            ("shared", shared_kernel, {"NUM_LANES": 8}),
            ("rows", rows_kernel, {"NUM_NODES": 256, "HAS_SINKS": False}),
        ):
            cases.append(
                CompileCase(
                    f"tree_attention/{name} {dtype} D{dim} G{group}" + " softcap" * has_softcap,
                    kernel,
                    _signature(kernel.arg_names, dtype),
                    flags | own,
                    num_warps=num_warps_of(DTYPES[dtype], sizes["BLOCK_M"]),
                    allowed_spill=16,  # a few addresses; a tile that spills takes hundreds
                    uses_matrix_instructions=dtype != "fp32",
                    aligned=tuple(name for name in kernel.arg_names if name in ALIGNED),
                )
            )
    return cases


def _signature(names: list[str], dtype: str) -> dict[str, str]:
    """Types of the arguments that are not constants."""
    of_name = dict.fromkeys(("query", "pool_key", "pool_value", "output"), f"*{dtype}")
    of_name |= dict.fromkeys(("peaks", "masses", "accs", "sinks"), "*fp32")
    of_name |= dict.fromkeys(("stride_row", "stride_head", "num_rows", "num_pages", "window"), "i32")
    of_name |= {"scale": "fp32", "softcap": "fp32"}
    return {name: of_name.get(name, "*i32") for name in names if not name.isupper()}
