"""`foredraft train-drafter`: distil a causal LM from a target log.

    python -m foredraft.train.drafter --config R.yaml
    accelerate launch -m foredraft.train.drafter --config R.yaml

An interrupted run goes on from its last checkpoint in `<out>.training`; the drafter appears in `out` when it
is complete.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, is_tensorboard_available
from transformers import PreTrainedTokenizerBase

from foredraft.infer.config import read_config, run_command
from foredraft.infer.drafter_card import CARD_FILE, StateNeeds, read_drafter_card
from foredraft.infer.identity import identify_target, sha256_of_json, tokenizer_sha256
from foredraft.infer.params import EngineConfig
from foredraft.infer.target import load_tokenizer
from foredraft.train.artifact import Artifact
from foredraft.train.batches import input_length, trained_length
from foredraft.train.draft_vocab import choose_draft_vocab, expected_counts
from foredraft.train.drafter_init import build_network, config_of, vocab_size_of
from foredraft.train.drafter_recipe import DrafterRecipe
from foredraft.train.log_rows import LogRow
from foredraft.train.logged_states import LoggedStates
from foredraft.train.processes import join_processes
from foredraft.train.splits import part_of
from foredraft.train.state_plan import StatePlan
from foredraft.train.target_log import TargetLog
from foredraft.train.target_runner import States, TargetRunner
from foredraft.train.trainer import Trainer, TrainingData

# settings that change neither the weights nor what is measured
FREE_KEYS = (
    *("log", "target", "revision", "out", "overwrite"),
    *("wandb", "wandb_project", "tensorboard", "log_every", "save_every", "threads", "gate_prompts"),
)
TERMINATED = 128 + signal.SIGTERM  # exit code, as a shell tells of a command that SIGTERM ended
MAX_TAIL_MASS = 0.75  # mean share of the teacher's mass that a log may leave out


def main(argv: list[str] | None = None) -> int:
    """Entry of `foredraft train-drafter`; returns the exit code."""
    recipe, resolved = read_config(DrafterRecipe, sys.argv[1:] if argv is None else argv, "train-drafter")
    return 0 if train_drafter(recipe, resolved) else TERMINATED


def train_drafter(recipe: DrafterRecipe, resolved: str, stop_at: int | None = None) -> bool:
    """Train the drafter of a recipe and write it, or find that this has been done.

    Args:
        recipe: of the drafter.
        resolved: the recipe as text, saved beside the result.
        stop_at: leave after so many updates, with a checkpoint and without a drafter (for tests).

    Returns:
        Whether the drafter is there; False where the run was stopped before its end, by SIGTERM or `stop_at`.

    Raises:
        ValueError: a log that is incomplete, empty or of another target; an `out` that holds something else;
            a loss that is not finite.
    """
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    accelerator = start_accelerator(recipe)
    logs = [TargetLog.open(folder) for folder in recipe.logs]
    fingerprint = _fingerprint_of(recipe, logs)
    if _is_done(recipe, fingerprint):
        accelerator.print(f"drafter {recipe.out}: complete already", file=sys.stderr)
        return True
    tokenizer = load_tokenizer(recipe.target, EngineConfig(revision=recipe.revision))
    _check_target(recipe, logs, tokenizer)
    rows = _usable_rows((row for log in logs for row in log.rows() if is_own(row, recipe)), recipe)
    rows = mix_on_policy(rows, recipe)
    heldout = _pick_heldout([row for log in logs for row in log.rows("heldout")], recipe)
    artifact = Artifact(recipe, resolved, tokenizer, logs[0].manifest, fingerprint)
    if recipe.ngram is not None:
        if accelerator.is_main_process:
            artifact.write_ngram(rows)
        accelerator.wait_for_everyone()
        return True
    _check_losses(recipe, rows)
    torch.manual_seed(recipe.seed)
    network = build_network(recipe, _draft_vocab(recipe, tokenizer, rows))
    states = _states_of(recipe, network.states, logs, rows, accelerator)
    work = Path(f"{recipe.out}.training")
    work.mkdir(parents=True, exist_ok=True)
    data = TrainingData(rows, heldout, states)
    trainer = Trainer(recipe, network, data, work, fingerprint, accelerator)
    trainer.run(stop_at)
    is_complete = trainer.state.step == trainer.num_steps
    if is_complete:
        network = trainer.whole_module()
        if accelerator.is_main_process:
            artifact.write_trained(trainer, network)
            shutil.rmtree(work)
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return is_complete


def start_accelerator(recipe: DrafterRecipe) -> Accelerator:
    """Accelerator with the recipe's precision and trackers.

    Raises:
        ValueError: a tracker that is not installed, or a kind of parallelism that the trainer cannot do.
    """
    trackers = ["wandb"] * (recipe.wandb != "off") + ["tensorboard"] * recipe.tensorboard
    if recipe.tensorboard and not is_tensorboard_available():
        raise ValueError("tensorboard is true, but that package is not installed: `pip install tensorboard`")
    accelerator = join_processes(
        mixed_precision="bf16" if recipe.precision == "bfloat16" else "no",
        log_with=trackers or None,
        project_dir=f"{recipe.out}.tensorboard" if recipe.tensorboard else None,
        # buffers are constants, equal in all processes
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    kind, is_known = accelerator.distributed_type, accelerator.is_fsdp2
    if kind == DistributedType.DEEPSPEED or (kind == DistributedType.FSDP and not is_known):
        raise ValueError(
            f"accelerate is configured for {kind.value.lower()}; drafters train data-parallel or sharded by "
            "FSDP of version 2: run `accelerate config` and choose FSDP, fsdp_version 2"
        )
    if trackers:
        options = {"wandb": {"mode": recipe.wandb, "name": Path(recipe.out).name}}
        shown = {
            name: value if isinstance(value, int | float | str) else str(value)
            for name, value in asdict(recipe).items()
        }
        accelerator.init_trackers(recipe.wandb_project, shown, options if recipe.wandb != "off" else {})
    return accelerator


def _fingerprint_of(recipe: DrafterRecipe, logs: Sequence[TargetLog]) -> str:
    """Hash of all that decides the result: recipe, target, and the logs' shards."""
    settings = {key: value for key, value in asdict(recipe).items() if key not in FREE_KEYS}
    shards = [shard.sha256 for log in logs for shard in log.manifest.shards]
    return sha256_of_json([settings, logs[0].manifest.target.weights_sha256, shards])


