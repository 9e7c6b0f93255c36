"""The real model: one text in three modes, acceptance of the demo's drafter, and asynchrony that is real.

Needs `make model`; what concerns a trained drafter needs `make demo` too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft.infer.engine import Engine
from foredraft.infer.params import EngineConfig, SamplingParams, SpeculationParams
from foredraft.infer.remote_guesser import RemoteGuesser
from foredraft.infer.request import Completion
from foredraft.infer.stats import RequestStats, pool
from foredraft.infer.tracing import summarise

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parent.parent
CASES = {
    "greedy": SamplingParams(max_new_tokens=40),
    "nucleus": SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.95, seed=1),
    "sampled-penalty": SamplingParams(max_new_tokens=40, temperature=1.0, repetition_penalty=1.1, seed=2),
    "stop-strings": SamplingParams(max_new_tokens=80, temperature=1.0, seed=3, stop=(". ", "\n\n")),
}


def demo_messages(split: str | None = None) -> list[list[dict[str, str]]]:
    lines = (REPOSITORY / "recipes" / "demo_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    return [prompt["messages"] for prompt in prompts if split in (None, prompt["split"])]


@pytest.fixture(scope="module")
def demo_drafter() -> str:
    folder = REPOSITORY / "runs" / "demo" / "drafter"
    if not (folder / "foredraft.json").exists():
        pytest.skip(f"{folder} is missing: run `make demo`")
    return str(folder)


def open_engine(target: Path, drafter: str, dtype: str = "bfloat16", **speculation: object) -> Engine:
    config = EngineConfig(dtype=dtype, speculation=SpeculationParams(**speculation))
    return Engine.from_pretrained(str(target), drafter, mode="plain", config=config)


def stats_of(completions: list[Completion]) -> RequestStats:
    return pool(completion.request_stats for completion in completions)


@pytest.fixture(scope="module")
def engine(smollm2: Path, demo_drafter: str) -> Iterator[Engine]:
    with open_engine(smollm2, demo_drafter) as engine:
        yield engine


@pytest.mark.parametrize(
    ("dtype", "shape"), [("bfloat16", "tree"), ("bfloat16", "chain"), ("float32", "tree")]
)
def test_modes_agree(smollm2: Path, demo_drafter: str, dtype: str, shape: str) -> None:
    prompts = demo_messages("heldout")[:4]
    with open_engine(smollm2, demo_drafter, dtype, block=shape) as engine:
        for name, params in CASES.items():
            plain = engine.generate(prompts, params)
            for mode in ("sync", "async"):
                others = engine.generate(prompts, params, mode=mode)
                assert [c.token_ids for c in others] == [c.token_ids for c in plain], (name, mode)
                assert [c.text for c in others] == [c.text for c in plain], (name, mode)


def test_heldout_acceptance(engine: Engine) -> None:
    """The demo's promise: sync settles 1.25 tokens a verification, async at least 0.9 of that."""
    params = SamplingParams(max_new_tokens=64)
    sync, remote = (
        stats_of(engine.generate(demo_messages("heldout")[:12], params, mode=mode))
        for mode in ("sync", "async")
    )
    print(
        f"tokens per verify: sync {sync.tokens / sync.rounds:.3f}, async {remote.tokens / remote.rounds:.3f}"
    )
    assert sync.tokens / sync.rounds >= 1.25
    assert remote.tokens / remote.rounds >= 0.9 * sync.tokens / sync.rounds


def test_drafting_happens_during_verification(smollm2: Path, demo_drafter: str, tmp_path: Path) -> None:
    """Over 50 prompts at least 60 % of the expand time lies inside verify spans of the other process."""
    trace = tmp_path / "trace.json"
    params = SamplingParams(max_new_tokens=24)
    with Engine.from_pretrained(str(smollm2), demo_drafter, mode="async", trace=trace) as engine:
        engine.generate(demo_messages()[:50], params)
    summary = summarise(trace)
    print(f"overlap {summary.overlap:.3f}, waiting {summary.seconds_wait:.2f} s")
    assert summary.overlap >= 0.6


def test_a_drafter_ten_times_slower_is_never_waited_for(engine: Engine, demo_drafter: str) -> None:
    slow = RemoteGuesser(demo_drafter, engine.target, engine.config, engine.trace, slow_factor=10.0)
    normal = engine.guessers.get("async")
    engine.guessers["async"] = slow
    try:
        params = SamplingParams(max_new_tokens=40)
        stats = stats_of(engine.generate(demo_messages("heldout")[:6], params, mode="async"))
    finally:
        slow.shutdown()
        engine.guessers.pop("async")
        if normal is not None:
            engine.guessers["async"] = normal
    print(f"waited {stats.seconds_waiting_for_draft:.2f} s of {stats.seconds_decode:.2f} s")
    assert stats.seconds_waiting_for_draft < 0.1 * stats.seconds_decode


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lockstep_has_the_rounds_of_sync(smollm2: Path, demo_drafter: str, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=48, temperature=temperature, seed=7)
    with open_engine(smollm2, demo_drafter, k=4, lockstep=4, on_miss="wait") as engine:
        prompts = demo_messages("heldout")[:12]
        sync, remote = (stats_of(engine.generate(prompts, params, mode=mode)) for mode in ("sync", "async"))
    print(f"rounds: sync {sync.rounds}, lockstep async {remote.rounds}")
    assert abs(remote.rounds - sync.rounds) <= 0.02 * sync.rounds


def test_predictor_hits_at_least_as_often_as_confidence(smollm2: Path, demo_drafter: str) -> None:
    """At equal budget, deterministically: six expansions of four nodes a round, tree of 7 guesses."""
    predictor = REPOSITORY / "runs" / "demo" / "predictor"
    speculation = SpeculationParams(lockstep=6, on_miss="wait")
    config = EngineConfig(dtype="bfloat16", draft_rows=4, speculation=speculation)
    with Engine.from_pretrained(str(smollm2), demo_drafter, str(predictor), config=config) as engine:
        prompts = demo_messages("heldout")[:20]
        for temperature, top_p in ((0.0, 1.0), (1.0, 0.95)):
            params = [
                SamplingParams(max_new_tokens=48, temperature=temperature, top_p=top_p, seed=seed)
                for seed in range(len(prompts))
            ]
            runs = {
                policy: engine.generate(prompts, params, policy=policy)
                for policy in ("confidence", "predictor")
            }
            assert len({tuple(map(tuple, (c.token_ids for c in run))) for run in runs.values()}) == 1
            hits = {policy: stats_of(run).hit_rate for policy, run in runs.items()}
            print(f"T = {temperature:g}: {hits}")
            assert hits["predictor"] >= hits["confidence"]
