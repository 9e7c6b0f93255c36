"""How a stage joins the processes that `accelerate launch` or torchrun started with it."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator


def join_processes(**settings: Any) -> Accelerator:
    """Accelerator of this process, in a group with all that were launched with it.

    Left to itself, accelerate takes each of several processes on a machine without GPU for the only one,
    unless ACCELERATE_USE_CPU is set; all of them would then write the same files.

    Args:
        settings: of `accelerate.Accelerator`.
    """
    is_group_of_cpus = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available()
    return Accelerator(cpu=is_group_of_cpus, **settings)
