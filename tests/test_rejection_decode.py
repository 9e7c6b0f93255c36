"""Decoding with rejection verification: the target's law in every mode, its text at temperature 0."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from foredraft.infer import generate, messages
from foredraft.infer.engine import Engine
from foredraft.infer.params import EngineConfig, Mode, SamplingParams, SpeculationParams
from foredraft.infer.tree import Block
from foredraft.infer.verify import prune

REJECTION = SpeculationParams(verification="rejection", block="chain", k=2, lockstep=2)
PROMPT = [7, 30, 41, 5]


def open_engine(
    target: Path, drafter: Path, speculation: SpeculationParams = REJECTION, record: Path | None = None
) -> Engine:
    config = EngineConfig(dtype="float32", speculation=speculation)
    return Engine.from_pretrained(str(target), str(drafter), config=config, record=record)


@pytest.mark.parametrize(("mode", "lockstep"), [("sync", 0), ("sync", 2), ("async", 0)])
def test_greedy_text_is_plain_text(mode: Mode, lockstep: int, tiny_target: Path, tiny_drafter: Path) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, repetition_penalty=1.1)
    prompts = [PROMPT, PROMPT * 20]
    with open_engine(tiny_target, tiny_drafter, replace(REJECTION, lockstep=lockstep)) as engine:
        plain = engine.generate(prompts, params, mode="plain")
        found = engine.generate(prompts, params, mode=mode)
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    if mode == "sync":
        assert sum(c.stats["tokens_per_verify"] for c in found) > 2.2


def exact_law(target: Path, length: int, top_k: int, temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of every continuation."""
    model = AutoModelForCausalLM.from_pretrained(target)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for path, probability in law.items():
            with torch.no_grad():
                logits_V = model(torch.tensor([[*PROMPT, *path]])).logits[0, -1].double()
            best = (logits_V / temperature).topk(top_k)
            pairs = zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True)
            longer |= {(*path, token): probability * p for token, p in pairs}
        law = longer
    return law


@pytest.mark.parametrize(
    ("mode", "saguaro", "num_draws", "length"),
    [
        ("sync", 0.4, 100, 3),
        ("async", 1.0, 60, 3),
        pytest.param("sync", 0.4, 2000, 4, marks=pytest.mark.slow),
        pytest.param("async", 1.0, 500, 3, marks=pytest.mark.slow),
    ],
)
def test_law_of_a_whole_decode(
    mode: Mode, saguaro: float, num_draws: int, length: int, tiny_target: Path, tiny_drafter: Path
) -> None:
    """First tokens over many seeds against the enumeration of all continuations (chi-square)."""
    params = SamplingParams(max_new_tokens=length, temperature=1.5, top_k=3, ignore_eos=True)
    speculation = replace(REJECTION, saguaro=saguaro, on_miss="ngram")
    with open_engine(tiny_target, tiny_drafter, speculation) as engine:
        seeded = [replace(params, seed=seed) for seed in range(num_draws)]
        completions = engine.generate([PROMPT] * num_draws, seeded, mode=mode)
    accepted = sum(c.stats["mean_accepted"] * c.stats["rounds"] for c in completions)
    assert 0 < accepted < sum(c.stats["rounds"] for c in completions), "some guesses of each kind"
    drawn = Counter(tuple(c.token_ids) for c in completions)
    law = exact_law(tiny_target, length, top_k=3, temperature=1.5)
    assert drawn.keys() <= law.keys()
    observed: dict[tuple[int, ...], int] = {}
    expected: dict[tuple[int, ...], float] = {}
    for path, probability in law.items():
        cell = path if probability * num_draws >= 5 else ()  # the rare ones together
        observed[cell] = observed.get(cell, 0) + drawn[path]
        expected[cell] = expected.get(cell, 0.0) + probability / sum(law.values()) * num_draws
    assert chisquare(list(observed.values()), list(expected.values())).pvalue > 1e-4


def test_laws_travel_to_the_bit() -> None:
    probs = torch.rand(5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    laws = [([5, 4, 3, 2, 1], probs.tolist()), ([9], [1.0])]
    settings = {"request": "r", "round": 1, "kind": "hit", "ids": [5, 9], "parents": [-1, 0]}
    block = messages.Block(**settings, path_probs=[0.7, 0.49], laws=laws)
    found = messages.decode(messages.encode(block))
    assert isinstance(found, messages.Block)
    assert torch.equal(torch.tensor(found.laws[0][1]), probs)
    with pytest.raises(ValueError, match="one a guess"):
        messages.Block(**settings, path_probs=[0.7, 0.49], laws=laws[:1])


@pytest.mark.parametrize(
    "law",
    [
        ([], []),
        ([1], []),
        ([1, 1], [0.5, 0.5]),
        ([1, 2], [1.0, 0.0]),
        ([1], [0.5]),
        ([1, 2], [0.5, float("nan")]),
    ],
    ids=["empty", "ragged", "token-twice", "zero", "half", "nan"],
)
def test_what_is_no_law_is_refused(law: tuple[list[int], list[float]]) -> None:
    with pytest.raises(ValueError, match="positive probabilities of sum 1"):
        messages.Block(kind="hit", ids=[1], parents=[-1], path_probs=[0.7], laws=[law])


def test_a_law_beyond_the_target_s_vocabulary_ends_the_chain() -> None:
    """Whichever token was drawn from it: to look at the token would change what is settled."""
    laws = [([5, 4], [0.5, 0.5]), ([9, 6], [0.5, 0.5]), ([5], [1.0])]
    block = Block([0, 1, 2], [5, 6, 5], [-1, 0, 1], [0.7, 0.49, 0.343], laws)
    assert prune(block, max_depth=8, vocab_size=9, max_nodes=8) == block.first(1)
    assert prune(block, max_depth=8, vocab_size=10, max_nodes=8) == block


def test_flags(tiny_target: Path, tiny_drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--target", str(tiny_target), "--drafter", str(tiny_drafter), "--mode", "sync", "--raw"]
    common += ["--prompt", "The sun goes", "--max-new-tokens", "8", "--json", "--block", "chain"]
    texts = []
    for flags in (["--verification", "rejection"], []):
        assert generate.main([*common, *flags]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1]
    drawn = [*common, "--verification", "rejection", "--saguaro", "0.5", "--temperature", "1"]
    assert generate.main([*drawn, "--fan-out", "2"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["token_ids"]) == 8
    assert "no effect" not in captured.err


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"verification": "rejection"}, "block must be chain with rejection, got 'tree'"),
        ({"verification": "typical"}, "verification must be one of coupled, rejection"),
        (
            {"verification": "rejection", "block": "chain", "policy": "predictor"},
            "confidence-q with rejection",
        ),
        ({"saguaro": 0.5}, "saguaro must be 1 without rejection"),
        ({"verification": "rejection", "block": "chain", "saguaro": 0.0}, r"saguaro must be in \(0, 1\]"),
    ],
    ids=["tree", "unknown", "predictor", "saguaro-alone", "saguaro-zero"],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SpeculationParams(**settings)


def test_nothing_is_recorded(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="come from coupled verification"):
        open_engine(tiny_target, tiny_drafter, record=tmp_path / "records")
