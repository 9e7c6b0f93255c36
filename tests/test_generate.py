"""`foredraft generate` over a fake engine: flags, seeds, output, what is refused before loading."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from foredraft.infer import flags, generate
from foredraft.infer.params import EngineConfig, SamplingParams
from foredraft.infer.request import Completion
from foredraft.infer.stats import RequestStats, RoundRecord


class FakeEngine:
    """Answers with the prompt's own tokens; remembers what it was asked."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.target = SimpleNamespace(tokenizer=tokenizer)
        self.max_prompt_tokens = 89
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.loaded: tuple[argparse.Namespace, EngineConfig, str, str | None] | None = None
        self.is_closed = False

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        return [self.complete(ids, one) for ids, one in zip(prompts, params, strict=True)]

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[str | Completion]:
        completion = self.complete(prompt, params)
        middle = len(completion.text) // 2
        yield from ("", completion.text[:middle], completion.text[middle:], completion)

    def complete(self, ids: list[int], params: SamplingParams) -> Completion:
        self.asked.append((ids, params))
        stats = RequestStats("plain", seconds_decode=0.5)
        stats.add_round(RoundRecord(0, 0, 1))
        text = self.target.tokenizer.decode(ids)
        assert params.seed is not None
        return Completion(text, ids, len(ids), "stop", params.seed, stats)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    """The engine that the command will load."""
    fake = FakeEngine(tiny_tokenizer)

    def load(args: argparse.Namespace, config: EngineConfig, mode: str, trace: str | None) -> FakeEngine:
        fake.loaded = (args, config, mode, trace)
        return fake

    monkeypatch.setattr(generate, "load_engine", load)
    return fake


def run(*argv: str) -> int:
    return generate.main(["--target", "t", *argv])


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two é"}]}\n')
    return str(path)


