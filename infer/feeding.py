"""Which states the rows of a request's drafting steps start from, for families that feed on the target.

A token's row starts from the target's state of the token before it, which exists once the target has run over
that one. Below the root it does not exist yet: there a row starts from what the drafter itself made of its
parent. What was computed so and is settled meanwhile is *stale*: its row is run once more when the target's
states are there, so that the context consists of true states only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foredraft.infer.drafter_card import StateNeeds
from foredraft.infer.drafters import Feed
from foredraft.infer.target_states import TargetStates


class Feeding:
    """States and stale positions of one request."""

    def __init__(self, needs: StateNeeds) -> None:
        self.states = TargetStates(needs)
        self.stale: list[int] = []  # committed positions whose row started from the drafter's own state
        self.num_refreshed = 0
        self._num_own: dict[int, int] = {}  # tree node: rows up to it that started from own states

    @property
    def has_context(self) -> bool:
        """Whether rows before the root matter: without, neither prompt nor stale rows need their states."""
        return self.states.needs.keeps_all

    def take(self, base_position: int, bits_NS: np.ndarray) -> None:
        """Take in states of the target from `base_position` on, uint16 [N, S].

        Raises:
            KeyError: they do not follow the last ones.
            ValueError: another width.
        """
        if not self.has_context:
            self.states.skip_to(max(self.states.num, base_position))
        if base_position != self.states.num:
            raise KeyError(f"states of position {base_position} do not follow those of {self.states.num - 1}")
        self.states.extend(bits_NS)

    def num_ready(self, start: int, wanted: int) -> int:
        """How many of `wanted` settled tokens from position `start` on can be run."""
        return max(0, min(wanted, self.states.num + 1 - start)) if self.has_context else wanted

    def is_ready(self, root_position: int) -> bool:
        """Whether the root can be run."""
        return self.states.num >= root_position

    def is_own(self, node: int) -> bool:
        """Whether a tree node ran from the drafter's own state."""
        return self._num_own.get(node, 0) > 0

    def commit(self, root_position: int, path: Sequence[int], survivors: set[int]) -> None:
        """A path of tree nodes was settled, whose first, the old root, lay at `root_position`."""
        if self.has_context:
            own = [root_position + index for index, node in enumerate(path) if self.is_own(node)]
            self.stale += own
        self._num_own = {node: number for node, number in self._num_own.items() if node in survivors}

    def refresh(self, positions: Sequence[int]) -> None:
        """Settled positions are about to run from true states."""
        fresh = set(positions)
        self.num_refreshed += len(fresh.intersection(self.stale))
        self.stale = [position for position in self.stale if position not in fresh]

    def start(self, nodes: Sequence[int], parents: Sequence[int | None]) -> list[int]:
        """Note the tree nodes that are about to run; for each, the steps since a state of the target."""
        for node, parent in zip(nodes, parents, strict=True):
            self._num_own[node] = 0 if parent is None else self._num_own.get(parent, 0) + 1
        return [self._num_own[node] for node in nodes]

    def feed(self, positions: Sequence[int], parent_slots: Sequence[int]) -> Feed:
        """What the rows of a step start from.

        Args:
            positions: of the rows that start from the target's states; they come first.
            parent_slots: slots of the parents of the others.
        """
        width = self.states.needs.width
        given = [self.states.at(position - 1) for position in positions]
        given_GS = np.stack(given) if given else np.zeros((0, width), np.uint16)
        source_n = np.array([*(-1 - index for index in range(len(given))), *parent_slots], np.int64)
        return Feed(source_n, given_GS)
