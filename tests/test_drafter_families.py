"""Every drafter family: it unrolls causally, learns, drafts in the engine as it unrolls, loads again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foredraft.infer.drafter_card import DrafterCard, read_drafter_card
from foredraft.infer.drafters import load_drafter
from foredraft.infer.drafters.network import DraftNetwork, Sequences
from foredraft.infer.engine import Engine
from foredraft.infer.params import EngineConfig, Mode, SpeculationParams
from foredraft.train.acceptance import chain_rounds, follow_row, sampling_of
from foredraft.train.chain_rounds import ChainRounds
from foredraft.train.drafter import train_drafter
from foredraft.train.drafter_init import build_network
from foredraft.train.drafter_recipe import (
    DrafterRecipe,
    Eagle3Recipe,
    InitRecipe,
    LoraRecipe,
    MLPRecipe,
    NgramRecipe,
)
from foredraft.train.export import export
from foredraft.train.log_rows import LogRow
from foredraft.train.recipe import ExportRecipe
from foredraft.train.target_log import TargetLog
from foredraft.train.target_runner import TargetRunner

K, NUM_STEPS, VOCAB = 3, 6, 320
FAMILIES: dict[str, dict[str, Any]] = {
    "lm": {"family": "lm", "init": InitRecipe(source="target", num_layers=2)},
    "lora": {
        "family": "lm",
        "init": InitRecipe(source="target", num_layers=2, lora=LoraRecipe(rank=8, alpha=16.0)),
    },
    "mlp": {"family": "mlp", "mlp": MLPRecipe(inner_size=48, num_steps=NUM_STEPS)},
    "eagle3": {"family": "eagle3", "eagle3": Eagle3Recipe(num_steps=NUM_STEPS, layers=(1, 2, 3))},
}
NETWORKS = list(FAMILIES)
FAMILIES["ngram"] = {"family": "ngram", "ngram": NgramRecipe()}


@pytest.fixture(scope="module")
def log(make_log: Callable[..., TargetLog]) -> TargetLog:
    """24 prompts, a fourth held out, greedy and sampled."""
    return make_log([f"word {n * n}" for n in range(24)], lambda n: n % 4 == 0)


@pytest.fixture
def make_recipe(log: TargetLog, tiny_target: Path, tmp_path: Path) -> Callable[..., DrafterRecipe]:
    """`make_recipe(name, **changes)`: a recipe of a family that is trained in seconds."""

    def make(name: str, **changes: Any) -> DrafterRecipe:
        settings: dict[str, Any] = {
            "log": str(log.folder),
            "target": str(tiny_target),
            "out": str(tmp_path / name),
            "draft_vocab_size": 200,
            "freeze_embeddings": True,
            "epochs": 1.0,
            "batch_tokens": 512,
            "accumulation": 1,
            "max_length": 128,
            "learning_rate": 3e-3,
            "warmup_fraction": 0.1,
            "final_fraction": 0.1,
            "weight_decay": 0.0,
            "clip_norm": 1.0,
            "precision": "float32",
            "seed": 0,
            "k": K,
            "eval_every": 0,
            "eval_rows": 8,
            "save_every": 0,
        }
        return DrafterRecipe(**(settings | FAMILIES[name] | changes))

    return make


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest, make_recipe: Callable[..., DrafterRecipe]) -> DraftNetwork:
    """An untrained network of each family over 200 tokens."""
    torch.manual_seed(0)
    return build_network(make_recipe(request.param), torch.arange(0, VOCAB, 2)[:150]).eval()


def random_sequences(network: DraftNetwork, lengths: list[list[int]], seed: int = 0) -> Sequences:
    """Lines of documents of given lengths with random tokens and states."""
    generator = torch.Generator().manual_seed(seed)
    positions_BT = torch.stack([torch.cat([torch.arange(size) for size in line]) for line in lengths])
    ids_BT = torch.randint(VOCAB, positions_BT.shape, generator=generator)
    width = network.states.width
    states_BTS = torch.randn(*positions_BT.shape, width, generator=generator) if width else None
    return Sequences(ids_BT, positions_BT, states_BTS)


@torch.no_grad()
def logits_of(network: DraftNetwork, sequences: Sequences) -> list[torch.Tensor]:
    """[B, T, D] of every step."""
    head = network.head(torch.float32)
    return [head.logits(hidden_BTH) for hidden_BTH in network(sequences, network.num_steps)]


def test_unroll_gives_every_step_at_every_anchor(network: DraftNetwork) -> None:
    steps = logits_of(network, random_sequences(network, [[20], [20]]))
    assert len(steps) == network.num_steps == (NUM_STEPS if network.states.layers else 1)
    assert {step.shape for step in steps} == {(2, 20, 150)}
    assert all(bool(step.isfinite().all()) for step in steps)


def test_a_token_never_changes_what_was_guessed_before_it(network: DraftNetwork) -> None:
    sequences, place = random_sequences(network, [[20]]), 11
    before = logits_of(network, sequences)
    ids_BT = sequences.ids_BT.clone()
    ids_BT[0, place] = (ids_BT[0, place] + 7) % VOCAB
    after = logits_of(network, replace(sequences, ids_BT=ids_BT))
    for step, (one, other) in enumerate(zip(before, after, strict=True), 1):
        # entries before their step's first anchor mean nothing
        first = step - 1
        torch.testing.assert_close(one[0, first:place], other[0, first:place], atol=1e-5, rtol=0)
        assert not torch.allclose(one[0, place], other[0, place])


def test_no_state_beyond_the_anchor_is_used(network: DraftNetwork) -> None:
    if not network.states.layers:
        pytest.skip("reads no states")
    sequences, place = random_sequences(network, [[20]]), 8
    before = logits_of(network, sequences)
    states_BTS = sequences.states_BTS.clone()
    states_BTS[0, place:] += 1.0
    after = logits_of(network, replace(sequences, states_BTS=states_BTS))
    for step, (one, other) in enumerate(zip(before, after, strict=True), 1):
        # the anchor of entry t is t - step + 1, and it starts from the state before it
        last = place + step
        torch.testing.assert_close(one[0, step - 1 : last], other[0, step - 1 : last], atol=1e-5, rtol=0)
        assert not torch.allclose(one[0, last], other[0, last])


def test_packed_documents_do_not_see_each_other(network: DraftNetwork) -> None:
    packed = random_sequences(network, [[9, 13, 6]])
    together = logits_of(network, packed)
    for start, size in ((0, 9), (9, 13), (22, 6)):
        part = slice(start, start + size)
        states_BTS = None if packed.states_BTS is None else packed.states_BTS[:, part]
        alone = Sequences(packed.ids_BT[:, part], packed.positions_BT[:, part], states_BTS)
        for step, logits in enumerate(logits_of(network, alone), 1):
            found = together[step - 1][:, part]
            torch.testing.assert_close(found[0, step - 1 :], logits[0, step - 1 :], atol=1e-4, rtol=0)


def trained(recipe: DrafterRecipe) -> DrafterCard:
    train_drafter(recipe, "recipe text")
    card = read_drafter_card(recipe.out)
    assert card is not None
    assert card.family == recipe.family
    return card


@pytest.mark.parametrize("name", NETWORKS)
def test_a_family_learns_a_tiny_log_by_heart(
    name: str, make_recipe: Callable[..., DrafterRecipe], make_log: Callable[..., TargetLog]
) -> None:
    log = make_log(["word 1", "word 2"], lambda n: n == 1, max_new_tokens=24)
    # the held-out prompt is the one that is learned: both sides of this log
    rows = list(log.rows())
    same = replace(log.manifest, num_shards=1, shards=[])
    folder = log.folder.parent / "same"
    learned = TargetLog.start(folder, same)
    learned.write_shard(
        0, [*[replace(row, split="train") for row in rows], *(replace(row, split="heldout") for row in rows)]
    )
    learned.gather()
    recipe = make_recipe(
        name,
        log=str(folder),
        epochs=400.0 if name in ("mlp", "eagle3") else 150.0,
        learning_rate=1e-2,
        draft_vocab_size=0,
        losses={"cross_entropy": 1.0},
    )
    measured = trained(recipe).measured["heldout"]["0"]
    assert measured["top1"] > 0.9
    assert measured["tokens_per_verify"] > 2.5
    assert measured["acc_marginal"][0] > 0.8
    assert len(measured["overlap"]) == recipe.num_steps


@pytest.fixture(scope="module")
def rows(log: TargetLog) -> list[LogRow]:
    return [row for row in log.rows("heldout") if len(row.response_ids) > 4]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_engine_drafts_as_the_trainer_unrolls(
    name: str, make_recipe: Callable[..., DrafterRecipe], rows: list[LogRow]
) -> None:
    recipe = make_recipe(name, epochs=6.0)
    trained(recipe)
    config = EngineConfig(dtype="float32", speculation=SpeculationParams(k=K, block="chain", on_miss="plain"))
    with Engine.from_pretrained(recipe.target, recipe.out, mode="sync", config=config) as engine:
        for row in rows[:6]:
            sampling = replace(sampling_of(row), max_new_tokens=len(row.response_ids))
            prompt = row.prompt_ids.tolist()
            found: dict[Mode, Any] = {}
            for mode in ("plain", "sync", "async"):
                [found[mode]] = engine.generate([prompt], sampling, mode=mode)
            tokens = {mode: completion.token_ids for mode, completion in found.items()}
            assert tokens["plain"] == tokens["sync"] == tokens["async"] == row.response_ids.tolist()
            assert_states_counted(recipe, found)
            if name != "ngram":
                assert_simulated(recipe, row, found["sync"].request_stats)
            assert_replayed(recipe, row, found["sync"].request_stats)


def assert_states_counted(recipe: DrafterRecipe, found: dict[Mode, Any]) -> None:
    """Bytes that went to the drafter: none, those of every token, or those of each round's last one."""
    needs = read_drafter_card(recipe.out).states
    num_bytes = {mode: completion.stats["state_bytes"] for mode, completion in found.items()}
    assert num_bytes["plain"] == 0
    num_tokens = found["sync"].prompt_tokens + len(found["sync"].token_ids)
    # a guess is never asked for behind the last token
    least = needs.num_bytes * (num_tokens // 2 if needs.keeps_all else 1)
    for mode in ("sync", "async"):
        assert (num_bytes[mode] > 0) == bool(needs.layers)
        assert least <= num_bytes[mode] <= needs.num_bytes * num_tokens


def assert_replayed(recipe: DrafterRecipe, row: LogRow, stats: Any) -> None:
    """The engine's rounds are those of a replay over the log."""
    config = EngineConfig(dtype="float32", draft_rows=8, lanes=K + 1)
    drafter = load_drafter(recipe.out, config)
    needs, states = drafter.states, None
    if needs.layers:
        states = TargetRunner.of_recipe(recipe, needs, torch.device("cpu")).bits_of
    rounds = ChainRounds(drafter, k=K, fan_out=16, states=states)
    [(_, records)] = rounds.run([row])
    # the last round of a response has no outcome where the response ends before it
    num_replayed = len(records) // (K + 1)
    assert num_replayed in (stats.rounds, stats.rounds - 1)


def assert_simulated(recipe: DrafterRecipe, row: LogRow, stats: Any) -> None:
    """The engine's rounds are those that the unrolled network foretells."""
    card = read_drafter_card(recipe.out)
    network = build_network(recipe, load_file(Path(recipe.out) / card.draft_vocab)["d2t"])
    weights = load_file(Path(recipe.out) / "model.safetensors")
    if recipe.family == "lm":
        network = build_network(
            replace(recipe, init=InitRecipe(source="model", model=recipe.out)),
            load_file(Path(recipe.out) / card.draft_vocab)["d2t"],
        )
    else:
        network.load_state_dict({k: v for k, v in weights.items() if k not in ("d2t", "t2d")})
    states = (
        TargetRunner.of_recipe(recipe, network.states, torch.device("cpu")) if network.states.layers else None
    )
    report = follow_row(network.eval(), row, 1024, states)
    expected = chain_rounds(report.ranks_ST == 0, K)
    assert (stats.rounds, stats.rounds_ngram) == (len(expected), 0)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_an_export_decodes_as_the_drafter(
    name: str, make_recipe: Callable[..., DrafterRecipe], rows: list[LogRow], tmp_path: Path
) -> None:
    recipe = make_recipe(name, epochs=2.0, gate_prompts=0)
    trained(recipe)
    out = tmp_path / "export"
    names = {"name": "me/drafter", "base_model": "me/target", "license": "mit", "language": ()}
    export(ExportRecipe(drafter=recipe.out, out=str(out), **names), "resolved")
    card = (out / "drafter" / "README.md").read_text()
    assert "{" not in card.replace("{'", "")
    assert f"family `{recipe.family}`" in card
    assert ("AutoModelForCausalLM" in card, "library_name: transformers" in card) == (
        recipe.init is not None,
    ) * 2
    assert ("## Acceptance" in card) == (name != "ngram")
    sampling = replace(sampling_of(rows[0]), max_new_tokens=16)
    config = EngineConfig(dtype="float32", speculation=SpeculationParams(k=K, block="chain", on_miss="plain"))
    rounds = []
    for folder in (recipe.out, f"{out}/drafter"):
        with Engine.from_pretrained(recipe.target, folder, mode="sync", config=config) as engine:
            [completion] = engine.generate([rows[0].prompt_ids.tolist()], sampling)
            rounds.append((completion.token_ids, completion.request_stats.rounds))
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("name", ["mlp", "eagle3"])
def test_an_artifact_says_what_it_reads(name: str, make_recipe: Callable[..., DrafterRecipe]) -> None:
    recipe = make_recipe(name, epochs=0.3)
    card = trained(recipe)
    drafter = load_drafter(recipe.out, EngineConfig())
    assert drafter.states == card.states
    assert card.states.width == 32 * len(card.states.layers)
    assert card.max_depth == drafter.max_depth == NUM_STEPS


def test_sections_belong_to_their_family(make_recipe: Callable[..., DrafterRecipe]) -> None:
    with pytest.raises(ValueError, match="mlp must be unset for family lm"):
        make_recipe("lm", mlp=MLPRecipe(inner_size=8, num_steps=8))
    with pytest.raises(ValueError, match="eagle3 must be a section"):
        make_recipe("eagle3", eagle3=None)
    with pytest.raises(ValueError, match="num_steps must be at least 2 k = 8"):
        make_recipe("mlp", k=4)