def test_json_is_one_object_a_line(
    engine: FakeEngine, prompt_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--prompts", prompt_file, "--json", "--seed", str(2**64 - 1)) == 0
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert [record["id"] for record in records] == ["a", 3]
    assert [record["seed"] for record in records] == [2**64 - 1, 1]
    assert list(records[0]) == ["id", "text", "token_ids", "prompt_tokens", "finish_reason", "seed", "stats"]
    assert "two é" in captured.out
    assert records[0]["stats"]["tokens_per_verify"] == 1
    assert captured.err == ""
    assert engine.is_closed


def test_text_streams_to_stdout_and_the_rest_to_stderr(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--prompt", "hi", "--raw", "--seed", "7") == 0
    captured = capsys.readouterr()
    assert captured.out == "hi\n"
    assert "seed 7" in captured.err
    assert "2.00 tokens/s" in captured.err


def test_a_random_seed_is_told(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = set()
    for _ in range(2):
        assert run("--prompt", "hi") == 0
        seeds.add(engine.asked[-1][1].seed)
        assert f"seed {engine.asked[-1][1].seed}," in capsys.readouterr().err
    assert len(seeds) == 2


def test_flags_reach_the_engine(engine: FakeEngine, tmp_path: Path) -> None:
    settings = tmp_path / "e.yaml"
    settings.write_text("page_size: 32\nspeculation: {k: 9, fan_out: 3}\n")
    argv = (
        "--drafter d --mode async --temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --seed 1 --stop A"
        " --repetition-penalty 1.1 --max-new-tokens 3 --stop B --block chain --block-nodes 4 --fan-out 2"
        " --budget 6 --policy confidence-q --on-miss wait --draft-timeout-ms 5 --dtype float32 --device c:0"
        " --draft-device c:1 --threads 3 --draft-threads 2 --revision r --allow-target-mismatch"
        " --trust-remote-code"
    )
    trace = str(tmp_path / "trace.json")
    assert run("--prompt", "x", "--engine-config", str(settings), "--trace", trace, *argv.split()) == 0
    assert engine.asked[0][1] == SamplingParams(
        max_new_tokens=3, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, seed=1,
        stop=("A", "B"),
    )  # fmt: skip
    assert engine.loaded is not None
    args, config, mode, trace_file = engine.loaded
    assert (args.target, args.drafter, mode, trace_file) == ("t", "d", "async", trace)
    spec = config.speculation
    assert (spec.k, spec.fan_out, spec.block, spec.block_nodes, spec.budget) == (9, 2, "chain", 4, 6)
    assert (spec.policy, spec.on_miss, spec.draft_timeout_ms) == ("confidence-q", "wait", 5)
    assert (config.page_size, config.dtype, config.device, config.draft_device) == (
        32,
        "float32",
        "c:0",
        "c:1",
    )
    assert (config.threads, config.draft_threads, config.revision) == (3, 2, "r")
    assert config.allow_target_mismatch and config.trust_remote_code


@pytest.mark.parametrize(("drafter", "mode"), [([], "plain"), (["--drafter", "d"], "async")])
def test_default_mode(engine: FakeEngine, drafter: list[str], mode: str) -> None:
    assert run("--prompt", "x", *drafter) == 0
    assert engine.loaded is not None and engine.loaded[2] == mode


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--prompt x --mode sync", "mode sync needs --drafter"),
        ("--prompt x --temprature 1", "unknown option --temprature; did you mean --temperature?"),
        ("--prompt x --temperature -1", "temperature must be in [0, 100), got -1.0"),
        ("--prompt x --top-p 0", "top_p must be in (0, 1], got 0.0"),
        ("--prompt x --seed -1", "seed must be in [0, 2^64), got -1"),
        ("--prompt x --max-new-tokens 0", "max_new_tokens must be at least 1"),
        ("--prompt x --max-new-tokens many", "argument --max-new-tokens: invalid int value: 'many'"),
        ("--prompt x --drafter d --k 0", "k must be in 1..64, got 0"),
        ("--prompt x --drafter d --verification rejection", "block must be chain with rejection, got 'tree'"),
        ("--prompt x --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--prompt x --prompts y", "not allowed with argument --prompt"),
        ("--json", "one of the arguments --prompt --prompts is required"),
        ("--prompts nowhere.jsonl", "prompt file nowhere.jsonl: no such file"),
        ("--prompt x --trace nowhere/t.json", "nowhere/t.json: expected a file in an existing folder"),
        ("--prompt x --engine-config nowhere.yaml", "nowhere.yaml: no such file"),
        ("--prompt x --mode quick", "argument --mode: invalid choice: 'quick'"),
    ],
)  # fmt: skip
def test_refused_before_anything_is_loaded(
    engine: FakeEngine, argv: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv.split()) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""
    assert engine.loaded is None


def test_a_prompt_that_does_not_fit_is_found_before_the_first_is_decoded(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{{"id": "long", "prompt": "{"x" * 400}"}}\n')
    assert run("--prompts", str(path), "--json") == 2
    captured = capsys.readouterr()
    assert "prompt long has " in captured.err
    assert "expected at most 89" in captured.err
    assert captured.out == ""
    assert engine.is_closed


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--lockstep 3", "--lockstep has no effect with mode plain"),
        ("--drafter d --mode plain", "--drafter has no effect with mode plain"),
        ("--drafter d --mode sync --on-miss wait", "--on-miss has no effect with mode sync"),
        ("--top-k 5", "--top-k has no effect with temperature 0"),
        ("--drafter d --draft-timeout-ms 5", "--draft-timeout-ms has no effect with --on-miss ngram"),
        ("--drafter d --lockstep 2 --budget 5", "--budget has no effect with --lockstep"),
        ("--drafter d --k 5", "--k has no effect with a tree, mode async and --on-miss ngram"),
        ("--drafter d --saguaro 0.5 --block chain --verification rejection",
         "--saguaro has no effect with temperature 0"),
        ("--drafter d --predictor p --block chain --verification rejection",
         "--predictor has no effect with --verification rejection"),
        ("--drafter d --k 5 --on-miss wait", ""),
        ("--drafter d --k 5 --mode sync", ""),
        ("--drafter d --k 5 --block chain", ""),
        ("--temperature 1 --top-k 5", ""),
    ],
)  # fmt: skip
def test_flags_without_effect_are_told(
    engine: FakeEngine, argv: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--prompt", "x", *argv.split()) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warnings == ([f"foredraft: warning: {expected}"] if expected else [])


def test_every_speculation_setting_has_a_flag() -> None:
    assert set(flags.SPECULATION_FLAGS) == set(flags.SpeculationParams.__dataclass_fields__)
    assert set(flags.ENGINE_FLAGS) < set(EngineConfig.__dataclass_fields__)
    assert set(flags.SAMPLING_FLAGS) < set(SamplingParams.__dataclass_fields__)
