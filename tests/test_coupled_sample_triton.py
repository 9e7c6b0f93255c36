"""Coupled sampling and candidates in Triton: the reference's tokens, scores and statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from foredraft.infer.params import SamplingParams
from foredraft.kernels import dispatch
from foredraft.kernels.coupled_sample_ref import keep_threshold
from foredraft.kernels.draws import Draw, draw_table
from foredraft.kernels.keep_thresholds_triton import keep_thresholds
from foredraft.kernels.philox_ref import bits_of, gumbel
from foredraft.kernels.philox_triton import bits_from as triton_bits_from
from foredraft.kernels.philox_triton import bits_of as triton_bits_of
from foredraft.kernels.philox_triton import gumbel as triton_gumbel
from foredraft.kernels.philox_triton import uniform as triton_uniform
from foredraft.kernels.top_candidates_ref import NO_TOKEN, TopCandidates

pytestmark = pytest.mark.usefixtures("poisoned_empty")

FILTERS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.7, top_k=5),
    "nucleus": SamplingParams(temperature=0.9, top_p=0.8),
    "wide-nucleus": SamplingParams(temperature=3.0, top_p=0.99),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "all": SamplingParams(
        temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.4,
        frequency_penalty=0.2, logit_bias=((5, -3.0), (6, 2.0)),
    ),
}  # fmt: skip
# rows, columns, whether they are some of the target's ids
SHAPES = {
    "N2-V49152-target": (2, 49152, False),
    "N1-C16384-of-49152": (1, 16384, True),
    "N3-V1025-ragged": (3, 1025, False),
    "N2-C1021-of-3063": (2, 1021, True),
    "N1-V3": (1, 3, False),
}
PRODUCTION = "N2-V49152-target"
CASES = [
    pytest.param(
        *shape,
        name,
        id=f"{size}-{name}",
        marks=[pytest.mark.slow] if size == PRODUCTION and name not in ("plain", "top-k") else [],
    )
    for size, shape in SHAPES.items()
    for name in FILTERS
]
NAMES = ("num_rows", "num_columns", "is_reduced", "name")


def make_rows(
    num_rows: int, num_columns: int, *, is_reduced: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits peaked like a language model's and flat ones in turn; the ids of the columns."""
    generator = torch.Generator().manual_seed(num_columns)
    logits_NC = 3.0 * torch.randn(num_rows, num_columns, generator=generator)
    logits_NC[::2, : num_columns // 40] += 9.0
    ids = torch.randperm(3 * num_columns, generator=generator)[:num_columns].sort().values
    return logits_NC, ids if is_reduced else None


def draws_of(filters: SamplingParams, num_rows: int, vocab_size: int) -> list[Draw]:
    """Distinct names with high bits set; tokens before each row, of which some are not in a reduced head."""
    return [
        Draw(filters, 2**64 - 1 - row, 2**31 + row, row % 2, (1, 2 % vocab_size), (row % vocab_size, 1))
        for row in range(num_rows)
    ]


def on(device: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


@pytest.mark.parametrize(NAMES, CASES)
def test_tokens_are_the_references(
    num_rows: int, num_columns: int, is_reduced: bool, name: str, kernel_device: str
) -> None:
    logits_NC, ids_C = make_rows(num_rows, num_columns, is_reduced=is_reduced)
    draws = draws_of(FILTERS[name], num_rows, num_columns)
    expected_N = dispatch.coupled_sample(logits_NC, draws, ids_C)
    with dispatch.forcing("triton"):
        found_N = dispatch.coupled_sample(logits_NC.to(kernel_device), draws, on(kernel_device, ids_C))
    assert found_N.tolist() == expected_N.tolist()


@pytest.mark.parametrize(NAMES, CASES)
def test_candidates_are_the_references(
    num_rows: int, num_columns: int, is_reduced: bool, name: str, kernel_device: str
) -> None:
    logits_NC, ids_C = make_rows(num_rows, num_columns, is_reduced=is_reduced)
    draws = draws_of(FILTERS[name], num_rows, num_columns)
    expected, found = both_candidates(logits_NC, draws, 16, ids_C, kernel_device)
    assert torch.equal(found.token_ids_NF, expected.token_ids_NF)
    # noise within 4 ulp, and sums of thousands of exponentials in another order
    for field in ("scores_NF", "log_probs_NF", "log_sum_exp_N", "entropy_N"):
        pair = getattr(found, field), getattr(expected, field)
        torch.testing.assert_close(
            *pair, rtol=2e-6, atol=2e-5, msg=lambda text, field=field: f"{field}: {text}"
        )


def both_candidates(
    logits_NC: torch.Tensor, draws: list[Draw], fan_out: int, ids_C: torch.Tensor | None, device: str
) -> tuple[TopCandidates, TopCandidates]:
    """By the reference, then by Triton."""
    expected = dispatch.top_candidates(logits_NC, draws, fan_out, ids_C)
    with dispatch.forcing("triton"):
        found = dispatch.top_candidates(logits_NC.to(device), draws, fan_out, on(device, ids_C))
    return expected, TopCandidates(*(tensor.cpu() for tensor in found))


@pytest.mark.parametrize("name", ["top-k", "nucleus", "wide-nucleus", "min-p", "all"])
def test_thresholds_are_found_without_a_sort(name: str, kernel_device: str) -> None:
    logits_NC, _ = make_rows(6, 2049)
    logits_NC[1] = logits_NC[1].round()  # whole groups of ties
    logits_NC[2, 5:] = -torch.inf
    logits_NC[3] *= 1e4  # saturated: one token has all the mass
    draws = draws_of(FILTERS[name], 6, 2049)
    table_N8 = draw_table(draws, torch.device(kernel_device))
    found_N = keep_thresholds(logits_NC.to(kernel_device), table_N8).cpu()
    torch.testing.assert_close(found_N, keep_threshold(logits_NC, FILTERS[name]), rtol=1e-6, atol=0.0)


def test_a_table_mixes_filters(kernel_device: str) -> None:
    logits_NC, _ = make_rows(len(FILTERS), 1500)
    draws = [Draw(filters, 7, 40 + row, output=(3,)) for row, filters in enumerate(FILTERS.values())]
    expected_N = dispatch.coupled_sample(logits_NC, draws)
    with dispatch.forcing("triton"):
        found_N = dispatch.coupled_sample(logits_NC.to(kernel_device), draws)
    assert found_N.tolist() == expected_N.tolist()


def test_ties_go_to_the_lowest_and_impossible_rows_stay_finite(kernel_device: str) -> None:
    logits_NC = torch.zeros(3, 3000)
    logits_NC[0, [1200, 7, 2999]] = 4.0
    logits_NC[1] = -torch.inf
    logits_NC[2, 1:] = -torch.inf
    draws = [Draw(SamplingParams(), 0, 1)] * 3
    with dispatch.forcing("triton"):
        assert dispatch.coupled_sample(logits_NC.to(kernel_device), draws).tolist() == [7, 0, 0]
    _, found = both_candidates(logits_NC, draws, 4, None, kernel_device)
    assert found.token_ids_NF.tolist() == [[7, 1200, 2999, 0], [NO_TOKEN] * 4, [0, *[NO_TOKEN] * 3]]
    assert found.scores_NF[2].tolist() == found.log_probs_NF[2].tolist() == [0.0, *[-torch.inf] * 3]
    assert found.entropy_N[2] == 0.0


@pytest.mark.parametrize("fan_out", [1, 64])
def test_any_fan_out(fan_out: int, kernel_device: str) -> None:
    logits_NC, _ = make_rows(2, 5000)
    draws = draws_of(FILTERS["plain"], 2, 5000)
    expected, found = both_candidates(logits_NC, draws, fan_out, None, kernel_device)
    assert torch.equal(found.token_ids_NF, expected.token_ids_NF)


def test_what_does_not_fit_is_refused(kernel_device: str) -> None:
    draws = [Draw(SamplingParams(), 0, 1)] * 2
    logits_NC = torch.zeros(2, 4, device=kernel_device)
    with dispatch.forcing("triton"):
        for operation in (dispatch.coupled_sample, lambda z, d: dispatch.top_candidates(z, d, 4)):
            with pytest.raises(ValueError, match=r"use \.float"):
                operation(logits_NC.T.contiguous().T, draws)
            with pytest.raises(ValueError, match="a draw a row"):
                operation(logits_NC, draws[:1])
        with pytest.raises(ValueError, match=r"fan_out must be in 1..64, got 65"):
            dispatch.top_candidates(logits_NC, draws, 65)


@triton.jit
def _noise_kernel(table_ptr, ids_ptr, bits_ptr, uniform_ptr, first, role: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    seed = tl.load(table_ptr)
    position, choice = tl.load(table_ptr + 1).to(tl.int32), tl.load(table_ptr + 2).to(tl.int32)
    some = triton_bits_of(tl.load(ids_ptr + place).to(tl.int32), seed, position, choice, role)
    run = triton_bits_from(first, seed, position, choice, role, BLOCK)
    tl.store(bits_ptr + place, some.to(tl.int32, bitcast=True))
    tl.store(bits_ptr + BLOCK + place, run.to(tl.int32, bitcast=True))
    tl.store(uniform_ptr, triton_uniform(seed, position, choice, role))


@pytest.mark.parametrize("role", [0, 1, 3])
def test_bits_equal_the_reference(role: int, kernel_device: str) -> None:
    draw = Draw(SamplingParams(), 2**64 - 12345, 2**31 + 77, 2**32 - 1)
    ids = torch.randint(0, 200_000, (1024,), generator=torch.Generator().manual_seed(role))
    bits = torch.zeros(2, 1024, dtype=torch.int32, device=kernel_device)
    uniform = torch.zeros(1, device=kernel_device)
    table = draw_table([draw], torch.device(kernel_device))
    _noise_kernel[(1,)](table, ids.to(kernel_device), bits, uniform, 4096, role=role, BLOCK=1024)
    some, run = bits.cpu().numpy().view(np.uint32)
    assert (some == bits_of(draw, role, ids.numpy())).all()
    assert (run == bits_of(draw, role, np.arange(4096, 5120))).all()
    assert uniform.item() == (bits_of(draw, role, np.zeros(1, np.int64))[0] >> 8) * 2.0**-24


@triton.jit
def _gumbel_kernel(bits_ptr, noise_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + place).to(tl.uint32, bitcast=True)
    tl.store(noise_ptr + place, triton_gumbel(bits))


def test_noise_is_within_four_ulp(kernel_device: str) -> None:
    """Of its own size, or of 1 where it is smaller; at both ends of the bits and between."""
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:4] = 0, 1, 0xFFFFFFFE, 0xFFFFFFFF
    bits[4:100] = np.arange(96)  # the largest noise
    noise = torch.zeros(4096, device=kernel_device)
    _gumbel_kernel[(1,)](torch.from_numpy(bits.view(np.int32)).to(kernel_device), noise, BLOCK=4096)
    exact = gumbel(bits)
    ulp = np.spacing(np.maximum(np.abs(exact), np.float32(1.0)))
    assert np.isfinite(exact).all()
    assert (np.abs(noise.cpu().numpy() - exact) <= 4 * ulp).all()
