"""Where a round's block comes from: nowhere (plain), a drafter here (sync), the draft server (async).

A guesser can only change how fast a request decodes, never what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foredraft.infer.ngram import NgramIndex
from foredraft.infer.request import Request
from foredraft.infer.speculator import Speculator
from foredraft.infer.stats import Outcome, Source
from foredraft.infer.tracing import Trace
from foredraft.infer.tree import Block

EMPTY_BLOCK = Block([], [], [], [])


@dataclass(frozen=True, slots=True)
class Guess:
    """A block to verify, who guessed it, and what the draft server found of the outcome that it answers."""

    block: Block
    source: Source = "draft"
    outcome: Outcome | None = None


class Guesser(Protocol):
    """One request at a time: prepare, open, then guess and outcome in turn, then close."""

    def prepare(self, request: Request) -> None:
        """Called before the target's prefill: a drafter elsewhere can read the prompt meanwhile."""
        ...

    def open(self, request: Request) -> None:
        """Begin a request whose first token is settled."""
        ...

    def guess(self, request: Request) -> Guess:
        """The block of the next round; may wait, within the bounds of the miss policy."""
        ...

    def outcome(self, request: Request, settled: Sequence[int]) -> None:
        """Tell what the round settled, before all else; `request.tokens` holds it already."""
        ...

    def close(self, request: Request) -> int:
        """End the request, whether or not it was opened; the draft tokens that were computed twice."""
        ...

    def shutdown(self) -> None:
        """No more requests come."""
        ...


class PlainGuesser:
    """No guesses: one token a round."""

    def prepare(self, request: Request) -> None:
        """Nothing to prepare."""

    def open(self, request: Request) -> None:
        """Nothing to begin."""

    def guess(self, request: Request) -> Guess:
        """Always empty."""
        return Guess(EMPTY_BLOCK)

    def outcome(self, request: Request, settled: Sequence[int]) -> None:
        """Nobody to tell."""

    def close(self, request: Request) -> int:
        """Nothing was drafted."""
        return 0

    def shutdown(self) -> None:
        """Nothing to end."""


class SyncGuesser:
    """A drafter in this process, that works between verifications."""

    def __init__(self, speculator: Speculator, trace: Trace) -> None:
        self.speculator = speculator
        self.trace = trace
        self.num_fed = 0  # positions whose states the speculator has

    def prepare(self, request: Request) -> None:
        """The drafter has to wait for its turn."""

    def open(self, request: Request) -> None:
        """Raises ValueError where the request does not fit the drafter's context."""
        self.speculator.open(
            request.id,
            request.tokens,
            request.params,
            request.speculation,
            request.num_remaining,
            request.num_prompt,
        )
        self.num_fed = 0
        self.feed(request)

    def feed(self, request: Request) -> None:
        """Hand over the target's states that are new, to a drafter that feeds on them."""
        if request.states is not None:
            bits_NS = request.states.since(self.num_fed)
            self.num_fed = request.states.num
            self.speculator.feed(request.id, self.num_fed - len(bits_NS), bits_NS)
            request.stats.state_bytes += bits_NS.nbytes

    def guess(self, request: Request) -> Guess:
        """Expand k times (or as often as lockstep says), then the best block."""
        with self.trace.span("expand", request=request.id):
            self.speculator.start_from_target(request.id)
            self.speculator.expand(request.id, request.speculation.lockstep or request.speculation.k)
        return Guess(self.speculator.block(request.id))

    def outcome(self, request: Request, settled: Sequence[int]) -> None:
        """Re-root the tree."""
        self.feed(request)
        self.speculator.advance(request.id, len(request.tokens) - len(settled), settled)

    def close(self, request: Request) -> int:
        """Free the drafter's KV."""
        if request.id not in self.speculator.sessions:
            return 0
        num_recomputed = self.speculator.stats(request.id)["draft_tokens_recomputed"]
        self.speculator.close(request.id)
        return num_recomputed

    def shutdown(self) -> None:
        """Write the records that are left."""
        self.speculator.finish()


class NgramGuesser:
    """Prompt lookup over the request's own tokens: what an asynchronous engine does on a miss."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.index = NgramIndex([])
        self.num_indexed = 0

    def prepare(self, request: Request) -> None:
        """Start anew, and index nothing yet: a request that always hits never needs it."""
        self.index, self.num_indexed = NgramIndex([]), 0

    def open(self, request: Request) -> None:
        """Indexed lazily."""

    def guess(self, request: Request) -> Guess:
        """A chain that continues the last occurrence of the current ending; empty where it is new."""
        self.index.extend(request.tokens[self.num_indexed :])
        self.num_indexed = len(request.tokens)
        tokens = self.index.guess(self.num_tokens)
        size = len(tokens)
        return Guess(
            Block(list(range(size)), tokens, list(range(-1, size - 1)), [1.0] * size),
            source="ngram" if size else "draft",
        )

    def outcome(self, request: Request, settled: Sequence[int]) -> None:
        """Indexed lazily."""

    def close(self, request: Request) -> int:
        """Nothing was drafted."""
        return 0

    def shutdown(self) -> None:
        """Nothing to end."""
