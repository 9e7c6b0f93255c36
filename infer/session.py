"""What the speculator keeps of a request, and the jobs that it plans for the drafter.

Shape letters: R nodes, K node features, F candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from foredraft.infer.drafters import Candidates, Drawn, Step
from foredraft.infer.echo import Echo
from foredraft.infer.expansions import Expansions
from foredraft.infer.features import NodeContexts
from foredraft.infer.feeding import Feeding
from foredraft.infer.params import ExpandPolicy, SpeculationParams
from foredraft.infer.sampler import CoupledSampler
from foredraft.infer.tree import Law, SpeculationTree
from foredraft.kernels.draws import Draw

ACCEPTANCE = 0.7  # believed of a guess that was drawn: it only orders the work


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
    factor: float | None  # of the law that a guess is drawn from; None: guesses are not drawn
    policy: ExpandPolicy


@dataclass(frozen=True, slots=True)
class Expanded:
    """Result of an expansion of R nodes: F candidates each, with their probabilities."""

    candidates: Candidates
    features_RK: np.ndarray  # float32
    echo_RF: np.ndarray  # uint8
    probs_RF: np.ndarray  # float32
    drawn: Drawn | None  # with rejection


@dataclass(frozen=True, slots=True)
class Job:
    """Planned work of one request: a chunk of its prompt, or rows whose candidates grow its tree."""

    request_id: str
    step: Step
    expand: Expand | None  # None in a prefill

    @property
    def kind(self) -> Literal["prefill", "expand"]:
        """What the job does."""
        return "prefill" if self.expand is None else "expand"

    @property
    def num_rows(self) -> int:
        """Real rows of the step."""
        return self.step.plan.num_rows


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
    feeding: Feeding | None = None  # for drafters that read the target's states
    laws: dict[int, Law] = field(default_factory=dict)  # rejection: of the guess below an expanded node
    num_expansions: int = 0
    num_recomputed: int = 0

    @property
    def root_position(self) -> int:
        """Absolute position of the root."""
        return len(self.tokens) - 1

    @property
    def can_expand(self) -> bool:
        """Whether outcomes may be prepared: the budget allows it, and what the root starts from is there."""
        has_budget = self.params.budget == 0 or self.num_spent < self.params.budget
        return has_budget and (self.feeding is None or self.feeding.is_ready(self.root_position))

    def with_guess(
        self, node: int, drawn: Drawn, row: int, tokens: list[int], probs: list[float]
    ) -> tuple[list[int], list[float]]:
        """Children of a node with its drawn guess as the likeliest, and keep the guess's law.

        No probability depends on which token was drawn, or the length of a chain would tell of it.
        """
        guess, is_law_m = int(drawn.token_ids_R[row]), drawn.law_ids_Rm[row] >= 0
        self.laws[node] = (
            drawn.law_ids_Rm[row][is_law_m].tolist(),
            drawn.law_probs_Rm[row][is_law_m].tolist(),
        )
        pairs = zip(tokens, probs, strict=True)
        others = [(token, (1.0 - ACCEPTANCE) * prob) for token, prob in pairs if token != guess]
        return [guess, *(token for token, _ in others)], [ACCEPTANCE, *(prob for _, prob in others)]
