"""States of the target in training: the target runs in the training process.

Shape letters: B lines, T tokens, S numbers of a token's states.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from foredraft.infer.drafter_card import StateNeeds
from foredraft.infer.state_tap import StateTap
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
    """Runs the target over batches, without gradients and without its head."""

    def __init__(self, recipe: DrafterRecipe, needs: StateNeeds, device: torch.device) -> None:
        self.model = load_model(recipe.target, recipe.revision, recipe, recipe.target_dtype)
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
