"""Where a completion ends, and its text so far: EOS ids, stop strings, token limit, incremental text.

Token ids are settled in blocks; `StopChecker.feed` says how many of a block are kept. Both its
end and its text depend on the sequence of tokens only, not on the blocks that they came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from foredraft.infer.params import SamplingParams

FinishReason = Literal["stop", "length"]

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not UTF-8, or not yet
MAX_INCOMPLETE = 3  # at most three bytes of a character can have arrived without completing it
MAX_PENDING = 16  # tokens after which bytes that never became a character are shown as they are


class AddedToken(Protocol):
    """What is read of a tokenizer's added token."""

    content: str
    special: bool


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Added tokens by id."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`."""
        ...


@dataclass(frozen=True, slots=True)
class StopResult:
    """How many of the fed tokens belong to the completion, and why it ended if it did."""

    num_kept: int
    finish_reason: FinishReason | None


class Detokenizer:
    """Text of a growing token sequence, a few decoded tokens a step.

    Tokens are decoded after some already shown ones, as what a token adds depends on its left neighbours: a
    leading space, the first bytes of its character. The bytes of an incomplete character are held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens that are shown already
        self._context_text = ""
        self._pending: list[int] = []  # tokens after them, not shown in full
        self._num_shown = 0  # characters of the pending text that are shown

    def add(self, token: int) -> str:
        """The text that becomes certain with one more token."""
        self._pending.append(token)
        text = self._pending_text()
        num_held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_INCOMPLETE)
        if num_held and len(self._pending) <= MAX_PENDING:
            return self._show(text[: len(text) - num_held])
        shown = self._show(text)
        self._settle()
        return shown

    def flush(self) -> str:
        """What is still held back, when no token follows."""
        return self._show(self._pending_text())

    def _show(self, text: str) -> str:
        shown = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return shown

    def _pending_text(self) -> str:
        text = self._decode(self._context + self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # a byte-fallback decoder gives up a whole run of bytes while its last character is incomplete
        return self._decode(self._pending)

    def _settle(self) -> None:
        """Make the pending tokens the context; a context without text would not show a leading space."""
        text = self._decode(self._pending)
        self._context = self._pending if text else self._context + self._pending
        self._context_text = text if text else self._decode(self._context)
        self._pending = []
        self._num_shown = 0

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class StopChecker:
    """Applies the stop rules of one request and keeps its tokens and text.

    Args:
        tokenizer: None if there are no stop strings and no text is wanted.
        eos_ids: ids that end a completion, unless `params.ignore_eos`.
        params: stop strings and max_new_tokens. A stop string that is a special token stops by its id.

    Raises:
        ValueError: stop strings without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_ids: Iterable[int], params: SamplingParams) -> None:
        if params.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none")
        special = special_token_ids(tokenizer) if params.stop and tokenizer else {}
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._max_new_tokens = params.max_new_tokens
        self._stop_strings = [text for text in params.stop if text not in special]
        self._stop_ids = {special[text] for text in params.stop if text in special}
        if not params.ignore_eos:
            self._stop_ids.update(eos_ids)
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._text = ""
        self._num_streamed = 0

    @property
    def text(self) -> str:
        """The text so far: without EOS, cut before a stop string, without an incomplete last character."""
        return self._text

    def feed(self, tokens: Sequence[int]) -> StopResult:
        """Take settled tokens in order, up to and including the one that ends the completion."""
        for num_before, token in enumerate(tokens):
            if self.finish_reason is not None:
                return StopResult(num_before, self.finish_reason)
            self._take(token)
        return StopResult(len(tokens), self.finish_reason)

    def text_delta(self) -> str:
        """Text to stream since the last call; holds back what may turn out to begin a stop string."""
        end = len(self._text)
        if self.finish_reason is None:
            end -= self._num_held_back()
        delta = self._text[self._num_streamed : end]
        self._num_streamed = max(self._num_streamed, end)
        return delta

    def _take(self, token: int) -> None:
        self.token_ids.append(token)
        is_stop_id = token in self._stop_ids
        if is_stop_id or (self._detokenizer is not None and self._adds_stop_string(token)):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._max_new_tokens:
            self.finish_reason = "length"
        ends_whole = is_stop_id or self.finish_reason == "length"
        if ends_whole and self._detokenizer is not None:
            self._text += self._detokenizer.flush()

    def _adds_stop_string(self, token: int) -> bool:
        """Append the token's text; on a stop string, the one that is complete first, cut before it."""
        assert self._detokenizer is not None, "text is only kept with a tokenizer"
        num_before = len(self._text)
        self._text += self._detokenizer.add(token)
        found = [
            (start + len(stop), start)
            for stop in self._stop_strings
            if (start := self._text.find(stop, max(0, num_before - len(stop) + 1))) >= 0
        ]
        if found:
            self._text = self._text[: min(found)[1]]
        return bool(found)

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stop_strings):
                return length
        return 0


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special tokens, which never show in the text, by their names."""
    return {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
