"""Long training runs: stopped and killed, packed, scheduled, compiled, tracked, sharded over processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from foredraft.infer.drafter_card import read_drafter_card
from foredraft.train import drafter as drafter_module
from foredraft.train.drafter import train_drafter
from foredraft.train.drafter_init import build_network
from foredraft.train.drafter_recipe import DrafterRecipe, Eagle3Recipe, InitRecipe, MLPRecipe
from foredraft.train.target_log import TargetLog
from foredraft.train.target_runner import TargetRunner
from foredraft.train.trainer import Trainer, TrainingData, mixed_losses

SECTIONS: dict[str, dict[str, Any]] = {
    "lm": {"init": InitRecipe(source="target", num_layers=2)},
    "mlp": {"mlp": MLPRecipe(inner_size=32, num_steps=6)},
    "eagle3": {"eagle3": Eagle3Recipe(num_steps=6, layers=(1, 2, 3))},
}
KILLED_IN_A_STEP = """
import os, signal, sys
from pathlib import Path
from foredraft.infer.config import read_config
from foredraft.train.drafter import train_drafter
from foredraft.train.drafter_recipe import DrafterRecipe
from foredraft.train.trainer import Trainer

def step(trainer, number, train_step=Trainer.train_step):
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(trainer, number)

Trainer.train_step = step
train_drafter(read_config(DrafterRecipe, sys.argv[1:], "test")[0], "x")
"""
SHARDED = """
import sys
import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from foredraft.infer.config import read_config
from foredraft.train.drafter import train_drafter
from foredraft.train.drafter_recipe import DrafterRecipe

def prepare(accelerator, network, optimizer, plain=Accelerator.prepare):
    names = {id(value): name for name, value in network.named_parameters()}
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    for layer in network.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    sharded = dict(network.named_parameters())
    assert all(isinstance(value, DTensor) for value in sharded.values())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[id(value)]] for value in group["params"]]
    return network, plain(accelerator, optimizer)

Accelerator.prepare = prepare
train_drafter(read_config(DrafterRecipe, sys.argv[2:], "test")[0], "x", stop_at=int(sys.argv[1]))
"""

SHARDED_BY_ACCELERATE = """
import sys
from foredraft.infer.config import read_config
from foredraft.train.drafter import train_drafter
from foredraft.train.drafter_recipe import DrafterRecipe
from foredraft.train.sharding import is_sharded
from foredraft.train.trainer import Trainer

def step(trainer, number, train_step=Trainer.train_step):
    assert is_sharded(trainer.network)
    return train_step(trainer, number)

