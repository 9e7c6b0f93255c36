"""The attention function that a transformers model calls: it stores keys and values, attends over the pool.

A model is loaded with `attn_implementation="foredraft"`; its batch plan travels in the keyword arguments of
`forward`, which transformers hands to the attention function of every layer. The mask function returns None:
the plan says what a row sees. No model code is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from foredraft.infer.kv_storage import KVStorage, LayerShape
from foredraft.kernels.dispatch import kv_write, tree_attention
from foredraft.kernels.tree_batch import Scoring, TreeBatch

ATTENTION_NAME = "foredraft"


@dataclass
class PagedContext:
    """What every layer of one step shares; passed to the model as `paged_context`."""

    batch: TreeBatch
    storage: KVStorage


@dataclass
class ProbeContext:
    """Passed in the probe of a loaded model: records which layers called, and with what shapes."""

    layers: dict[int, LayerShape] = field(default_factory=dict)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' calling convention.

    Args:
        module: the attention layer; its `layer_idx` names the layer.
        query: [1, H, R, D].
        key: [1, K, R, D].
        value: [1, K, R, Dv].
        attention_mask: None, from `no_mask`.
        scaling: factor of the scores; D ** -0.5 where a family leaves it out.
        kwargs: `paged_context`, and where a family has them `sliding_window`, `softcap`, `s_aux`.

    Returns:
        ([1, R, H, Dv], None).
    """
    context = kwargs["paged_context"]
    layer = module.layer_idx
    if isinstance(context, ProbeContext):
        context.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        num_groups = query.shape[1] // key.shape[1]
        return value.repeat_interleave(num_groups, 1).transpose(1, 2).contiguous(), None
    keys_NKD, values_NKD = context.storage.keys(layer), context.storage.values(layer)
    key_RKD, value_RKD = key[0].transpose(0, 1), value[0].transpose(0, 1)
    kv_write(keys_NKD, values_NKD, context.batch.write_slots_R, key_RKD, value_RKD)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, kwargs.get("softcap"), kwargs.get("sliding_window"))
    query_RHD = query[0].transpose(0, 1)
    output_RHD = tree_attention(query_RHD, keys_NKD, values_NKD, context.batch, scoring, kwargs.get("s_aux"))
    return output_RHD[None], None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask of a step: none, ever."""


def register() -> None:
    """Make `attn_implementation="foredraft"` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
