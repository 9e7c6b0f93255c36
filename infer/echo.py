"""What a request's own text has said before: small models repeat themselves, and so do good answers.

Of every candidate three things are known: whether it occurs in the text, whether it has followed the last
token there, whether it has followed the last two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

OCCURRED, FOLLOWED_ONE, FOLLOWED_TWO = 1, 2, 4


class Echo:
    """Index of a growing text; O(1) a token, and O(path + F) a question."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._last: list[int] = []  # at most two
        self._occurred: set[int] = set()
        self._after_one: dict[int, set[int]] = {}
        self._after_two: dict[tuple[int, int], set[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            if self._last:
                self._after_one.setdefault(self._last[-1], set()).add(token)
            if len(self._last) == 2:
                self._after_two.setdefault((self._last[0], self._last[1]), set()).add(token)
            self._occurred.add(token)
            self._last = [*self._last[-1:], token]

    def bits(self, path: Sequence[int], candidate_ids_F: np.ndarray) -> np.ndarray:
        """OCCURRED, FOLLOWED_ONE, FOLLOWED_TWO of every candidate after the text and a path; uint8 [F].

        The path's tokens count as text. At least one token must have been said.
        """
        text = [*self._last, *path]
        num_new = len(path)
        one = self._after_one.get(text[-1], set())
        two = self._after_two.get((text[-2], text[-1]), set()) if len(text) > 1 else set()
        occurred = self._occurred
        if path:
            occurred = occurred.union(path)
            new = range(len(text) - num_new, len(text))
            one = one.union(text[i] for i in new if i > 0 and text[i - 1] == text[-1])
            two = two.union(text[i] for i in new if i > 1 and text[i - 2 : i] == text[-2:])
        found = [
            OCCURRED * (token in occurred) | FOLLOWED_ONE * (token in one) | FOLLOWED_TWO * (token in two)
            for token in candidate_ids_F.tolist()
        ]
        return np.array(found, np.uint8)
