"""The trained drafter as a folder that any tool can load, published by one rename."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from foredraft.infer.atomic import atomic_folder
from foredraft.infer.config import save_resolved
from foredraft.infer.drafter_card import DrafterCard, StateNeeds, write_drafter_card
from foredraft.infer.drafters.network import DraftNetwork
from foredraft.infer.drafters.ngram import NgramConfig
from foredraft.infer.drafters.ngram import save as save_ngram
from foredraft.train.draft_vocab import DRAFT_VOCAB_FILE, save_draft_vocab
from foredraft.train.drafter_init import config_of
from foredraft.train.drafter_recipe import DrafterRecipe
from foredraft.train.gate import check_in_engine
from foredraft.train.log_rows import LogRow
from foredraft.train.lora import merge_lora
from foredraft.train.provenance import git_commit, versions
from foredraft.train.target_log import LogManifest

if TYPE_CHECKING:
    from foredraft.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Artifact:
    """What every drafter folder says, whatever its family.

    Args:
        recipe: of the drafter.
        resolved: the same as text.
        tokenizer: the target's.
        manifest: of the (first) target log.
        fingerprint: of recipe and logs.
    """

    recipe: DrafterRecipe
    resolved: str
    tokenizer: PreTrainedTokenizerBase
    manifest: LogManifest
    fingerprint: str

    def write_trained(self, trainer: Trainer, network: DraftNetwork) -> None:
        """Write a trained network to the recipe's `out`, once the engine has confirmed its figures.

        A head keeps its full width where the family has one: rows outside the draft vocabulary are those that
        it was initialised with.

        Args:
            trainer: at its end.
            network: its `whole_module`.

        Raises:
            ValueError: the gate's; nothing is written then, and the checkpoint stays.
        """
        recipe, state = self.recipe, trainer.state
        if recipe.init is not None and recipe.init.lora is not None:
            merge_lora(network)
        dtype = saved_dtype(recipe.target, recipe.revision)
        measured: dict[str, Any] = {"heldout": state.curve[-1]["heldout"]} if state.curve else {}
        training = {
            "losses": recipe.losses,
            "tokens": state.tokens,
            "steps": state.step,
            "seconds": round(state.seconds, 1),
            "skipped": state.num_skipped,
            "processes": state.num_processes,
            "curve": state.curve,
        }
        with atomic_folder(Path(recipe.out)) as folder:
            network.save(folder, dtype)
            self._write_rest(folder, network, training, measured)
            rows = spread(trainer.data.heldout, recipe.gate_prompts)
            if rows:
                # as it was saved and as the engine runs it
                network.to(dtype).eval().head_dtype = dtype
                states = trainer.data.states
                measured["engine"] = check_in_engine(recipe, folder, network, rows, states)
                self._write_rest(folder, network, training, measured)

    def write_ngram(self, rows: Sequence[LogRow]) -> None:
        """Write an `ngram` drafter, whose corpus are the rows' responses."""
        section = self.recipe.ngram
        assert section is not None, "the recipe checks it"
        config = NgramConfig(
            longest=section.longest,
            shortest=section.shortest,
            max_positions=config_of(self.recipe).get_text_config().max_position_embeddings,
        )
        responses = [row.response_ids for row in rows] if section.uses_log else []
        tokens_N = np.concatenate([np.zeros(0, np.int32), *responses])
        network = Untrained(section.max_depth, StateNeeds(), None)
        with atomic_folder(Path(self.recipe.out)) as folder:
            save_ngram(folder, config, tokens_N)
            self._write_rest(folder, network, {"tokens": len(tokens_N)}, {})

    def _write_rest(
        self,
        folder: Path,
        network: DraftNetwork | Untrained,
        training: dict[str, Any],
        measured: dict[str, Any],
    ) -> None:
        """Tokenizer, draft vocabulary, foredraft.json and recipe.yaml."""
        recipe, manifest = self.recipe, self.manifest
        self.tokenizer.save_pretrained(folder)
        if network.d2t_D is not None:
            save_draft_vocab(folder, network.d2t_D)
        card = DrafterCard(
            family=recipe.family,
            target=manifest.target,
            tokenizer_sha256=manifest.tokenizer_sha256,
            draft_vocab=None if network.d2t_D is None else DRAFT_VOCAB_FILE,
            max_depth=network.max_depth,
            states=network.states,
            training={
                "recipe": asdict(recipe),
                **training,
                "versions": versions(),
                "git": git_commit(),
                "fingerprint": self.fingerprint,
                "log": describe_log(manifest),
            },
            measured=measured,
        )
        write_drafter_card(folder, card)
        save_resolved(folder, self.resolved)


class Untrained(NamedTuple):
    """What a card says of a drafter without a network."""

    max_depth: int
    states: StateNeeds
    d2t_D: torch.Tensor | None


def spread(rows: Sequence[LogRow], count: int) -> list[LogRow]:
    """At most `count` rows, evenly over all."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


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
