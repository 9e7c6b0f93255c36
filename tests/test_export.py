"""Exports: others load them, they decode as before, cards show measured figures, nothing is half written."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from foredraft.infer import bench
from foredraft.infer.cli import main as foredraft
from foredraft.infer.engine import Engine
from foredraft.infer.params import EngineConfig, Mode, SamplingParams, SpeculationParams
from foredraft.infer.request import Completion
from foredraft.train import export as export_module
from foredraft.train.collect import collect
from foredraft.train.drafter import train_drafter
from foredraft.train.drafter_recipe import DrafterRecipe, InitRecipe
from foredraft.train.export import export
from foredraft.train.log_recipe import LogRecipe, ResponseGroup
from foredraft.train.recipe import ExportRecipe

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
PROMPTS = [[1, 7, 7, 30, 31], list(range(40, 110)), [5, 6, 5, 6, 5]]


@pytest.fixture(scope="module")
def drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of two layers and 200 tokens, trained for seconds on a log of the tiny target."""
    folder = tmp_path_factory.mktemp("export")
    lines = [{"prompt": f"word {n * n}", "split": "train" if n % 5 else "heldout"} for n in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = LogRecipe(
        target=str(tiny_target), prompts=str(folder / "prompts.jsonl"), out=str(folder / "log"),
        groups=(ResponseGroup(responses=1, temperature=0.0), ResponseGroup(responses=1, temperature=1.0)),
        max_new_tokens=16, top_k_logprobs=16, heldout_fraction=0.1, seed=0, prompts_per_shard=20,
        dtype="float32", rows=32,
    )  # fmt: skip
    collect(log, "recipe")
    recipe = DrafterRecipe(
        log=log.out, target=str(tiny_target), out=str(folder / "drafter"),
        init=InitRecipe(source="target", num_layers=2), draft_vocab_size=200, freeze_embeddings=True,
        epochs=4.0, batch_tokens=512, accumulation=1, max_length=128, learning_rate=3e-3, warmup_fraction=0.1,
        final_fraction=0.1, weight_decay=0.01, clip_norm=1.0, precision="float32", seed=0, k=4, eval_every=0,
        eval_rows=8, save_every=0, reserved_fraction=0.4,
    )  # fmt: skip
    train_drafter(recipe, "recipe text")
    return folder / "drafter"


@pytest.fixture(scope="module")
def predictor(drafter: Path) -> Path:
    """An outcome predictor of that drafter, from the smoke recipes."""
    folder = drafter.parent
    outcomes = ["--log", f"{folder}/log", "--drafter", str(drafter), "--out", f"{folder}/outcomes"]
    assert foredraft(["outcomes", "--config", str(RECIPES / "smoke_outcomes.yaml"), *outcomes]) == 0
    fit = ["--outcomes", f"{folder}/outcomes", "--out", f"{folder}/predictor", "--learning_curve", "true"]
    assert foredraft(["train-predictor", "--config", str(RECIPES / "smoke_predictor.yaml"), *fit]) == 0
    return folder / "predictor"


@pytest.fixture(scope="module")
def report(drafter: Path, tiny_target: Path) -> Path:
    """A bench of that drafter."""
    folder = drafter.parent
    with redirect_stdout(StringIO()):
        flags = f"--modes plain,sync --repeats 1 --limit 2 --max-new-tokens 8 --out {folder}/b.json"
        models = ["--target", str(tiny_target), "--drafter", str(drafter)]
        prompts = ["--prompts", str(folder / "prompts.jsonl")]
        assert bench.main([*models, *prompts, *flags.split()]) == 0
    return folder / "b.json"


@pytest.fixture
def recipe(drafter: Path, tiny_target: Path, tmp_path: Path) -> ExportRecipe:
    """Of the drafter alone; names in the card are folders, so that its examples run."""
    return ExportRecipe(
        drafter=str(drafter),
        out=str(tmp_path / "out"),
        name=str(tmp_path / "out" / "drafter"),
        base_model=str(tiny_target),
        license="apache-2.0",
        language=("en",),
    )


def card_of(recipe: ExportRecipe, part: str = "drafter") -> str:
    return (Path(recipe.out) / part / "README.md").read_text()


def edited(folder: Path, copy: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a drafter with another foredraft.json."""
    shutil.copytree(folder, copy)
    content = json.loads((copy / "foredraft.json").read_text())
    change(content)
    (copy / "foredraft.json").write_text(json.dumps(content))
    return copy


def test_the_exported_drafter_assists_transformers(recipe: ExportRecipe, tiny_target: Path) -> None:
    export(recipe, "resolved")
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    drafter = AutoModelForCausalLM.from_pretrained(f"{recipe.out}/drafter")
    calls: list[int] = []
    drafter.register_forward_hook(lambda *_: calls.append(1))
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
        alone = target.generate(ids, **settings)
        assert torch.equal(alone, target.generate(ids, assistant_model=drafter, **settings))
    assert calls


def test_the_examples_of_the_card_run(recipe: ExportRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    export(recipe, "resolved")
    for code in re.findall(r"```python\n(.*?)```", card_of(recipe), re.DOTALL):
        # no draft server here: it takes seconds to start, and other tests do it
        exec(code.replace('mode="async"', 'mode="sync"'), {})
    [command] = re.findall(r"^    foredraft (generate .*) --prompt", card_of(recipe), re.MULTILINE)
    assert (
        foredraft([*command.replace("async", "sync").split(), "--prompt", "x", "--max-new-tokens", "4"]) == 0
    )
    assert capsys.readouterr().out


def decode(target: Path, drafter: str, mode: Mode, temperature: float) -> list[Completion]:
    """In lockstep, so that rounds and hits are the same in every run."""
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=5, ignore_eos=True)
    config = EngineConfig(threads=1, speculation=SpeculationParams(lockstep=3, on_miss="wait"))
    with Engine.from_pretrained(str(target), drafter, mode=mode, config=config) as engine:
        return engine.generate(PROMPTS, params)


@pytest.mark.parametrize(
    ("mode", "temperature"),
    [("sync", 0.0), ("sync", 1.0), pytest.param("async", 1.0, marks=pytest.mark.slow)],
)
def test_it_decodes_as_before(
    recipe: ExportRecipe, tiny_target: Path, mode: Mode, temperature: float
) -> None:
    export(recipe, "resolved")
    before = decode(tiny_target, recipe.drafter, mode, temperature)
    after = decode(tiny_target, f"{recipe.out}/drafter", mode, temperature)
    names = ("rounds", "acc_marginal", "acc_conditional", "hits", "leaves", "misses")
    assert [c.token_ids for c in before] == [c.token_ids for c in after]
    assert [[c.stats[n] for n in names] for c in before] == [[c.stats[n] for n in names] for c in after]
    assert any(c.stats["tokens_per_verify"] > 1 for c in after)
    assert mode == "sync" or sum(c.stats["hits"] for c in after) > 0


def test_the_export_is_the_artifact_and_its_card(recipe: ExportRecipe) -> None:
    export(recipe, "resolved")
    found = {path.name: path.read_bytes() for path in (Path(recipe.out) / "drafter").iterdir()}
    card = found.pop("README.md").decode()
    assert found == {path.name: path.read_bytes() for path in Path(recipe.drafter).iterdir()}
    assert {
        "draft_vocab.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "recipe.yaml",
    } <= found.keys()
    assert (Path(recipe.out) / "recipe.yaml").read_text() == "resolved"
    assert "{" not in card
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["base_model"] == recipe.base_model
    assert (metadata["license"], metadata["language"]) == ("apache-2.0", ["en"])


def test_the_card_has_the_measured_figures(recipe: ExportRecipe, report: Path) -> None:
    export(replace(recipe, bench=str(report), language=()), "resolved")
    card, source = card_of(recipe), json.loads((Path(recipe.drafter) / "foredraft.json").read_text())
    assert "language" not in yaml.safe_load(card.split("---\n")[1])
    for temperature, figures in source["measured"]["heldout"].items():
        row = next(
            line for line in card.splitlines() if line.startswith(f"| {temperature} | {figures['positions']}")
        )
        assert row.endswith(f"| {figures['top16']:.3f} | 4 | {figures['tokens_per_verify']:.3f} |")
    assert f"| their tokens | {source['training']['log']['tokens']:,} |" in card
    assert source["training"]["log"]["prompts_sha256"] in card
    assert source["target"]["weights_sha256"] in card
    measured = json.loads(report.read_text())
    plain, sync = measured["results"]
    assert f"| plain | 0 | {plain['stats']['tokens_per_second']:.1f} | - (-) | 1.00 | - |" in card
    ratio = measured["ratios"]["sync"][0]["ratio"]
    assert f"| sync | 0 | {sync['stats']['tokens_per_second']:.1f} | {ratio:.2f} (" in card
    assert "| block | tree of 7 guesses |" in card
    assert f"| processor | {measured['processor']} |\n| system | {measured['machine']} |\n" in card


def test_without_measured_acceptance_nothing_is_written(
    recipe: ExportRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = edited(Path(recipe.drafter), tmp_path / "bare", lambda card: card.pop("measured"))
    flags = {
        "drafter": bare,
        "out": recipe.out,
        "name": "a/b",
        "base_model": "c",
        "license": "mit",
        "language": "[]",
    }
    assert (
        foredraft(["export", *(part for key, value in flags.items() for part in (f"--{key}", str(value)))])
        == 2
    )
    told = capsys.readouterr().err
    assert f"measured.heldout: expected in {bare}/foredraft.json, found no" in told
    assert "`foredraft train-drafter` makes it" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda card: card["measured"]["heldout"]["0"].pop("top4"),
            r"measured\.heldout\.0\.top4: expected in",
        ),
        (lambda card: card["training"].pop("log"), r"training\.log\.prompts_sha256: expected in"),
        (lambda card: card.update(draft_vocab="other.safetensors"), r"is incomplete: no other\.safetensors"),
        (lambda card: card.update(schema=9), "schema 1 expected, found 9"),
    ],
    ids=["figure", "data", "file", "schema"],
)
def test_incomplete_drafters_are_refused(
    recipe: ExportRecipe, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = edited(Path(recipe.drafter), tmp_path / "edited", change)
    with pytest.raises(ValueError, match=message):
        export(replace(recipe, drafter=str(folder)), "resolved")
    assert not Path(recipe.out).exists()


def test_a_plain_model_is_refused(recipe: ExportRecipe, tiny_drafter: Path) -> None:
    with pytest.raises(ValueError, match=r"has no foredraft\.json, so nothing is known of it"):
        export(replace(recipe, drafter=str(tiny_drafter)), "resolved")


def test_a_predictor_goes_along_with_its_own_card(
    recipe: ExportRecipe, predictor: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(replace(recipe, predictor=str(predictor)), "resolved")
    folder = Path(recipe.out) / "predictor"
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    card = found.pop("README.md").decode()
    assert found == {path.name: path.read_bytes() for path in predictor.iterdir()}
    assert f"add `--predictor {recipe.name}-predictor`" in card_of(recipe)
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert (metadata["base_model"], metadata["library_name"]) == (recipe.name, "foredraft")
    heldout = json.loads(found["config.json"])["calibration"]["heldout"]
    losses = heldout["log_loss"]
    names = ("constant", "depth", "entropy", "confidence", "predictor")
    assert f"| cross-entropy | {' | '.join(f'{losses[name]:.3f}' for name in names)} |" in card
    areas = " | ".join(f"{heldout['auroc'][name]:.3f}" for name in names[2:])
    assert f"| area under ROC | - | - | {areas} |" in card
    assert f"| S_1 | {heldout['ece']['S_1']:.3f} |" in card
    rates = heldout["hit_rate"]["0"]["8"]
    policies = ("uniform", "geometric", "confidence", "predictor", "oracle")
    assert f"| 0 | 8 | {' | '.join(f'{rates[policy]:.3f}' for policy in policies)} |" in card
    assert "The same fit to fewer prompts" in card
    assert "{" not in card
    assert "## In the engine" not in card
    models = ["--target", str(tiny_target), "--drafter", f"{recipe.out}/drafter", "--predictor", str(folder)]
    assert (
        foredraft(["generate", *models, *["--mode", "sync", "--prompt", "x", "--max-new-tokens", "4"]]) == 0
    )
    assert capsys.readouterr().out


def test_a_predictor_of_another_drafter_or_without_figures_is_refused(
    recipe: ExportRecipe, predictor: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(predictor, tmp_path / "other")
    content = json.loads((folder / "config.json").read_text())
    del content["calibration"]["heldout"]["ece"]
    (folder / "config.json").write_text(json.dumps(content))
    missing = (
        rf"calibration\.heldout\.ece: expected in {folder}/config\.json, found nothing; `foredraft train-"
    )
    with pytest.raises(ValueError, match=missing):
        export(replace(recipe, predictor=str(folder)), "resolved")
    (folder / "config.json").write_text(json.dumps(content | {"drafter_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="was trained for the drafter with weights 000000000000"):
        export(replace(recipe, predictor=str(folder)), "resolved")
    assert not Path(recipe.out).exists()


def test_figures_of_another_model_are_refused(recipe: ExportRecipe, report: Path, tmp_path: Path) -> None:
    content = json.loads(report.read_text())
    other = tmp_path / "other.json"
    hashes = content["weights_sha256"]
    for role in ("drafter", "target", "predictor"):
        other.write_text(json.dumps(content | {"weights_sha256": {**hashes, role: "f" * 64}}))
        with pytest.raises(ValueError, match=f"is of a {role} with weights ffffffffffff"):
            export(replace(recipe, bench=str(other)), "resolved")
    del content["weights_sha256"]
    other.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"not a bench report that this version reads .*measure again"):
        export(replace(recipe, bench=str(other)), "resolved")
    with pytest.raises(ValueError, match=r"no bench report nowhere\.json; make one with"):
        export(replace(recipe, bench="nowhere.json"), "resolved")
    assert not Path(recipe.out).exists()


def test_what_out_holds_decides(recipe: ExportRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    out = Path(recipe.out)
    export(recipe, "resolved")
    export(recipe, "other text")
    assert "complete already" in capsys.readouterr().err
    assert (out / "recipe.yaml").read_text() == "resolved"
    changed = replace(recipe, license="mit")
    with pytest.raises(
        ValueError, match="holds another export; choose another `out`, or pass --overwrite true"
    ):
        export(changed, "resolved")
    export(replace(changed, overwrite=True), "resolved")
    assert "license: mit" in card_of(recipe)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt; choose an `out` of its own"):
        export(replace(recipe, overwrite=True), "resolved")


def test_the_source_is_never_overwritten(recipe: ExportRecipe, tmp_path: Path) -> None:
    source = shutil.copytree(recipe.drafter, tmp_path / "run" / "drafter")
    for out in (source.parent, source):
        with pytest.raises(ValueError, match="choose an `out` of its own"):
            export(replace(recipe, drafter=str(source), out=str(out), overwrite=True), "resolved")
    assert (source / "model.safetensors").is_file()


def test_a_full_disk_leaves_what_was_there(recipe: ExportRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, out = shutil.copyfile, Path(recipe.out)

    def copy_until_full(source: Path, target: Path) -> None:
        if target.name == "model.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        copy(source, target)

    monkeypatch.setattr(export_module.shutil, "copyfile", copy_until_full)
    with pytest.raises(OSError, match="No space left"):
        export(recipe, "resolved")
    assert list(out.parent.iterdir()) == []
    monkeypatch.setattr(export_module.shutil, "copyfile", copy)
    export(recipe, "resolved")
    before = card_of(recipe)
    monkeypatch.setattr(export_module.shutil, "copyfile", copy_until_full)
    with pytest.raises(OSError, match="No space left"):
        export(replace(recipe, license="mit", overwrite=True), "resolved")
    assert card_of(recipe) == before
    assert list(out.parent.iterdir()) == [out]


def test_of_several_processes_the_first_exports(
    recipe: ExportRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [f"--{key}={getattr(recipe, key)}" for key in ("drafter", "out", "name", "base_model", "license")]
    for rank in ("1", "0"):
        assert not Path(recipe.out).exists()
        monkeypatch.setenv("RANK", rank)
        assert foredraft(["export", *flags, "--language=[en]"]) == 0
    assert card_of(recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"license": "two words"}, "license must be one word"),
        ({"name": ""}, "name must be one word"),
        ({"language": ("English",)}, "language must be codes such as en"),
    ],
)
def test_bad_recipes_are_refused(recipe: ExportRecipe, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(recipe, **changes)
