"""Training of drafters: it learns, resumes bit for bit, runs on two processes, others can load the result."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft.infer.config import read_config
from foredraft.infer.drafter_card import read_drafter_card
from foredraft.infer.drafters import load_drafter
from foredraft.infer.identity import identify_target
from foredraft.infer.params import EngineConfig, SamplingParams
from foredraft.kernels.draws import Draw
from foredraft.kernels.top_candidates_ref import top_candidates
from foredraft.train.acceptance import ranks_of
from foredraft.train.drafter import train_drafter
from foredraft.train.drafter_recipe import DrafterRecipe, InitRecipe, LoraRecipe
from foredraft.train.log_recipe import LogRecipe, OnPolicyRecipe, SynthesisRecipe
from foredraft.train.log_rows import LogRow
from foredraft.train.recipe import ExportRecipe, OutcomesRecipe, PredictorRecipe
from foredraft.train.target_log import TargetLog
from foredraft.train.trainer import Trainer

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = {
    "synthesise": SynthesisRecipe,
    "log": LogRecipe,
    "on_policy": OnPolicyRecipe,
    "drafter": DrafterRecipe,
    "outcomes": OutcomesRecipe,
    "predictor": PredictorRecipe,
    "export": ExportRecipe,
}


@pytest.fixture(scope="module")
def log_folder(make_log: Callable[..., TargetLog]) -> Path:
    """Log of the tiny target: 40 prompts, a fifth held out, greedy and sampled."""
    return make_log([f"word {n * n}" for n in range(40)], lambda n: n % 5 == 0).folder


@pytest.fixture
def recipe(log_folder: Path, tiny_target: Path, tmp_path: Path) -> DrafterRecipe:
    return DrafterRecipe(
        log=str(log_folder),
        target=str(tiny_target),
        out=str(tmp_path / "drafter"),
        init=InitRecipe(source="target", num_layers=2),
        draft_vocab_size=200,
        freeze_embeddings=True,
        epochs=2.0,
        batch_tokens=512,
        accumulation=1,
        max_length=128,
        learning_rate=3e-3,
        warmup_fraction=0.1,
        final_fraction=0.1,
        weight_decay=0.01,
        clip_norm=1.0,
        precision="float32",
        seed=0,
        k=4,
        eval_every=5,
        eval_rows=12,
        save_every=0,
    )


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def assert_bitwise_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_training_raises_heldout_acceptance(recipe: DrafterRecipe) -> None:
    train_drafter(replace(recipe, epochs=12.0, eval_every=0), "recipe text")
    card = read_drafter_card(recipe.out)
    assert card is not None
    assert (Path(recipe.out) / "recipe.yaml").read_text() == "recipe text"
    first = replace(recipe, out=recipe.out + "-untrained", learning_rate=1e-9, epochs=0.1)
    train_drafter(first, "recipe text")
    before = read_drafter_card(first.out)
    assert before is not None
    for temperature in ("0", "1"):
        measured = card.measured["heldout"][temperature]
        assert measured["top1"] > before.measured["heldout"][temperature]["top1"] + 0.1
        assert measured["tokens_per_verify"] > 1.0
    manifest = TargetLog.open(recipe.log).manifest
    assert card.training["log"]["prompts_sha256"] == manifest.prompts_sha256
    assert card.training["log"]["tokens"] == sum(shard.tokens for shard in manifest.shards) > 0
    assert card.training["tokens"] == 12 * sum(
        len(row.response_ids) for row in TargetLog.open(recipe.log).rows("train")
    )


def test_resume_is_bitwise(recipe: DrafterRecipe) -> None:
    # dropout draws from the RNG that a checkpoint must restore
    init = InitRecipe(source="scratch", num_layers=2, config={"attention_dropout": 0.1})
    straight = replace(recipe, init=init, attention="eager", save_every=3)
    train_drafter(straight, "x")
    resumed = replace(straight, out=recipe.out + "-resumed")
    train_drafter(resumed, "x", stop_at=5)
    assert not Path(resumed.out).exists()
    checkpoints = [path.name for path in Path(resumed.out + ".training").iterdir()]
    assert checkpoints == ["checkpoint-000005"]
    torch.manual_seed(1234)
    train_drafter(resumed, "x")
    assert_bitwise_equal(weights_of(straight.out), weights_of(resumed.out))
    cards = [read_drafter_card(out) for out in (straight.out, resumed.out)]
    assert cards[0].training["steps"] == cards[1].training["steps"] >= 10
    assert cards[0].training["curve"] == cards[1].training["curve"]
    assert not Path(resumed.out + ".training").exists()


def test_checkpoint_of_another_recipe_is_refused(recipe: DrafterRecipe) -> None:
    train_drafter(recipe, "x", stop_at=2)
    with pytest.raises(ValueError, match="is of another recipe or target log; delete"):
        train_drafter(replace(recipe, learning_rate=1e-3), "x")


def test_a_finished_drafter_is_not_trained_again(
    recipe: DrafterRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    train_drafter(replace(recipe, epochs=0.5), "x")
    before = (Path(recipe.out) / "model.safetensors").stat().st_mtime_ns
    train_drafter(replace(recipe, epochs=0.5, log_every=3), "x")
    assert "complete already" in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds a drafter of another recipe or target log"):
        train_drafter(replace(recipe, epochs=0.6), "x")
    assert (Path(recipe.out) / "model.safetensors").stat().st_mtime_ns == before
    train_drafter(replace(recipe, epochs=0.6, overwrite=True), "x")
    assert (Path(recipe.out) / "model.safetensors").stat().st_mtime_ns != before


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "trained"])
def test_artifact_is_a_normal_model(recipe: DrafterRecipe, tiny_target: Path, freeze: bool) -> None:
    train_drafter(replace(recipe, freeze_embeddings=freeze, epochs=1.0), "x")
    model = AutoModelForCausalLM.from_pretrained(recipe.out)
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    card, drafter = read_drafter_card(recipe.out), load_drafter(recipe.out, EngineConfig(dtype="float32"))
    assert card is not None
    d2t_D = load_file(Path(recipe.out) / card.draft_vocab)["d2t"]
    assert model.config.num_hidden_layers == 2
    assert d2t_D.dtype == torch.int64
    assert torch.equal(drafter.token_ids_C, d2t_D)
    assert (len(d2t_D), bool((d2t_D.diff() > 0).all())) == (200, True)
    tokenizer = AutoTokenizer.from_pretrained(recipe.out)
    assert set(tokenizer.all_special_ids) <= set(d2t_D.tolist())
    outside_V = torch.ones(320, dtype=torch.bool)
    outside_V[d2t_D] = False
    assert torch.equal(model.lm_head.weight[outside_V], target.lm_head.weight[outside_V])
    is_same = torch.equal(model.lm_head.weight[d2t_D], target.lm_head.weight[d2t_D])
    assert is_same == freeze


def test_whole_vocabulary_and_tied_head(
    recipe: DrafterRecipe, log_folder: Path, make_tiny_model: object, tmp_path: Path
) -> None:
    other = make_tiny_model("tied", seed=5, tie_word_embeddings=True, num_hidden_layers=1, hidden_size=16)
    from_model = replace(
        recipe,
        init=InitRecipe(source="model", model=str(other)),
        draft_vocab_size=0,
        freeze_embeddings=False,
        accumulation=2,
        epochs=1.0,
    )
    train_drafter(from_model, "x")
    card = read_drafter_card(recipe.out)
    assert card is not None
    assert card.draft_vocab is None
    model = AutoModelForCausalLM.from_pretrained(recipe.out)
    assert model.lm_head.weight.shape == (320, 16)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def token_log(log_folder: Path, folder: Path) -> TargetLog:
    """The same log without distributions."""
    source = TargetLog.open(log_folder)
    manifest = replace(source.manifest, top_k_logprobs=0, num_shards=1, shards=[])
    log = TargetLog.start(folder, manifest)

    def strip(row: LogRow) -> LogRow:
        nothing = np.empty((len(row.response_ids), 0))
        return replace(row, topk_ids=nothing, topk_logprobs=nothing)

    log.write_shard(0, [strip(row) for row in source.rows()])
    log.gather()
    return log


def test_a_log_of_tokens_trains_by_cross_entropy(
    recipe: DrafterRecipe, log_folder: Path, tmp_path: Path
) -> None:
    token_log(log_folder, tmp_path / "tokens")
    tokens = replace(recipe, log=str(tmp_path / "tokens"), epochs=8.0, eval_every=0)
    with pytest.raises(ValueError, match="losses forward_kl compare distributions, of which the log keeps"):
        train_drafter(tokens, "x")
    train_drafter(replace(tokens, losses={"cross_entropy": 1.0}), "x")
    card = read_drafter_card(recipe.out)
    assert card is not None
    assert card.measured["heldout"]["0"]["top8"] > 0.2
    assert card.training["losses"] == {"cross_entropy": 1.0}


@pytest.mark.parametrize(
    "losses",
    [{"reverse_kl": 1.0}, {"total_variation": 1.0}, {"forward_kl": 0.5, "lk": 1.0, "cross_entropy": 0.0}],
    ids="+".join,
)
def test_other_losses_train_head_and_embeddings(
    recipe: DrafterRecipe, losses: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    train_drafter(replace(recipe, epochs=12.0, eval_every=0, losses=losses, freeze_embeddings=False), "x")
    card = read_drafter_card(recipe.out)
    assert card is not None
    assert card.training["losses"] == losses
    told = " + ".join(f"{weight:g} {name}" for name, weight in losses.items())
    assert f"loss: {told}\n" in capsys.readouterr().err
    assert card.measured["heldout"]["0"]["top8"] > 0.2


def test_two_processes_train_like_two_accumulated_batches(
    recipe: DrafterRecipe,
    tmp_path: Path,
    write_recipe: Callable[[DrafterRecipe], Path],
    launch_on_cpus: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    # with a trained head: the loss takes its weight, out of sight of the wrapper of several processes
    recipe = replace(recipe, freeze_embeddings=False, save_every=2)
    one = replace(recipe, out=str(tmp_path / "one"), accumulation=2)
    two = replace(recipe, out=str(tmp_path / "two"), accumulation=1)
    for num_processes, wanted in ((1, one), (2, two)):
        path = write_recipe(wanted)
        launch_on_cpus(num_processes, "-m", "foredraft.train.drafter", "--config", str(path))
        card = read_drafter_card(wanted.out)
        assert card is not None
        assert card.training["processes"] == num_processes
    first, second = weights_of(one.out), weights_of(two.out)
    # the sums of gradients are taken in another order
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=2e-4, msg=name)


def test_steps_that_are_not_finite_are_skipped_and_too_many_end_the_run(
    recipe: DrafterRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, calls = Trainer.loss, []

    def poisoned(trainer: Trainer, *args: Any) -> torch.Tensor:
        calls.append(1)
        return loss(trainer, *args) * (float("nan") if len(calls) in (2, 4) else 1.0)

    monkeypatch.setattr(Trainer, "loss", poisoned)
    train_drafter(replace(recipe, out=recipe.out + "-skipped", max_skipped=2), "x")
    card = read_drafter_card(recipe.out + "-skipped")
    assert card is not None
    assert card.training["skipped"] == 2
    calls.clear()
    message = r"step 3: loss nan, gradient norm nan, after 1 steps that were skipped.*log's rows [0-9a-f]{32}"
    with pytest.raises(ValueError, match=message):
        train_drafter(replace(recipe, save_every=1, max_skipped=1), "x")
    assert not Path(recipe.out).exists()
    assert [path.name for path in Path(recipe.out + ".training").iterdir()] == ["checkpoint-000003"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": InitRecipe(source="target", num_layers=9)}, r"num_layers must be in 1\.\.3"),
        ({"init": InitRecipe(source="target", layers=(0, 7))}, r"layers must be in 0\.\.2, got \[0, 7\]"),
        ({"draft_vocab_size": 2}, r"draft_vocab_size must be in 3\.\.320"),
        ({"max_length": 2}, "no train row with a prompt shorter than max_length 2"),
        ({"log": "nowhere"}, "nowhere is not a target log"),
        ({"losses": {"kl": 1.0}}, "losses must be weights of some of forward_kl, .*, got 'kl'"),
        ({"losses": {"forward_kl": 0.0, "lk": 0.0}}, "losses must be 0 or positive, not all 0, got"),
        ({"losses": {"forward_kl": 1.0, "lk": -0.5}}, "losses must be 0 or positive, not all 0, got"),
        ({"losses": {"lk": float("nan")}}, "losses must be 0 or positive, not all 0, got"),
    ],
    ids=["depth", "layers", "vocabulary", "length", "log", "loss", "no-loss", "negative-loss", "nan-loss"],
)
def test_bad_recipes_are_refused(recipe: DrafterRecipe, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_drafter(replace(recipe, **changes), "x")
    assert not Path(recipe.out).exists()


def test_log_of_another_target_is_refused(recipe: DrafterRecipe, make_tiny_model: object) -> None:
    other = make_tiny_model("other", seed=9)
    with pytest.raises(ValueError, match=r"is of target tiny-target .*, the recipe's target is other"):
        train_drafter(replace(recipe, target=str(other)), "x")


def test_logs_of_two_targets_are_not_mixed(
    recipe: DrafterRecipe, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    log = TargetLog.open(recipe.log)
    other = identify_target(str(make_tiny_model("another", seed=9)))
    stranger = TargetLog.start(
        tmp_path / "stranger", replace(log.manifest, target=other, num_shards=1, shards=[])
    )
    stranger.write_shard(0, list(log.rows())[:4])
    stranger.gather()
    with pytest.raises(
        ValueError, match=r"stranger is of target another .*, the recipe's target is tiny-target"
    ):
        train_drafter(replace(recipe, log=(recipe.log, str(stranger.folder))), "x")


def test_lora_needs_the_targets_vocabulary(
    recipe: DrafterRecipe, make_tiny_model: Callable[..., Path]
) -> None:
    wider = make_tiny_model("wider", seed=4, vocab_size=384)
    init = InitRecipe(source="model", model=str(wider), lora=LoraRecipe(rank=4, alpha=8.0))
    with pytest.raises(ValueError, match="has a vocabulary of 384, the target one of 320: LoRA leaves"):
        train_drafter(replace(recipe, init=init), "x")
    assert not Path(recipe.out).exists()


def test_a_log_that_keeps_too_little_is_refused(
    recipe: DrafterRecipe, make_log: Callable[..., TargetLog]
) -> None:
    log = make_log(["word 1", "word 2"], lambda n: n == 1, top_k_logprobs=1)
    with pytest.raises(
        ValueError, match=r"keeps the 1 most probable tokens, \d+% of the mass; make a log with"
    ):
        train_drafter(replace(recipe, log=str(log.folder)), "x")


def test_a_log_without_heldout_rows_trains_only_without_a_gate(
    recipe: DrafterRecipe, make_log: Callable[..., TargetLog]
) -> None:
    log = make_log(["word 1", "word 2"], lambda n: False)
    unmeasured = replace(recipe, log=str(log.folder), epochs=0.5)
    with pytest.raises(
        ValueError, match=r"has no held-out row .* or train without any figure by gate_prompts 0"
    ):
        train_drafter(unmeasured, "x")
    train_drafter(replace(unmeasured, gate_prompts=0), "x")
    card = read_drafter_card(recipe.out)
    assert card is not None
    assert card.measured == {}


def test_equal_scores_rank_as_the_drafters_candidates() -> None:
    # a bfloat16 head gives equal logits often
    logits_TD = 4.0 * torch.randn(300, 2000, generator=torch.Generator().manual_seed(0))
    logits_TD = logits_TD.bfloat16().float()
    draws = [Draw(SamplingParams(temperature=0.0), 0, position) for position in range(300)]
    candidates = top_candidates(logits_TD, draws, 16)
    best_T2 = logits_TD.topk(2).values
    assert int((best_T2[:, 0] == best_T2[:, 1]).sum()) > 0
    for place in range(16):
        assert bool((ranks_of(logits_TD, candidates.token_ids_NF[:, place]) == place).all())
    assert bool((ranks_of(logits_TD, logits_TD.argmin(-1)) >= 16).all())


def test_wandb_offline(recipe: DrafterRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_drafter(replace(recipe, wandb="offline", epochs=0.5, log_every=1), "x")
    assert list((tmp_path / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize(
    "path",
    sorted((REPOSITORY / "recipes").rglob("*.yaml")),
    ids=lambda path: str(path.relative_to(REPOSITORY / "recipes").with_suffix("")),
)
def test_every_recipe_loads(path: Path) -> None:
    # demo_log.yaml, and in the folder of a target log.yaml, drafter_mlp.yaml
    kind = path.stem.rpartition("_")[2]
    cls = RECIPES[next(name for name in (path.stem, kind, path.stem.partition("_")[0]) if name in RECIPES)]
    instance, resolved = read_config(cls, ["--config", str(path)], "recipe")
    assert isinstance(instance, cls)
    assert yaml.safe_load(resolved).keys() == set(cls.__slots__)
