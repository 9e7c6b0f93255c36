"""The sampling pipeline against transformers' logits processors, and its law against softmax."""

from __future__ import annotations

from collections.abc import Callable

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
from foredraft.kernels import coupled_sample_fast, coupled_sample_ref
from foredraft.kernels.coupled_sample_fast import top_columns
from foredraft.kernels.coupled_sample_ref import perturbed_scores
from foredraft.kernels.draws import Draw
from foredraft.kernels.penalties import penalise
from foredraft.kernels.philox_ref import gumbel_row

CoupledSample = Callable[..., torch.Tensor]

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


FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "nucleus": {"temperature": 0.9, "top_p": 0.8},
    "wide-nucleus": {"temperature": 3.0, "top_p": 0.99},
    "top-k": {"temperature": 0.7, "top_k": 5},
    "all": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalty": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3},
}


@pytest.fixture(params=[coupled_sample_ref, coupled_sample_fast], ids=["reference", "fast"])
def coupled_sample(request: pytest.FixtureRequest) -> CoupledSample:
    return request.param.coupled_sample


def noise_of(draw: Draw, vocab_size: int) -> torch.Tensor:
    """float32 [V]."""
    return torch.from_numpy(gumbel_row(draw.seed, draw.position, draw.choice, vocab_size))


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
    draws = [
        Draw(params, 3, row, prompt=seen[:5], output=seen[5:]) for row, seen in enumerate(seen_RN.tolist())
    ]
    scores_RV = perturbed_scores(logits_RV, draws)
    expected_RV = transformers_scores(logits_RV, params, seen_RN)
    differs = scores_RV.isinf() != expected_RV.isinf()
    # float32 sums of thousands of probabilities: a token at the edge of the nucleus may fall on either side
    assert distance_to_nucleus_edge(expected_RV, logits_RV, params)[differs].lt(1e-6).all()
    kept = ~scores_RV.isinf() & ~differs
    noise_RV = torch.stack([noise_of(draw, vocab_size) for draw in draws])
    # adding and removing noise rounds at its size
    torch.testing.assert_close(
        (scores_RV / params.temperature - noise_RV)[kept], expected_RV[kept], rtol=1.3e-6, atol=1e-5
    )


def test_score_adds_temperature_times_noise() -> None:
    logits_RV, params = torch.randn(4, 9), SamplingParams(temperature=0.6, seed=0)
    draws = [Draw(params, 0, position) for position in (3, 8, 3, 1)]
    noise_RV = torch.stack([noise_of(draw, 9) for draw in draws])
    torch.testing.assert_close(perturbed_scores(logits_RV, draws), logits_RV + 0.6 * noise_RV)


def test_greedy_ignores_filters_and_breaks_ties_by_lowest_id(coupled_sample: CoupledSample) -> None:
    logits_RV = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    params = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    assert coupled_sample(logits_RV, [Draw(params, 0, 1)] * 2).tolist() == [1, 0]


@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}], ids=["plain", "nucleus"]
)
def test_law_is_softmax(settings: dict) -> None:
    """3e4 draws at distinct positions against the exact probabilities (chi-square)."""
    num_draws, vocab_size = 30_000, 8
    torch.manual_seed(1)
    logits_V = torch.randn(vocab_size) * 1.5
    params = SamplingParams(seed=11, **settings)
    draws = [Draw(params, 11, position) for position in range(num_draws)]
    chosen_R = coupled_sample_ref.coupled_sample(logits_V.expand(num_draws, -1).contiguous(), draws)
    exact_V = transformers_scores(logits_V[None], params, torch.zeros(1, 1, dtype=torch.long))[0].softmax(-1)
    counts_V = torch.bincount(chosen_R, minlength=vocab_size)
    possible = exact_V > 0
    assert not counts_V[~possible].any()
    expected = exact_V[possible].double()
    result = chisquare(counts_V[possible].numpy(), (expected / expected.sum() * num_draws).numpy())
    assert result.pvalue > 1e-4


