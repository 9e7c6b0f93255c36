"""Coarse logits (see distill_loss_ref.py) in chunks: no tensor of [N, D], however many tokens there are.

A chunk is as many positions as have MAX_CHUNK logits together, at least one: a tensor [n, D] of the hidden
states' type with n D <= max(MAX_CHUNK, D), 128 MiB in bfloat16. Its logits are rounded to that type, as the
head of a model in that type rounds them. Two passes over a chunk, each by blocks of the vocabulary or of
rows, do what grows with the vocabulary and is no matrix product. An implementation gives both:

    read      z -> coarse logits [n, C + 1]
    replace   z -> dz, in place, from the upstream gradient g:  dz_i = g_i for a chosen token,
              dz_j = exp(z_j - c_o) g_o for any other; then times scale (1 - (z / softcap)^2)

    dh = dz W,   dW = dz^T h,   db = sum of dz over rows

The backward pass makes the logits of a chunk again, unless there was a single one: then they are kept, and a
second backward pass through the same graph is refused by autograd. Beside the gradients, both passes hold one
chunk and, where there is more than one, a product [D, H] of a chunk and the float32 sum of these.

Shape letters: N positions, n those of a chunk, H hidden size, D draft vocabulary, C chosen columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from foredraft.kernels.distill_loss_ref import Head

MAX_CHUNK = 1 << 26


class Passes(NamedTuple):
    """What an implementation does with the raw logits W h + b of a chunk."""

    # (logits_nD, ids_nC, head, coarse_nC to write); the logits are left as they were
    read: Callable[[torch.Tensor, torch.Tensor, Head, torch.Tensor], None]
    # (logits_nD to overwrite, ids_nC, head, coarse_nC, upstream_nC)
    replace: Callable[[torch.Tensor, torch.Tensor, Head, torch.Tensor, torch.Tensor], None]


def coarse_logits_by(
    passes: Passes, hidden_NH: torch.Tensor, head: Head, ids_NC: torch.Tensor
) -> torch.Tensor:
    """`distill_loss_ref.coarse_logits`, chunk by chunk."""
    return _CoarseLogits.apply(hidden_NH, head.weight_DH, head.bias_D, head, ids_NC, passes)


def _chunks(num_rows: int, num_draft: int) -> list[slice]:
    size = max(1, MAX_CHUNK // num_draft)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


class _CoarseLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_DH: torch.Tensor,
        bias_D: torch.Tensor | None,
        head: Head,  # the same weight and bias; autograd sees tensors only as arguments of their own
        ids_NC: torch.Tensor,
        passes: Passes,
    ) -> torch.Tensor:
        num_rows, num_columns = ids_NC.shape
        coarse_NC = hidden_NH.new_empty((num_rows, num_columns + 1), dtype=torch.float32)
        chunks = _chunks(num_rows, len(weight_DH))
        logits_nD = None
        for rows in chunks:
            logits_nD = linear(hidden_NH[rows], weight_DH, bias_D)
            passes.read(logits_nD, ids_NC[rows], head, coarse_NC[rows])
        kept_nD = logits_nD if len(chunks) == 1 else None
        ctx.save_for_backward(hidden_NH, weight_DH, bias_D, ids_NC, coarse_NC, kept_nD)
        ctx.scale, ctx.softcap, ctx.passes = head.scale, head.softcap, passes
        return coarse_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_NC: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_DH, bias_D, ids_NC, coarse_NC, kept_nD = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        head = Head(weight_DH, bias_D, ctx.scale, ctx.softcap)
        upstream_NC = upstream_NC.contiguous()
        chunks = _chunks(len(ids_NC), len(weight_DH))
        gradient_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        total_DH, total_D = None, None
        for rows in chunks:
            hidden_nH = hidden_NH[rows]
            logits_nD = linear(hidden_nH, weight_DH, bias_D) if kept_nD is None else kept_nD
            ctx.passes.replace(logits_nD, ids_NC[rows], head, coarse_NC[rows], upstream_NC[rows])
            if gradient_NH is not None:
                torch.mm(logits_nD, weight_DH, out=gradient_NH[rows])
            if needs_weight:
                total_DH = _add(total_DH, logits_nD.t() @ hidden_nH, len(chunks))
            if needs_bias:
                total_D = _add(total_D, logits_nD.sum(0, dtype=torch.float32), len(chunks))
        if kept_nD is not None:
            # a kernel's writes are unknown to autograd, which must refuse these logits to a second pass
            torch.autograd.graph.increment_version(kept_nD)
        return (
            gradient_NH,
            None if total_DH is None else total_DH.to(weight_DH.dtype),
            None if total_D is None else total_D.to(weight_DH.dtype),
            *(None,) * 3,
        )


def _add(total: torch.Tensor | None, part: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Sums of several parts are float32: rounding to bfloat16 after each would lose the small ones."""
    if total is None:
        return part if num_parts == 1 else part.float()
    return total.add_(part)
