"""Rejection verification of chains: exact in law for any drafter, in plain float32 torch.

Guess x_i of a chain was drawn from q_i; the target's law there, after the pinned pipeline of
coupled_sample_ref.py, is p_i = softmax(kept logits / T), at T = 0 all mass on the arg-max. Then

    x_i is accepted                iff  U_i q_i(x_i) < p_i(x_i)
    at the first rejection         the token is drawn from (p_i - q_i)+ / Z_i,  Z_i = sum of (p_i - q_i)+
    after the last guess           the token is drawn from p

(Leviathan et al., 2211.17192; Chen et al., 2302.01318). The law of the token is min(p, q) + (1 - sum min(p,
q)) (p - q)+ / Z = p. The test is strict and a product: nothing of probability 0 is accepted at U = 0, and
there is no 0 / 0. q must be the numbers that the guess was drawn by, to the bit, so they travel with it,
most often as a row of few tokens. A guess that its own row gives no mass was not drawn from it; the one-hot
law at the guess is exact for a guess from anywhere and replaces the row. Where Z is rounding noise, the
token is drawn from p.

A law is drawn from by arg-max of log p + g (Gumbel-max). U and g come from the request's seed and the token's
position, each from the stream of its own role (philox_ref.py).

Shape letters: S sequences, K guesses of a chain at most, M = K + 1 places, N rows (S * M), m tokens of a
law's row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from foredraft.kernels.coupled_sample_ref import keep_threshold
from foredraft.kernels.draws import Draw
from foredraft.kernels.penalties import penalise
from foredraft.kernels.philox_ref import RESIDUAL_ROLE, gumbel_of, uniform

NO_GUESS = -1  # as a token: the chain has ended
NO_RESIDUAL = 1e-6  # a mass below is rounding


class DraftLaw(NamedTuple):
    """What guesses were drawn from: a row a guess, of m tokens; of all V in order where no ids are given."""

    probs_SKm: torch.Tensor  # float32
    ids_SKm: torch.Tensor | None = None  # int64, different within a row; NO_GUESS with probability 0: unused


class Settled(NamedTuple):
    """What a verification settled: the first guesses of the chain, then the bonus token."""

    num_accepted_S: torch.Tensor  # int64
    bonus_S: torch.Tensor  # int64


def rejection_verify(
    logits_SMV: torch.Tensor, tokens_SK: torch.Tensor, law: DraftLaw, draws: Sequence[Draw]
) -> Settled:
    """Accept or reject the guesses of every chain in turn.

    Args:
        logits_SMV: raw target logits, float32, after the root and after every guess.
        tokens_SK: int64, guessed tokens, NO_GUESS beyond the chain's end.
        law: what they were drawn from.
        draws: how the token of every place is drawn, sequence by sequence; S * M of them.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    check_chains(logits_SMV, tokens_SK, law, draws)
    num_places, vocab_size = logits_SMV.shape[1:]
    num_accepted, bonus = [], []
    for sequence, (logits_MV, tokens_K) in enumerate(zip(logits_SMV, tokens_SK.tolist(), strict=True)):
        places = draws[sequence * num_places :][:num_places]
        probs_MV = target_law(logits_MV, places)
        drafted_KV = dense_law(law, sequence, tokens_K, vocab_size).to(probs_MV.device)
        accepted = 0
        while accepted < len(tokens_K) and tokens_K[accepted] != NO_GUESS:
            p, q = (law_XV[accepted, tokens_K[accepted]] for law_XV in (probs_MV, drafted_KV))
            if not uniform(places[accepted]) * q < p:
                break
            accepted += 1
        drawn_from_V = probs_MV[accepted]
        if accepted < len(tokens_K) and tokens_K[accepted] != NO_GUESS:
            residual_V = (drawn_from_V - drafted_KV[accepted]).clamp_min(0.0)
            drawn_from_V = residual_V if residual_V.sum() > NO_RESIDUAL else drawn_from_V
        noise_V = gumbel_of(places[accepted], RESIDUAL_ROLE, np.arange(vocab_size))
        num_accepted.append(accepted)
        bonus.append((drawn_from_V.log() + noise_V.to(drawn_from_V.device)).argmax())
    return Settled(tokens_SK.new_tensor(num_accepted), torch.stack(bonus))


def target_law(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """p, float32 [N, V]: softmax of the kept logits at each row's temperature; at 0 the lowest arg-max."""
    kept_NV = kept_logits(logits_NV, draws)
    temperature_N1 = torch.tensor([[draw.filters.temperature] for draw in draws], device=logits_NV.device)
    sampled_NV = (kept_NV / temperature_N1.clamp_min(torch.finfo(torch.float32).tiny)).softmax(-1)
    greedy_NV = torch.nn.functional.one_hot(kept_NV.argmax(-1), kept_NV.shape[-1])
    return torch.where(temperature_N1 > 0.0, sampled_NV, greedy_NV.float())


def kept_logits(
    logits_NC: torch.Tensor, draws: Sequence[Draw], token_ids_C: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits after penalties, float32 [N, C]; -inf where a filter removed the column."""
    rows = []
    for draw, row in zip(draws, penalise(logits_NC, draws, token_ids_C).split(1), strict=True):
        threshold_1 = keep_threshold(row, draw.filters) if draw.filters.temperature > 0.0 else None
        rows.append(row if threshold_1 is None else row.masked_fill(row < threshold_1[:, None], -torch.inf))
    return torch.cat(rows)


def dense_law(law: DraftLaw, sequence: int, tokens_K: Sequence[int], vocab_size: int) -> torch.Tensor:
    """q of one chain, float32 [K, V]; one-hot where the guess has no mass in its own row."""
    probs_KV = law.probs_SKm[sequence]
    if law.ids_SKm is not None:
        ids_Km = law.ids_SKm[sequence]
        zeros_KV = probs_KV.new_zeros(len(tokens_K), vocab_size)
        probs_KV = zeros_KV.scatter_add(1, ids_Km.clamp_min(0), probs_KV)
    probs_KV = probs_KV.clone()
    for q_V, token in zip(probs_KV, tokens_K, strict=True):
        if token != NO_GUESS and q_V[token] == 0.0:
            q_V.zero_()[token] = 1.0
    return probs_KV


def check_chains(
    logits_SMV: torch.Tensor, tokens_SK: torch.Tensor, law: DraftLaw, draws: Sequence[Draw]
) -> None:
    """Raise ValueError unless all fit together."""
    num_sequences, num_guesses = tokens_SK.shape
    vocab_size = logits_SMV.shape[-1]
    width = law.probs_SKm.shape[-1] if law.ids_SKm is not None else vocab_size
    tensors = {
        "logits_SMV": (logits_SMV, (num_sequences, num_guesses + 1, vocab_size), torch.float32),
        "tokens_SK": (tokens_SK, (num_sequences, num_guesses), torch.int64),
        "probs_SKm": (law.probs_SKm, (num_sequences, num_guesses, width), torch.float32),
    }
    if law.ids_SKm is not None:
        tensors["ids_SKm"] = (law.ids_SKm, (num_sequences, num_guesses, width), torch.int64)
    for name, (tensor, shape, dtype) in tensors.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)} "
                f"of strides {tensor.stride()}"
            )
    if len(draws) != num_sequences * (num_guesses + 1):
        raise ValueError(f"expected a draw a place, {num_sequences * (num_guesses + 1)}, got {len(draws)}")
