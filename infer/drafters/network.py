"""The networks behind the families: what a trainer unrolls under teacher forcing.

Step s of an unroll, s = 1, 2, ..., guesses as the engine does s tokens beyond the last settled one. Entry
[b, t] of step s guesses the token after t when the tokens up to t are right: the *anchor*, the root of the
tree, is then t - s + 1, and the last state of the target that may be used is that of the token before it.

Shape letters: B sequences, T tokens, S numbers of a token's states, H size of what the head takes, D draft
vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from foredraft.infer.drafter_card import StateNeeds
from foredraft.kernels.distill_loss_ref import Head


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token sequences, several documents in a row of the batch where they are packed."""

    ids_BT: torch.Tensor  # int64, padded at the end
    positions_BT: torch.Tensor  # int64, from 0 in every document
    states_BTS: torch.Tensor | None = None  # of the target after every token, for families that feed on them

    @property
    def documents_BT(self) -> torch.Tensor:
        """Number of the document that each token belongs to, int64."""
        return (self.positions_BT == 0).cumsum(-1)

    def has_anchor(self, step: int) -> torch.Tensor:
        """Whether an entry of a step has its anchor in the same document, bool [B, T]."""
        return self.positions_BT >= step - 1

    @property
    def states_before_BTS(self) -> torch.Tensor:
        """The target's states of the token before each; zeros before the first of a document."""
        assert self.states_BTS is not None, "the family names the states that it needs"
        before_BTS = self.states_BTS.roll(1, 1)
        return before_BTS.masked_fill((self.positions_BT == 0)[..., None], 0.0)


class DraftNetwork(nn.Module, ABC):
    """A family's network in training.

    Attributes:
        states: what it reads of the target.
        num_steps: steps of an unroll that differ; 1 where guesses depend on the tokens alone.
        max_depth: deepest guess that a tree should hold.
        head_dtype: of the product of hidden states and head.
        d2t_D: target ids of the draft vocabulary, int64; None: the whole vocabulary.
        t2d_V: draft id of every target id, or -1; set where it is trained, None with the whole vocabulary.
    """

    states: StateNeeds
    num_steps: int
    max_depth: int
    d2t_D: torch.Tensor | None
    t2d_V: torch.Tensor | None

    def __init__(self, d2t_D: torch.Tensor | None, head_dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dtype = head_dtype
        self.register_buffer("d2t_D", d2t_D, persistent=False)
        self.register_buffer("t2d_V", None, persistent=False)

    @abstractmethod
    def unroll(self, sequences: Sequences, num_steps: int) -> Iterator[torch.Tensor]:
        """What the head takes [B, T, H], of steps 1 .. `num_steps`, or fewer where the rest are equal."""

    @property
    @abstractmethod
    def head_parameter(self) -> nn.Parameter:
        """The weight that `head` is made of."""

    @abstractmethod
    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the files of the family into an artifact's folder."""

    @abstractmethod
    def head(self, dtype: torch.dtype | None = None) -> Head:
        """The head over the draft vocabulary in a type (None: `head_dtype`)."""

    def forward(self, sequences: Sequences, num_steps: int) -> list[torch.Tensor]:
        """`unroll` as a list: what wrappers of data-parallel training call."""
        return list(self.unroll(sequences, num_steps))


def gathered(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter outside its module's forward: whole where training shards it, with a mean of gradients."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    whole = parameter.redistribute(mesh, [Replicate()] * mesh.ndim)
    return whole.to_local(grad_placements=[Partial("avg")] * mesh.ndim)
