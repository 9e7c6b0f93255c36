"""Acceptance of a drafter on held-out rows, from teacher-forced logits: what the engine would accept.

On the settled path the drafter sees what the target said, so its guesses along a logged response, with the
logged seed and filters, are the engine's guesses: chain rounds under coupled verification are exact.

Shape letters: T response tokens, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from foredraft.infer.drafters.network import DraftNetwork, Sequences
from foredraft.infer.params import SamplingParams
from foredraft.infer.sampler import CoupledSampler
from foredraft.kernels import dispatch
from foredraft.kernels.coupled_sample_ref import perturbed_scores
from foredraft.kernels.distill_loss_ref import OUTSIDE, Teacher, map_teacher
from foredraft.kernels.draws import Draw
from foredraft.train.batches import Batch, collate, trained_length
from foredraft.train.log_rows import LogRow
from foredraft.train.target_runner import States

WIDTHS = (1, 2, 4, 8, 16)  # top-F agreement is reported for these F


def chain_rounds(is_match_ST: np.ndarray, k: int) -> list[int]:
    """Tokens that each round settles when chains of k guesses are verified along a response.

    The first token comes from the prompt's prefill. A round accepts guesses while they match, at most k, and
    adds the target's own next token; the response's end cuts the last round.

    Args:
        is_match_ST: bool; whether the guess at step s (s tokens beyond the root, the last row for all
            further ones) is response token t, given the tokens before it.
        k: guesses of a round.
    """
    last_step, num_tokens = len(is_match_ST) - 1, is_match_ST.shape[1]
    settled, rounds = 1, []
    while settled < num_tokens:
        accepted = 0
        while (
            accepted < k
            and settled + accepted < num_tokens
            and is_match_ST[min(accepted, last_step), settled + accepted]
        ):
            accepted += 1
        rounds.append(min(accepted + 1, num_tokens - settled))
        settled += rounds[-1]
    return rounds


@dataclass(frozen=True, slots=True)
class RowReport:
    """What a network would have guessed along one response, at each of S unrolled steps."""

    ranks_ST: np.ndarray  # int64, place of response token t among the perturbed scores, 0 = best guess
    overlaps_ST: np.ndarray  # float32, 1 - TV between the raw distributions at temperature 1; NaN: not known


@torch.no_grad()
def follow_row(network: DraftNetwork, row: LogRow, max_length: int, states: States | None) -> RowReport:
    """Unroll a network over a row.

    A token outside the draft vocabulary has place D; so has one whose anchor lies before the text.
    """
    device = next(network.parameters()).device
    batch = collate([[row]], max_length).to(device)
    length = trained_length(row, max_length)
    states_BTS = None if states is None else states.of([[row]], batch)
    sequences = Sequences(batch.ids_BT, batch.positions_BT, states_BTS)
    head, draws = network.head(), _draws(row, length)
    teacher = teacher_of(batch, network)
    places_T, has_distributions = teacher.token_N[:length], row.topk_ids.shape[1] > 0
    ranks, overlaps = [], []
    for step, hidden_1TH in enumerate(network.unroll(sequences, network.num_steps), 1):
        hidden_NH = hidden_1TH[0][batch.positions_N].to(network.head_dtype)
        logits_TD = head.logits(hidden_NH[:length]).float()
        scores_TD = perturbed_scores(logits_TD, draws, network.d2t_D)
        own_T1 = scores_TD.gather(1, places_T.clamp(min=0)[:, None])
        ranks_T = ranks_of(scores_TD, places_T)
        has_anchor_T = sequences.has_anchor(step)[0][batch.positions_N[:length]]
        is_guessed_T = (places_T != OUTSIDE) & torch.isfinite(own_T1[:, 0]) & has_anchor_T
        ranks.append(torch.where(is_guessed_T, ranks_T, scores_TD.shape[1]).cpu().numpy())
        overlap_T = torch.full((length,), torch.nan)
        if has_distributions:
            loss_N = dispatch.distill_loss(hidden_NH, head, teacher, {"total_variation": 1.0})
            overlap_T = 1.0 - loss_N[:length]
        overlaps.append(overlap_T.cpu().numpy())
    return RowReport(np.stack(ranks), np.stack(overlaps))


def ranks_of(scores_TD: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
    """Place of one column of every row when the row falls, int64 [T].

    Logits of a bfloat16 head are often equal; these stand in the order in which a drafter's candidates do.
    """
    width = min(max(WIDTHS), scores_TD.shape[1])
    best_TF = scores_TD.topk(width, -1).indices
    is_own_TF = best_TF == places_T[:, None]
    num_better_T = (scores_TD > scores_TD.gather(1, places_T.clamp(min=0)[:, None])).sum(-1)
    return torch.where(is_own_TF.any(-1), is_own_TF.int().argmax(-1), num_better_T.clamp(min=width))


def teacher_of(batch: Batch, network: DraftNetwork) -> Teacher:
    """The teacher of a batch over a network's draft vocabulary."""
    return map_teacher(batch.topk_ids_NK, batch.topk_logprobs_NK, batch.targets_N, network.t2d_V)


def measure_acceptance(
    network: DraftNetwork,
    rows: Sequence[LogRow],
    *,
    k: int,
    max_length: int,
    states: States | None = None,
) -> dict[str, dict[str, Any]]:
    """Agreement and simulated chain rounds on rows, by temperature.

    Returns:
        For each temperature (as text): positions; top1, top2, ... (share of response tokens among the best F
        guesses of step 1); k; tokens_per_verify (tokens after the first / rounds of chains of k guesses);
        acc_marginal and acc_conditional (k numbers, of guess 1 .. k); overlap (1 - TV, a number a step).
    """
    was_training = network.training
    network.eval()
    found: dict[float, list[RowReport]] = {}
    for row in rows:
        found.setdefault(row.temperature, []).append(follow_row(network, row, max_length, states))
    network.train(was_training)
    return {f"{temperature:g}": _summary(reports, k) for temperature, reports in sorted(found.items())}


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


def _summary(reports: list[RowReport], k: int) -> dict[str, Any]:
    ranks_T = np.concatenate([report.ranks_ST[0] for report in reports])
    rounds = [settled for report in reports for settled in chain_rounds(report.ranks_ST == 0, k)]
    overlaps_ST = np.concatenate([report.overlaps_ST for report in reports], axis=1)
    num_reached = [sum(settled > depth for settled in rounds) for depth in range(k + 1)]
    return {
        "positions": len(ranks_T),
        **{f"top{width}": float((ranks_T < width).mean()) for width in WIDTHS},
        "k": k,
        "tokens_per_verify": sum(rounds) / len(rounds) if rounds else 1.0,
        "acc_marginal": [num / max(1, len(rounds)) for num in num_reached[1:]],
        "acc_conditional": [num / max(1, above) for above, num in pairwise(num_reached)],
        "overlap": [float(value) for value in overlaps_ST.mean(axis=1)],
    }


def _draws(row: LogRow, length: int) -> list[Draw]:
    """How every response token was drawn."""
    response = row.response_ids.tolist()
    positions = range(row.first_position, row.first_position + length)
    sampler = CoupledSampler(sampling_of(row), row.prompt_ids.tolist())
    return sampler.draws(positions, [response[:place] for place in range(length)])
