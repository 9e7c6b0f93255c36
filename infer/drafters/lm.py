"""Family `lm`: an independent causal LM with the target's tokenizer, on its own paged KV pool.

The folder keeps a full-width head, so that any tool can load it; here the head is cut to the draft vocabulary
at load.
"""

from __future__ import annotations

import torch

from foredraft.infer.drafter_card import DrafterCard, StateNeeds
from foredraft.infer.drafters import Step
from foredraft.infer.drafters.paged import PagedDrafter, read_draft_vocab
from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import EngineConfig

DEFAULT_MAX_DEPTH = 64  # it drafts to any depth; deeper guesses are never worth their expansion


class LMDrafter(PagedDrafter):
    """Drafts with a causal LM; candidates are the best perturbed scores over its (reduced) vocabulary."""

    def __init__(self, model: PagedModel, draft_vocab_C: torch.Tensor | None, max_depth: int) -> None:
        super().__init__(model, draft_vocab_C, max_depth, StateNeeds())
        self.model = model
        if draft_vocab_C is not None:
            keep_head_rows(model.model, draft_vocab_C)

    def logits(self, step: Step, num_rows: int) -> torch.Tensor:
        """Run a step; logits after its last rows."""
        return self.model.run(step.plan, step.moves)[step.plan.num_rows - num_rows :]

    def prefill(self, step: Step) -> None:
        """Run a planned chunk, with the head at one row only."""
        self.model.run(step.plan, step.moves, keep_rows=[step.plan.num_rows - 1])


def keep_head_rows(model: torch.nn.Module, token_ids_C: torch.Tensor) -> None:
    """Replace the output head by its rows of the draft vocabulary."""
    head = model.get_output_embeddings()
    with torch.device("meta"):
        cut = torch.nn.Linear(head.in_features, len(token_ids_C), bias=head.bias is not None)
    cut.weight = torch.nn.Parameter(head.weight[token_ids_C].clone(), requires_grad=False)
    if head.bias is not None:
        cut.bias = torch.nn.Parameter(head.bias[token_ids_C].clone(), requires_grad=False)
    model.set_output_embeddings(cut)


def load(source: str, card: DrafterCard | None, config: EngineConfig) -> LMDrafter:
    """Load the family from a folder.

    Raises:
        ValueError: no model there, or a draft vocabulary that does not fit it.
    """
    model = PagedModel.load(source, config)
    if card is None:
        return LMDrafter(model, None, DEFAULT_MAX_DEPTH)
    draft_vocab_C = read_draft_vocab(source, card, model.vocab_size, model.device)
    return LMDrafter(model, draft_vocab_C, card.max_depth)
