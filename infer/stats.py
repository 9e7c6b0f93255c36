"""What a decode cost and gained: rounds of a request in, the published figures out; pooled by sums.

A round is one target pass over a block after prefill. The prefill's token is neither in `rounds` nor in
`tokens`, so plain decoding has tokens_per_verify = 1 exactly. Entry 0 of `acc_marginal` and `acc_conditional`
is depth 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from foredraft.infer.params import Mode

Outcome = Literal["hit", "leaf", "miss"]
Source = Literal["draft", "ngram"]


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One target pass over a block.

    block_depth: depth of the deepest guess in the block; 0 = a round without guesses.
    accepted: guesses that equalled the target's token, without the bonus token.
    emitted: tokens that the request kept: accepted + 1, or fewer when a stop rule ended it inside the block.
    outcome: what the draft server found when it read the outcome that this round's block answers; None for
        the first round after prefill, when no server answered, in plain and in sync mode.
    source: who guessed the block.
    """

    block_depth: int
    accepted: int
    emitted: int
    outcome: Outcome | None = None
    source: Source = "draft"


@dataclass(slots=True)
class RequestStats:
    """Counts and seconds of one request, or of several after `pool`; all figures are derived from them."""

    mode: Mode
    prefill_chunks: int = 0
    draft_tokens_recomputed: int = 0
    state_bytes: int = 0  # of the target's states, handed to a drafter that feeds on them
    seconds_prefill: float = 0.0
    seconds_decode: float = 0.0  # wall time from the end of prefill to the last token
    seconds_verify: float = 0.0
    seconds_waiting_for_draft: float = 0.0
    tokens: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    # rounds by (depth that the block reached, guesses accepted, who guessed): the acceptance figures follow
    shapes: Counter[tuple[int, int, Source]] = field(default_factory=Counter)

    def add_round(self, record: RoundRecord) -> None:
        """Count one round. What a stop rule cut off the block counts neither as accepted nor as reached."""
        is_cut = record.emitted <= record.accepted
        accepted = record.emitted if is_cut else record.accepted
        depth = accepted if is_cut else record.block_depth
        self.shapes[depth, accepted, record.source] += 1
        self.tokens += record.emitted
        if record.outcome is not None:
            self.outcomes[record.outcome] += 1

    @property
    def rounds(self) -> int:
        """Target passes after prefill."""
        return self.shapes.total()

    @property
    def target_forwards(self) -> int:
        """All target passes."""
        return self.rounds + self.prefill_chunks

    @property
    def rounds_ngram(self) -> int:
        """Rounds whose block came from prompt lookup."""
        return sum(count for (_, _, source), count in self.shapes.items() if source == "ngram")

    @property
    def mean_accepted(self) -> float | None:
        """Guesses accepted a round, bonus token excluded."""
        return ratio(sum(accepted * count for (_, accepted, _), count in self.shapes.items()), self.rounds)

    @property
    def acc_marginal(self) -> list[float]:
        """Entry i - 1: rounds that accepted at least i guesses / rounds."""
        longest = max((accepted for _, accepted, _ in self.shapes), default=0)
        return [self._count(min_accepted=i) / self.rounds for i in range(1, longest + 1)]

    @property
    def acc_conditional(self) -> list[float | None]:
        """Entry i - 1: of the rounds that accepted i - 1 guesses and whose block reached depth i, the share
        that accepted i. The drafter's own blocks only: n-gram blocks stay out.
        """
        deepest = max((depth for depth, _, source in self.shapes if source == "draft"), default=0)
        reached = [self._count(i - 1, min_depth=i, source="draft") for i in range(1, deepest + 1)]
        kept = [self._count(i, min_depth=i, source="draft") for i in range(1, deepest + 1)]
        return [ratio(part, whole) for part, whole in zip(kept, reached, strict=True)]

    @property
    def hit_rate(self) -> float | None:
        """Hits among the outcomes that the draft server read; a leaf is a miss."""
        return ratio(self.outcomes["hit"], self.outcomes.total())

    def as_dict(self) -> dict[str, Any]:
        """The published statistics, ready for JSON; a figure that nothing was counted for is None."""
        is_async = self.mode == "async"
        return {
            "mode": self.mode,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "tokens_per_verify": ratio(self.tokens, self.rounds),
            "mean_accepted": self.mean_accepted,
            "acc_marginal": self.acc_marginal,
            "acc_conditional": self.acc_conditional,
            "hits": self.outcomes["hit"] if is_async else None,
            "leaves": self.outcomes["leaf"] if is_async else None,
            "misses": self.outcomes["miss"] if is_async else None,
            "hit_rate": self.hit_rate if is_async else None,
            "tokens_per_second": ratio(self.tokens, self.seconds_decode),
            "seconds_prefill": self.seconds_prefill,
            "seconds_decode": self.seconds_decode,
            "seconds_verify": self.seconds_verify,
            "seconds_waiting_for_draft": self.seconds_waiting_for_draft,
            "draft_tokens_recomputed": self.draft_tokens_recomputed,
            "state_bytes": self.state_bytes,
            "target_forwards": self.target_forwards,
            "prefill_chunks": self.prefill_chunks,
            "rounds_ngram": self.rounds_ngram,
        }

    def _count(self, min_accepted: int, min_depth: int = 0, source: Source | None = None) -> int:
        return sum(
            count
            for (depth, accepted, made_by), count in self.shapes.items()
            if accepted >= min_accepted and depth >= min_depth and source in (None, made_by)
        )


def pool(requests: Iterable[RequestStats]) -> RequestStats:
    """Sum the counts and seconds of requests of one mode; ratios of the result weigh every round alike.

    Raises ValueError for an empty selection or several modes.
    """
    parts = list(requests)
    modes = {part.mode for part in parts}
    if len(modes) != 1:
        raise ValueError(f"expected statistics of one mode to pool, found {sorted(modes) or 'none'}")
    total = RequestStats(mode=parts[0].mode)
    for name in (item.name for item in fields(RequestStats) if item.name != "mode"):
        setattr(total, name, sum((getattr(part, name) for part in parts), start=getattr(total, name)))
    return total


def ratio(part: float, whole: float) -> float | None:
    """part / whole, or None when there is nothing to divide by."""
    return part / whole if whole else None
