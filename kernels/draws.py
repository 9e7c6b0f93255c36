"""How the token of a row is drawn: filters, the name of its noise, the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from foredraft.kernels.host_copy import to_device


class Filters(Protocol):
    """The sampling fields that the pipeline reads; `foredraft.infer.params.SamplingParams` has them."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's draw. The tokens before it are read only where a penalty is on."""

    filters: Filters
    seed: int  # unsigned 64 bits; read where the temperature is positive
    position: int  # absolute index in the sequence of the token being drawn
    choice: int = 0  # index of the completion where several share a seed
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()  # the response so far and the row's own path in the tree

    @property
    def is_penalised(self) -> bool:
        """Whether penalties or biases edit the row's logits."""
        filters = self.filters
        return needs_tokens(filters) or bool(filters.logit_bias)


def needs_tokens(filters: Filters) -> bool:
    """Whether the draw depends on the tokens before it."""
    return (
        filters.repetition_penalty != 1.0
        or filters.presence_penalty != 0.0
        or filters.frequency_penalty != 0.0
    )


# columns of a table
SEED, POSITION, CHOICE, TOP_K, TEMPERATURE, TOP_P, MIN_P = range(7)
TABLE_WIDTH = 8


def draw_table(draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    """What kernels read of the draws in one copy: int64 [N, 8]; float32 fields as their bits."""
    integers = [(d.seed, d.position, d.choice, d.filters.top_k) for d in draws]
    floats = [(d.filters.temperature, d.filters.top_p, d.filters.min_p) for d in draws]
    table_N8 = np.zeros((len(draws), TABLE_WIDTH), np.uint64)
    table_N8[:, SEED : TOP_K + 1] = np.array(integers, np.uint64).reshape(-1, 4)
    table_N8[:, TEMPERATURE : MIN_P + 1] = np.array(floats, np.float32).reshape(-1, 3).view(np.uint32)
    return to_device(table_N8.view(np.int64), device)
