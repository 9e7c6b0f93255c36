"""Attention of packed rows over a paged KV pool, in plain float32 torch.

Every row attends to the committed prefix of its sequence and to its own ancestors in the speculation tree.
Keys are taken in logical order and cut into splits of 64, aligned to absolute position. A whole split of the
committed prefix is loaded once for all rows of a sequence (DeFT, arXiv 2404.00242); the last, ragged split is
gathered per row: committed tail, then the ancestors in depth order.

A split is one *item*: [lanes * group, head_dim] x [head_dim, 64], always of that shape, whoever the lanes
are. Items are reduced by a pairwise tree over the absolute split index, whose value does not change when
empty splits follow. So a row's bits depend neither on its neighbours, nor on what is committed and what is
still in the tree. There is no mask of context size: only ragged splits, and those that straddle a sliding
window, carry one.

Shape letters: R rows, S sequences, L lanes (row places of a sequence), I items, J masked items (the last
ones), P splits of the longest row, H query heads, K key-value heads, G = H / K, M = L * G, D head dimension,
N slots of the pool.
"""

from __future__ import annotations

import torch

from foredraft.kernels.tree_batch import Scoring, TreeBatch
from foredraft.kernels.tree_items import items_of

LOWEST = -1.0e30  # stands for -inf where exp(x - max) must stay defined


def sum_splits(parts_RP: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 1 by adjacent pairs: trailing zeros never change the bits."""
    while parts_RP.shape[1] > 1:
        if parts_RP.shape[1] % 2:
            parts_RP = torch.nn.functional.pad(parts_RP, [0, 0] * (parts_RP.ndim - 2) + [0, 1])
        parts_RP = parts_RP[:, 0::2] + parts_RP[:, 1::2]
    return parts_RP.squeeze(1)


def gather_items(pool_NKD: torch.Tensor, slots_I64: torch.Tensor) -> torch.Tensor:
    """Keys or values of all items, float32 [I, K, 64, D]."""
    rows = pool_NKD.index_select(0, slots_I64.reshape(-1))
    rows_IK64D = rows.view(*slots_I64.shape, *pool_NKD.shape[1:]).transpose(1, 2)
    # one pass for layout and type, where float().contiguous() makes two
    return torch.empty(rows_IK64D.shape, device=rows.device).copy_(rows_IK64D)


def tree_attention(
    query_RHD: torch.Tensor,
    pool_key_NKD: torch.Tensor,
    pool_value_NKD: torch.Tensor,
    batch: TreeBatch,
    scoring: Scoring,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [R, H, Dv] in the query's dtype; the rows' own keys are in the pool already.

    Args:
        query_RHD: [R, H, D], any float dtype.
        pool_key_NKD: keys of one layer, [N, K, D].
        pool_value_NKD: values of one layer, [N, K, Dv].
        batch: what every row sees.
        scoring: of the layer.
        sinks_H: one more logit a head in the softmax's denominator (gpt-oss).
    """
    num_rows, num_heads, head_dim = query_RHD.shape
    num_kv_heads = pool_key_NKD.shape[1]
    group = num_heads // num_kv_heads
    items, softcap = items_of(batch, scoring.window), scoring.softcap
    num_items, num_lanes = items.seq_I.numel(), items.lane_rows_SL.shape[1]

    query_RKGD = (query_RHD.float() * scoring.scale).view(num_rows, num_kv_heads, group, head_dim)
    lanes_SLKGD = query_RKGD[items.lane_rows_SL]
    lanes_SKMD = lanes_SLKGD.transpose(1, 2).reshape(-1, num_kv_heads, num_lanes * group, head_dim)
    query_IKMD = lanes_SKMD[items.seq_I]
    scores_IKM64 = query_IKMD @ gather_items(pool_key_NKD, items.slots_I64).transpose(2, 3)
    if softcap is not None:
        scores_IKM64 = softcap * torch.tanh(scores_IKM64 / softcap)
    hide_tails(scores_IKM64, items.tail_mask_JL64, group)

    peak_IKM = scores_IKM64.amax(-1).clamp_min(LOWEST)
    weights_IKM64 = (scores_IKM64 - peak_IKM[..., None]).exp_()
    output_IKMD = weights_IKM64 @ gather_items(pool_value_NKD, items.slots_I64)

    def parts_of_rows(values_IKM: torch.Tensor) -> torch.Tensor:
        """[R, P, K, G, ...]: every row's splits in order, anything finite where it has none."""
        by_lane = values_IKM.view(num_items, num_kv_heads, num_lanes, group, *values_IKM.shape[3:])
        return by_lane[items.part_items_RP, :, items.row_lane_R[:, None]]

    # a missing split counts with factor exp(LOWEST - peak) = 0
    peaks_RPKG = parts_of_rows(peak_IKM).masked_fill_(items.part_missing_RP[:, :, None, None], LOWEST)
    peak_RKG = peaks_RPKG.amax(1)
    if sinks_H is not None:
        sinks_KG = sinks_H.float().view(num_kv_heads, group)
        peak_RKG = torch.maximum(peak_RKG, sinks_KG)
    factor_RPKG = (peaks_RPKG - peak_RKG[:, None]).exp()
    mass_RKG = sum_splits(parts_of_rows(weights_IKM64.sum(-1)) * factor_RPKG)
    if sinks_H is not None:
        mass_RKG = mass_RKG + (sinks_KG - peak_RKG).exp()
    output_RKGD = sum_splits(parts_of_rows(output_IKMD) * factor_RPKG[..., None])
    output_RKGD = output_RKGD / mass_RKG.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return output_RKGD.reshape(num_rows, num_heads, -1).to(query_RHD.dtype)


def hide_tails(scores_IKM64: torch.Tensor, mask_JL64: torch.Tensor, group: int) -> None:
    """Set scores of keys that the last J items do not show to -inf, in place. Mask bool [J, 1 or L, 64]."""
    num_tails, num_lanes, _ = mask_JL64.shape
    if num_tails == 0:
        return
    if num_lanes > 1:
        mask_JL64 = mask_JL64.repeat_interleave(group, 1)
    scores_IKM64[scores_IKM64.shape[0] - num_tails :].masked_fill_(~mask_JL64[:, None], -torch.inf)
