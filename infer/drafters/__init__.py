"""Drafter families. A family is one file: how it is loaded, how it turns rows of a tree into candidates."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from foredraft.infer.drafter_card import StateNeeds, family_of, read_drafter_card
from foredraft.infer.hub import local_folder
from foredraft.infer.params import EngineConfig

if TYPE_CHECKING:
    from foredraft.infer.kv_pool import KVPool
    from foredraft.infer.step_plan import Row, StepPlan
    from foredraft.kernels.draws import Draw

FAMILIES = {
    "lm": "foredraft.infer.drafters.lm",
    "mlp": "foredraft.infer.drafters.mlp",
    "eagle3": "foredraft.infer.drafters.eagle3",
    "ngram": "foredraft.infer.drafters.ngram",
}


@dataclass(frozen=True, slots=True)
class Candidates:
    """The F best guesses after each of R rows, by descending perturbed score.

    Where a filter left fewer than F, the rest has token -1 and -inf.
    """

    token_ids_RF: np.ndarray  # int32, in the target's vocabulary
    scores_RF: np.ndarray  # float32, log-confidence: perturbed score minus log-sum-exp over the vocabulary
    log_probs_RF: np.ndarray  # float32, the drafter's own
    entropy_R: np.ndarray  # float32, of the drafter's own distribution, in nats


@dataclass(frozen=True, slots=True)
class Drawn:
    """A guess after each of R rows and the law that it was drawn from, for rejection verification."""

    token_ids_R: np.ndarray  # int64
    law_ids_Rm: np.ndarray  # int64; -1 where fewer tokens have mass
    law_probs_Rm: np.ndarray  # float32


@dataclass(frozen=True, slots=True)
class Feed:
    """Which state every row of a step starts from, for families that feed on the target's states."""

    source_n: np.ndarray  # int64: slot of a token that the drafter has run; or -1 - row of given_GS
    given_GS: np.ndarray  # uint16: states of the target as bfloat16 bits, zeros before the first token


class Step(NamedTuple):
    """A planned step of a drafter: its rows, the moves to apply before, and what the rows start from."""

    plan: StepPlan
    moves: Sequence[tuple[np.ndarray, np.ndarray]]
    feed: Feed | None = None


class Drafter(Protocol):
    """What the speculator needs of a family. Planning touches bookkeeping only, running tensors only."""

    max_depth: int
    max_positions: int
    row_bucket: int
    pool: KVPool
    states: StateNeeds

    def plan_prefill(self, seq: int, token_ids: Sequence[int]) -> StepPlan:
        """Plan the next chunk of certain tokens; at most `prefill_room(seq)` of them."""
        ...

    def prefill_room(self, seq: int) -> int:
        """Tokens that the next prefill chunk can take."""
        ...

    def plan_rows(self, rows: Sequence[Row]) -> StepPlan:
        """Plan one batched step."""
        ...

    def prefill(self, step: Step) -> None:
        """Run a planned chunk."""
        ...

    def expand(self, step: Step, draws: Sequence[Draw], fan_out: int) -> Candidates:
        """Run planned rows; candidates after the last of them, a row a draw."""
        ...

    def expand_and_draw(
        self, step: Step, draws: Sequence[Draw], fan_out: int, factor: float
    ) -> tuple[Candidates, Drawn]:
        """As `expand` at temperature 0, and a guess a row; `factor` is that of `kernels.saguaro`."""
        ...


def load_drafter(source: str, config: EngineConfig) -> Drafter:
    """Load a drafter by the family in its foredraft.json; a plain Hugging Face causal LM is an `lm` drafter.

    Args:
        source: a folder or a Hub id.
        config: as for the target; see `EngineConfig.of_drafter`.

    Raises:
        ValueError: nothing there, or a family that this version does not know.
    """
    card = read_drafter_card(source)
    family = family_of(card)
    if family not in FAMILIES:
        raise ValueError(
            f"drafter {source} is of family {family!r}; this version knows {', '.join(FAMILIES)}"
        )
    return importlib.import_module(FAMILIES[family]).load(str(local_folder(source)), card, config.of_drafter)
