"""Family `lm`: an independent causal LM with the target's tokenizer, on its own paged KV pool.

The folder keeps a full-width head, so that any tool can load it; here the head is cut to the draft vocabulary
at load.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from foredraft.infer.drafter_card import DrafterCard, StateNeeds
from foredraft.infer.drafters import Step
from foredraft.infer.drafters.network import DraftNetwork, Sequences, gathered
from foredraft.infer.drafters.paged import PagedDrafter, read_draft_vocab
from foredraft.infer.paged_model import PagedModel
from foredraft.infer.params import EngineConfig
from foredraft.kernels.distill_loss_ref import Head

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


class LMNetwork(DraftNetwork):
    """A Hugging Face causal LM in training, with a head over the draft vocabulary only.

    The loss takes hidden states and head apart, so that it can make the logits in chunks.

    Args:
        model: the drafter to be, weights in float32.
        d2t_D: target ids of the draft vocabulary, int64 [D]; None: the whole vocabulary.
        freeze_embeddings: input embeddings and head keep their values.
        head_dtype: of the product of hidden states and head.
    """

    states = StateNeeds()
    num_steps = 1  # guesses depend on the tokens alone, wherever the anchor is
    max_depth = DEFAULT_MAX_DEPTH

    def __init__(
        self,
        model: PreTrainedModel,
        d2t_D: torch.Tensor | None,
        *,
        freeze_embeddings: bool,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(d2t_D, head_dtype)
        self.model = model
        self._no_split_modules = model._no_split_modules  # what accelerate's FSDP shards layer by layer
        head = model.get_output_embeddings()
        if freeze_embeddings:
            model.get_input_embeddings().requires_grad_(False)
            head.requires_grad_(False)
        is_cut_once = freeze_embeddings and d2t_D is not None
        frozen_head_DH = head.weight[d2t_D].clone() if is_cut_once else None
        self.register_buffer("frozen_head_DH", frozen_head_DH, persistent=False)

    def unroll(self, sequences: Sequences, num_steps: int) -> Iterator[torch.Tensor]:
        """Hidden states [B, T, H] of the only step; causal attention keeps padding out of all that counts."""
        output = self.model.base_model(
            input_ids=sequences.ids_BT, position_ids=sequences.positions_BT, use_cache=False
        )
        yield output.last_hidden_state

    @property
    def head_parameter(self) -> nn.Parameter:
        """The head's weight."""
        return self.model.get_output_embeddings().weight

    def head(self, dtype: torch.dtype | None = None) -> Head:
        """The head's rows of the draft vocabulary in a type (None: `head_dtype`), and what follows them."""
        dtype = dtype or self.head_dtype
        head, config = self.model.get_output_embeddings(), self.model.config.get_text_config()
        weight_DH = gathered(head.weight)
        bias_D = None if getattr(head, "bias", None) is None else gathered(head.bias)
        if self.d2t_D is not None:
            weight_DH = weight_DH[self.d2t_D] if self.frozen_head_DH is None else self.frozen_head_DH
            bias_D = None if bias_D is None else bias_D[self.d2t_D]
        return Head(
            weight_DH.to(dtype),
            None if bias_D is None else bias_D.to(dtype),
            scale=(getattr(config, "logit_scale", None) or 1.0) / getattr(config, "logits_scaling", 1.0),
            softcap=getattr(config, "final_logit_softcapping", None) or None,
        )

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write a Hugging Face model folder, its head as wide as the target's vocabulary."""
        self.model.to(dtype).save_pretrained(folder)

    @torch.no_grad()
    def check_head(self) -> None:
        """Refuse a family whose logits this module does not reproduce.

        Raises:
            ValueError: the model's own logits differ.
        """
        was_training = self.training
        self.eval()
        vocab_size = self.model.config.get_text_config().vocab_size
        ids_1T = torch.arange(1, 9)[None].to(self.model.device) % vocab_size
        [hidden_1TH] = self.unroll(Sequences(ids_1T, torch.arange(8, device=ids_1T.device)[None]), 1)
        own_ND = self.head(torch.float32).logits(hidden_1TH[0])
        logits_NV = self.model(input_ids=ids_1T, use_cache=False).logits[0]
        self.train(was_training)
        expected_ND = logits_NV if self.d2t_D is None else logits_NV[:, self.d2t_D]
        difference = float((own_ND - expected_ND).abs().max())
        if difference > 1e-3 * max(1.0, float(expected_ND.abs().max())):
            raise ValueError(
                f"models of type {self.model.config.model_type} cannot be trained as drafters: their logits "
                f"are not those of the last hidden state and the head (they differ by {difference:.3g})"
            )


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