def _is_done(recipe: DrafterRecipe, fingerprint: str) -> bool:
    """Whether `out` holds this very drafter.

    Raises:
        ValueError: it holds something else, and the recipe does not say overwrite.
    """
    out = Path(recipe.out)
    if not out.exists() or recipe.overwrite:
        return False
    card = read_drafter_card(out)
    if card is None:
        raise ValueError(f"{out} exists and holds no {CARD_FILE}; choose another `out`")
    if card.training.get("fingerprint") != fingerprint:
        raise ValueError(
            f"{out} holds a drafter of another recipe or target log; choose another `out`, or pass "
            "--overwrite true"
        )
    return True


def _check_target(
    recipe: DrafterRecipe, logs: Sequence[TargetLog], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a recipe whose target is not that of every log.

    Raises:
        ValueError: other weights or another tokenizer.
    """
    target, expected = identify_target(recipe.target, recipe.revision), tokenizer_sha256(tokenizer)
    for folder, log in zip(recipe.logs, logs, strict=True):
        if not target.is_same(log.manifest.target) or expected != log.manifest.tokenizer_sha256:
            raise ValueError(
                f"target log {folder} is of target {log.manifest.target}, the recipe's target is {target}; "
                "train for the log's target, or make a log of this one with `foredraft log`"
            )


def _check_losses(recipe: DrafterRecipe, rows: Sequence[LogRow]) -> None:
    """Refuse losses that compare distributions where the logs keep too little of them.

    Raises:
        ValueError: a log of tokens only, or most of the mass beyond the kept tokens.
    """
    names = {name for losses in (recipe.losses, recipe.final_losses or {}) for name in losses if losses[name]}
    if "cross_entropy" in names and any(row.source == "drafter" for row in rows):
        raise ValueError(
            "cross_entropy would teach the drafter its own mistakes, the tokens of an on-policy log; "
            "use losses that compare distributions, or leave that log out"
        )
    compared = sorted(names - {"cross_entropy"})
    if not compared:
        return
    num_kept = min(row.topk_ids.shape[1] for row in rows)
    tail = float(np.mean(np.concatenate([row.tail_mass for row in rows]))) if num_kept else 1.0
    if tail > MAX_TAIL_MASS:
        raise ValueError(
            f"losses {', '.join(compared)} compare distributions, of which the log keeps the {num_kept} most "
            f"probable tokens, {1.0 - tail:.0%} of the mass; make a log with a larger top_k_logprobs, or use "
            "losses {cross_entropy: 1.0}"
        )


def is_own(row: LogRow, recipe: DrafterRecipe) -> bool:
    """Whether the drafter may learn from a row."""
    return part_of(row.request_id, row.split, recipe.reserved_fraction) == "train"


def _usable_rows(rows: Iterable[LogRow], recipe: DrafterRecipe) -> list[LogRow]:
    """Rows of which some response token is left within `max_length`.

    Raises:
        ValueError: none is left.
    """
    usable = [row for row in rows if row.first_position < recipe.max_length and len(row.response_ids)]
    if not usable:
        raise ValueError(
            f"target log {recipe.log} has no train row with a prompt shorter than max_length "
            f"{recipe.max_length} that reserved_fraction {recipe.reserved_fraction:g} leaves to the drafter"
        )
    return usable


def mix_on_policy(rows: Sequence[LogRow], recipe: DrafterRecipe) -> list[LogRow]:
    """All of the target's own rows, and as many of a drafter's mistakes as the recipe's share asks for.

    Raises:
        ValueError: a share of mistakes that no log holds.
    """
    own = [row for row in rows if row.source != "drafter"]
    mistakes = [row for row in rows if row.source == "drafter"]
    if not recipe.on_policy_share:
        return [*own, *mistakes]
    if not mistakes:
        raise ValueError(
            f"on_policy_share is {recipe.on_policy_share:g}, but no log of {', '.join(recipe.logs)} holds a "
            "drafter's mistakes; make one with `foredraft on-policy` and add its folder to `log`"
        )
    num_own = sum(trained_length(row, recipe.max_length) for row in own)
    wanted = num_own * recipe.on_policy_share / (1.0 - recipe.on_policy_share)
    order = np.random.default_rng([recipe.seed, len(mistakes)]).permutation(len(mistakes))
    lengths = np.array([trained_length(mistakes[index], recipe.max_length) for index in order])
    count = int(np.searchsorted(np.cumsum(lengths), wanted)) + 1
    return [*own, *(mistakes[index] for index in sorted(order[:count]))]


def _pick_heldout(rows: list[LogRow], recipe: DrafterRecipe) -> list[LogRow]:
    """At most `eval_rows` held-out rows, spread evenly over each temperature's.

    Raises:
        ValueError: there is none, and the recipe asks for a gate.
    """
    rows = [row for row in rows if row.first_position < recipe.max_length and row.is_targets]
    if not rows and recipe.gate_prompts and recipe.ngram is None:
        raise ValueError(
            f"target log {recipe.log} has no held-out row with a prompt shorter than max_length "
            f"{recipe.max_length}: nothing says how good the drafter is. Make a log with a heldout_fraction "
            "above 0, or train without any figure by gate_prompts 0"
        )
    temperatures = sorted({row.temperature for row in rows})
    picked: list[LogRow] = []
    for temperature in temperatures:
        same = [row for row in rows if row.temperature == temperature]
        count = min(len(same), max(1, recipe.eval_rows // len(temperatures)))
        picked += [same[index * len(same) // count] for index in range(count)]
    return picked


def _states_of(
    recipe: DrafterRecipe,
    needs: StateNeeds,
    logs: Sequence[TargetLog],
    rows: Sequence[LogRow],
    accelerator: Accelerator,
) -> States | None:
    """Where a family's states come from, and what that costs; None for a family that reads none.

    Raises:
        ValueError: they are to come from a log that holds none, or others.
    """
    if not needs.layers:
        return None
    if recipe.states == "log":
        return LoggedStates(logs, needs)
    runner = TargetRunner.of_recipe(recipe, needs, accelerator.device)
    num_tokens = sum(input_length(row, recipe.max_length) for row in rows)
    plan = StatePlan(num_tokens, needs.width)
    accelerator.print(plan.run(runner.measure_rate(rows, recipe), recipe.epochs), file=sys.stderr)
    return runner


def _draft_vocab(
    recipe: DrafterRecipe, tokenizer: PreTrainedTokenizerBase, rows: Sequence[LogRow]
) -> torch.Tensor | None:
    """Target ids that the drafter can guess, int64 [D]; None: all. Errors as `choose_draft_vocab`."""
    vocab_size = vocab_size_of(recipe)
    target_size = config_of(recipe).get_text_config().vocab_size
    if not 0 < recipe.draft_vocab_size < vocab_size:
        return None if vocab_size == target_size else torch.arange(min(vocab_size, target_size))
    always = {token for token in tokenizer.all_special_ids if token < vocab_size}
    always |= {int(row.response_ids[-1]) for row in rows if row.finish_reason == "stop"}
    counts_V = expected_counts(rows, max(vocab_size, target_size))[:vocab_size]
    return torch.from_numpy(choose_draft_vocab(counts_V, recipe.draft_vocab_size, always))


if __name__ == "__main__":
    sys.exit(run_command(main))
