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

from dataclasses import dataclass, field

import torch

SPLIT = 64
LOWEST = -1.0e30  # stands for -inf where exp(x - max) must stay defined


@dataclass
class AttentionPlan:
    """Which keys every row of one step sees; shared by all layers. Built by `foredraft.infer.step_plan`."""

    write_slots_R: torch.Tensor  # int64, slot of each row's own key and value
    item_slots_I64: torch.Tensor  # int64 [I, 64], slots of each item's keys in logical order
    item_seq_I: torch.Tensor  # int64, sequence of each item
    item_start_I: torch.Tensor  # int64, absolute position of each item's first key
    tail_mask_JL64: torch.Tensor  # bool [J, 1 or L, 64], keys that the last J items show
    lane_rows_SL: torch.Tensor  # int64, row in each lane (any row where a lane is empty)
    lane_positions_SL: torch.Tensor  # int64, absolute position of each lane's row
    row_lane_R: torch.Tensor  # int64
    part_items_RP: torch.Tensor  # int64, item of each absolute split of each row; any where there is none
    part_missing_RP: torch.Tensor  # bool, where there is none
    windowed: dict[int, AttentionPlan] = field(default_factory=dict)

    def within(self, window: int) -> AttentionPlan:
        """The same step for a layer that sees the last `window` keys: items out of reach are left out."""
        if window not in self.windowed:
            self.windowed[window] = restrict_to_window(self, window)
        return self.windowed[window]


def restrict_to_window(plan: AttentionPlan, window: int) -> AttentionPlan:
    """Drop the items that no lane's window reaches and mask the others; splits keep their absolute places."""
    num_items, num_tails = plan.item_seq_I.numel(), plan.tail_mask_JL64.shape[0]
    first_visible_SL = plan.lane_positions_SL - window + 1
    in_reach_I = plan.item_start_I + SPLIT > first_visible_SL.amin(1)[plan.item_seq_I]
    kept = in_reach_I.nonzero().squeeze(1)
    key_positions_I164 = plan.item_start_I[kept, None, None] + torch.arange(SPLIT, device=kept.device)
    mask_IL64 = key_positions_I164 >= first_visible_SL[plan.item_seq_I[kept]][:, :, None]
    is_tail = kept >= num_items - num_tails
    mask_IL64[is_tail] &= plan.tail_mask_JL64[kept[is_tail] - (num_items - num_tails)]
    new_index = torch.zeros(num_items, dtype=torch.long, device=kept.device)
    new_index[kept] = torch.arange(kept.numel(), device=kept.device)
    return AttentionPlan(
        write_slots_R=plan.write_slots_R,
        item_slots_I64=plan.item_slots_I64[kept],
        item_seq_I=plan.item_seq_I[kept],
        item_start_I=plan.item_start_I[kept],
        tail_mask_JL64=mask_IL64,
        lane_rows_SL=plan.lane_rows_SL,
        lane_positions_SL=plan.lane_positions_SL,
        row_lane_R=plan.row_lane_R,
        part_items_RP=new_index[plan.part_items_RP],
        part_missing_RP=plan.part_missing_RP | ~in_reach_I[plan.part_items_RP],
    )


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
    plan: AttentionPlan,
    scale: float,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [R, H, Dv] in the query's dtype; the rows' own keys are in the pool already.

    Args:
        query_RHD: [R, H, D], any float dtype.
        pool_key_NKD: keys of one layer, [N, K, D].
        pool_value_NKD: values of one layer, [N, K, Dv].
        plan: see `AttentionPlan`.
        scale: factor of the scores, usually D ** -0.5.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        sinks_H: one more logit a head in the softmax's denominator (gpt-oss).
    """
    num_rows, num_heads, head_dim = query_RHD.shape
    num_kv_heads = pool_key_NKD.shape[1]
    group = num_heads // num_kv_heads
    num_items, num_lanes = plan.item_seq_I.numel(), plan.lane_rows_SL.shape[1]

    query_RKGD = (query_RHD.float() * scale).view(num_rows, num_kv_heads, group, head_dim)
    lanes_SLKGD = query_RKGD[plan.lane_rows_SL]
    lanes_SKMD = lanes_SLKGD.transpose(1, 2).reshape(-1, num_kv_heads, num_lanes * group, head_dim)
    query_IKMD = lanes_SKMD[plan.item_seq_I]
    scores_IKM64 = query_IKMD @ gather_items(pool_key_NKD, plan.item_slots_I64).transpose(2, 3)
    if softcap is not None:
        scores_IKM64 = softcap * torch.tanh(scores_IKM64 / softcap)
    hide_tails(scores_IKM64, plan.tail_mask_JL64, group)

    peak_IKM = scores_IKM64.amax(-1).clamp_min(LOWEST)
    weights_IKM64 = (scores_IKM64 - peak_IKM[..., None]).exp_()
    output_IKMD = weights_IKM64 @ gather_items(pool_value_NKD, plan.item_slots_I64)

    def parts_of_rows(values_IKM: torch.Tensor) -> torch.Tensor:
        """[R, P, K, G, ...]: every row's splits in order, anything finite where it has none."""
        by_lane = values_IKM.view(num_items, num_kv_heads, num_lanes, group, *values_IKM.shape[3:])
        return by_lane[plan.part_items_RP, :, plan.row_lane_R[:, None]]

    # a missing split counts with factor exp(LOWEST - peak) = 0
    peaks_RPKG = parts_of_rows(peak_IKM).masked_fill_(plan.part_missing_RP[:, :, None, None], LOWEST)
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
