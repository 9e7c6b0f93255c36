"""Rejection verification and its drafter's draw in Triton: the reference's tokens and laws."""

from __future__ import annotations

import pytest
import torch

from foredraft.infer.params import SamplingParams
from foredraft.kernels import dispatch
from foredraft.kernels.draws import Draw
from foredraft.kernels.rejection_verify_ref import NO_GUESS, DraftLaw, Settled

pytestmark = pytest.mark.usefixtures("poisoned_empty")


FILTERS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "nucleus": SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.4),
}
SHAPES = [
    pytest.param(1, 7, 49152, 64, id="production"),
    pytest.param(3, 4, 1023, 5, id="odd"),
    pytest.param(2, 1, 7, 7, id="tiny-vocabulary"),
    pytest.param(4, 0, 1025, 1, id="no-guesses"),
    pytest.param(2, 3, 2049, 0, id="dense-law"),
]


def chains(
    num_sequences: int, num_guesses: int, vocab_size: int, width: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, DraftLaw]:
    """Logits, guesses and their laws: near the target's own, so that many guesses are accepted."""
    generator = torch.Generator().manual_seed(seed)
    logits_SMV = torch.randn(num_sequences, num_guesses + 1, vocab_size, generator=generator) * 3
    logits_SMV[-1, :, vocab_size // 2 :] = -torch.inf  # whole slices without a possible token
    near_SKV = logits_SMV[:, :-1] + 0.7 * torch.randn(
        num_sequences, num_guesses, vocab_size, generator=generator
    )
    best = near_SKV.topk(width or vocab_size, -1)
    probs_SKm = best.values.softmax(-1)
    picks = (
        torch.multinomial(probs_SKm.reshape(-1, probs_SKm.shape[-1]), 1, generator=generator)
        if num_guesses
        else None
    )
    picks_SK1 = (
        torch.zeros(num_sequences, 0, 1).long()
        if picks is None
        else picks.view(num_sequences, num_guesses, 1)
    )
    tokens_SK = best.indices.gather(-1, picks_SK1).squeeze(-1)
    if width:
        return logits_SMV, tokens_SK.contiguous(), DraftLaw(probs_SKm.contiguous(), best.indices.contiguous())
    return logits_SMV, tokens_SK.contiguous(), DraftLaw(near_SKV.softmax(-1).contiguous())


def draws_of(filters: SamplingParams, num_sequences: int, num_places: int, seed: int) -> list[Draw]:
    return [
        Draw(filters, seed * 2**40 + sequence, 100 + place, choice=sequence % 2, prompt=(1, 3), output=(2,))
        for sequence in range(num_sequences)
        for place in range(num_places)
    ]


def settle(
    implementation: str, device: str, chain: tuple[torch.Tensor, torch.Tensor, DraftLaw], draws: list[Draw]
) -> Settled:
    logits_SMV, tokens_SK, law = chain
    law = DraftLaw(*(None if tensor is None else tensor.to(device) for tensor in law))
    with dispatch.forcing(implementation):
        settled = dispatch.rejection_verify(logits_SMV.to(device), tokens_SK.to(device), law, draws)
    return Settled(*(tensor.cpu() for tensor in settled))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("num_sequences", "num_guesses", "vocab_size", "width"), SHAPES)
def test_triton_equals_the_reference(
    num_sequences: int, num_guesses: int, vocab_size: int, width: int, name: str, kernel_device: str
) -> None:
    if vocab_size > 5000 and name not in ("greedy", "temperature"):
        pytest.skip("the filters do not depend on V")
    for seed in range(1 if vocab_size > 5000 else 2):
        chain = chains(num_sequences, num_guesses, vocab_size, width, seed)
        if num_guesses > 2:
            chain[1][-1, -1] = NO_GUESS
        draws = draws_of(FILTERS[name], num_sequences, num_guesses + 1, seed)
        expected, found = (settle(one, kernel_device, chain, draws) for one in ("reference", "triton"))
        assert torch.equal(found.num_accepted_S, expected.num_accepted_S)
        assert torch.equal(found.bonus_S, expected.bonus_S)


SAGUARO_SHAPES = [
    pytest.param(2, 49152, 64, False, id="N2-C49152-m64"),
    pytest.param(5, 1021, 5, True, id="N5-C1021-of-3063-m5"),
    pytest.param(3, 7, 64, False, id="N3-C7-whole-law"),
]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("num_rows", "num_columns", "num_kept", "is_reduced"), SAGUARO_SHAPES)
def test_a_guess_and_its_law_are_the_references(
    num_rows: int, num_columns: int, num_kept: int, is_reduced: bool, name: str, kernel_device: str
) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    logits_NC = 3.0 * torch.randn(num_rows, num_columns, generator=generator)
    logits_NC[-1, 2:] = -torch.inf  # fewer tokens are possible than a law has room for
    ids = torch.randperm(3 * num_columns, generator=generator)[:num_columns].sort().values
    draws = draws_of(FILTERS[name], num_rows, 1, seed=5)
    found = []
    for implementation, device in (("reference", "cpu"), ("triton", kernel_device)):
        ids_C = ids.to(device) if is_reduced else None
        with dispatch.forcing(implementation):
            drafted = dispatch.saguaro(logits_NC.to(device), draws, num_kept, 3, 0.4, ids_C)
        found.append([tensor.cpu() for tensor in drafted])
    for expected, own in zip(*found, strict=True):
        if expected.is_floating_point():
            # a softmax of a few tokens in another order
            torch.testing.assert_close(own, expected, rtol=3e-6, atol=1e-7)
        else:
            assert torch.equal(own, expected)


def test_what_does_not_fit_is_refused(kernel_device: str) -> None:
    logits_SMV, tokens_SK, law = chains(2, 3, 40, 4, seed=0)
    draws = draws_of(FILTERS["temperature"], 2, 4, seed=0)
    wrong = {
        "logits_SMV must be contiguous": (logits_SMV.mT.contiguous().mT, tokens_SK, law, draws),
        "tokens_SK must be contiguous torch.int64": (logits_SMV, tokens_SK.int(), law, draws),
        "probs_SKm must be contiguous": (logits_SMV, tokens_SK, DraftLaw(law.probs_SKm), draws),
        "a draw a place, 8, got 7": (logits_SMV, tokens_SK, law, draws[:-1]),
    }
    for implementation in ("reference", "triton"):
        for text, arguments in wrong.items():
            with dispatch.forcing(implementation), pytest.raises(ValueError, match=text):
                dispatch.rejection_verify(*arguments)
        with dispatch.forcing(implementation), pytest.raises(ValueError, match="contiguous float32"):
            dispatch.saguaro(logits_SMV[0].T, draws_of(FILTERS["greedy"], 1, 40, seed=0), 4, 3, 1.0)
