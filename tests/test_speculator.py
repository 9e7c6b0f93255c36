"""The speculator under every order of plans, outcomes and results: it guesses as a fresh start would."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from foredraft.infer.drafters import load_drafter
from foredraft.infer.params import EngineConfig, SamplingParams, SpeculationParams
from foredraft.infer.session import Session
from foredraft.infer.speculator import Speculator

GREEDY = SamplingParams(seed=0, max_new_tokens=400)
SAMPLED = SamplingParams(seed=3, temperature=0.8, repetition_penalty=1.2, max_new_tokens=400)


@pytest.fixture(scope="module")
def speculator(tiny_drafter: Path) -> Speculator:
    return Speculator(load_drafter(str(tiny_drafter), EngineConfig()))


def root_guesses(session: Session) -> list[tuple[int, float]]:
    tree = session.tree
    return [(tree.token(child), tree.prob(child)) for child in tree.children(tree.root)]


def expand_root(speculator: Speculator, name: str) -> list[tuple[int, float]]:
    session = speculator.sessions[name]
    while not session.tree.children(session.tree.root):
        assert speculator.expand(name, 1)
    return root_guesses(session)


def assert_as_if_fresh(speculator: Speculator, name: str, sampling: SamplingParams) -> None:
    """The candidates after the root are those of a request opened with the same tokens."""
    session = speculator.sessions[name]
    guesses = expand_root(speculator, name)
    speculator.open("fresh", session.tokens, sampling, session.params)
    fresh = expand_root(speculator, "fresh")
    speculator.close("fresh")
    assert [token for token, _ in guesses] == [token for token, _ in fresh]
    assert [prob for _, prob in guesses] == pytest.approx([prob for _, prob in fresh], abs=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_guesses_survive_every_interleaving(
    speculator: Speculator, sampling: SamplingParams, shape: str
) -> None:
    """Outcomes arrive before, while and after jobs run: hits, partial matches, misses of several tokens."""
    generator = random.Random(0)
    params = SpeculationParams(block=shape, fan_out=4)
    speculator.open("a", [generator.randrange(320) for _ in range(70)], sampling, params)
    kinds = set()
    for _ in range(40):
        for _ in range(generator.randrange(3)):
            speculator.expand("a", 1)
        # in flight when the outcome comes
        job = speculator.next_job("a") if generator.random() < 0.5 else None
        session = speculator.sessions["a"]
        settled = guessed_path(session, generator.randrange(4))
        if not settled or generator.random() < 0.4:
            settled.append(generator.randrange(320))
        kinds.add(speculator.advance("a", len(session.tokens), settled))
        if job is not None:
            speculator.merge(job, speculator.run(job))
        if generator.random() < 0.5:
            assert_as_if_fresh(speculator, "a", sampling)
    assert kinds == {"hit", "leaf", "miss"}
    assert speculator.stats("a")["draft_tokens_recomputed"] == 0
    speculator.close("a")


def guessed_path(session: Session, length: int) -> list[int]:
    """Tokens down the best guesses."""
    tree, node, path = session.tree, session.tree.root, []
    while len(path) < length and tree.children(node):
        node = tree.children(node)[0]
        path.append(tree.token(node))
    return path


def test_a_hit_computes_nothing_again(speculator: Speculator) -> None:
    """After a hit no settled token waits for its KV, and what is kept was computed before."""
    speculator.open("b", list(range(5, 30)), GREEDY, SpeculationParams())
    session = speculator.sessions["b"]
    for _ in range(10):
        speculator.expand("b", 4)
        path = guessed_path(session, 2)
        before = set(session.kv_nodes)
        assert speculator.advance("b", len(session.tokens), path) == "hit"
        assert set(session.kv_nodes) <= before
        assert not session.pending
    speculator.close("b")


def test_budget_stops_between_outcomes(speculator: Speculator) -> None:
    speculator.open("c", [5, 6, 7], GREEDY, SpeculationParams(budget=8))
    speculator.expand("c", 2)
    speculator.block("c")
    for _ in range(50):
        speculator.expand("c", 1)
    session = speculator.sessions["c"]
    assert 8 <= session.num_spent < 8 + speculator.drafter.row_bucket
    assert speculator.next_job("c") is None
    speculator.advance("c", 3, guessed_path(session, 1))
    assert speculator.next_job("c") is not None
    speculator.close("c")


def test_a_full_suffix_does_not_churn(speculator: Speculator) -> None:
    """Without a budget the tree fills its KV, then rests: no likely node gives way to an unlikely one."""
    speculator.open("d", [9, 8, 7], SAMPLED, SpeculationParams())
    for _ in range(200):
        if not speculator.expand("d", 1):
            break
    else:
        pytest.fail("the speculator never rests")
    assert len(speculator.sessions["d"].kv_nodes) <= 256
    assert speculator.stats("d")["draft_tokens_recomputed"] == 0
    speculator.close("d")


def test_outcomes_out_of_order_and_contexts_too_long_are_refused(speculator: Speculator) -> None:
    speculator.open("e", [5, 6, 7], GREEDY, SpeculationParams())
    with pytest.raises(KeyError):
        speculator.advance("e", 5, [1])
    with pytest.raises(KeyError):
        speculator.advance("unknown", 3, [1])
    speculator.close("e")
    with pytest.raises(ValueError, match=r"holds 1024 positions, the request needs 1000 \+ 100"):
        speculator.open("f", [5] * 1000, SamplingParams(seed=0, max_new_tokens=100), SpeculationParams())
    assert not speculator.sessions


def test_pages_come_back(speculator: Speculator) -> None:
    pool = speculator.drafter.pool
    before = pool.num_free_pages
    speculator.open("g", list(range(200)), GREEDY, SpeculationParams())
    speculator.expand("g", 3)
    job = speculator.next_job("g")
    assert job is not None
    speculator.close("g")  # with a job in flight
    speculator.merge(job, speculator.run(job))
    assert pool.num_free_pages == before
