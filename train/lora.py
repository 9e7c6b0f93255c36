"""LoRA by peft on a causal LM in place, and its end: merged into the weights, since no engine loads adapters.

Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from foredraft.train.drafter_recipe import LoraRecipe


def add_lora(model: PreTrainedModel, recipe: LoraRecipe) -> None:
    """Freeze a model and give its linear layers adapters.

    Raises:
        ValueError: names of modules that the model lacks.
    """
    head = model.get_output_embeddings()
    linear = {
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=recipe.dropout,
        target_modules=list(recipe.modules) or sorted(linear),
    )
    model.requires_grad_(False)
    inject_adapter_in_model(config, model)


def merge_lora(model: nn.Module) -> None:
    """Fold all adapters into the weights they belong to; a model without any stays as it is."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLayer):
                child.merge()
                setattr(parent, name, child.get_base_layer())
    model.requires_grad_(True)