Trainer.train_step = step
train_drafter(read_config(DrafterRecipe, sys.argv[1:], "test")[0], "x")
"""


@pytest.fixture(scope="module")
def log(make_log: Callable[..., TargetLog]) -> TargetLog:
    """40 prompts, a fifth held out, greedy and sampled."""
    return make_log([f"word {n * n}" for n in range(40)], lambda n: n % 5 == 0)


@pytest.fixture
def make_recipe(log: TargetLog, tiny_target: Path, tmp_path: Path) -> Callable[..., DrafterRecipe]:
    """`make_recipe(family, **changes)`: ten updates or so."""

    def make(family: str = "lm", **changes: Any) -> DrafterRecipe:
        settings: dict[str, Any] = {
            "log": str(log.folder),
            "target": str(tiny_target),
            "out": str(tmp_path / "drafter"),
            "family": family,
            "draft_vocab_size": 200,
            "freeze_embeddings": True,
            "epochs": 2.0,
            "batch_tokens": 512,
            "accumulation": 1,
            "max_length": 128,
            "learning_rate": 3e-3,
            "warmup_fraction": 0.1,
            "final_fraction": 0.1,
            "weight_decay": 0.01,
            "clip_norm": 1.0,
            "precision": "float32",
            "seed": 0,
            "k": 3,
            "eval_every": 0,
            "eval_rows": 8,
            "save_every": 0,
            "gate_prompts": 0,
        }
        return DrafterRecipe(**(settings | SECTIONS[family] | changes))

    return make


def weights_of(recipe: DrafterRecipe) -> dict[str, torch.Tensor]:
    return load_file(Path(recipe.out) / "model.safetensors")


def checkpoints_of(recipe: DrafterRecipe) -> list[str]:
    return [path.name for path in Path(f"{recipe.out}.training").iterdir()]


def assert_bitwise_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_sigterm_saves_and_the_same_command_goes_on(
    make_recipe: Callable[..., DrafterRecipe],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    straight = make_recipe(out=str(tmp_path / "straight"))
    train_drafter(straight, "x")
    recipe, train_step = make_recipe(), Trainer.train_step

    def terminated(trainer: Trainer, step: int) -> Any:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(trainer, step)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "train_step", terminated)
        assert not train_drafter(recipe, "x")
    assert "stopped after step 4; the same command goes on from there" in capsys.readouterr().err
    assert not Path(recipe.out).exists()
    assert checkpoints_of(recipe) == ["checkpoint-000004"]
    assert train_drafter(recipe, "x")
    assert_bitwise_equal(weights_of(straight), weights_of(recipe))


def test_a_run_killed_between_checkpoints_ends_as_if_nothing_happened(
    make_recipe: Callable[..., DrafterRecipe], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    straight = make_recipe(out=str(tmp_path / "straight"), save_every=3)
    train_drafter(straight, "x")
    recipe = make_recipe(save_every=3)
    command = [sys.executable, "-c", KILLED_IN_A_STEP, "--config", str(write_recipe(recipe))]
    killed = subprocess.run(command, capture_output=True, timeout=240, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert checkpoints_of(recipe) == ["checkpoint-000003"]
    train_drafter(recipe, "x")
    assert_bitwise_equal(weights_of(straight), weights_of(recipe))


@pytest.mark.parametrize("family", ["mlp", "eagle3"])
def test_families_that_feed_on_states_resume_bit_for_bit(
    family: str, make_recipe: Callable[..., DrafterRecipe], tmp_path: Path
) -> None:
    straight, resumed = make_recipe(family, out=str(tmp_path / "straight")), make_recipe(family)
    train_drafter(straight, "x")
    train_drafter(resumed, "x", stop_at=4)
    torch.manual_seed(99)
    train_drafter(resumed, "x")
    assert_bitwise_equal(weights_of(straight), weights_of(resumed))


def test_losses_change_linearly(make_recipe: Callable[..., DrafterRecipe]) -> None:
    recipe = make_recipe(
        losses={"forward_kl": 1.0, "lk": 0.5}, final_losses={"lk": 1.5, "cross_entropy": 0.2}
    )
    assert mixed_losses(recipe, 0.0) == {"forward_kl": 1.0, "lk": 0.5}
    assert mixed_losses(recipe, 0.5) == {"forward_kl": 0.5, "lk": 1.0, "cross_entropy": 0.1}
    assert mixed_losses(recipe, 1.0) == {"lk": 1.5, "cross_entropy": 0.2}


def test_the_schedule_of_losses_reaches_the_weights(
    make_recipe: Callable[..., DrafterRecipe], tmp_path: Path
) -> None:
    losses: dict[str, Any] = {"losses": {"forward_kl": 1.0}, "final_losses": {"lk": 1.0}}
    mixed = make_recipe(out=str(tmp_path / "mixed"), **losses)
    pure = make_recipe(out=str(tmp_path / "pure"))
    for recipe in (mixed, pure):
        train_drafter(recipe, "x")
    first, second = weights_of(mixed), weights_of(pure)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert read_drafter_card(mixed.out).training["recipe"]["final_losses"] == {"lk": 1.0}


@pytest.mark.parametrize("family", ["lm", "mlp", "eagle3"])
def test_packed_rows_have_the_loss_and_gradient_of_rows_apart(
    family: str, make_recipe: Callable[..., DrafterRecipe], log: TargetLog
) -> None:
    recipe = make_recipe(family)
    torch.manual_seed(0)
    network = build_network(recipe, torch.arange(200))
    rows = list(log.rows("train"))[:5]
    states = None
    if network.states.layers:
        states = TargetRunner.of_recipe(recipe, network.states, torch.device("cpu"))
    folder = Path(f"{recipe.out}.training")
    trainer = Trainer(recipe, network, TrainingData(rows, [], states), folder, "x", Accelerator(cpu=True))
    found = []
    for lines in ([[row] for row in rows], [rows[:2], rows[2:]]):
        network.zero_grad()
        loss = trainer.loss(lines, {"forward_kl": 1.0, "lk": 0.5})
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
        found.append((loss.detach(), gradient))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-3)


def test_packing_trains_on_every_token_in_fewer_steps(
    make_recipe: Callable[..., DrafterRecipe], tmp_path: Path
) -> None:
    packed = make_recipe(out=str(tmp_path / "packed"), packing=True)
    apart = make_recipe(out=str(tmp_path / "apart"))
    for recipe in (packed, apart):
        train_drafter(recipe, "x")
    found = [read_drafter_card(recipe.out).training for recipe in (packed, apart)]
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["steps"] <= found[1]["steps"]


def test_event_files_hold_what_the_trackers_are_told(make_recipe: Callable[..., DrafterRecipe]) -> None:
    recipe = make_recipe(tensorboard=True, log_every=1, epochs=0.5)
    train_drafter(recipe, "x")
    content = b"".join(path.read_bytes() for path in Path(f"{recipe.out}.tensorboard").rglob("events.out.*"))
    for name in (b"train/loss", b"train/skipped", b"heldout/T0/tokens_per_verify", b"heldout/T1/overlap"):
        assert name in content


@pytest.mark.slow
def test_a_compiled_network_learns_the_same(
    make_recipe: Callable[..., DrafterRecipe], tmp_path: Path
) -> None:
    compiled = make_recipe(out=str(tmp_path / "compiled"), compile=True, epochs=0.5)
    eager = make_recipe(out=str(tmp_path / "eager"), epochs=0.5)
    for recipe in (compiled, eager):
        train_drafter(recipe, "x")
    first, second = weights_of(compiled), weights_of(eager)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=5e-4, msg=name)


def torchrun(*command: str) -> None:
    """Run a program on two CPU processes."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*launcher, *command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr


