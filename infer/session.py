"""What the speculator keeps of a request, and the jobs that it plans for the drafter.

Shape letters: R nodes, K node features, F candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from foredraft.infer.drafters import Candidates
from foredraft.infer.echo import Echo
from foredraft.infer.expansions import Expansions
from foredraft.infer.features import NodeContexts
from foredraft.infer.params import ExpandPolicy, SpeculationParams
from foredraft.infer.sampler import CoupledSampler
from foredraft.infer.step_plan import StepPlan
from foredraft.infer.tree import SpeculationTree
from foredraft.kernels.draws import Draw


@dataclass(frozen=True, slots=True)
class Expand:
    """The nodes that a job expands, what is wanted of the drafter, what is believed of its answer."""

    nodes: list[int]
    anchor: int  # absolute position of the root
    paths: list[list[int]]  # tokens below the root, of every node
    echo: Echo  # of the settled text; an outcome may prolong it while the job runs
    contexts: NodeContexts
    draws: list[Draw]
    fan_out: int
    policy: ExpandPolicy


@dataclass(frozen=True, slots=True)
class Expanded:
    """Result of an expansion of R nodes: F candidates each, with their probabilities."""

    candidates: Candidates
    features_RK: np.ndarray  # float32
    echo_RF: np.ndarray  # uint8
    probs_RF: np.ndarray  # float32


@dataclass(frozen=True, slots=True)
class Job:
    """Planned work of one request: a chunk of its prompt, or rows whose candidates grow its tree."""

    request_id: str
    plan: StepPlan
    moves: list[tuple[np.ndarray, np.ndarray]]
    expand: Expand | None  # None in a prefill

    @property
    def kind(self) -> Literal["prefill", "expand"]:
        """What the job does."""
        return "prefill" if self.expand is None else "expand"

    @property
    def num_rows(self) -> int:
        """Real rows of the step."""
        return self.plan.num_rows


@dataclass(slots=True)
class Session:
    """State of one request on the drafter's side."""

    tokens: list[int]  # all settled tokens; the last is the tree's root
    seq: int
    tree: SpeculationTree
    sampler: CoupledSampler
    params: SpeculationParams
    pending: list[int]  # settled tokens before the root whose KV is not planned yet
    prompt_hash: str
    echo: Echo  # of all settled tokens
    expansions: Expansions = field(default_factory=Expansions)
    kv_nodes: dict[int, int] = field(default_factory=dict)  # tree node -> pool node; KV there or in flight
    block_nodes: set[int] = field(default_factory=set)  # of the block being verified
    num_spent: int = 0  # nodes expanded outside the block since the last outcome
    evicted: set[int] = field(default_factory=set)  # tree nodes whose KV was given up
    num_expansions: int = 0
    num_recomputed: int = 0

    @property
    def root_position(self) -> int:
        """Absolute position of the root."""
        return len(self.tokens) - 1

    @property
    def has_budget(self) -> bool:
        """Whether more outcomes may be prepared before the next one arrives."""
        return self.params.budget == 0 or self.num_spent < self.params.budget
