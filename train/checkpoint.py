"""Checkpoints of a training run, in safetensors and JSON only.

checkpoint-000100/weights.safetensors     trained parameters (frozen ones are those of the start)
checkpoint-000100/optimizer.safetensors   `<parameter>.<state>`
checkpoint-000100/rng.safetensors         `rank<i>.cpu`, `rank<i>.cuda`
checkpoint-000100/state.json              step, tokens, seconds, curve, fingerprint, number of processes
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from foredraft.infer.atomic import atomic_folder
from foredraft.train.sharding import sharded_like, whole

PREFIX = "checkpoint-"


@dataclass(kw_only=True, slots=True)
class LoopState:
    """Where a training run is. The step number is the data position too."""

    fingerprint: str  # of recipe and log
    num_processes: int
    step: int = 0  # updates done
    tokens: int = 0  # trained positions so far
    seconds: float = 0.0
    num_skipped: int = 0  # updates left out for numbers that are not finite
    curve: list[dict[str, Any]] = field(default_factory=list)  # reports on held-out rows


def save_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: LoopState,
    accelerator: Accelerator,
) -> None:
    """Write a checkpoint atomically, then delete older ones. All processes call it, the first one writes."""
    rng = _gather_rng(accelerator)
    weights, moments = _trained_parameters(module), _flatten_optimizer(module, optimizer)
    if accelerator.is_main_process:
        path = folder / f"{PREFIX}{state.step:06d}"
        with atomic_folder(path) as temporary:
            save_file(weights, temporary / "weights.safetensors")
            save_file(moments, temporary / "optimizer.safetensors")
            save_file(rng, temporary / "rng.safetensors")
            (temporary / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
        for older in folder.glob(f"{PREFIX}*"):
            if older != path:
                shutil.rmtree(older)
    accelerator.wait_for_everyone()


def load_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    fresh: LoopState,
    accelerator: Accelerator,
) -> LoopState:
    """Restore the newest checkpoint; returns its state, or `fresh` where there is none.

    Raises:
        ValueError: it belongs to another recipe or log, or to another number of processes.
    """
    paths = sorted(folder.glob(f"{PREFIX}*"))
    if not paths:
        return fresh
    path = paths[-1]
    state = LoopState(**json.loads((path / "state.json").read_text()))
    if state.fingerprint != fresh.fingerprint:
        raise ValueError(
            f"{path} is of another recipe or target log; delete {folder} to start afresh, "
            "or choose another `out`"
        )
    if state.num_processes != fresh.num_processes:
        raise ValueError(
            f"{path} was written by {state.num_processes} processes, these are {fresh.num_processes}; "
            f"use the same number, or delete {folder} to start afresh"
        )
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in load_file(path / "weights.safetensors").items():
            parameters[name].copy_(sharded_like(parameters[name], value))
    _restore_optimizer(module, optimizer, load_file(path / "optimizer.safetensors"))
    _restore_rng(load_file(path / "rng.safetensors"), accelerator)
    return state


def _trained_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that training changes, by name, whole, on the CPU."""
    named = module.named_parameters()
    return {name: whole(value.detach()).cpu().contiguous() for name, value in named if value.requires_grad}


def _flatten_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State tensors of every parameter as `<parameter>.<state>`."""
    names = {id(value): name for name, value in module.named_parameters()}
    return {
        f"{names[id(value)]}.{key}": whole(torch.as_tensor(tensor)).cpu().contiguous()
        for value, entries in optimizer.state.items()
        for key, tensor in entries.items()
    }


def _restore_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, flat: dict[str, torch.Tensor]
) -> None:
    """Inverse of `_flatten_optimizer`."""
    parameters = dict(module.named_parameters())
    for full_name, tensor in flat.items():
        name, _, key = full_name.rpartition(".")
        # the step count stays where AdamW keeps it
        value = tensor if key == "step" else sharded_like(parameters[name], tensor)
        optimizer.state.setdefault(parameters[name], {})[key] = value


def _gather_rng(accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """RNG states of all processes."""
    own = {"cpu": torch.get_rng_state()}
    if accelerator.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(accelerator.device)
    gathered = {kind: accelerator.gather(state[None].to(accelerator.device)) for kind, state in own.items()}
    return {
        f"rank{rank}.{kind}": state.cpu().contiguous()
        for kind, states in gathered.items()
        for rank, state in enumerate(states)
    }


def _restore_rng(states: dict[str, torch.Tensor], accelerator: Accelerator) -> None:
    """Set the RNG states of this process."""
    torch.set_rng_state(states[f"rank{accelerator.process_index}.cpu"])
    if accelerator.device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rank{accelerator.process_index}.cuda"], accelerator.device)
