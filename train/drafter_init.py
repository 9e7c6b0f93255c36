"""First weights of an `lm` drafter: layers of the target, another model, or random."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from foredraft.infer.identity import check_tokenizer, tokenizer_sha256
from foredraft.infer.paged_model import load_causal_lm
from foredraft.infer.params import EngineConfig
from foredraft.infer.state_tap import layer_stack
from foredraft.train.drafter_recipe import DrafterRecipe, InitRecipe


def build_drafter(recipe: DrafterRecipe, target_tokenizer_sha256: str) -> PreTrainedModel:
    """The untrained drafter in float32.

    Raises:
        ValueError: no such model, layers that the target lacks, a model with another tokenizer.
    """
    init = recipe.init
    if init.source == "model":
        assert init.model is not None, "the recipe checks it"
        tokenizer = AutoTokenizer.from_pretrained(init.model)
        check_tokenizer(
            tokenizer_sha256(tokenizer), target_tokenizer_sha256, f"init.model {init.model}", recipe.target
        )
        return load_for_training(init.model, None, recipe)
    target = load_for_training(recipe.target, recipe.revision, recipe)
    if init.source == "target":
        return keep_layers(target, chosen_layers(init, target.config.get_text_config().num_hidden_layers))
    config = target.config
    cut_config(config, evenly_spaced(init.num_layers, config.get_text_config().num_hidden_layers))
    config.update(init.config or {})
    torch.manual_seed(recipe.seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=recipe.attention)


def load_for_training(source: str, revision: str | None, recipe: DrafterRecipe) -> PreTrainedModel:
    """A causal LM in float32 with transformers' own attention."""
    config = EngineConfig(dtype="float32", revision=revision, trust_remote_code=recipe.trust_remote_code)
    model = load_causal_lm(source, config, "cpu")
    model.set_attn_implementation(recipe.attention)
    return model


def evenly_spaced(count: int, num_layers: int) -> list[int]:
    """Indices of `count` layers from the first to the last.

    Raises:
        ValueError: more layers asked for than there are.
    """
    if count > num_layers:
        raise ValueError(f"init.num_layers must be in 1..{num_layers} (the target's layers), got {count}")
    return [round(index * (num_layers - 1) / max(1, count - 1)) for index in range(count)]


def chosen_layers(init: InitRecipe, num_layers: int) -> list[int]:
    """The target's layers that the drafter starts from.

    Raises:
        ValueError: layers that the target lacks.
    """
    if init.layers and init.layers[-1] >= num_layers:
        raise ValueError(f"init.layers must be in 0..{num_layers - 1}, got {list(init.layers)}")
    return list(init.layers) or evenly_spaced(init.num_layers, num_layers)


def keep_layers(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Cut a model to some of its decoder layers, in place.

    Raises:
        ValueError: the family keeps its layers in an unknown way.
    """
    parent, name = layer_stack(model)
    kept = nn.ModuleList(getattr(parent, name)[index] for index in layers)
    setattr(parent, name, kept)
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    cut_config(model.config, layers)
    return model


def cut_config(config: PretrainedConfig, layers: list[int]) -> None:
    """Cut a configuration to some of its layers: their number, and every list with an entry a layer."""
    text_config = config.get_text_config()
    num_layers = text_config.num_hidden_layers
    for name, value in text_config.to_dict().items():
        if isinstance(value, list) and len(value) == num_layers:
            setattr(text_config, name, [value[index] for index in layers])
    text_config.num_hidden_layers = len(layers)