@pytest.mark.parametrize("name", FILTERS)
def test_a_reduced_head_sees_the_noise_of_its_target_ids(name: str, coupled_sample: CoupledSample) -> None:
    """A head of some columns chooses what the whole one does, were all other tokens impossible."""
    params, token_ids = SamplingParams(**FILTERS[name]), torch.tensor([3, 17, 29, 31])
    logits_RV = torch.full((20, 32), -torch.inf)
    logits_RV[:, token_ids] = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    draws = [Draw(params, 5, position, prompt=(3, 4), output=(17,)) for position in range(20)]
    full_R = coupled_sample(logits_RV, draws)
    assert torch.equal(coupled_sample(logits_RV[:, token_ids].contiguous(), draws, token_ids), full_R)
    assert set(full_R.tolist()) > {3} or name == "greedy"


@pytest.mark.parametrize("names", [*[[name] for name in FILTERS], list(FILTERS)], ids=[*FILTERS, "mixed"])
def test_the_fast_choice_equals_the_reference(names: list[str]) -> None:
    vocab_size = 20001
    generator = torch.Generator().manual_seed(1)
    logits_RV = 3.0 * torch.randn(16 * len(names), vocab_size, generator=generator)
    # rows peaked like a language model's, and flat ones whose nucleus is wide
    logits_RV[: 8 * len(names), :30] += 12.0
    draws = [
        Draw(SamplingParams(**FILTERS[name]), 2**63 + row, 7 + row, prompt=(1, 5), output=(row,))
        for row, name in enumerate(16 * names)
    ]
    chosen_R = coupled_sample_fast.coupled_sample(logits_RV, draws)
    assert torch.equal(chosen_R, coupled_sample_ref.coupled_sample(logits_RV, draws))


@pytest.mark.parametrize("shape", [(3, 20000, 64), (2, 20017, 8), (4, 100, 64), (1, 5, 64)])
def test_top_columns_are_topk(shape: tuple[int, int, int]) -> None:
    num_rows, vocab_size, width = shape
    logits_RV = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    logits_RV[0, :40] += 10.0
    top = top_columns(logits_RV, width)
    expected = logits_RV.topk(min(width, vocab_size))
    assert torch.equal(top.logits_NW, expected.values)
    assert torch.equal(logits_RV.gather(1, top.columns_NW), expected.values)


def test_penalties_edit_what_openai_and_transformers_say() -> None:
    """Token 0 in the prompt, 1 twice in the output, 2 in both, 3 biased, 4 nowhere."""
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((3, -4.0), (9, 1.0))
    )
    logits_1V = torch.tensor([[4.0, -3.0, 1.0, 2.0, 5.0]])
    draw = Draw(params, 0, 6, prompt=(0, 2), output=(1, 2, 1))
    expected_1V = torch.tensor([[2.0, -6.0 - 0.5 - 0.5, 0.5 - 0.5 - 0.25, -2.0, 5.0]])
    assert torch.equal(penalise(logits_1V, [draw]), expected_1V)
    some_C = torch.tensor([2, 4, 1])
    assert torch.equal(penalise(logits_1V[:, some_C], [draw], some_C), expected_1V[:, some_C])
    assert penalise(logits_1V, [Draw(SamplingParams(), 0, 6, output=(1,))]) is logits_1V


def test_penalties_cover_the_rows_own_path() -> None:
    sampler = CoupledSampler(SamplingParams(repetition_penalty=2.0), prompt=[2])
    logits_RV = torch.tensor([[4.0, 3.0, 1.0]] * 2)
    draws = sampler.draws([5, 6], [[], [0]])
    assert coupled_sample_ref.coupled_sample(logits_RV, draws).tolist() == [0, 1]


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "logit_bias"])
def test_settings_out_of_range_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: ((3, 200.0),) if field == "logit_bias" else 2.5})


def test_logits_that_do_not_fit_are_refused(coupled_sample: CoupledSample) -> None:
    draws = [Draw(SamplingParams(), 0, 1)] * 2
    for logits, expected in [
        (torch.zeros(3, 4), "a draw a row, 3, got 2"),
        (torch.zeros(2, 4).half(), "float32, got torch.float16"),
        (torch.zeros(4, 2).T, "use .float"),
    ]:
        with pytest.raises(ValueError, match=expected):
            coupled_sample(logits, draws)
