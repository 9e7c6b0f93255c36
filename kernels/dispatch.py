"""Which implementation of an operation runs: Triton for CUDA tensors, plain torch for all others.

Engine and trainer call the operations of this module and no other. Each has

* `<op>_ref.py`     plain float32 torch, the definition, on any device;
* `<op>_triton.py`  the same signature for a GPU, or for the CPU under TRITON_INTERPRET=1;
* for some, a faster torch path for the CPU.

The environment variable FOREDRAFT_KERNELS (`reference` or `triton`) or `forcing` overrides the choice, and
`calls` counts which implementation ran.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, ParamSpec, TypeVar, cast

import torch

from foredraft.kernels import (
    coupled_sample_fast,
    coupled_sample_ref,
    distill_loss_fast,
    distill_loss_ref,
    kv_commit_ref,
    kv_write_ref,
    rejection_verify_ref,
    saguaro_ref,
    top_candidates_ref,
    tree_attention_ref,
    verify_walk_ref,
)

P = ParamSpec("P")
T = TypeVar("T")
Implementation = Literal["reference", "fast", "triton"]
OVERRIDES = ("reference", "triton")

calls: Counter[tuple[str, Implementation]] = Counter()
_forced = os.environ.get("FOREDRAFT_KERNELS", "")
if _forced and _forced not in OVERRIDES:
    raise ValueError(f"FOREDRAFT_KERNELS must be one of {', '.join(OVERRIDES)} or empty, got {_forced!r}")


@contextmanager
def forcing(implementation: Literal["reference", "triton"]) -> Iterator[None]:
    """Use one implementation of every operation for a while, in all threads of this process."""
    global _forced
    before, _forced = _forced, implementation
    try:
        yield
    finally:
        _forced = before


def dispatched(reference: Callable[P, T], fast: Callable[P, T] | None = None) -> Callable[P, T]:
    """The operation of a reference, with its name, signature and docstring.

    Args:
        reference: `<op>` of `<op>_ref.py`; its first argument is a tensor, whose device decides.
        fast: what runs on the CPU instead of the reference, with the same results up to rounding.
    """
    name = reference.__name__

    @functools.wraps(reference)
    def operation(*args: P.args, **kwargs: P.kwargs) -> T:
        implementation = _choose(cast(torch.Tensor, args[0]), has_fast=fast is not None)
        calls[name, implementation] += 1
        if implementation == "triton":
            return cast(T, _triton(name)(*args, **kwargs))
        chosen = fast if implementation == "fast" and fast is not None else reference
        return chosen(*args, **kwargs)

    return operation


def _choose(first: torch.Tensor, *, has_fast: bool) -> Implementation:
    if _forced == "reference":
        return "reference"
    if _forced == "triton" or first.is_cuda:
        return "triton"
    return "fast" if has_fast else "reference"


@functools.cache
def _triton(name: str) -> Callable[..., object]:
    """Imported on first use: Triton exists on Linux only."""
    return getattr(importlib.import_module(f"foredraft.kernels.{name}_triton"), name)


kv_commit = dispatched(kv_commit_ref.kv_commit)
kv_write = dispatched(kv_write_ref.kv_write)
tree_attention = dispatched(tree_attention_ref.tree_attention)
coupled_sample = dispatched(coupled_sample_ref.coupled_sample, fast=coupled_sample_fast.coupled_sample)
top_candidates = dispatched(top_candidates_ref.top_candidates)
saguaro = dispatched(saguaro_ref.saguaro)
verify_walk = dispatched(verify_walk_ref.verify_walk)
rejection_verify = dispatched(rejection_verify_ref.rejection_verify)
distill_loss = dispatched(distill_loss_ref.distill_loss, fast=distill_loss_fast.distill_loss)
