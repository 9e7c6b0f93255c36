"""The training loop of a drafter: batches, loss, update, reports, checkpoints; on one process or several."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from foredraft.kernels import dispatch
from foredraft.kernels.distill_loss_ref import map_teacher
from foredraft.train.acceptance import measure_acceptance
from foredraft.train.batches import Batch, BatchPlan, collate, trained_length
from foredraft.train.checkpoint import LoopState, load_checkpoint, save_checkpoint
from foredraft.train.draft_vocab import invert
from foredraft.train.drafter_recipe import DrafterRecipe
from foredraft.train.log_rows import LogRow
from foredraft.train.progress import ProgressReport
from foredraft.train.student import Student

ADAM_BETAS = (0.9, 0.95)


def learning_rate(step: int, num_steps: int, recipe: DrafterRecipe) -> float:
    """Linear warm-up, then a cosine down to `final_fraction` of the peak."""
    num_warmup = max(1, round(recipe.warmup_fraction * num_steps))
    if step < num_warmup:
        return recipe.learning_rate * (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return recipe.learning_rate * (recipe.final_fraction + (1.0 - recipe.final_fraction) * cosine)


def build_optimizer(student: nn.Module, recipe: DrafterRecipe) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices, but not for embeddings: rows that no token trains must stay."""
    trained = [(name, value) for name, value in student.named_parameters() if value.requires_grad]
    embeddings = {id(m.weight) for m in student.modules() if isinstance(m, nn.Embedding)}
    embeddings.add(id(student.model.get_output_embeddings().weight))
    decays = [value for _, value in trained if value.ndim >= 2 and id(value) not in embeddings]
    others = [value for _, value in trained if value.ndim < 2 or id(value) in embeddings]
    groups = [
        {"params": decays, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=ADAM_BETAS, fused=True)


class Trainer:
    """Trains a student on rows of a log.

    Args:
        recipe: of the drafter.
        student: the module to train, on the CPU.
        rows: training rows.
        heldout: rows of the reports.
        folder: of the checkpoints.
        fingerprint: of recipe and log; a checkpoint of another one is refused.
        accelerator: knows processes, device and precision.
    """

    def __init__(
        self,
        recipe: DrafterRecipe,
        student: Student,
        rows: Sequence[LogRow],
        heldout: Sequence[LogRow],
        folder: Path,
        fingerprint: str,
        accelerator: Accelerator,
    ) -> None:
        self.recipe, self.rows, self.heldout = recipe, rows, heldout
        self.folder, self.accelerator = folder, accelerator
        self.lengths = [trained_length(row, recipe.max_length) for row in rows]
        self.plan = BatchPlan(
            [row.first_position + length - 1 for row, length in zip(rows, self.lengths, strict=True)],
            batch_tokens=recipe.batch_tokens,
            per_step=recipe.accumulation * accelerator.num_processes,
            seed=recipe.seed,
        )
        self.num_steps = math.ceil(recipe.epochs * self.plan.steps_per_epoch)
        self.student, self.optimizer = accelerator.prepare(student, build_optimizer(student, recipe))
        self.module: Student = accelerator.unwrap_model(self.student)
        vocab_size = student.model.config.get_text_config().vocab_size
        self.t2d_V = None if self.module.d2t_D is None else invert(self.module.d2t_D, vocab_size)
        fresh = LoopState(fingerprint=fingerprint, num_processes=accelerator.num_processes)
        self.state = load_checkpoint(folder, self.module, self.optimizer.optimizer, fresh, accelerator)
        has_distributions = rows[0].topk_ids.shape[1] > 0
        self.losses = recipe.losses if has_distributions else {"cross_entropy": 1.0}
        self.outside_mass = torch.zeros(())  # of the teacher, in the last batch

    def run(self, stop_at: int | None = None) -> None:
        """Train to the end of the schedule, or (for tests) until `stop_at` updates are done.

        Raises:
            ValueError: loss or gradient norm is not finite; the message names the step.
        """
        state, recipe, is_main = self.state, self.recipe, self.accelerator.is_main_process
        end = self.num_steps if stop_at is None else stop_at
        started = time.monotonic() - state.seconds
        self.student.train()
        with ProgressReport("train: steps", self.num_steps, done=state.step, is_enabled=is_main) as report:
            report.say("loss: " + " + ".join(f"{weight:g} {name}" for name, weight in self.losses.items()))
            while True:
                is_last = state.step == self.num_steps
                if is_last or is_due(state.step, recipe.eval_every):
                    self.report(report)
                if state.step > 0 and (state.step == end or is_due(state.step, recipe.save_every)):
                    self.save()
                if state.step >= end:
                    break
                loss, norm = self.train_step(state.step)
                state.step += 1
                state.seconds = time.monotonic() - started
                if is_due(state.step, recipe.log_every):
                    self.log(report, loss, norm)

    def train_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; returns this process's share of the mean loss, and the gradient norm."""
        accelerator, recipe = self.accelerator, self.recipe
        groups = self.plan.step(step)
        num_trained = sum(self.lengths[row] for group in groups for row in group)
        own = groups[accelerator.process_index :: accelerator.num_processes]
        total = torch.zeros((), device=accelerator.device)
        for index, group in enumerate(own):
            batch = collate([self.rows[row] for row in group], recipe.max_length).to(accelerator.device)
            is_last = index == len(own) - 1
            with nullcontext() if is_last else accelerator.no_sync(self.student):
                loss = (self.loss(batch) * batch.weights_N).sum() / num_trained
                # gradients are averaged over processes, each of which holds a share of the mean
                accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
        trained = [value for group in self.optimizer.param_groups for value in group["params"]]
        norm = accelerator.clip_grad_norm_(trained, recipe.clip_norm)
        if not (torch.isfinite(total) and torch.isfinite(norm)):
            raise ValueError(
                f"step {step}: loss {float(total):g}, gradient norm {float(norm):g}; the weights are those "
                "of the step before. Lower learning_rate or clip_norm, or use precision float32"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.num_steps, recipe)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.tokens += num_trained
        return total, norm

    def loss(self, batch: Batch) -> torch.Tensor:
        """Loss of every position, padding included, float32 [N]."""
        hidden_NH = self.student(batch.ids_BT, batch.positions_N).to(self.module.head_dtype)
        teacher = map_teacher(batch.topk_ids_NK, batch.topk_logprobs_NK, batch.targets_N, self.t2d_V)
        self.outside_mass = (teacher.outside_N * batch.weights_N).sum() / batch.weights_N.sum()
        return dispatch.distill_loss(hidden_NH, self.module.head(), teacher, self.losses)

    def report(self, report: ProgressReport) -> None:
        """Measure held-out acceptance, once a step; it goes into the curve."""
        state = self.state
        is_measured = bool(state.curve) and state.curve[-1]["step"] == state.step
        if self.accelerator.is_main_process and self.heldout and not is_measured:
            recipe = self.recipe
            found = measure_acceptance(self.module, self.heldout, k=recipe.k, max_length=recipe.max_length)
            state.curve.append({"step": state.step, "tokens": state.tokens, "heldout": found})
            for temperature, values in found.items():
                report.say(
                    f"step {state.step}, held out at T={temperature}: top-1 {values['top1']:.3f}, "
                    f"top-8 {values['top8']:.3f}, tokens per verify {values['tokens_per_verify']:.3f} "
                    f"(chain, K={recipe.k})"
                )
                self.track({f"heldout/T{temperature}/{name}": value for name, value in values.items()})
        self.accelerator.wait_for_everyone()

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
