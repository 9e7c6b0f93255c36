"""Rejection verification settles tokens of the target's law, whatever the drafter draws from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foredraft.infer.params import SamplingParams
from foredraft.kernels.draws import Draw
from foredraft.kernels.philox_ref import ACCEPT_ROLE, DRAFT_ROLE, RESIDUAL_ROLE, bits_of, uniform
from foredraft.kernels.rejection_verify_ref import NO_GUESS, DraftLaw, rejection_verify, target_law
from foredraft.kernels.saguaro_ref import saguaro

VOCAB, NUM_DRAWS = 12, 2000
ZERO_UNIFORM = {"seed": 0, "position": 4623156}  # found by search: U is exactly 0 there
PROCESSORS = {
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "top-p": SamplingParams(temperature=1.2, top_p=0.8),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.5),
}


def logits(seed: int, scale: float = 1.5) -> torch.Tensor:
    """[V] of a target or of a drafter."""
    return scale * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def one_hot(tokens_N: torch.Tensor) -> DraftLaw:
    return DraftLaw(torch.ones(len(tokens_N), 1, 1), tokens_N[:, None, None])


def guesses(source: str, logits_V: torch.Tensor, draws: list[Draw]) -> tuple[torch.Tensor, DraftLaw]:
    """A guess a draw, int64 [N], and its law as the drafter ships it."""
    rows_NV = logits_V.expand(len(draws), -1).contiguous()
    fixed_N = torch.full((len(draws),), 3)
    match source:
        case "q" | "sigma" | "top-m":
            width, factor = (4 if source == "top-m" else VOCAB), (0.4 if source == "sigma" else 1.0)
            drafted = saguaro(rows_NV, draws, num_kept=width, fan_out=3, factor=factor)
            return drafted.tokens_N, DraftLaw(drafted.probs_Nm[:, None], drafted.ids_Nm[:, None])
        case "dense":
            drafted = saguaro(rows_NV, draws, num_kept=VOCAB, fan_out=3, factor=1.0)
            probs_NV = torch.zeros_like(rows_NV).scatter_add(1, drafted.ids_Nm.clamp_min(0), drafted.probs_Nm)
            return drafted.tokens_N, DraftLaw(probs_NV[:, None])
        case "best":
            best_N = rows_NV.argmax(-1)
            return best_N, one_hot(best_N)
        case "ngram":
            return fixed_N, one_hot(fixed_N)
        case "another row":  # that gives the guess no mass
            return fixed_N, one_hot(fixed_N + 1)
    raise AssertionError(source)


def settled_law(
    draws: list[Draw], logits_V: torch.Tensor, tokens_N: torch.Tensor, law: DraftLaw
) -> torch.Tensor:
    """Frequencies [V] of the token settled at the first place."""
    logits_NMV = logits_V.expand(len(draws), 2, -1).contiguous()
    places = [draw for draw in draws for _ in range(2)]
    settled = rejection_verify(logits_NMV, tokens_N[:, None], law, places)
    first_N = torch.where(settled.num_accepted_S == 1, tokens_N, settled.bonus_S)
    return torch.bincount(first_N, minlength=VOCAB) / len(draws)


def total_variation(found_V: torch.Tensor, expected_V: torch.Tensor) -> float:
    return float((found_V - expected_V).abs().sum()) / 2


BOUND = 3 * (VOCAB / (2 * np.pi * NUM_DRAWS)) ** 0.5


@pytest.mark.parametrize("source", ["q", "sigma", "top-m", "dense", "best", "ngram", "another row"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_law_of_one_position(processor: str, source: str) -> None:
    filters = PROCESSORS[processor]
    target_V, drafter_V = logits(1), logits(1) + 0.8 * logits(2)
    draws = [Draw(filters, seed, 40, prompt=(1, 5), output=(5, 7)) for seed in range(NUM_DRAWS)]
    expected_V = target_law(target_V[None], draws[:1])[0]
    found_V = settled_law(draws, target_V, *guesses(source, drafter_V, draws))
    assert total_variation(found_V, expected_V) < BOUND
    assert not found_V[expected_V == 0.0].any()


def test_a_storm_of_ties_leaves_the_law_alone() -> None:
    """Six equal logits, of which the drafter keeps four, whichever: its row says which."""
    tied_V = torch.tensor([2.0] * 6 + [0.0] * 6).bfloat16().float()
    draws = [Draw(SamplingParams(temperature=1.0), seed, 9) for seed in range(NUM_DRAWS)]
    found_V = settled_law(draws, tied_V, *guesses("top-m", tied_V, draws))
    assert total_variation(found_V, tied_V.softmax(-1)) < BOUND


def test_a_perfect_drafter_is_always_accepted() -> None:
    draws = [Draw(SamplingParams(temperature=1.0), seed, 9) for seed in range(200)]
    tokens_N, law = guesses("q", logits(3), draws)
    logits_NMV = logits(3).expand(200, 2, -1).contiguous()
    places = [draw for draw in draws for _ in range(2)]
    assert rejection_verify(logits_NMV, tokens_N[:, None], law, places).num_accepted_S.all()


def test_what_has_no_probability_is_never_accepted() -> None:
    draw = Draw(SamplingParams(temperature=1.0, top_k=2), **ZERO_UNIFORM)
    assert uniform(draw) == 0.0
    logits_V = torch.arange(VOCAB).float()  # top-k keeps the last two
    logits_1MV = logits_V.expand(1, 2, -1).contiguous()
    for token, is_kept in [(VOCAB - 3, False), (0, False), (VOCAB - 2, True), (VOCAB - 1, True)]:
        tokens_N = torch.tensor([token])
        settled = rejection_verify(logits_1MV, tokens_N[:, None], one_hot(tokens_N), [draw, draw])
        assert bool(settled.num_accepted_S[0]) == is_kept
        assert settled.bonus_S[0] >= VOCAB - 2


def test_greedy_accepts_the_arg_max_and_settles_it() -> None:
    draws = [Draw(SamplingParams(), seed, 9) for seed in range(20)]
    best = int(logits(4).argmax())
    for source in ("q", "sigma", "best", "ngram"):
        found_V = settled_law(draws, logits(4), *guesses(source, logits(4 + (source == "q")), draws))
        assert found_V[best] == 1.0


def test_a_chain_ends_where_its_guesses_do() -> None:
    """All places of one sequence accept; the bonus token is drawn at the first place without a guess."""
    logits_1MV = torch.full((1, 4, VOCAB), -20.0)
    for place, token in enumerate((5, 6, 7, 8)):
        logits_1MV[0, place, token] = 20.0
    draws = [Draw(SamplingParams(temperature=1.0), 3, 50 + place) for place in range(4)]
    for guessed, accepted, bonus in [
        ([5, 6, 7], 3, 8),
        ([5, 6, NO_GUESS], 2, 7),
        ([5, 9, 7], 1, 6),
        ([-1] * 3, 0, 5),
    ]:
        law = DraftLaw(torch.ones(1, 3, 1), torch.tensor(guessed)[None, :, None])
        settled = rejection_verify(logits_1MV, torch.tensor([guessed]), law, draws)
        assert (int(settled.num_accepted_S), int(settled.bonus_S)) == (accepted, bonus)


def test_roles_draw_from_distinct_streams() -> None:
    draw = Draw(SamplingParams(temperature=1.0), 7, 11)
    tokens = np.arange(4096)
    streams = [bits_of(draw, role, tokens) for role in (0, ACCEPT_ROLE, RESIDUAL_ROLE, DRAFT_ROLE)]
    assert len(np.unique(np.concatenate(streams))) >= 4 * 4096 - 2  # a birthday is possible
    uniforms = np.stack([stream / 2.0**32 for stream in streams])
    correlations = np.corrcoef(uniforms) - np.eye(4)
    assert np.abs(correlations).max() < 5 / 4096**0.5
