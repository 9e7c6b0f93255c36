"""The tensors behind the KV pool: keys and values of every layer, and a drafter's own states, by slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from foredraft.kernels.dispatch import kv_commit


class LayerShape(NamedTuple):
    """What one attention layer stores of a token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class KVStorage:
    """One stacked tensor [B, N, K, D] a distinct (heads, dim): one operation moves slots in all layers."""

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        state_dim: int = 0,
    ) -> None:
        wanted: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for layer, shape in layers.items():
            wanted.setdefault((shape.num_kv_heads, shape.key_dim), []).append((layer, "key"))
            wanted.setdefault((shape.num_kv_heads, shape.value_dim), []).append((layer, "value"))
        if state_dim:
            wanted.setdefault((1, state_dim), []).append((0, "state"))
        self.stacks: list[torch.Tensor] = []
        self.views: dict[tuple[int, str], torch.Tensor] = {}
        for (heads, dim), names in wanted.items():
            # zeros, not empty: scratch slots are read (masked), and nan * 0 is not 0
            stack_BNKD = torch.zeros(len(names), num_slots, heads, dim, dtype=dtype, device=device)
            self.stacks.append(stack_BNKD)
            self.views.update(zip(names, stack_BNKD, strict=True))

    def keys(self, layer: int) -> torch.Tensor:
        """[N, K, D] of one layer."""
        return self.views[layer, "key"]

    def values(self, layer: int) -> torch.Tensor:
        """[N, K, Dv] of one layer."""
        return self.views[layer, "value"]

    @property
    def states(self) -> torch.Tensor:
        """[N, S]: what a drafter made of every token, for the step after it."""
        return self.views[0, "state"][:, 0]

    def move(self, batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Apply the pool's moves in order; within a batch all sources are read before any is written."""
        for source, destination in batches:
            for stack_BNKD in self.stacks:
                device = stack_BNKD.device
                kv_commit(
                    stack_BNKD, torch.from_numpy(source).to(device), torch.from_numpy(destination).to(device)
                )
