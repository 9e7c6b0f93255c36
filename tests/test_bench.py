"""`foredraft bench` over a fake engine whose speeds, tokens and divergences are known."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from foredraft.infer import bench
from foredraft.infer.bench_summary import Timing, first_divergence, ratio_with_interval
from foredraft.infer.identity import TargetIdentity
from foredraft.infer.params import EngineConfig, ExpandPolicy, Mode, SamplingParams, SpeculationParams
from foredraft.infer.request import Completion
from foredraft.infer.stats import RequestStats, RoundRecord

SECONDS_PER_ROUND = {"plain": 1.0, "sync": 1.5, "async": 1.0}
TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]


class FakeEngine:
    """Eight decoded tokens a completion: 8 rounds in plain mode, 4 in the others, at fixed seconds each."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        model = SimpleNamespace(model=SimpleNamespace(dtype="torch.bfloat16"))
        identity = TargetIdentity(id="t", revision=None, weights_sha256="abc")
        self.target = SimpleNamespace(tokenizer=tokenizer, model=model, identity=identity)
        self.drafter = self.predictor = None
        self.max_prompt_tokens = 89
        self.num_threads = 1
        self.threads_in_use = 1
        self.asked: list[tuple[Mode, SamplingParams, tuple[int, ...]]] = []
        self.diverging: Mode | None = None
        self.slow_calls: set[int] = set()
        self.policies: set[ExpandPolicy | None] = set()

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        mode: Mode,
        policy: ExpandPolicy | None = None,
    ) -> list[Completion]:
        [ids], [one] = prompts, params
        self.asked.append((mode, one, tuple(ids)))
        self.policies.add(policy)
        seconds = (
            SECONDS_PER_ROUND[mode] / self.threads_in_use * (100 if len(self.asked) in self.slow_calls else 1)
        )
        stats = RequestStats(mode, prefill_chunks=1)
        for number in range(8 if mode == "plain" else 4):
            outcome = "hit" if mode == "async" and number else None
            accepted = int(mode != "plain")
            stats.add_round(RoundRecord(2 * accepted, accepted, 1 + accepted, outcome))
            stats.seconds_decode += seconds
        tokens = [3, *TOKENS]
        if mode == self.diverging and one.seed == 11 and one.temperature:
            tokens[4] = 99
        assert one.seed is not None
        return [Completion("text", tokens, len(ids), "length", one.seed, stats)]

    @contextmanager
    def using_threads(self, num_threads: int) -> Iterator[None]:
        self.threads_in_use = num_threads
        yield
        self.threads_in_use = self.num_threads

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    """The engine that the command will load."""
    fake = FakeEngine(tiny_tokenizer)

    def load(args: argparse.Namespace, config: EngineConfig, mode: str) -> FakeEngine:
        return fake

    monkeypatch.setattr(bench, "load_engine", load)
    monkeypatch.setattr(bench, "num_cores", lambda: 1)
    return fake


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}\n{"id": "c", "prompt": "three"}\n'
    )
    return str(path)


def run(prompt_file: str, *argv: str) -> int:
    return bench.main(["--target", "t", "--drafter", "d", "--prompts", prompt_file, "--seed", "10", *argv])


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out)


