"""The demo's orchestration with stubs as stages: what is run again, what is reused, what the table says."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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


def report(num_prompts: int = 3) -> dict[str, Any]:
    stats = {"tokens_per_second": 20.0, "tokens_per_verify": 1.0, "hit_rate": None}
    divergence = {"id": "a", "temperature": 1.0, "index": 4}
    results = [
        {"mode": mode, "temperature": t, "stats": stats | ({"hit_rate": 0.5} if mode == "async" else {})}
        for t in (0.0, 1.0)
        for mode in ("plain", "async")
    ]
    return {
        "results": results,
        "ratios": {"async": [{"temperature": t, "ratio": 1.5, "interval": [1.25, 1.75]} for t in (0.0, 1.0)]},
        "identical_outputs": {"async": {"same": 5, "of": 6, "first_divergences": [divergence]}},
        "engine": {
            "speculation": {
                "block": "tree",
                "block_nodes": 7,
                "fan_out": 8,
                "budget": 0,
                "k": 4,
                "on_miss": "ngram",
            }
        },
        "plain_all_cores": [
            {
                "temperature": 0.0,
                "threads": 2,
                "tokens_per_second": 25.0,
                "ratio": 1.25,
                "interval": [1.2, 1.3],
            }
        ],
        "num_prompts": num_prompts,
        "sampling": {"max_new_tokens": 128},
        "dtype": "bfloat16",
        "cores": 2,
        "threads": 1,
    }


def test_table_shows_every_result_with_its_circumstances(demo: ModuleType) -> None:
    record = {"log": {"key": "", "seconds": 12.3}}
    lines = demo.table(report(), {"training": {"tokens": 123456}}, record).splitlines()
    assert lines[2] == "| plain | 0 | 20.0 | 1.00 | 1.00 | - | - |"
    assert lines[3] == "| async | 0 | 20.0 | 1.50 (1.25 to 1.75) | 1.00 | 0.50 | 3 of 3 |"
    assert lines[5] == "| async | 1 | 20.0 | 1.50 (1.25 to 1.75) | 1.00 | 0.50 | 2 of 3 |"
    text = "\n".join(lines[6:])
    for fact in (
        "tree of 7 guesses",
        "F = 8",
        "budget: until the outcome",
        "123,456 response tokens",
        "log 12 s",
    ):
        assert fact in text


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


def test_measured_prompts_are_of_every_category(demo: ModuleType) -> None:
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    heldout = [prompt for prompt in prompts if prompt["split"] == "heldout"]
    measured = heldout[: int(demo.BENCH_SETTINGS["--limit"])]
    assert {prompt["category"] for prompt in measured} == {prompt["category"] for prompt in prompts}
