"""State of one request on the target's side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foredraft.infer.params import SamplingParams, SpeculationParams
from foredraft.infer.planner import BlockPlanner
from foredraft.infer.sampler import CoupledSampler
from foredraft.infer.stats import RequestStats
from foredraft.infer.stopping import StopChecker
from foredraft.infer.target_states import TargetStates


@dataclass(slots=True)
class Request:
    """What a decode knows of itself. The last of `tokens` is the root: settled, its KV not computed yet."""

    id: str
    num_prompt: int
    tokens: list[int]  # prompt and output
    params: SamplingParams  # with a seed, and no more new tokens than the context has room for
    seq: int  # of the target's KV pool
    sampler: CoupledSampler
    stopping: StopChecker
    stats: RequestStats
    speculation: SpeculationParams
    planner: BlockPlanner
    states: TargetStates | None = None  # of all tokens before the root, for a drafter that feeds on them

    @property
    def root_position(self) -> int:
        """Absolute position of the root."""
        return len(self.tokens) - 1

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be settled."""
        return self.params.max_new_tokens - (len(self.tokens) - self.num_prompt)

    @property
    def is_finished(self) -> bool:
        """Whether a stop rule or the token limit was reached."""
        return self.stopping.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    seed: int
    request_stats: RequestStats  # the counts behind `stats`, to be pooled

    @property
    def stats(self) -> dict[str, Any]:
        """The published statistics (see `foredraft.infer.stats`), ready for JSON."""
        return self.request_stats.as_dict()
