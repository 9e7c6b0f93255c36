"""The trained drafter as a folder that any tool can load, published by one rename."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from foredraft.infer.atomic import atomic_folder
from foredraft.infer.config import save_resolved
from foredraft.infer.drafter_card import DrafterCard, write_drafter_card
from foredraft.train.draft_vocab import DRAFT_VOCAB_FILE, save_draft_vocab
from foredraft.train.provenance import git_commit, versions
from foredraft.train.target_log import LogManifest

if TYPE_CHECKING:
    from foredraft.train.trainer import Trainer

MAX_DEPTH = 64  # a causal LM drafts to any depth; deeper guesses are never worth their expansion


def write_drafter(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, manifest: LogManifest, resolved: str
) -> None:
    """Write model, tokenizer, draft vocabulary, foredraft.json and recipe.yaml to the recipe's `out`.

    The head keeps its full width: rows outside the draft vocabulary are those that it was initialised with.
    """
    recipe, state, module = trainer.recipe, trainer.state, trainer.module
    d2t_D = module.d2t_D
    with atomic_folder(Path(recipe.out)) as folder:
        module.model.to(saved_dtype(recipe.target, recipe.revision)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if d2t_D is not None:
            save_draft_vocab(folder, d2t_D)
        measured = {"heldout": state.curve[-1]["heldout"]} if state.curve else {}
        training = {
            "recipe": asdict(recipe),
            "losses": trainer.losses,
            "tokens": state.tokens,
            "steps": state.step,
            "seconds": round(state.seconds, 1),
            "processes": state.num_processes,
            "versions": versions(),
            "git": git_commit(),
            "fingerprint": state.fingerprint,
            "curve": state.curve,
            "log": describe_log(manifest),
        }
        card = DrafterCard(
            family="lm",
            target=manifest.target,
            tokenizer_sha256=manifest.tokenizer_sha256,
            draft_vocab=None if d2t_D is None else DRAFT_VOCAB_FILE,
            max_depth=MAX_DEPTH,
            training=training,
            measured=measured,
        )
        write_drafter_card(folder, card)
        save_resolved(folder, resolved)


def describe_log(manifest: LogManifest) -> dict[str, Any]:
    """What a model card says of the training data."""
    return {
        "prompts_sha256": manifest.prompts_sha256,
        "responses": sum(shard.rows for shard in manifest.shards),
        "tokens": sum(shard.tokens for shard in manifest.shards),
        "created": manifest.created,
        "top_k_logprobs": manifest.top_k_logprobs,
        "max_new_tokens": manifest.recipe["max_new_tokens"],
        "groups": manifest.recipe["groups"],
    }


def saved_dtype(target: str, revision: str | None) -> torch.dtype:
    """The dtype of the target's weights: drafter and target run in the same one."""
    if target.endswith(".gguf"):
        return torch.bfloat16
    config = AutoConfig.from_pretrained(target, revision=revision)
    return config.dtype or torch.float32
