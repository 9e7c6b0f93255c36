"""The demo's orchestration with stubs as stages: what is run again, what is reused, what the table says."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from foredraft.infer.features import NODE_FEATURES
from foredraft.infer.outcome_records import OutcomeRecords
from foredraft.infer.predictor import LOG_OTHER, OutcomePredictor
from foredraft.train.allocation import Rounds
from foredraft.train.predictor_report import report_heldout

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPTS = REPOSITORY / "recipes" / "demo_prompts.jsonl"
APPEND = "import sys; open(sys.argv[1], 'a').write(open(sys.argv[2]).read())"


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", REPOSITORY / "scripts" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["demo"]


ASYNC = "async:predictor"


def report(num_prompts: int = 3) -> dict[str, Any]:
    stats = {"tokens_per_second": 20.0, "tokens_per_verify": 1.0, "hit_rate": None}
    divergence = {"id": "a", "temperature": 1.0, "index": 4}
    spec = {"block": "tree", "block_nodes": 7, "fan_out": 8, "budget": 0, "k": 4, "on_miss": "ngram"}
    results = [
        {"arm": arm, "temperature": t, "stats": stats | ({"hit_rate": 0.5} if arm == ASYNC else {})}
        for t in (0.0, 1.0)
        for arm in ("plain", ASYNC)
    ]
    all_cores = {"temperature": 0.0, "threads": 2, "tokens_per_second": 25.0}
    return {
        "results": results,
        "ratios": {ASYNC: [{"temperature": t, "ratio": 1.5, "interval": [1.25, 1.75]} for t in (0.0, 1.0)]},
        "identical_outputs": {ASYNC: {"same": 5, "of": 6, "first_divergences": [divergence]}},
        "engine": {"speculation": spec},
        "plain_all_cores": [all_cores | {"ratio": 1.25, "interval": [1.2, 1.3]}],
        "num_prompts": num_prompts,
        "sampling": {"max_new_tokens": 128},
        "dtype": "bfloat16",
        "cores": 2,
        "processor": "Abacus",
        "threads": 1,
    }


def test_table_shows_every_result(demo: ModuleType) -> None:
    lines = demo.bench_table(report()).splitlines()
    assert len(lines) == 7
    assert lines[2] == "| plain | 0 | 20.0 | 1.00 | 1.00 | - | - |"
    assert lines[3] == "| async:predictor | 0 | 20.0 | 1.50 (1.25 to 1.75) | 1.00 | 0.50 | 3 of 3 |"
    assert lines[5] == "| async:predictor | 1 | 20.0 | 1.50 (1.25 to 1.75) | 1.00 | 0.50 | 2 of 3 |"
    assert lines[6] == "| plain, 2 threads | 0 | 25.0 | 1.25 (1.20 to 1.30) | 1.00 | - | - |"
    assert len({line.count("|") for line in lines}) == 1


def test_circumstances_are_told(demo: ModuleType) -> None:
    record = {"log": {"key": "", "seconds": 12.3}}
    text = demo.circumstances(report(), {"training": {"tokens": 123456}}, record)
    for fact in (
        "tree of 7 guesses",
        "F = 8",
        "budget: until the outcome",
        "123,456 response tokens",
        "log 12 s",
    ):
        assert fact in text


def test_predictor_is_shown_with_what_it_replaces(demo: ModuleType) -> None:
    """Figures of the real report, so that a renamed key fails here and not after minutes of the demo."""
    rng = np.random.default_rng(0)
    records = chain_records(rng, num_rounds=40, k=4)
    figures = report_heldout(OutcomePredictor(), records, records, Rounds.of(records, 4), (4, 8))
    calibration = {
        "heldout": figures,
        "prompts": {"fit": 30, "calibration": 13},
        "records": {"fit": 12345, "calibration": 5},
    }
    lines = demo.predictor_table(calibration).splitlines()
    rates = figures["hit_rate"]["1"]["8"]
    assert "8 prepared outcomes, chain of 4 guesses, F = 16, by policy (40 rounds of 5" in lines[0]
    [header, _, first, second, every] = [line.split(" | ") for line in lines if line.startswith("|")]
    assert header[:4] == ["| T", "uniform", "geometric", "confidence"]
    assert [first[0], second[0], every[0]] == ["| 0", "| 1", "| all"]
    policies = ("uniform", "geometric", "confidence", "predictor", "oracle")
    assert second[1:6] == [f"{rates[policy]:.3f}" for policy in policies]
    # untrained it equals the policy confidence
    assert second[6] == "+0.000 (+0.000 to +0.000) |"
    text = "\n".join(lines)
    for fact in ("S_1 ", "S_3 ", "confidence", "Log loss", "12,345 records of 30 prompts", "13 others"):
        assert fact in text


def chain_records(rng: np.random.Generator, num_rounds: int, k: int) -> OutcomeRecords:
    """Random chain rounds of five prompts at two temperatures, F = 16."""
    size = num_rounds * (k + 1)
    round_N = np.arange(size) // (k + 1)
    scores_NF = np.log(np.sort(rng.dirichlet(np.full(17, 0.3), size)[:, :16])[:, ::-1] + 1e-9)
    features_NK = rng.normal(size=(size, len(NODE_FEATURES)))
    features_NK[:, LOG_OTHER] = np.log1p(-np.exp(scores_NF).sum(1) + 1e-6)
    return OutcomeRecords(
        request_id_N=np.array([f"{n % 5:032x}" for n in round_N]),
        seed_N=np.zeros(size, np.uint64),
        anchor_N=round_N * 10,
        depth_N=np.arange(size) % (k + 1),
        temperature_N=(round_N % 2).astype(np.float32),
        features_NK=features_NK.astype(np.float32),
        candidate_ids_NF=np.tile(np.arange(16), (size, 1)),
        scores_NF=scores_NF.astype(np.float32),
        log_probs_NF=scores_NF.astype(np.float32),
        echo_NF=rng.integers(0, 8, (size, 16)).astype(np.uint8),
        labels_N=rng.integers(0, 17, size),
    )


def test_every_recipe_stage_makes_what_the_next_one_reads(demo: ModuleType) -> None:
    """The recipes' `out` are the results that the stages wait for, and each reads an earlier one."""
    made: set[str] = set()
    for stage in demo.stages():
        out = Path(stage.result).parent
        if "--config" in stage.command:
            recipe = yaml.safe_load((REPOSITORY / stage.inputs[0]).read_text())
            out = Path(recipe["out"])
            assert Path(stage.result).is_relative_to(out), stage.name
            keys = ("target", "log", "drafter", "outcomes", "predictor", "bench")
            read = {recipe[key] for key in keys if key in recipe}
            assert read, stage.name
            assert read <= made, stage.name
        made |= {str(out), stage.result}
    assert {f"runs/demo/{name}" for name in ("log", "drafter", "outcomes", "predictor")} < made


