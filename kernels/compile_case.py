"""One variant of a kernel, as it is compiled ahead of time: what a test needs to compile it without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompileCase:
    """Arguments of `triton.compile` for one kernel.

    `signature` maps every parameter that is not constant to its type ("*bf16", "*fp32", "*i64", "i32" and so
    on); `constants` gives the values of the others.
    """

    name: str  # such as "tree_attention/shared bf16 D128 G4"
    kernel: Any  # a triton.jit function
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    allowed_spill: int = 0  # bytes of a thread
    uses_matrix_instructions: bool = False  # of half precision: the machine code must hold mma or wgmma
    aligned: tuple[str, ...] = field(default=())  # pointers and integers that are multiples of 16
