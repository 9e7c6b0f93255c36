"""States of the target in training: the target runs in the training process.

Shape letters: B lines, T tokens, S numbers of a token's states.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from foredraft.infer.drafter_card import StateNeeds
from foredraft.infer.state_tap import StateTap
from foredraft.infer.target_states import to_bits
from foredraft.train.batches import Batch, collate
from foredraft.train.drafter_init import load_model
from foredraft.train.drafter_recipe import DrafterRecipe
from foredraft.train.log_rows import LogRow


class States(Protocol):
    """Where a batch's states come from."""

    def of(self, lines: Sequence[Sequence[LogRow]], batch: Batch) -> torch.Tensor:
        """States after every token [B, T, S] on the batch's device."""
        ...


class TargetRunner:
    """Runs the target over batches, without gradients and without its head.

    Args:
        model: the target with transformers' own attention.
        needs: which of its states.
        device: where it runs.
    """

    @classmethod
    def of_recipe(cls, recipe: DrafterRecipe, needs: StateNeeds, device: torch.device) -> Self:
        """The target of a drafter's recipe."""
        return cls(load_model(recipe.target, recipe.revision, recipe, recipe.target_dtype), needs, device)

    def __init__(self, model: PreTrainedModel, needs: StateNeeds, device: torch.device) -> None:
        self.model = model
        self.model.requires_grad_(False).eval().to(device)
        self.tap = StateTap(self.model, needs.layers)

    def measure_rate(self, rows: Sequence[LogRow], recipe: DrafterRecipe) -> float:
        """Tokens a second of one batch, after one that warms up."""
        lines = [[row] for row in rows[: max(1, recipe.batch_tokens // recipe.max_length)]]
        batch = collate(lines, recipe.max_length).to(self.model.device)
        self.of(lines, batch)
        started = time.perf_counter()
        self.of(lines, batch)
        if batch.ids_BT.is_cuda:
            torch.cuda.synchronize()
        return batch.ids_BT.numel() / (time.perf_counter() - started)

    @torch.no_grad()
    def of(self, lines: Sequence[Sequence[LogRow]], batch: Batch) -> torch.Tensor:
        """States after every token [B, T, S]."""
        self.model.base_model(input_ids=batch.ids_BT, position_ids=batch.positions_BT, use_cache=False)
        return self.tap.take()

    @torch.no_grad()
    def bits_of(self, row: LogRow) -> np.ndarray:
        """States after every token of a row but the last, bfloat16 bits [L, S]."""
        ids = np.concatenate([row.prompt_ids, row.response_ids[:-1]]).astype(np.int64)
        self.model.base_model(input_ids=torch.from_numpy(ids)[None].to(self.model.device), use_cache=False)
        return to_bits(self.tap.take()[0])