def test_reported_budget_is_measured(demo: ModuleType) -> None:
    recipe = yaml.safe_load((REPOSITORY / "recipes" / "demo_predictor.yaml").read_text())
    assert int(demo.REPORTED_BUDGET) in recipe["budgets"]


def test_stages_run_again_only_when_something_changed(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def stage(name: str) -> Any:
        command = (sys.executable, "-c", APPEND, f"{name}.out", f"{name}.in")
        return demo.Stage(name, command, (f"{name}.in",), f"{name}.out")

    def outputs() -> list[str]:
        demo.run_stages(tmp_path / "stages.json")
        return [Path(f"{name}.out").read_text() for name in "ab"]

    monkeypatch.setattr(demo, "stages", lambda: [stage("a"), stage("b")])
    Path("a.in").write_text("1")
    Path("b.in").write_text("2")
    assert outputs() == ["1", "2"]
    assert outputs() == ["1", "2"], "nothing changed"
    Path("b.in").write_text("3")
    assert outputs() == ["1", "23"], "the last stage's input changed"
    Path("a.in").write_text("4")
    assert outputs() == ["14", "233"], "what follows a changed stage is stale"
    Path("b.out").unlink()
    assert outputs() == ["14", "3"], "a lost result is made again"


def test_a_failed_stage_is_not_recorded(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = demo.Stage("a", (sys.executable, "-c", "raise SystemExit(2)"), (), str(tmp_path))
    monkeypatch.setattr(demo, "stages", lambda: [failing])
    with pytest.raises(subprocess.CalledProcessError):
        demo.run_stages(tmp_path / "stages.json")
    assert not (tmp_path / "stages.json").exists()


def test_prompts_are_balanced_and_a_fifth_is_held_out() -> None:
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    assert len({prompt["messages"][0]["content"] for prompt in prompts}) == len(prompts)
    heldout = [prompt for prompt in prompts if prompt["split"] == "heldout"]
    assert len(heldout) == len(prompts) // 5
    for part in (prompts, heldout):
        categories = Counter(prompt["category"] for prompt in part)
        assert max(categories.values()) - min(categories.values()) <= 1


def test_measured_prompts_are_of_every_category(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PROMPTS", str(PROMPTS))
    monkeypatch.setattr(demo, "HELDOUT", str(tmp_path / "heldout.jsonl"))
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert demo.write_heldout_prompts() == sum(prompt["split"] == "heldout" for prompt in prompts)
    lines = (tmp_path / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    measured = [json.loads(line) for line in lines[: int(demo.BENCH_SETTINGS["--limit"])]]
    assert {prompt["split"] for prompt in measured} == {"heldout"}
    assert {prompt["category"] for prompt in measured} == {prompt["category"] for prompt in prompts}
