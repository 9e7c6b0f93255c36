"""Tables over trained drafters: replayed rounds are the engine's, a learning curve shows every report."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foredraft.infer.drafter_card import read_drafter_card
from foredraft.infer.engine import Engine
from foredraft.infer.params import EngineConfig, SpeculationParams
from foredraft.train.acceptance import sampling_of
from foredraft.train.target_log import TargetLog

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def load_script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        # dataclasses look their module up
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def log(make_log: Callable[..., TargetLog]) -> TargetLog:
    """6 prompts, a third held out; one greedy and two sampled responses to each."""
    return make_log([f"word {n * n}" for n in range(6)], lambda n: n % 3 == 0)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_replayed_rounds_are_those_of_the_engine(
    log: TargetLog,
    make_artifact: Callable[..., Path],
    tiny_target: Path,
    load_script: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = make_artifact()
    script = load_script("compare_drafters")
    assert script.main([str(drafter), "--logs", str(log.folder), "--k", "3", "--threads", "1"]) == 0
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert cells(header)[:6] == ["drafter", "log", "T", "responses", "rounds", "tokens per verify"]
    found = {cells(line)[2]: cells(line) for line in lines}
    speculation = SpeculationParams(k=3, block="chain", block_nodes=3, on_miss="plain", policy="confidence")
    config = EngineConfig(dtype="float32", threads=1, speculation=speculation)
    with Engine.from_pretrained(str(tiny_target), str(drafter), mode="sync", config=config) as engine:
        for temperature, count in ((0.0, 6), (1.0, 12)):
            rounds = tokens = 0
            rows = [row for row in log.rows() if row.temperature == temperature]
            for row in rows:
                sampling = replace(sampling_of(row), max_new_tokens=len(row.response_ids))
                [completion] = engine.generate([row.prompt_ids.tolist()], sampling)
                assert completion.token_ids == row.response_ids.tolist()
                rounds += completion.request_stats.rounds
                tokens += len(row.response_ids) - 1
            line = found[f"{temperature:g}"]
            assert (len(rows), int(line[3]), int(line[4])) == (count, count, rounds)
            assert line[5] == f"{tokens / rounds:.3f}"
            accepted = [float(cell) for cell in line[6:]]
            assert 1.0 > accepted[0] > accepted[1] > accepted[2] > 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--k", "0"], "expected 1 <= k < rows"), (["--split", "heldout"], "no heldout rows of its target")],
)
def test_bad_options_are_refused(
    options: list[str],
    message: str,
    make_artifact: Callable[..., Path],
    make_log: Callable[..., TargetLog],
    load_script: Callable[[str], ModuleType],
) -> None:
    whole = make_log(["word 1"], lambda n: False)
    with pytest.raises(ValueError, match=message):
        load_script("compare_drafters").main([str(make_artifact()), "--logs", str(whole.folder), *options])


def test_a_learning_curve_has_a_line_for_every_report(
    make_artifact: Callable[..., Path],
    load_script: Callable[[str], ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def point(step: int) -> dict[str, Any]:
        figures = {"top1": 0.01 * step, "top8": 0.5, "overlap": [0.25, 0.2], "tokens_per_verify": 1.5}
        return {"step": step, "tokens": 1000 * step, "heldout": {"0": figures, "1": figures}}

    training = {"recipe": {"k": 3}, "curve": [point(10), point(20)]}
    folder, out = make_artifact(training=training), tmp_path / "curve"
    assert read_drafter_card(folder).training["curve"] == training["curve"]
    script = load_script("learning_curve")
    assert script.main([str(folder), "--out", str(out)]) == 0
    table = out.with_suffix(".md").read_text()
    assert capsys.readouterr().out == table
    assert [cells(line)[1:4] for line in table.splitlines()[2:6]] == [
        ["10", "10,000", "0"],
        ["10", "10,000", "1"],
        ["20", "20,000", "0"],
        ["20", "20,000", "1"],
    ]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="holds 1 reports"):
        script.main([str(make_artifact(training=training | {"curve": [point(10)]})), "--out", str(out)])