def test_sharded_parameters_train_save_and_resume_like_whole_ones(
    make_recipe: Callable[..., DrafterRecipe], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"freeze_embeddings": False, "clip_norm": 0.5, "epochs": 1.0, "eval_every": 2}
    whole = make_recipe(out=str(tmp_path / "whole"), accumulation=2, **settings)
    train_drafter(whole, "x")
    sharded = make_recipe(out=str(tmp_path / "sharded"), **settings)
    (tmp_path / "sharded.py").write_text(SHARDED)
    for stop_at in ("3", "100"):
        torchrun(str(tmp_path / "sharded.py"), stop_at, "--config", str(write_recipe(sharded)))
    first, second = weights_of(whole), weights_of(sharded)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=2e-4, msg=name)
    cards = [read_drafter_card(recipe.out) for recipe in (whole, sharded)]
    assert cards[1].training["processes"] == 2
    for one, other in zip(*(card.training["curve"] for card in cards), strict=True):
        assert one["step"] == other["step"]
        assert one["heldout"]["0"]["top8"] == pytest.approx(other["heldout"]["0"]["top8"], abs=0.02)


def test_two_processes_train_a_family_that_feeds_on_states(
    make_recipe: Callable[..., DrafterRecipe], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    one = make_recipe("eagle3", out=str(tmp_path / "one"), accumulation=2, epochs=1.0)
    two = make_recipe("eagle3", out=str(tmp_path / "two"), epochs=1.0)
    train_drafter(one, "x")
    torchrun("-m", drafter_module.__name__, "--config", str(write_recipe(two)))
    first, second = weights_of(one), weights_of(two)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=2e-4, msg=name)
    assert read_drafter_card(two.out).training["processes"] == 2


@pytest.mark.gpu
def test_fsdp_as_accelerate_sets_it_up_trains_like_one_process(
    make_recipe: Callable[..., DrafterRecipe], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"freeze_embeddings": False, "epochs": 1.0, "eval_every": 2}
    whole = make_recipe(out=str(tmp_path / "whole"), **settings)
    sharded = make_recipe(out=str(tmp_path / "sharded"), **settings)
    train_drafter(whole, "x")
    (tmp_path / "sharded.py").write_text(SHARDED_BY_ACCELERATE)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--use_fsdp"]
    wrapping = ["--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    program = [str(tmp_path / "sharded.py"), "--config", str(write_recipe(sharded))]
    result = subprocess.run(
        [*launcher, *wrapping, *program], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    second = weights_of(sharded)
    for name, value in weights_of(whole).items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=2e-4, msg=name)
