"""Hidden states of a target, caught while it runs: what some drafters feed on.

A layer id k means the residual stream that *enters* decoder layer k, transformers' `hidden_states[k]`; the
number of layers is the id of what enters the head, behind the last norm. Engines count in several ways (some
name the layer whose output it is, k - 1), so artifacts of foredraft keep to this one convention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def layer_stack(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """Where a model keeps its list of decoder layers: the parent module and the attribute.

    Raises:
        ValueError: the family keeps its layers in an unknown way.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    stacks = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    if len(stacks) != 1:
        raise ValueError(
            f"layers of models of type {model.config.model_type} are not known: expected one list of "
            f"{num_layers} decoder layers, found {len(stacks)}"
        )
    return stacks[0]


class StateTap:
    """Hooks on a model. Forward it, then `take`.

    Args:
        model: a causal LM.
        layers: ids of states; 0 is what the embeddings give.

    Raises:
        ValueError: ids that the model lacks.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        parent, name = layer_stack(model)
        stack = list(getattr(parent, name))
        if not layers or not all(0 <= layer <= len(stack) for layer in layers):
            raise ValueError(
                f"states enter layers 0..{len(stack)} ({len(stack)}: the head), got {list(layers)}"
            )
        self.layers = tuple(layers)
        self._found: dict[int, torch.Tensor] = {}
        self._hooks = [
            stack[layer].register_forward_pre_hook(self._entering(layer), with_kwargs=True)
            for layer in set(layers) - {len(stack)}
        ]
        if len(stack) in layers:
            self._hooks.append(model.base_model.register_forward_hook(self._leaving(len(stack))))

    def remove(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()

    def take(self) -> torch.Tensor:
        """States of the last forward [..., S], those of the layers side by side in the order given."""
        states = torch.cat([self._found[layer] for layer in self.layers], -1)
        self._found.clear()
        return states

    def _entering(self, layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._found[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _leaving(self, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._found[layer] = output[0]

        return hook
