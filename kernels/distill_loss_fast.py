"""The distillation loss on a CPU: the passes of `distill_loss_chunks.py` by blocks of rows.

Blocks are small enough for the cache, and large enough that threads, which wait for each other after every
operation on one, seldom do so.

Shape letters: see distill_loss_chunks.py; m rows of a block, E = D + 1: a last column takes what belongs to
tokens outside the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from foredraft.kernels.distill_loss_chunks import Passes, coarse_logits_by
from foredraft.kernels.distill_loss_ref import OUTSIDE, Head, Teacher, loss_by, scale_logits

MAX_BLOCK = 1 << 21  # numbers of a block, 8 MiB of float32
LOWEST = torch.finfo(torch.float32).min


def distill_loss(
    hidden_NH: torch.Tensor, head: Head, teacher: Teacher, losses: Mapping[str, float]
) -> torch.Tensor:
    """Weighted sum of losses of every position. Arguments and errors: `distill_loss_ref.distill_loss`."""
    return loss_by(partial(coarse_logits_by, Passes(_read, _replace)), hidden_NH, head, teacher, losses)


def _blocks(
    logits_nD: torch.Tensor, ids_nC: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Rows, a float32 buffer [m, E] whose last column is -inf, and their chosen columns [m, C]."""
    num_rows, num_draft = logits_nD.shape
    size = min(num_rows, max(1, MAX_BLOCK // num_draft))
    block_mE = torch.empty(size, num_draft + 1, dtype=torch.float32)
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        ids_mC = ids_nC[rows]
        block_mE[:, num_draft] = -torch.inf
        yield rows, block_mE[: rows.stop - start], ids_mC.masked_fill(ids_mC == OUTSIDE, num_draft)


def _load(logits_mD: torch.Tensor, head: Head, z_mD: torch.Tensor) -> None:
    """Write scaled logits."""
    z_mD.copy_(logits_mD)
    if head.scale != 1.0 or head.softcap:
        z_mD.copy_(scale_logits(z_mD, head.scale, head.softcap))


def _read(logits_nD: torch.Tensor, ids_nC: torch.Tensor, head: Head, coarse_nC: torch.Tensor) -> None:
    for rows, block_mE, columns_mC in _blocks(logits_nD, ids_nC):
        _load(logits_nD[rows], head, block_mE[:, :-1])
        coarse_nC[rows, :-1] = block_mE.gather(-1, columns_mC)
        block_mE.scatter_(-1, columns_mC, -torch.inf)
        torch.logsumexp(block_mE, -1, out=coarse_nC[rows, -1])


def _replace(
    logits_nD: torch.Tensor,
    ids_nC: torch.Tensor,
    head: Head,
    coarse_nC: torch.Tensor,
    upstream_nC: torch.Tensor,
) -> None:
    softcap = head.softcap
    for rows, block_mE, columns_mC in _blocks(logits_nD, ids_nC):
        z_mD = block_mE[:, :-1]
        _load(logits_nD[rows], head, z_mD)
        slope_mD = 1.0 - (z_mD / softcap).square_() if softcap else None
        # the floor is for a tail of -inf only; chosen columns may overflow here, they are overwritten
        z_mD.sub_(coarse_nC[rows, -1:].clamp(min=LOWEST)).exp_().mul_(upstream_nC[rows, -1:])
        block_mE.scatter_(-1, columns_mC, upstream_nC[rows, :-1])
        if slope_mD is not None:
            z_mD.mul_(slope_mD)
        logits_nD[rows] = z_mD if head.scale == 1.0 else z_mD.mul_(head.scale)
