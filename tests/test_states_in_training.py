"""States of the target for training: run beside it or stored with the log, and what either costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.infer.drafter_card import StateNeeds
from foredraft.infer.state_tap import StateTap
from foredraft.train import state_plan
from foredraft.train.batches import collate
from foredraft.train.drafter_recipe import DrafterRecipe, Eagle3Recipe
from foredraft.train.logged_states import LoggedStates, states_path
from foredraft.train.state_plan import StatePlan
from foredraft.train.target_log import TargetLog
from foredraft.train.target_runner import TargetRunner

LAYERS = (1, 2, 3)
NEEDS = StateNeeds(layers=LAYERS, width=96, keeps_all=True)


@pytest.fixture(scope="module")
def log(make_log: Callable[..., TargetLog]) -> TargetLog:
    """Eight prompts with the states that enter layers 0 to 3."""
    return make_log([f"word {n}" for n in range(8)], lambda n: n < 2, hidden_layers=(0, 1, 2, 3))


@pytest.fixture
def recipe(log: TargetLog, tiny_target: Path, tmp_path: Path) -> DrafterRecipe:
    return DrafterRecipe(
        log=str(log.folder),
        target=str(tiny_target),
        out=str(tmp_path / "drafter"),
        family="eagle3",
        eagle3=Eagle3Recipe(num_steps=4, layers=LAYERS),
        draft_vocab_size=0,
        freeze_embeddings=True,
        epochs=1.0,
        batch_tokens=256,
        accumulation=1,
        max_length=64,
        learning_rate=1e-3,
        warmup_fraction=0.1,
        final_fraction=0.1,
        weight_decay=0.0,
        clip_norm=1.0,
        precision="float32",
        seed=0,
        k=2,
        eval_every=0,
        eval_rows=4,
        save_every=0,
    )


def test_layer_ids_are_those_of_transformers(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    tap = StateTap(model, (0, 2, 3))
    ids = torch.arange(3, 20)[None]
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    found = tap.take()
    assert torch.equal(found, torch.cat([hidden[0], hidden[2], hidden[3]], -1))
    tap.remove()
    with pytest.raises(ValueError, match=r"states enter layers 0\.\.3 \(3: the head\), got \[4\]"):
        StateTap(model, (4,))


@pytest.mark.parametrize("is_packed", [False, True], ids=["lines", "packed"])
def test_stored_states_are_those_of_the_target(
    log: TargetLog, recipe: DrafterRecipe, is_packed: bool
) -> None:
    rows = list(log.rows())[:4]
    lines = [rows[:3], rows[3:]] if is_packed else [[row] for row in rows]
    batch = collate(lines, 64)
    stored = LoggedStates([log], NEEDS).of(lines, batch)
    run = TargetRunner.of_recipe(recipe, NEEDS, torch.device("cpu")).of(lines, batch)
    is_input_BT = torch.zeros(batch.ids_BT.shape, dtype=torch.bool)
    for index, line in enumerate(lines):
        is_input_BT[index, : sum(row.first_position + len(row.response_ids) - 1 for row in line)] = True
    scale = run.abs().max()
    torch.testing.assert_close(stored[is_input_BT] / scale, run[is_input_BT] / scale, atol=4e-3, rtol=0)


def test_a_log_without_the_states_is_refused(log: TargetLog) -> None:
    with pytest.raises(
        ValueError, match=r"states of layers \[1, 9\] are to come from the log.*\[0, 1, 2, 3\]"
    ):
        LoggedStates([log], StateNeeds(layers=(1, 9), width=64))


def test_a_lost_states_file_is_a_damaged_shard(log: TargetLog) -> None:
    path = states_path(log.shard_paths[0])
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        with pytest.raises(ValueError, match="missing or damaged: shard-00000"):
            TargetLog.open(log.folder)
    finally:
        path.write_bytes(content)
    TargetLog.open(log.folder)


def test_states_are_never_written_where_they_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_plan.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    plan = StatePlan(num_tokens=1000, width=1000)
    with pytest.raises(ValueError, match=r"need 1\.9 MiB in .*, where 1\.0 MiB are free; log fewer"):
        plan.stored(tmp_path / "not" / "there")
    assert "1,000 tokens, 195.3 KiB of 1.0 MiB free" in StatePlan(num_tokens=1000, width=100).stored(tmp_path)
    assert "2 times at 50 tokens/s: 40 s in all" in plan.run(50.0, 2.0)
    assert list(tmp_path.iterdir()) == []


def test_rows_keep_one_state_a_token(log: TargetLog) -> None:
    rows = list(log.rows())
    states = LoggedStates([log], StateNeeds(layers=(0,), width=32))
    for row in rows:
        assert states.bits_of(row).shape == (len(row.prompt_ids) + len(row.response_ids) - 1, 32)
    assert len({row.key for row in rows}) == len(rows)
    assert all(row.states is None for row in rows)
    assert np.unique([row.seed for row in rows]).size == len(rows)
