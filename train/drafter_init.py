"""Networks before training: layers of the target, another model, random weights, or a speculator's."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from foredraft.infer.drafters.eagle3 import Eagle3Network, default_layers
from foredraft.infer.drafters.lm import LMNetwork
from foredraft.infer.drafters.mlp import MLPConfig, MLPNetwork
from foredraft.infer.drafters.network import DraftNetwork
from foredraft.infer.identity import check_tokenizer, tokenizer_sha256
from foredraft.infer.paged_model import load_causal_lm
from foredraft.infer.params import EngineConfig
from foredraft.infer.state_tap import layer_stack
from foredraft.infer.target import load_tokenizer
from foredraft.train.draft_vocab import invert
from foredraft.train.drafter_recipe import DrafterRecipe, InitRecipe
from foredraft.train.log_recipe import Dtype
from foredraft.train.lora import add_lora


def build_network(recipe: DrafterRecipe, d2t_D: torch.Tensor | None) -> DraftNetwork:
    """The untrained network of a recipe's family in float32.

    Args:
        recipe: of the drafter.
        d2t_D: target ids of the draft vocabulary, int64; None: the whole vocabulary.

    Raises:
        ValueError: no such model, layers that the target lacks, sizes or vocabularies that do not fit.
    """
    head_dtype = torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32
    build = {"lm": _build_lm, "mlp": _build_mlp, "eagle3": _build_eagle3}[recipe.family]
    network = build(recipe, d2t_D, head_dtype)
    if d2t_D is not None:
        vocab_size = config_of(recipe).get_text_config().vocab_size
        network.t2d_V = invert(d2t_D, vocab_size)
    return network


def _build_lm(recipe: DrafterRecipe, d2t_D: torch.Tensor | None, head_dtype: torch.dtype) -> LMNetwork:
    """A causal LM: layers of the target, another model, or random weights."""
    init = recipe.init
    assert init is not None, "the recipe checks it"
    model = _first_model(recipe, init)
    if init.lora is not None:
        add_lora(model, init.lora)
    network = LMNetwork(
        model,
        d2t_D,
        freeze_embeddings=recipe.freeze_embeddings or init.lora is not None,
        head_dtype=head_dtype,
    )
    network.check_head()
    return network


def _first_model(recipe: DrafterRecipe, init: InitRecipe) -> PreTrainedModel:
    if init.source == "model":
        assert init.model is not None, "the recipe checks it"
        expected = tokenizer_sha256(load_tokenizer(recipe.target, EngineConfig(revision=recipe.revision)))
        found = tokenizer_sha256(AutoTokenizer.from_pretrained(init.model))
        check_tokenizer(found, expected, f"init.model {init.model}", recipe.target)
        model = load_model(init.model, None, recipe)
        size = model.config.get_text_config().vocab_size
        if init.lora is not None and size != (expected := config_of(recipe).get_text_config().vocab_size):
            raise ValueError(
                f"init.model {init.model} has a vocabulary of {size}, the target one of {expected}: LoRA "
                "leaves embeddings and head as they are, so it needs a model with the target's; train the "
                "whole model (without lora), or choose another one"
            )
        return model
    if init.source == "target":
        target = load_model(recipe.target, recipe.revision, recipe)
        return keep_layers(target, chosen_layers(init, target.config.get_text_config().num_hidden_layers))
    config = config_of(recipe)
    cut_config(config, evenly_spaced(init.num_layers, config.get_text_config().num_hidden_layers))
    config.update(init.config or {})
    torch.manual_seed(recipe.seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=recipe.attention)


def config_of(recipe: DrafterRecipe) -> PretrainedConfig:
    """The target's configuration."""
    if recipe.target.endswith(".gguf"):
        return load_model(recipe.target, None, recipe).config
    return AutoConfig.from_pretrained(recipe.target, revision=recipe.revision)


def vocab_size_of(recipe: DrafterRecipe) -> int:
    """Tokens that the untrained network's head knows."""
    other = recipe.init.model if recipe.init is not None else None
    config = config_of(recipe) if other is None else AutoConfig.from_pretrained(other)
    return config.get_text_config().vocab_size


def _build_mlp(recipe: DrafterRecipe, d2t_D: torch.Tensor | None, head_dtype: torch.dtype) -> MLPNetwork:
    """The MLP speculator with the target's embeddings and head."""
    assert recipe.mlp is not None, "the recipe checks it"
    target = load_model(recipe.target, recipe.revision, recipe)
    text = target.config.get_text_config()
    head = target.get_output_embeddings().weight.detach()
    head_DH = head if d2t_D is None else head[d2t_D]
    config = MLPConfig(
        hidden_size=text.hidden_size,
        inner_size=recipe.mlp.inner_size,
        vocab_size=text.vocab_size,
        draft_vocab_size=len(head_DH),
        num_steps=recipe.mlp.num_steps,
        layer=text.num_hidden_layers,
        max_positions=text.max_position_embeddings,
    )
    torch.manual_seed(recipe.seed)
    network = MLPNetwork(config, d2t_D, head_dtype)
    network.embed.weight.data.copy_(target.get_input_embeddings().weight)
    network.lm_head.weight.data.copy_(head_DH)
    return network


def _build_eagle3(
    recipe: DrafterRecipe, d2t_D: torch.Tensor | None, head_dtype: torch.dtype
) -> Eagle3Network:
    """One layer of the target's sizes, its head begun with the target's."""
    section = recipe.eagle3
    assert section is not None, "the recipe checks it"
    target = load_model(recipe.target, recipe.revision, recipe)
    text = target.config.get_text_config()
    head = target.get_output_embeddings().weight.detach()
    head_DH = head if d2t_D is None else head[d2t_D]
    num_heads = text.num_attention_heads
    layer = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=section.intermediate_size or text.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=getattr(text, "rope_parameters", None),
        tie_word_embeddings=False,
    )
    layers = section.layers or default_layers(text.num_hidden_layers)
    torch.manual_seed(recipe.seed)
    network = Eagle3Network(layer, len(head_DH), layers, section.num_steps, d2t_D, head_dtype)
    network.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    network.lm_head.weight.data.copy_(head_DH)
    if recipe.freeze_embeddings:
        network.lm_head.requires_grad_(False)
    return network


def load_model(
    source: str, revision: str | None, recipe: DrafterRecipe, dtype: Dtype = "float32"
) -> PreTrainedModel:
    """A causal LM with transformers' own attention; ValueError where there is none."""
    config = EngineConfig(dtype=dtype, revision=revision, trust_remote_code=recipe.trust_remote_code)
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
