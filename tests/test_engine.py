"""Plain, synchronous and asynchronous decoding give the same tokens, whatever the settings and the faults."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, LogitsProcessorList, TopKLogitsWarper

from foredraft.infer.engine import Engine
from foredraft.infer.params import EngineConfig, Mode, SamplingParams, SpeculationParams
from foredraft.infer.remote_guesser import RemoteGuesser
from foredraft.infer.request import Completion
from foredraft.infer.target import Target

PROMPT_LENGTHS = (1, 63, 64, 65, 600)
CASES = {
    "greedy": SamplingParams(max_new_tokens=70, ignore_eos=True),
    "nucleus": SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.95, seed=1, ignore_eos=True),
    "penalty": SamplingParams(
        max_new_tokens=40, temperature=1.0, repetition_penalty=1.1, seed=2**63, ignore_eos=True
    ),
    "greedy-penalty": SamplingParams(max_new_tokens=40, repetition_penalty=1.3, ignore_eos=True),
    "one-token": SamplingParams(max_new_tokens=1, temperature=1.0, seed=4),
    "two-tokens": SamplingParams(max_new_tokens=2, temperature=1.0, seed=4),
}
ENGINES = [
    pytest.param(("float32", "tree"), id="float32-tree"),
    pytest.param(("float32", "chain"), id="float32-chain"),
    pytest.param(("bfloat16", "tree"), id="bfloat16-tree"),
    pytest.param(("bfloat16", "chain"), id="bfloat16-chain"),
]


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def make_engine(target: Path, drafter: Path, dtype: str = "float32", **speculation: object) -> Engine:
    config = EngineConfig(dtype=dtype, threads=1, speculation=SpeculationParams(**speculation))
    return Engine.from_pretrained(str(target), str(drafter), mode="plain", config=config)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny_target: Path, tiny_drafter: Path) -> Iterator[Engine]:
    dtype, shape = request.param
    with make_engine(tiny_target, tiny_drafter, dtype, block=shape) as engine:
        yield engine


@pytest.mark.parametrize("case", CASES)
def test_modes_agree(engine: Engine, case: str) -> None:
    plain = engine.generate(prompts(), CASES[case])
    for mode in ("sync", "async"):
        assert tokens_of(engine.generate(prompts(), CASES[case], mode=mode)) == tokens_of(plain), mode


def test_modes_agree_on_stop_strings_and_several_eos_ids(engine: Engine) -> None:
    free = engine.generate(
        prompts((5, 70)), SamplingParams(max_new_tokens=60, temperature=1.0, seed=9, ignore_eos=True)
    )
    texts = [completion.text for completion in free]
    stop = tuple(text[20:22] for text in texts if len(text) > 22 and "\ufffd" not in text[20:22])
    stopping = SamplingParams(max_new_tokens=60, temperature=1.0, seed=9, stop=stop or ("e",))
    original = engine.target.eos_ids
    engine.target.eos_ids = original | {free[0].token_ids[40], free[1].token_ids[40]}
    try:
        plain = engine.generate(prompts((5, 70)), stopping)
        for mode in ("sync", "async"):
            others = engine.generate(prompts((5, 70)), stopping, mode=mode)
            assert tokens_of(others) == tokens_of(plain)
            assert [c.text for c in others] == [c.text for c in plain]
            assert [c.finish_reason for c in others] == [c.finish_reason for c in plain]
    finally:
        engine.target.eos_ids = original
    assert all(len(short.token_ids) < 60 for short in plain)


def test_speculation_saves_forwards_and_every_forward_is_counted(engine: Engine) -> None:
    model = engine.target.model
    for mode in ("plain", "sync", "async"):
        before = model.num_forwards
        completions = engine.generate(prompts(), CASES["nucleus"], mode=mode)
        stats = [completion.stats for completion in completions]
        assert model.num_forwards - before == sum(s["rounds"] + s["prefill_chunks"] for s in stats)
        assert sum(s["prefill_chunks"] for s in stats) == sum(-(-n // 64) for n in PROMPT_LENGTHS)
        assert all(s["tokens"] == 39 for s in stats)
        per_verify = sum(s["tokens"] for s in stats) / sum(s["rounds"] for s in stats)
        # free running: on a busy machine the draft server may come too late for every round
        assert {"plain": per_verify == 1.0, "sync": per_verify > 1.0, "async": per_verify >= 1.0}[mode]


def test_kv_pages_come_back(engine: Engine) -> None:
    pool = engine.target.model.pool
    before = pool.num_free_pages
    engine.generate(prompts(), CASES["two-tokens"], mode="sync")
    stream = engine.stream(prompts()[2], CASES["greedy"], mode="async")
    for _ in range(3):
        next(stream)
    stream.close()  # an abandoned request
    assert pool.num_free_pages == before


def test_streamed_text_adds_up(engine: Engine) -> None:
    *deltas, completion = engine.stream(prompts()[1], CASES["nucleus"], mode="sync")
    assert isinstance(completion, Completion)
    assert "".join(deltas) == completion.text


def test_greedy_equals_transformers_generate(tiny_target: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_target)
    with Engine.from_pretrained(str(tiny_target), mode="plain") as engine:
        completions = engine.generate(prompts(), CASES["greedy"])
    for prompt, completion in zip(prompts(), completions, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=70, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


def exact_law(
    model: torch.nn.Module, prompt: list[int], length: int, top_k: int
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `length` tokens under softmax over the `top_k` best tokens."""
    law = {(): 1.0}
    keep = LogitsProcessorList([TopKLogitsWarper(top_k)])
    for _ in range(length):
        longer = {}
        for path, probability in law.items():
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *path]])).logits[:, -1]
            step = keep(None, logits)[0].softmax(-1)
            for token in step.nonzero().flatten().tolist():
                longer[(*path, token)] = probability * step[token].item()
        law = longer
    return law


