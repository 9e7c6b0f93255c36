"""Parameters that FSDP2 shards over processes: whole, and back. All processes call these together."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(value: torch.Tensor) -> torch.Tensor:
    """All of a tensor, of which this process may hold a shard."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def sharded_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This process's share of a whole value for a parameter, on the parameter's device."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def is_sharded(module: nn.Module) -> bool:
    """Whether a process holds only a part of the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())
