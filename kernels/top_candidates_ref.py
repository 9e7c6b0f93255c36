"""The best perturbed scores of every row and what the predictor reads of the distribution, in plain torch.

    scores     z' + T * g of the kept tokens after penalties (coupled_sample_ref.py), minus their log-sum-exp:
               a log-softmax at unit scale, the untrained outcome predictor's log-probability
    log_probs  log_softmax of the raw logits z; entropy and log-sum-exp of the same

Shape letters: N rows, C columns of the head, F candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from foredraft.kernels.coupled_sample_ref import check_rows, perturbed_scores
from foredraft.kernels.draws import Draw

NO_TOKEN = -1
MAX_FAN_OUT = 64


class TopCandidates(NamedTuple):
    """F guesses a row, best first; where a filter left fewer, NO_TOKEN with -inf."""

    token_ids_NF: torch.Tensor  # int64, target ids
    scores_NF: torch.Tensor  # float32
    log_probs_NF: torch.Tensor  # float32
    log_sum_exp_N: torch.Tensor  # float32
    entropy_N: torch.Tensor  # float32, in nats


def top_candidates(
    logits_NC: torch.Tensor, draws: Sequence[Draw], fan_out: int, token_ids_C: torch.Tensor | None = None
) -> TopCandidates:
    """Candidates after every row. Of equal scores, which come first is open.

    Args:
        logits_NC: raw logits, float32, contiguous.
        draws: one a row.
        fan_out: F; no more than C candidates are given.
        token_ids_C: int64 target id of every column; None: columns are target ids.

    Raises:
        ValueError: not a draw a row, logits of another type or layout, F out of 1..MAX_FAN_OUT.
    """
    check_candidates(logits_NC, draws, fan_out)
    scores_NC = perturbed_scores(logits_NC, draws, token_ids_C)
    best = scores_NC.topk(min(fan_out, scores_NC.shape[1]), -1)
    log_sum_exp_N = logits_NC.logsumexp(-1)
    log_probs_NC = logits_NC - log_sum_exp_N[:, None]
    tokens_NF = best.indices if token_ids_C is None else token_ids_C[best.indices]
    is_left_NF = best.values == -torch.inf
    return TopCandidates(
        token_ids_NF=tokens_NF.masked_fill(is_left_NF, NO_TOKEN),
        scores_NF=best.values - scores_NC.logsumexp(-1, keepdim=True),
        log_probs_NF=log_probs_NC.gather(1, best.indices).masked_fill(is_left_NF, -torch.inf),
        log_sum_exp_N=log_sum_exp_N,
        # 0 log 0 is 0
        entropy_N=-(log_probs_NC.exp() * log_probs_NC.clamp(min=torch.finfo(torch.float32).min)).sum(-1),
    )


def check_candidates(logits_NC: torch.Tensor, draws: Sequence[Draw], fan_out: int) -> None:
    """Raise ValueError unless the arguments fit."""
    check_rows(logits_NC, draws)
    if not 1 <= fan_out <= MAX_FAN_OUT:
        raise ValueError(f"fan_out must be in 1..{MAX_FAN_OUT}, got {fan_out}")
