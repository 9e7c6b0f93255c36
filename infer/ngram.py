"""Prompt lookup: guess that the text goes on as it did after the last occurrence of its current ending.

The index grows with the text, so that a round costs microseconds whatever the length of the context.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Where every n-gram of prompt + output was last followed by something.

    Longer endings are tried first (`longest` tokens, down to `shortest`). Add settled tokens only: what
    is added stays. Raises ValueError unless 1 <= shortest <= longest.
    """

    def __init__(self, tokens: Sequence[int], *, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"expected 1 <= shortest <= longest, got shortest {shortest} and longest {longest}"
            )
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._next_position: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append settled tokens."""
        for token in tokens:
            end = len(self._tokens)
            for length in self._lengths:
                if length <= end:
                    self._next_position[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def guess(self, num_tokens: int) -> list[int]:
        """The next `num_tokens` tokens as a chain, or [] if the ending is new.

        A continuation that reaches the end of the text goes on into the guesses themselves (a repetition).
        """
        start = self._match()
        if start is None or num_tokens <= 0:
            return []
        period = len(self._tokens) - start
        copied = self._tokens[start : start + num_tokens]
        return [copied[i % period] for i in range(num_tokens)]

    def _match(self) -> int | None:
        """Position after the most recent earlier occurrence of the longest known ending."""
        for length in self._lengths:
            if length <= len(self._tokens):
                position = self._next_position.get(tuple(self._tokens[-length:]))
                if position is not None:
                    return position
        return None
