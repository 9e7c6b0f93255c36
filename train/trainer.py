"""The training loop of a drafter: batches, loss, update, reports, checkpoints; on one process or several."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from foredraft.infer.drafters.network import DraftNetwork, Sequences
from foredraft.kernels import dispatch
from foredraft.kernels.distill_loss_ref import LOSSES
from foredraft.train.acceptance import measure_acceptance, teacher_of
from foredraft.train.batches import BatchPlan, Line, collate, input_length, trained_length
from foredraft.train.checkpoint import LoopState, load_checkpoint, save_checkpoint
from foredraft.train.drafter_init import build_network
from foredraft.train.drafter_recipe import DrafterRecipe
from foredraft.train.log_rows import LogRow
from foredraft.train.progress import ProgressReport
from foredraft.train.sharding import is_sharded, whole
from foredraft.train.target_runner import States

ADAM_BETAS = (0.9, 0.95)


def learning_rate(step: int, num_steps: int, recipe: DrafterRecipe) -> float:
    """Linear warm-up, then a cosine down to `final_fraction` of the peak."""
    num_warmup = max(1, round(recipe.warmup_fraction * num_steps))
    if step < num_warmup:
        return recipe.learning_rate * (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return recipe.learning_rate * (recipe.final_fraction + (1.0 - recipe.final_fraction) * cosine)


def build_optimizer(network: DraftNetwork, recipe: DrafterRecipe) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices, but not for embeddings: rows that no token trains must stay."""
    trained = [(name, value) for name, value in network.named_parameters() if value.requires_grad]
    kept = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
    kept.add(id(network.head_parameter))
    decays = [value for _, value in trained if value.ndim >= 2 and id(value) not in kept]
    others = [value for _, value in trained if value.ndim < 2 or id(value) in kept]
    groups = [
        {"params": decays, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=ADAM_BETAS, fused=True)


def mixed_losses(recipe: DrafterRecipe, progress: float) -> dict[str, float]:
    """Weights of the losses after a share of all updates: on the line from `losses` to `final_losses`."""
    if recipe.final_losses is None:
        return recipe.losses
    names = [name for name in LOSSES if name in recipe.losses or name in recipe.final_losses]
    ends = [(recipe.losses.get(name, 0.0), recipe.final_losses.get(name, 0.0)) for name in names]
    mixed = {name: (1.0 - progress) * a + progress * b for name, (a, b) in zip(names, ends, strict=True)}
    return {name: weight for name, weight in mixed.items() if weight > 0.0}


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What a drafter learns from, and what it is measured on."""

    rows: Sequence[LogRow]
    heldout: Sequence[LogRow]
    states: States | None = None  # for a family that feeds on the target's


class Trainer:
    """Trains a network on rows of a log.

    Args:
        recipe: of the drafter.
        network: the module to train, on the CPU.
        data: rows and, for a family that feeds on them, the target's states.
        folder: of the checkpoints.
        fingerprint: of recipe and log; a checkpoint of another one is refused.
        accelerator: knows processes, device and precision.
    """

    def __init__(
        self,
        recipe: DrafterRecipe,
        network: DraftNetwork,
        data: TrainingData,
        folder: Path,
        fingerprint: str,
        accelerator: Accelerator,
    ) -> None:
        self.recipe, self.data = recipe, data
        self.folder, self.accelerator = folder, accelerator
        self.lengths = [trained_length(row, recipe.max_length) for row in data.rows]
        self.plan = BatchPlan(
            [input_length(row, recipe.max_length) for row in data.rows],
            batch_tokens=recipe.batch_tokens,
            per_step=recipe.accumulation * accelerator.num_processes,
            seed=recipe.seed,
            line_tokens=recipe.max_length if recipe.packing else 0,
        )
        self.num_steps = math.ceil(recipe.epochs * self.plan.steps_per_epoch)
        optimizer = build_optimizer(network, recipe)
        self.network, self.optimizer = accelerator.prepare(network, optimizer)
        self.module: DraftNetwork = accelerator.unwrap_model(self.network)
        self.forward = torch.compile(self.network, dynamic=True) if recipe.compile else self.network
        fresh = LoopState(fingerprint=fingerprint, num_processes=accelerator.num_processes)
        self.state = load_checkpoint(folder, self.module, self.optimizer.optimizer, fresh, accelerator)
        self.outside_mass = torch.zeros(())  # of the teacher, in the last batch
        self.is_stopped = False
        self.copy: DraftNetwork | None = None  # whole, where training shards the module

    def run(self, stop_at: int | None = None) -> None:
        """Train to the end of the schedule, or (for tests) until `stop_at` updates are done.

        SIGTERM ends it after the update at hand, with a checkpoint.

        Raises:
            ValueError: more updates than the recipe allows had numbers that are not finite.
        """
        state, recipe, is_main = self.state, self.recipe, self.accelerator.is_main_process
        end = self.num_steps if stop_at is None else min(stop_at, self.num_steps)
        started = time.monotonic() - state.seconds
        self.network.train()
        title = "train: steps"
        with (
            ProgressReport(title, self.num_steps, done=state.step, is_enabled=is_main) as report,
            self.stopping(),
        ):
            losses = mixed_losses(recipe, 0.0)
            report.say("loss: " + " + ".join(f"{weight:g} {name}" for name, weight in losses.items()))
            while True:
                is_last = state.step == self.num_steps
                if is_last or is_due(state.step, recipe.eval_every):
                    self.report(report)
                is_end = state.step >= end or self.must_stop()
                if state.step > 0 and (is_end or is_due(state.step, recipe.save_every)):
                    self.save()
                if is_end:
                    break
                loss, norm = self.train_step(state.step)
                state.step += 1
                state.seconds = time.monotonic() - started
                if is_due(state.step, recipe.log_every):
                    self.log(report, loss, norm)
            if self.is_stopped:
                report.say(f"stopped after step {state.step}; the same command goes on from there")

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """SIGTERM asks for the end of the run while this is entered."""

        def stop(*_: object) -> None:
            self.is_stopped = True

        is_main_thread = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, stop) if is_main_thread else None
        try:
            yield
        finally:
            if is_main_thread:
                signal.signal(signal.SIGTERM, before)

    def must_stop(self) -> bool:
        """Whether any process was asked to stop; all processes agree on the step."""
        if self.accelerator.num_processes == 1:
            return self.is_stopped
        flag = torch.tensor(float(self.is_stopped), device=self.accelerator.device)
        self.is_stopped = bool(self.accelerator.reduce(flag, "sum") > 0)
        return self.is_stopped

    def train_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; returns this process's share of the mean loss, and the gradient norm."""
        accelerator, recipe = self.accelerator, self.recipe
        forwards = self.plan.step(step)
        num_trained = sum(self.lengths[row] for lines in forwards for line in lines for row in line)
        own = forwards[accelerator.process_index :: accelerator.num_processes]
        losses = mixed_losses(recipe, step / self.num_steps)
        total = torch.zeros((), device=accelerator.device)
        for index, lines in enumerate(own):
            rows = [[self.data.rows[row] for row in line] for line in lines]
            is_last = index == len(own) - 1
            with nullcontext() if is_last else accelerator.no_sync(self.network):
                loss = self.loss(rows, losses) / num_trained
                # gradients are averaged over processes, each of which holds a share of the mean
                accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
        trained = [value for group in self.optimizer.param_groups for value in group["params"]]
        norm = whole(accelerator.clip_grad_norm_(trained, recipe.clip_norm))
        # the norm is that of all processes' gradients, so all come to the same decision
        if torch.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(step, self.num_steps, recipe)
            self.optimizer.step()
        else:
            self.skip(step, own, total, norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.state.tokens += num_trained
        return total, norm

    def skip(self, step: int, own: list[list[Line]], total: torch.Tensor, norm: torch.Tensor) -> None:
        """Count an update that is left out; ValueError with the batch's rows beyond the recipe's bound."""
        self.state.num_skipped += 1
        if self.state.num_skipped <= self.recipe.max_skipped:
            return
        ids = sorted({self.data.rows[row].request_id for lines in own for line in lines for row in line})
        raise ValueError(
            f"step {step}: loss {float(total):g}, gradient norm {float(norm):g}, after "
            f"{self.state.num_skipped - 1} steps that were skipped for this (max_skipped "
            f"{self.recipe.max_skipped}); the weights are those of the step before. Lower learning_rate or "
            f"clip_norm, use precision float32, or look at the log's rows {', '.join(ids)}"
        )

    def loss(self, rows: Sequence[Sequence[LogRow]], losses: Mapping[str, float]) -> torch.Tensor:
        """Sum over all trained positions and unrolled steps, each step by its weight."""
        module, batch = self.module, collate(rows, self.recipe.max_length).to(self.accelerator.device)
        states = None if self.data.states is None else self.data.states.of(rows, batch)
        sequences = Sequences(batch.ids_BT, batch.positions_BT, states)
        teacher = teacher_of(batch, module)
        self.outside_mass = (teacher.outside_N * batch.weights_N).sum() / batch.weights_N.sum()
        total = torch.zeros((), device=batch.ids_BT.device)
        head = module.head()
        for step, hidden_BTH in enumerate(self.forward(sequences, module.num_steps), 1):
            weight = self.recipe.weight_of_step(step)
            if weight == 0.0:
                continue
            has_anchor_N = sequences.has_anchor(step).flatten()[batch.positions_N]
            hidden_NH = hidden_BTH.flatten(0, 1)[batch.positions_N].to(module.head_dtype)
            loss_N = dispatch.distill_loss(hidden_NH, head, teacher, losses)
            total = total + weight * (loss_N * batch.weights_N * has_anchor_N).sum()
        return total

    def report(self, report: ProgressReport) -> None:
        """Measure held-out acceptance, once a step; it goes into the curve."""
        state, module = self.state, self.whole_module()
        is_measured = bool(state.curve) and state.curve[-1]["step"] == state.step
        if self.accelerator.is_main_process and self.data.heldout and not is_measured:
            recipe = self.recipe
            data = self.data
            found = measure_acceptance(
                module, data.heldout, k=recipe.k, max_length=recipe.max_length, states=data.states
            )
            state.curve.append({"step": state.step, "tokens": state.tokens, "heldout": found})
            for temperature, values in found.items():
                report.say(
                    f"step {state.step}, held out at T={temperature}: top-1 {values['top1']:.3f}, "
                    f"top-8 {values['top8']:.3f}, tokens per verify {values['tokens_per_verify']:.3f} "
                    f"(chain, K={recipe.k})"
                )
                self.track(flat_metrics(f"heldout/T{temperature}", values))
        self.accelerator.wait_for_everyone()

    def whole_module(self) -> DraftNetwork:
        """The network with all its parameters, in the first process; a copy where training shards them."""
        if not is_sharded(self.module):
            return self.module
        parameters = {name: whole(value.detach()) for name, value in self.module.named_parameters()}
        if not self.accelerator.is_main_process:
            return self.module
        if self.copy is None:
            d2t_D = self.module.d2t_D
            copy = build_network(self.recipe, None if d2t_D is None else d2t_D.cpu())
            self.copy = copy.to(self.accelerator.device)
        with torch.no_grad():
            for name, value in self.copy.named_parameters():
                value.copy_(parameters[name])
        return self.copy

    def log(self, report: ProgressReport, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Progress line and tracker entry; the only place of the loop that waits for the device."""
        mean = float(self.accelerator.reduce(loss, "sum"))
        rate = learning_rate(self.state.step - 1, self.num_steps, self.recipe)
        report.update(self.state.step, f"loss {mean:.3f}")
        self.track(
            {
                "train/loss": mean,
                "train/grad_norm": float(norm),
                "train/learning_rate": rate,
                "train/tokens": self.state.tokens,
                "train/outside_mass": float(self.outside_mass),
                "train/skipped": self.state.num_skipped,
            }
        )

    def save(self) -> None:
        """Write a checkpoint."""
        save_checkpoint(self.folder, self.module, self.optimizer.optimizer, self.state, self.accelerator)

    def track(self, values: dict[str, float]) -> None:
        """Send values to the tracker, if there is one."""
        self.accelerator.log(values, step=self.state.step)


def is_due(step: int, every: int) -> bool:
    """Whether something done every `every` steps (0: never) is due."""
    return every > 0 and step % every == 0


def flat_metrics(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers and lists of numbers by name, as trackers want them."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        entries = (
            {f"{name}/{i}": v for i, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
        )
        flat |= {f"{prefix}/{key}": float(number) for key, number in entries.items()}
    return flat
