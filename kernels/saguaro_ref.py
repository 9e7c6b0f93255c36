"""The law that a drafter draws a guess from, and the draw, for rejection verification; plain float32 torch.

    q'     softmax(kept logits / T) over the m most likely tokens that the pipeline keeps, renormalised
    sigma  the F most likely of them scaled by C, renormalised (Saguaro sampling: Kumar et al., 2603.03251):
           less mass on them leaves more of a rejection's law where outcomes are prepared. C = 1: q' itself

The guess is the arg-max of log sigma + g, g of the drafter's role (philox_ref.py). Only m tokens have mass,
so the row that travels to the verifier is the whole law, to the bit. T = 0: all mass on the most likely
token.

Shape letters: N rows, C columns of the drafter's head, m tokens of a law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from foredraft.kernels.coupled_sample_ref import check_rows
from foredraft.kernels.draws import Draw
from foredraft.kernels.philox_ref import DRAFT_ROLE, gumbel_of
from foredraft.kernels.rejection_verify_ref import NO_GUESS, kept_logits


class Drafted(NamedTuple):
    """A guess a row, and the law that it was drawn from."""

    tokens_N: torch.Tensor  # int64
    ids_Nm: torch.Tensor  # int64, most likely first; NO_GUESS where fewer tokens are kept
    probs_Nm: torch.Tensor  # float32


def saguaro(
    logits_NC: torch.Tensor,
    draws: Sequence[Draw],
    num_kept: int,
    fan_out: int,
    factor: float,
    token_ids_C: torch.Tensor | None = None,
) -> Drafted:
    """Draw a guess from every row.

    Args:
        logits_NC: raw logits of the drafter, float32.
        draws: how the token of every row is drawn.
        num_kept: m; the law is the full one where it is at least C.
        fan_out: F, outcomes that are prepared after a token.
        factor: C in (0, 1].
        token_ids_C: int64 target id of every column; None: columns are target ids.

    Raises:
        ValueError: not a draw a row.
    """
    check_rows(logits_NC, draws)
    best = kept_logits(logits_NC, draws, token_ids_C).topk(min(num_kept, logits_NC.shape[1]), -1)
    ids_Nm = best.indices if token_ids_C is None else token_ids_C[best.indices]
    tokens, laws = [], []
    for draw, values_m, ids_m in zip(draws, best.values, ids_Nm, strict=True):
        rank_m = torch.arange(len(values_m), device=values_m.device)
        if draw.filters.temperature > 0.0:
            weights_m = (values_m / draw.filters.temperature).softmax(-1)
        else:
            weights_m = (rank_m == 0).float()
        weights_m = torch.where(rank_m < fan_out, factor * weights_m, weights_m)
        laws.append(weights_m / weights_m.sum())
        noise_m = gumbel_of(draw, DRAFT_ROLE, ids_m.cpu().numpy()).to(values_m.device)
        tokens.append(ids_m[(laws[-1].log() + noise_m).argmax()])
    probs_Nm = torch.stack(laws)
    return Drafted(torch.stack(tokens), ids_Nm.masked_fill(probs_Nm == 0.0, NO_GUESS), probs_Nm)