@pytest.mark.parametrize(("mode", "num_draws"), [("plain", 1500), ("sync", 400), ("async", 400)])
def test_law_of_a_whole_decode(mode: Mode, num_draws: int, tiny_target: Path, tiny_drafter: Path) -> None:
    """First three tokens over many seeds against the enumeration of all 27 continuations (chi-square)."""
    prompt, length = prompts((7,))[0], 3
    law = exact_law(AutoModelForCausalLM.from_pretrained(tiny_target), prompt, length, top_k=3)
    params = SamplingParams(max_new_tokens=length, temperature=1.0, top_k=3, ignore_eos=True)
    with make_engine(tiny_target, tiny_drafter, k=2) as engine:
        seeded = [replace(params, seed=seed) for seed in range(num_draws)]
        drawn = [tuple(c.token_ids) for c in engine.generate([prompt] * num_draws, seeded, mode=mode)]
    assert set(drawn) <= set(law)
    likely = [path for path, probability in law.items() if probability * num_draws >= 5]
    observed = [drawn.count(path) for path in likely]
    total = sum(law.values())  # 1 up to float32
    expected = [law[path] / total * num_draws for path in likely]
    rest = num_draws - sum(observed), num_draws - sum(expected)
    if rest[1] > 1e-6:
        observed, expected = [*observed, rest[0]], [*expected, rest[1]]
    assert chisquare(observed, expected).pvalue > 1e-4


def test_lockstep_gives_the_rounds_of_synchronous_decoding(tiny_target: Path, tiny_drafter: Path) -> None:
    params = [replace(CASES["nucleus"], seed=seed, max_new_tokens=60) for seed in range(4)]
    some = prompts((5, 20, 64, 130))
    for shape in ("tree", "chain"):
        settings = {"block": shape, "k": 4, "lockstep": 4, "on_miss": "wait"}
        with make_engine(tiny_target, tiny_drafter, **settings) as engine:
            sync = engine.generate(some, params, mode="sync")
            remote = engine.generate(some, params, mode="async")
        num_sync, num_async = (sum(c.stats["rounds"] for c in cs) for cs in (sync, remote))
        assert abs(num_async - num_sync) <= 0.02 * num_sync
        assert sum(c.stats["hits"] for c in remote) > 0
        assert all(c.stats["draft_tokens_recomputed"] == 0 for c in sync + remote)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_failing_server_changes_only_speed(
    tiny_target: Path, tiny_drafter: Path, fault: signal.Signals
) -> None:
    params = SamplingParams(max_new_tokens=300, temperature=1.0, seed=5, ignore_eos=True)
    prompt = prompts((20,))[0]
    with make_engine(tiny_target, tiny_drafter) as engine:
        (plain,) = engine.generate([prompt], params)
        engine.generate([prompt], CASES["two-tokens"], mode="async")
        remote = engine.guessers["async"]
        assert isinstance(remote, RemoteGuesser)
        stream = engine.stream(prompt, params, mode="async")
        list(itertools.islice(stream, 10))
        os.kill(remote.client.server_pid, fault)
        *_, completion = stream
        assert isinstance(completion, Completion)
        assert completion.token_ids == plain.token_ids
        # the next request is served as well, by whatever server there is
        assert tokens_of(engine.generate([prompt], params, mode="async")) == [plain.token_ids]


def test_a_slow_drafter_is_never_waited_for(tiny_target: Path, tiny_drafter: Path) -> None:
    with make_engine(tiny_target, tiny_drafter) as engine:
        engine.guessers["async"] = RemoteGuesser(
            str(tiny_drafter), engine.target, engine.config, engine.trace, slow_factor=30.0
        )
        completions = engine.generate(prompts(), CASES["nucleus"], mode="async")
    stats = [completion.stats for completion in completions]
    rounds = sum(s["rounds"] for s in stats)
    # a wait ends after 10 ms; a draft takes many times that
    assert sum(s["seconds_waiting_for_draft"] for s in stats) / rounds < 0.03


def test_refusals_say_what_to_do(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode sync needs a drafter"):
        Engine.from_pretrained(str(tiny_target), mode="sync")
    with Engine.from_pretrained(str(tiny_target), mode="plain") as engine:
        with pytest.raises(ValueError, match=r"1\.\.1023 tokens to leave room for an answer, got 1024"):
            engine.generate([[5] * 1024])
        with pytest.raises(ValueError, match=r"1\.\.1023 tokens to leave room for an answer, got 0"):
            engine.generate([[]])
        with pytest.raises(ValueError, match="mode must be one of"):
            engine.generate([[5]], mode="fast")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="one SamplingParams a prompt"):
            engine.generate([[5]], [SamplingParams()] * 2)


def test_a_drafter_of_another_tokenizer_is_refused(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    target = Target.load(str(tiny_target), EngineConfig())
    target.tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="another tokenizer"):
        Engine(target, str(tiny_drafter), "plain", EngineConfig())


def test_a_context_end_is_a_length_limit(tiny_target: Path, tiny_drafter: Path) -> None:
    prompt = prompts((1000,))[0]
    with make_engine(tiny_target, tiny_drafter) as engine:
        params = SamplingParams(max_new_tokens=100, ignore_eos=True)
        plain, sync = (engine.generate([prompt], params, mode=mode)[0] for mode in ("plain", "sync"))
    assert len(plain.token_ids) == 24
    assert plain.finish_reason == "length"
    assert sync.token_ids == plain.token_ids
