"""The drafter in training: a causal LM whose head runs at chosen positions, over the draft vocabulary only.

The loss takes hidden states and head apart, so that it can make the logits in chunks.

Shape letters: B sequences, T tokens, H hidden size, N chosen positions, D draft and V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from foredraft.kernels.distill_loss_ref import Head


class Student(nn.Module):
    """A Hugging Face causal LM with a sliced head.

    Args:
        model: the drafter to be, weights in float32.
        d2t_D: target ids of the draft vocabulary, int64 [D]; None: the whole vocabulary.
        freeze_embeddings: input embeddings and head keep their values.
        head_dtype: of the product of hidden states and head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        d2t_D: torch.Tensor | None,
        *,
        freeze_embeddings: bool,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model, self.head_dtype = model, head_dtype
        self.register_buffer("d2t_D", d2t_D, persistent=False)
        head = model.get_output_embeddings()
        if freeze_embeddings:
            model.get_input_embeddings().requires_grad_(False)
            head.requires_grad_(False)
        is_cut_once = freeze_embeddings and d2t_D is not None
        frozen_head_DH = head.weight[d2t_D].clone() if is_cut_once else None
        self.register_buffer("frozen_head_DH", frozen_head_DH, persistent=False)

    def forward(self, ids_BT: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, H] of the tokens at flat positions b * T + t, as the head takes them.

        Args:
            ids_BT: int64, sequences padded at the end; causal attention keeps padding out of all that counts.
            positions_N: int64.
        """
        hidden_BTH = self.model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return hidden_BTH.flatten(0, 1)[positions_N]

    def logits(self, ids_BT: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """Draft logits [N, D] of the same positions, in `head_dtype`."""
        return self.head().logits(self(ids_BT, positions_N).to(self.head_dtype))

    def head(self, dtype: torch.dtype | None = None) -> Head:
        """The head's rows of the draft vocabulary in a type (None: `head_dtype`), and what follows them."""
        dtype = dtype or self.head_dtype
        head, config = self.model.get_output_embeddings(), self.model.config.get_text_config()
        weight_DH, bias_D = head.weight, getattr(head, "bias", None)
        if self.d2t_D is not None:
            weight_DH = weight_DH[self.d2t_D] if self.frozen_head_DH is None else self.frozen_head_DH
            bias_D = None if bias_D is None else bias_D[self.d2t_D]
        return Head(
            weight_DH.to(dtype),
            None if bias_D is None else bias_D.to(dtype),
            scale=(getattr(config, "logit_scale", None) or 1.0) / getattr(config, "logits_scaling", 1.0),
            softcap=getattr(config, "final_logit_softcapping", None) or None,
        )

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
        hidden_NH = self(ids_1T, torch.arange(8, device=ids_1T.device))
        own_ND = self.head(torch.float32).logits(hidden_NH)
        logits_NV = self.model(input_ids=ids_1T, use_cache=False).logits[0]
        self.train(was_training)
        expected_ND = logits_NV if self.d2t_D is None else logits_NV[:, self.d2t_D]
        difference = float((own_ND - expected_ND).abs().max())
        if difference > 1e-3 * max(1.0, float(expected_ND.abs().max())):
            raise ValueError(
                f"models of type {self.model.config.model_type} cannot be trained as drafters: their logits "
                f"are not those of the last hidden state and the head (they differ by {difference:.3g})"
            )
