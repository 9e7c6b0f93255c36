"""The law of rejection verification through whole speculation loops, over Markov chains of few tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from foredraft.infer.drafter_card import StateNeeds
from foredraft.infer.drafters import Candidates, Drawn, Step
from foredraft.infer.kv_pool import KVPool
from foredraft.infer.ngram import NgramIndex
from foredraft.infer.params import SamplingParams, SpeculationParams
from foredraft.infer.sampler import CoupledSampler, greedy
from foredraft.infer.speculator import Speculator
from foredraft.infer.step_plan import Row
from foredraft.infer.tree import Block
from foredraft.infer.verify import settle
from foredraft.kernels import dispatch
from foredraft.kernels.draws import Draw

LAW_WIDTH = 64
PROMPT = [0, 1, 0, 2, 0]  # so that endings recur


@dataclass(frozen=True, slots=True)
class Rows:
    """A planned step."""

    rows: Sequence[Row]

    @property
    def num_rows(self) -> int:
        return len(self.rows)


@dataclass
class MarkovDrafter:
    """Its guesses depend on the last token alone: a row of a table of logits float32 [V, V]."""

    logits_VV: torch.Tensor
    row_bucket: int = 4
    max_depth: int = 16
    max_positions: int = 1024
    states: StateNeeds = field(default_factory=StateNeeds)
    pool: KVPool = field(default_factory=lambda: KVPool(num_pages=16))

    def prefill_room(self, seq: int) -> int:
        return 64

    def plan_prefill(self, seq: int, token_ids: Sequence[int]) -> Rows:
        self.pool.extend(seq, len(token_ids))
        return Rows([])

    def prefill(self, step: Step) -> None:
        pass

    def plan_rows(self, rows: Sequence[Row]) -> Rows:
        return Rows(rows)

    def expand_and_draw(
        self, step: Step, draws: Sequence[Draw], fan_out: int, factor: float
    ) -> tuple[Candidates, Drawn]:
        logits_RV = self.logits_VV[[row.token for row in step.plan.rows[-len(draws) :]]]
        drawn = dispatch.saguaro(logits_RV, draws, LAW_WIDTH, fan_out, factor)
        best = dispatch.top_candidates(logits_RV, [greedy(draw) for draw in draws], fan_out)
        arrays = (best.token_ids_NF.int(), best.scores_NF, best.log_probs_NF, best.entropy_N)
        return Candidates(*(one.numpy() for one in arrays)), Drawn(*(one.numpy() for one in drawn))


def decode(
    speculator: Speculator,
    target_VV: torch.Tensor,
    params: SpeculationParams,
    *,
    seed: int,
    length: int,
    before: int,
    during: int,
    is_ngram: bool = False,
) -> tuple[list[int], list[tuple[str, int]]]:
    """Tokens after PROMPT, and of every round what the outcome was and how many guesses were ready.

    before, during: expansions before the block is read and while it is verified; is_ngram: what is missing
    is looked up.
    """
    sampling = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=64)
    sampler, tokens, rounds = CoupledSampler(sampling, PROMPT), list(PROMPT), []
    speculator.open("r", tokens, sampling, params)
    kind = "open"
    while len(tokens) < len(PROMPT) + length:
        speculator.expand("r", before)
        block = speculator.block("r")
        rounds.append((kind, len(block.tokens)))
        if is_ngram and not block.tokens:
            ids = NgramIndex(tokens, longest=2, shortest=1).guess(2)
            block = Block([], ids, [-1, 0][: len(ids)], [])
        speculator.expand("r", during)
        draws = sampler.draws(range(len(tokens), len(tokens) + len(block.tokens) + 1), [])
        logits_MV = target_VV[[tokens[-1], *block.tokens]]
        settled = settle(block, logits_MV, draws, "rejection").settled
        kind = speculator.advance("r", len(tokens), settled)
        tokens += settled
    speculator.close("r")
    return tokens[len(PROMPT) :][:length], rounds


@pytest.mark.parametrize(
    ("num_texts", "length"),
    [pytest.param(150, 3, id="fast"), pytest.param(2000, 4, id="thorough", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("saguaro", [1.0, 0.3])
@pytest.mark.parametrize(
    ("before", "during", "is_ngram"),
    [(2, 0, False), (1, 2, False), (0, 3, False), (0, 2, True)],
    ids=["sync", "waited", "plain-on-miss", "ngram-on-miss"],
)
def test_law_of_the_first_tokens(
    before: int, during: int, is_ngram: bool, saguaro: float, num_texts: int, length: int
) -> None:
    """Chi-square against the enumeration of all texts; hits, misses, blocks of all lengths, empty ones too.

    F is less than the tokens that a guess may be.
    """
    generator = torch.Generator().manual_seed(3)
    vocab_size = 4
    target_VV = torch.randn(vocab_size, vocab_size, generator=generator)
    drafter_VV = target_VV + torch.randn(vocab_size, vocab_size, generator=generator)
    speculator = Speculator(MarkovDrafter(drafter_VV))
    params = SpeculationParams(
        verification="rejection", block="chain", k=3, fan_out=2, saguaro=saguaro, budget=5
    )
    found: Counter[tuple[int, ...]] = Counter()
    kinds: Counter[str] = Counter()
    sizes: Counter[int] = Counter()
    for seed in range(num_texts):
        text, rounds = decode(
            speculator,
            target_VV,
            params,
            seed=seed,
            length=length,
            before=before,
            during=during,
            is_ngram=is_ngram,
        )
        found[tuple(text)] += 1
        kinds.update(kind for kind, _ in rounds)
        sizes.update(size for _, size in rounds)
    assert kinds["hit"]
    assert kinds["miss"]
    assert len(sizes) > 1
    probs_VV = target_VV.double().softmax(-1).numpy()
    texts = list(itertools.product(range(vocab_size), repeat=length))
    law = np.array(
        [np.prod([probs_VV[pair] for pair in itertools.pairwise((PROMPT[-1], *t))]) for t in texts]
    )
    expected, observed = num_texts * law / law.sum(), np.array([found[text] for text in texts])
    is_rare = expected < 5
    observed = [*observed[~is_rare], observed[is_rare].sum()]
    expected = [*expected[~is_rare], expected[is_rare].sum()]
    assert chisquare(observed, expected).pvalue > 1e-4


def logits_of(laws: dict[int, dict[int, float]], vocab_size: int) -> torch.Tensor:
    """[V, V]; a token without a law has the uniform one."""
    probs_VV = torch.zeros(vocab_size, vocab_size)
    for token in range(vocab_size):
        law = laws.get(token, dict.fromkeys(range(vocab_size), 1 / vocab_size))
        for following, prob in law.items():
            probs_VV[token, following] = prob
    return probs_VV.log()


def test_what_is_prepared_tells_nothing_of_a_guess() -> None:
    """Outcome 2 is prepared only where the guess below outcome 1 is 3, whose future is certain.

    If both guesses came from the same noise, a block after outcome 2 could only say 3, and 3 would come too
    often after 2.
    """
    either = {3: 0.5, 4: 0.5}
    shared = {1: either, 2: either, 3: {3: 1.0}, 4: either}
    target_VV = logits_of({0: {1: 0.3, 2: 0.7}, **shared}, 5)
    drafter_VV = logits_of({0: {1: 0.8, 2: 0.2}, **shared}, 5)
    speculator = Speculator(MarkovDrafter(drafter_VV, row_bucket=1, max_depth=4))
    params = SpeculationParams(verification="rejection", block="chain", k=1, fan_out=2)
    after_2: Counter[int] = Counter()
    num_prepared: Counter[bool] = Counter()
    for seed in range(300):
        text, rounds = decode(speculator, target_VV, params, seed=seed, length=2, before=0, during=7)
        if text[0] == 2:
            after_2[text[1]] += 1
            num_prepared[rounds[-1][1] > 0] += 1
    assert min(num_prepared.values()) > 20, "the preparation depends on the other guess"
    assert chisquare([after_2[3], after_2[4]]).pvalue > 1e-4