def test_json_layout(engine: FakeEngine, prompt_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(prompt_file, "--json", "--temperature", "0", "0.7", "--fan-out", "3") == 0
    found = report(capsys)
    assert [(r["mode"], r["temperature"]) for r in found["results"]] == [
        (mode, temperature) for temperature in (0.0, 0.7) for mode in ("plain", "sync", "async")
    ]
    plain, sync, asynchronous = found["results"][:3]
    assert plain["stats"]["tokens_per_verify"] == 1
    assert plain["stats"]["tokens"] == 24
    assert plain["stats"]["hit_rate"] is None
    assert plain["speculation"] is None
    assert sync["stats"]["tokens_per_verify"] == 2
    assert asynchronous["stats"]["hit_rate"] == 1
    assert asynchronous["stats"]["hits"] == 9
    assert asynchronous["speculation"]["fan_out"] == 3
    assert asynchronous["tokens_per_second_repeats"] == [2.0, 2.0, 2.0]
    assert found["ratios"]["async"][0] == {
        "temperature": 0.0, "ratio": 2.0, "interval": [2.0, 2.0], "level": 0.95,
    }  # fmt: skip
    assert found["ratios"]["sync"][1]["ratio"] == pytest.approx(2 / 1.5)
    assert found["identical_outputs"] == {
        mode: {"same": 6, "of": 6, "first_divergences": []} for mode in ("sync", "async")
    }
    assert found["prompts_sha256"] == hashlib.sha256(Path(prompt_file).read_bytes()).hexdigest()
    assert found["weights_sha256"] == {"target": "abc"}
    assert found["dtype"] == "bfloat16"
    assert found["cores"] >= found["threads"] == 1
    assert found["processor"]
    assert found["versions"]["torch"]
    assert (found["num_prompts"], found["repeats"], found["seed"]) == (3, 3, 10)


def test_plain_decoding_on_all_cores_is_measured_too(
    engine: FakeEngine, prompt_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "num_cores", lambda: 4)
    assert run(prompt_file, "--json", "--temperature", "0", "1") == 0
    zero, one = report(capsys)["plain_all_cores"]
    assert (zero["temperature"], zero["threads"], zero["tokens_per_second"], zero["ratio"]) == (
        0.0,
        4,
        4.0,
        4.0,
    )
    assert (one["temperature"], one["ratio"]) == (1.0, 4.0)
    assert run(prompt_file) == 0
    assert "plain, 4 threads" in capsys.readouterr().out
    assert run(prompt_file, "--json", "--modes", "async") == 0
    assert report(capsys)["plain_all_cores"] == []


def test_order_rotates_seeds_agree_and_the_warm_up_is_not_counted(
    engine: FakeEngine, prompt_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompt_file, "--json", "--repeats", "2") == 0
    warm_up, measured = engine.asked[:3], engine.asked[3:]
    assert all(params.max_new_tokens == 16 for _, params, _ in warm_up)
    assert len(measured) == 2 * 3 * 3
    firsts = [mode for mode, _, _ in measured[::3]]
    assert firsts == ["plain", "sync", "async", "sync", "async", "plain"]
    assert [params.seed for _, params, _ in measured] == [10] * 3 + [11] * 3 + [12] * 3 + [10] * 3 + [
        11
    ] * 3 + [12] * 3
    assert all(params.max_new_tokens == 128 for _, params, _ in measured)


def test_divergences_are_found_and_shown(
    engine: FakeEngine, prompt_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.diverging = "async"
    assert run(prompt_file, "--json", "--temperature", "0", "1") == 0
    outputs = report(capsys)["identical_outputs"]
    assert outputs["sync"]["same"] == 6
    assert outputs["async"]["same"] == 5
    assert outputs["async"]["first_divergences"] == [
        {"id": "b", "temperature": 1.0, "seed": 11, "repeat": 0, "index": 4, "plain": 8, "found": 99}
    ]
    assert run(prompt_file, "--temperature", "0", "1") == 0
    printed = capsys.readouterr().out
    assert 'async differs: {"id": "b"' in printed
    assert [printed.count(same) for same in ("3 of 3", "2 of 3")] == [3, 1]


def test_a_completion_that_ends_early_differs_where_it_ends() -> None:
    case = SimpleNamespace(prompt=SimpleNamespace(id=1), params=SimpleNamespace(temperature=0.0, seed=0))
    run = SimpleNamespace(token_ids=[1, 2], case=case, repeat=0)
    found = first_divergence(run, [1, 2, 3])
    assert (found["index"], found["plain"], found["found"]) == (2, 3, None)


def test_one_slow_repeat_does_not_move_the_median(
    engine: FakeEngine, prompt_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.slow_calls = {4}
    assert run(prompt_file, "--json") == 0
    found = report(capsys)
    assert found["results"][0]["stats"]["tokens_per_second"] == 1
    assert found["ratios"]["async"][0]["ratio"] == 2


def test_table_out_file_and_modes(
    engine: FakeEngine, prompt_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    assert run(prompt_file, "--modes", "async,plain", "--limit", "2", "--out", str(out)) == 0
    captured = capsys.readouterr()
    assert "2.00 (2.00 to 2.00)" in captured.out
    assert "2 of 2" in captured.out
    spec = SpeculationParams()
    shape = f"block: {spec.block} of {spec.block_nodes} guesses; F = {spec.fan_out}"
    assert f"{shape}; B = until the outcome arrives" in captured.out
    saved = json.loads(out.read_text())
    assert [result["mode"] for result in saved["results"]] == ["plain", "async"]
    assert saved["num_prompts"] == 2
    assert {mode for mode, _, _ in engine.asked} == {"plain", "async"}


def test_a_mode_may_be_measured_under_several_policies(
    engine: FakeEngine, prompt_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = "plain,async:predictor,async:confidence"
    assert run(prompt_file, "--modes", arms, "--predictor", "p", "--limit", "2", "--json") == 0
    found = report(capsys)
    assert [result["arm"] for result in found["results"]] == ["plain", "async:confidence", "async:predictor"]
    assert [result["policy"] for result in found["results"]] == [None, "confidence", "predictor"]
    assert found["results"][2]["speculation"]["policy"] == "predictor"
    assert (
        found["ratios"].keys() == found["identical_outputs"].keys() == {"async:confidence", "async:predictor"}
    )
    assert engine.policies == {None, "confidence", "predictor"}


def test_without_plain_there_is_nothing_to_compare_with(
    engine: FakeEngine, prompt_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompt_file, "--modes", "sync", "--json") == 0
    captured = capsys.readouterr()
    assert "no ratios" in captured.err
    assert json.loads(captured.out)["ratios"] == {}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--modes plain,fast", "each once, got 'plain,fast'"),
        ("--modes plain,plain", "each once"),
        ("--modes plain:confidence", "each once"),
        ("--modes plain,async:predictor", "policy predictor needs --predictor FOLDER"),
        (
            "--modes async:predictor --predictor p --verification rejection --block chain",
            "confidence-q with rejection, got 'predictor'",
        ),
        ("--repeats 0", "--repeats must be at least 1, got 0"),
        ("--limit 0", "--limit must be at least 1, got 0"),
        ("--temperature -1", "temperature must be in [0, 100), got -1.0"),
        ("--temperature", "argument --temperature: expected at least one argument"),
        ("--out nowhere/b.json", "--out nowhere/b.json: expected a file in an existing folder"),
        ("--sed 3", "unknown option --sed; did you mean --seed?"),
    ],
)  # fmt: skip
def test_refusals(
    engine: FakeEngine, prompt_file: str, argv: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompt_file, *argv.split()) == 2
    assert expected in capsys.readouterr().err
    assert engine.asked == []


def test_a_drafted_mode_needs_a_drafter(prompt_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--target", "t", "--prompts", prompt_file, "--modes", "plain,sync"]) == 2
    assert "mode sync needs --drafter" in capsys.readouterr().err


def test_interval_covers_the_ratio_and_pairs_the_prompts() -> None:
    rng = np.random.default_rng(1)
    tokens = np.full((3, 40), 50.0)
    plain = Timing(tokens, rng.uniform(1, 3, (1, 40)).repeat(3, 0))
    # the prompts differ a lot in speed, but each is exactly 1.25 times as fast: pairing removes the spread
    faster = Timing(tokens, plain.seconds_RP / 1.25)
    found = ratio_with_interval(faster, plain)
    assert found["ratio"] == pytest.approx(1.25)
    assert found["interval"] == pytest.approx([1.25, 1.25])
    noisy = Timing(tokens, plain.seconds_RP / rng.uniform(1.0, 1.5, (3, 40)))
    low, high = ratio_with_interval(noisy, plain)["interval"]
    assert low < ratio_with_interval(noisy, plain)["ratio"] < high
    assert 0.02 < high - low < 0.3
