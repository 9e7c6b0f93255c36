"""How many guesses to verify: the block grows while a guess is worth the time that it adds.

A verification of n guesses settles E(n) = 1 + (sum of their path probabilities) tokens and takes T_v(n)
seconds. At a rate of R tokens a second, the next guess pays while P > R * (T_v(n + 1) - T_v(n)): Dinkelbach's
rule for the greatest ratio of expected tokens to expected seconds over many rounds. It needs probabilities
that mean what they say, so it applies to those of an outcome predictor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

FLAT: tuple[float, ...] = (1.0,)  # every verification costs the same


@dataclass(slots=True)
class BlockPlanner:
    """Chooses n for one request.

    Args:
        seconds: T_v, entry n for n guesses; larger blocks cost what the last entry says.
    """

    seconds: Sequence[float]
    _tokens: float = field(default=1.0, init=False)  # as if one plain round had been seen
    _seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self._seconds = self.seconds_of(0)

    def seconds_of(self, num_guesses: int) -> float:
        """T_v(n)."""
        return self.seconds[min(num_guesses, len(self.seconds) - 1)]

    @property
    def rate(self) -> float:
        """R: tokens a second of this request so far, by the table's times."""
        return self._tokens / self._seconds

    def block_size(self, path_probs: Sequence[float]) -> int:
        """How many of the guesses to verify, best first.

        A step of the table may be too high for the next guess alone and pay for several: the n of the
        greatest E(n) - R * T_v(n) is taken, the largest of equals.
        """
        expected = accumulate(path_probs, initial=1.0)
        gains = [tokens - self.rate * self.seconds_of(n) for n, tokens in enumerate(expected)]
        return max(range(len(gains)), key=lambda n: (gains[n], n))

    def observe(self, num_guesses: int, num_settled: int) -> None:
        """A verification of n guesses settled so many tokens."""
        self._tokens += num_settled
        self._seconds += self.seconds_of(num_guesses)


def increasing(seconds: Sequence[float]) -> tuple[float, ...]:
    """The nearest table that never falls (least squares): a measured table without its noise.

    Pool-adjacent-violators: neighbours out of order are replaced by their mean.
    """
    groups: list[tuple[float, int]] = []  # mean, size
    for value in seconds:
        groups.append((value, 1))
        while len(groups) > 1 and groups[-2][0] >= groups[-1][0]:
            (left, num_left), (right, num_right) = groups[-2:]
            total = num_left + num_right
            groups[-2:] = [((left * num_left + right * num_right) / total, total)]
    return tuple(mean for mean, size in groups for _ in range(size))
