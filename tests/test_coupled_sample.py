"""The sampling pipeline against transformers' logits processors, and its law against softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foredraft.infer.params import SamplingParams
from foredraft.infer.sampler import CoupledSampler
from foredraft.kernels.coupled_sample_ref import coupled_argmax, perturbed_scores
from foredraft.kernels.philox_ref import gumbel, gumbel_row, philox4x32

PIPELINES = [
    pytest.param({"temperature": 0.7}, id="temperature"),
    pytest.param({"temperature": 1.0, "top_k": 5}, id="top_k"),
    pytest.param({"temperature": 0.7, "top_p": 0.95}, id="top_p"),
    pytest.param({"temperature": 1.3, "top_p": 0.999}, id="wide_nucleus"),
    pytest.param({"temperature": 1.0, "min_p": 0.05}, id="min_p"),
    pytest.param(
        {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.1}, id="all"
    ),
]


def transformers_scores(
    logits_RV: torch.Tensor, params: SamplingParams, seen_RN: torch.Tensor
) -> torch.Tensor:
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(seen_RN, logits_RV)


def distance_to_nucleus_edge(
    expected_RV: torch.Tensor, logits_RV: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """|mass of strictly better tokens - top_p| of every token, float64 [R, V]; infinite without a nucleus."""
    if params.top_p == 1.0 or params.top_k:
        return torch.full(expected_RV.shape, torch.inf)
    probs_RV = (logits_RV.double() / params.temperature).softmax(-1)
    ordered_RV, order_RV = probs_RV.sort(descending=True)
    before_RV = torch.empty_like(probs_RV).scatter_(1, order_RV, ordered_RV.cumsum(1) - ordered_RV)
    return (before_RV - params.top_p).abs()


@pytest.mark.parametrize("vocab_size", [50, 3001])
@pytest.mark.parametrize("settings", PIPELINES)
def test_masks_and_order_equal_transformers(settings: dict, vocab_size: int) -> None:
    torch.manual_seed(0)
    logits_RV = torch.randn(16, vocab_size) * 3
    params = SamplingParams(seed=3, **settings)
    seen_RN = torch.randint(vocab_size, (16, 12))
    seen_RV = torch.zeros(16, vocab_size, dtype=torch.bool).scatter_(1, seen_RN, True)
    noise_RV = torch.zeros(16, vocab_size)
    scores_RV = perturbed_scores(logits_RV, params, noise_RV, seen_RV)
    expected_RV = transformers_scores(logits_RV, params, seen_RN)
    differs = scores_RV.isinf() != expected_RV.isinf()
    # float32 sums of thousands of probabilities: a token at the edge of the nucleus may fall on either side
    assert distance_to_nucleus_edge(expected_RV, logits_RV, params)[differs].lt(1e-6).all()
    kept = ~scores_RV.isinf() & ~differs
    torch.testing.assert_close(scores_RV[kept] / params.temperature, expected_RV[kept])


def test_score_adds_temperature_times_noise() -> None:
    logits_RV, noise_RV = torch.randn(4, 9), torch.randn(4, 9)
    params = SamplingParams(temperature=0.6, seed=0)
    torch.testing.assert_close(
        perturbed_scores(logits_RV, params, noise_RV, None), logits_RV + 0.6 * noise_RV
    )


def test_greedy_ignores_filters_and_breaks_ties_by_lowest_id() -> None:
    logits_RV = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    params = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    assert coupled_argmax(logits_RV, params, None, None).tolist() == [1, 0]


def noise_of_positions(seed: int, num_positions: int, vocab_size: int) -> np.ndarray:
    """float32 [num_positions, V]: the rows of `gumbel_row` in one call; V a multiple of 4."""
    counter = np.zeros((num_positions, vocab_size // 4, 4), dtype=np.uint32)
    counter[..., 0] = np.arange(vocab_size // 4)
    counter[..., 1] = np.arange(num_positions)[:, None]
    rows = gumbel(philox4x32(seed, counter.reshape(-1, 4))).reshape(num_positions, vocab_size)
    assert (rows[7] == gumbel_row(seed, 7, 0, vocab_size)).all()
    return rows


@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}], ids=["plain", "nucleus"]
)
def test_law_is_softmax(settings: dict) -> None:
    """2e5 draws at distinct positions against the exact probabilities (chi-square)."""
    num_draws, vocab_size = 200_000, 8
    torch.manual_seed(1)
    logits_V = torch.randn(vocab_size) * 1.5
    params = SamplingParams(seed=11, **settings)
    noise_RV = torch.from_numpy(noise_of_positions(11, num_draws, vocab_size))
    chosen_R = coupled_argmax(logits_V.expand(num_draws, -1), params, noise_RV, None)
    exact_V = transformers_scores(logits_V[None], params, torch.zeros(1, 1, dtype=torch.long))[0].softmax(-1)
    counts_V = torch.bincount(chosen_R, minlength=vocab_size)
    possible = exact_V > 0
    assert not counts_V[~possible].any()
    expected = exact_V[possible].double()
    result = chisquare(counts_V[possible].numpy(), (expected / expected.sum() * num_draws).numpy())
    assert result.pvalue > 1e-4


def test_reduced_vocabulary_sees_the_noise_of_its_target_ids() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    token_ids = torch.tensor([3, 17, 29])
    full, reduced = CoupledSampler(params, 32), CoupledSampler(params, 32, token_ids)
    assert torch.equal(reduced.noise([4, 9]), full.noise([4, 9])[:, token_ids])


def test_noise_of_a_position_does_not_depend_on_what_was_asked_before() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    sampler = CoupledSampler(params, 16)
    first = sampler.noise([200]).clone()
    sampler.noise(list(range(100)))
    assert torch.equal(sampler.noise([200]), first)


def test_repetition_penalty_covers_the_rows_own_path() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    logits_RV = torch.tensor([[4.0, 3.0, 1.0]] * 2)
    assert CoupledSampler(params, 3).choose(logits_RV, [5, 6], [[2], [2, 0]]) == [0, 1]
