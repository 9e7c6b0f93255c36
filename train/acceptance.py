"""Acceptance of a drafter on held-out rows, from teacher-forced logits: what the engine would accept.

On the settled path the drafter sees what the target said, so its guesses along a logged response, with the
logged seed and filters, are the engine's guesses: chain rounds under coupled verification are exact.

Shape letters: T response tokens, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foredraft.infer.params import SamplingParams
from foredraft.infer.sampler import CoupledSampler
from foredraft.kernels.coupled_sample_ref import perturbed_scores
from foredraft.kernels.draws import Draw
from foredraft.train.batches import collate, trained_length
from foredraft.train.log_rows import LogRow
from foredraft.train.student import Student

WIDTHS = (1, 2, 4, 8, 16)  # top-F agreement is reported for these F


def chain_rounds(is_match: Sequence[bool], k: int) -> list[int]:
    """Tokens that each round settles when chains of k guesses are verified along a response.

    The first token comes from the prompt's prefill. A round accepts guesses while they match, at most k, and
    adds the target's own next token; the response's end cuts the last round.

    Args:
        is_match: for every response token, whether the drafter guesses it after the tokens before it.
        k: guesses of a round.
    """
    settled, rounds = 1, []
    while settled < len(is_match):
        accepted = 0
        while accepted < k and settled + accepted < len(is_match) and is_match[settled + accepted]:
            accepted += 1
        rounds.append(min(accepted + 1, len(is_match) - settled))
        settled += rounds[-1]
    return rounds


@torch.no_grad()
def token_ranks(student: Student, row: LogRow, max_length: int) -> np.ndarray:
    """Place of every response token among the drafter's perturbed scores, 0 = best guess; int64 [T].

    A token outside the draft vocabulary has place D.
    """
    device = student.model.device
    batch = collate([row], max_length).to(device)
    length = trained_length(row, max_length)
    logits_TD = student.logits(batch.ids_BT, batch.positions_N)[:length].float()
    tokens_T, columns = batch.targets_N[:length], student.d2t_D
    scores_TD = perturbed_scores(logits_TD, _draws(row, length), columns)
    if columns is None:
        places_T, is_inside_T = tokens_T, torch.ones_like(tokens_T, dtype=torch.bool)
    else:
        places_T = torch.searchsorted(columns, tokens_T).clamp(max=len(columns) - 1)
        is_inside_T = columns[places_T] == tokens_T
    own_T1 = scores_TD.gather(1, places_T[:, None])
    ranks_T = (scores_TD > own_T1).sum(-1)
    is_guessed_T = is_inside_T & torch.isfinite(own_T1[:, 0])
    return torch.where(is_guessed_T, ranks_T, scores_TD.shape[1]).cpu().numpy()


def measure_acceptance(
    student: Student, rows: Sequence[LogRow], *, k: int, max_length: int
) -> dict[str, dict[str, float]]:
    """Agreement and simulated chain rounds on rows, by temperature.

    Returns:
        For each temperature (as text): positions, top1, top2, ... (share of response tokens among the best F
        guesses), k, tokens_per_verify (tokens after the first / rounds of chains of k guesses).
    """
    was_training = student.training
    student.eval()
    ranks: dict[float, list[np.ndarray]] = {}
    for row in rows:
        ranks.setdefault(row.temperature, []).append(token_ranks(student, row, max_length))
    student.train(was_training)
    return {f"{temperature:g}": _summary(found, k) for temperature, found in sorted(ranks.items())}


def sampling_of(row: LogRow) -> SamplingParams:
    """The sampling settings that a row was logged with."""
    return SamplingParams(
        temperature=row.temperature,
        top_k=row.top_k,
        top_p=row.top_p,
        min_p=row.min_p,
        repetition_penalty=row.repetition_penalty,
        seed=row.seed,
        choice=row.choice,
    )


def _summary(ranks: list[np.ndarray], k: int) -> dict[str, float]:
    together = np.concatenate(ranks)
    rounds = [settled for row in ranks for settled in chain_rounds((row == 0).tolist(), k)]
    agreement = {f"top{width}": float((together < width).mean()) for width in WIDTHS}
    tokens_per_verify = sum(rounds) / len(rounds) if rounds else 1.0
    return {"positions": len(together), **agreement, "k": k, "tokens_per_verify": tokens_per_verify}


def _draws(row: LogRow, length: int) -> list[Draw]:
    """How every response token was drawn."""
    response = row.response_ids.tolist()
    positions = range(row.first_position, row.first_position + length)
    sampler = CoupledSampler(sampling_of(row), row.prompt_ids.tolist())
    return sampler.draws(positions, [response[:place] for place in range(length)])
