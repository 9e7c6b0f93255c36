"""States of the target along one request, kept for a drafter that feeds on them.

They travel as the bits of bfloat16, which is enough for a drafter and half of what float32 needs.

Shape letters: N positions, S numbers of one position's states (all layers side by side).
"""

from __future__ import annotations

import numpy as np
import torch

from foredraft.infer.drafter_card import StateNeeds


def to_bits(states_NS: torch.Tensor) -> np.ndarray:
    """bfloat16 bits of states on any device, uint16 [N, S]."""
    return states_NS.to(torch.bfloat16).contiguous().view(torch.uint16).cpu().numpy()


def from_bits(bits_NS: np.ndarray, device: torch.device) -> torch.Tensor:
    """Inverse of `to_bits`: bfloat16 [N, S]."""
    return torch.from_numpy(bits_NS).to(device).view(torch.bfloat16)


class TargetStates:
    """States of the positions 0 .. num - 1 of one request; only the last where no more is needed."""

    def __init__(self, needs: StateNeeds) -> None:
        self.needs = needs
        self.num = 0
        self._bits_NS = np.zeros((64 if needs.keeps_all else 1, needs.width), np.uint16)

    @property
    def first(self) -> int:
        """First position whose states are still here."""
        return 0 if self.needs.keeps_all else max(0, self.num - 1)

    def extend(self, bits_NS: np.ndarray) -> None:
        """Append states of the next positions, uint16 [N, S].

        Raises:
            ValueError: another width.
        """
        if bits_NS.ndim != 2 or bits_NS.shape[1] != self.needs.width:
            raise ValueError(f"expected states of {self.needs.width} numbers, got shape {bits_NS.shape}")
        if not len(bits_NS):
            return
        start, self.num = self.num, self.num + len(bits_NS)
        if not self.needs.keeps_all:
            self._bits_NS[0] = bits_NS[-1]
            return
        if self.num > len(self._bits_NS):
            room = np.zeros((max(self.num, 2 * len(self._bits_NS)) - start, self.needs.width), np.uint16)
            self._bits_NS = np.concatenate([self._bits_NS[:start], room])
        self._bits_NS[start : self.num] = bits_NS

    def skip_to(self, num: int) -> None:
        """Pretend to know the positions before `num`, of which nothing is needed any more."""
        assert not self.needs.keeps_all and num >= self.num, "only where the last one suffices"
        self.num = num

    def since(self, start: int) -> np.ndarray:
        """States of the positions from `start`, or from the first that is here, uint16 [N, S]."""
        start = max(start, self.first)
        return self._bits_NS[start - self.first : self.num - self.first]

    def at(self, position: int) -> np.ndarray:
        """States of one position, uint16 [S]; zeros before the first and for those that are gone."""
        if not self.first <= position < self.num:
            return np.zeros(self.needs.width, np.uint16)
        return self._bits_NS[position - self.first]
