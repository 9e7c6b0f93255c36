"""Chain rounds along logged responses: the engine's rounds with block `chain`, the log in the target's place.

Each round guesses k tokens, best score first, and takes candidates after the root and after every guess. Many
responses run at once, each with one node in a step. A drafter that feeds on states of the target gets them as
the engine hands them over: a root starts from the target's, and so do settled tokens, which run once more.

Shape letters: R rows of a step (one a response), F candidates, L tokens, S numbers of a token's states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from foredraft.infer.drafters import Candidates, Drafter, Feed, Step
from foredraft.infer.echo import Echo
from foredraft.infer.features import NodeContexts
from foredraft.infer.feeding import Feeding
from foredraft.infer.outcome_records import UNKNOWN, OutcomeRecords, label_of
from foredraft.infer.sampler import CoupledSampler
from foredraft.infer.step_plan import Row
from foredraft.kernels.draws import Draw
from foredraft.train.acceptance import sampling_of
from foredraft.train.log_rows import LogRow
from foredraft.train.replay import concatenate, make_records

# the target's states after every token of a row but the last, bfloat16 bits [L, S]
StatesOfRow = Callable[[LogRow], np.ndarray]


@dataclass(slots=True, eq=False)
class ChainedResponse:
    """One response in the middle of its rounds."""

    row: LogRow
    tokens: list[int]
    seq: int
    sampler: CoupledSampler
    root: int  # absolute position of the round's root, whose KV is not there yet
    echo: Echo  # of the text up to the root
    feeding: Feeding | None = None  # for a drafter that feeds on states
    guesses: list[int] = field(default_factory=list)
    kv_nodes: list[int] = field(default_factory=list)  # of the root and the guesses
    parts: list[Candidates] = field(default_factory=list)  # of the same
    rounds: list[OutcomeRecords] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether the response ends before the outcome of the next round."""
        return self.root + 1 >= len(self.tokens)

    @property
    def num_right(self) -> int:
        """Guesses that the target followed."""
        said = self.tokens[self.root + 1 :]
        pairs = enumerate(zip(self.guesses, said, strict=False))
        return next((i for i, (guess, token) in pairs if guess != token), min(len(self.guesses), len(said)))

    def row_of_step(self) -> Row:
        """The root, or the last guess."""
        return Row(self.seq, (self.guesses or [self.tokens[self.root]])[-1], self.kv_nodes[-1])

    def stale_rows(self) -> list[Row]:
        """Settled tokens that ran from the drafter's own states, to run from the target's."""
        stale = self.feeding.stale if self.feeding is not None else []
        return [Row(self.seq, self.tokens[position], position=position) for position in stale]

    def draw(self) -> Draw:
        """Of the token after that row."""
        output = [*self.tokens[self.row.first_position : self.root + 1], *self.guesses]
        return self.sampler.draws([self.root + len(self.guesses) + 1], [output])[0]


class ChainRounds:
    """Runs rounds over rows, as many at once as the drafter's bucket holds.

    Args:
        drafter: with a wide row bucket, and k + 1 lanes where it feeds on states.
        k: guesses of a round.
        fan_out: F.
        states: of the target, for a drafter that feeds on them.
        observe: told of every round before it is settled: the response, how many of its guesses are right.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        k: int,
        fan_out: int,
        states: StatesOfRow | None = None,
        observe: Callable[[ChainedResponse, int], None] | None = None,
    ) -> None:
        self.drafter, self.k, self.fan_out = drafter, k, fan_out
        self.states, self.observe = states, observe
        assert (states is not None) == bool(drafter.states.layers), "the caller has looked at its card"
        # the rows of a round's first step: a root, and at most k settled tokens to run again
        rows_of_one = k + 1 if drafter.states.keeps_all else 1
        self.num_active = max(1, drafter.row_bucket // rows_of_one)

    def run(self, rows: Iterable[LogRow]) -> Iterator[tuple[LogRow, OutcomeRecords]]:
        """Every row with its rounds, as it ends; k + 1 records a round. A row without a round is left out."""
        waiting = iter(rows)
        active: list[ChainedResponse] = []
        while True:
            while len(active) < self.num_active and (row := next(waiting, None)) is not None:
                active.append(self._begin(row))
            if not active:
                return
            self._round([response for response in active if not response.is_finished])
            for response in [response for response in active if response.is_finished]:
                active.remove(response)
                self.drafter.pool.free(response.seq)
                if response.rounds:
                    yield response.row, OutcomeRecords.concatenate(response.rounds)

    def _begin(self, row: LogRow) -> ChainedResponse:
        """Read the prompt; the first root is the first response token, which the prompt's prefill settled."""
        drafter, tokens = self.drafter, [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        feeding = None
        if self.states is not None:
            feeding = Feeding(replace(drafter.states, keeps_all=True))
            feeding.take(0, self.states(row))
        seq, start = drafter.pool.begin(), 0
        while start < row.first_position:
            end = min(start + drafter.prefill_room(seq), row.first_position)
            plan = drafter.plan_prefill(seq, tokens[start:end])
            feed = feeding.feed(range(start, end), []) if feeding is not None else None
            drafter.prefill(Step(plan, drafter.pool.drain_moves(), feed))
            start = end
        root, sampler = row.first_position, CoupledSampler(sampling_of(row), row.prompt_ids.tolist())
        return ChainedResponse(row, tokens, seq, sampler, root, Echo(tokens[: root + 1]), feeding)

    def _round(self, responses: list[ChainedResponse]) -> None:
        """One round of every response."""
        for _ in range(self.k + 1) if responses else ():
            self._expand(responses)
        for response in responses:
            self._settle(response)

    def _expand(self, responses: list[ChainedResponse]) -> None:
        """One step: candidates after the last node of every chain, and the next guess."""
        pool = self.drafter.pool
        for response in responses:
            if response.parts:
                response.guesses.append(int(response.parts[-1].token_ids_RF[0, 0]))
            parent = response.kv_nodes[-1] if response.kv_nodes else None
            response.kv_nodes += pool.append(response.seq, [parent]).nodes
        stale = [row for response in responses if not response.parts for row in response.stale_rows()]
        plan = self.drafter.plan_rows([*stale, *(response.row_of_step() for response in responses)])
        draws = [response.draw() for response in responses]
        step = Step(plan, pool.drain_moves(), self._feed(responses))
        found = self.drafter.expand(step, draws, self.fan_out)
        for index, response in enumerate(responses):
            response.parts.append(
                Candidates(*(getattr(found, name)[index : index + 1] for name in Candidates.__slots__))
            )

    def _feed(self, responses: list[ChainedResponse]) -> Feed | None:
        """What the rows of a step start from: in a round's first step the target's states, then its own."""
        if self.states is None:
            return None
        if responses[0].parts:
            pool = self.drafter.pool
            slots = [pool.slot(response.seq, response.kv_nodes[-2]) for response in responses]
            width = self.drafter.states.width
            return Feed(np.array(slots, np.int64), np.zeros((0, width), np.uint16))
        feedings = [(response, response.feeding) for response in responses if response.feeding is not None]
        given = [feeding.states.at(place - 1) for _, feeding in feedings for place in feeding.stale]
        given += [feeding.states.at(response.root - 1) for response, feeding in feedings]
        for _, feeding in feedings:
            feeding.refresh(feeding.stale)
        return Feed(-1 - np.arange(len(given)), np.stack(given))

    def _settle(self, response: ChainedResponse) -> None:
        """Label the round's nodes by what the target said, and go to the next root."""
        num_right = response.num_right
        if self.observe is not None:
            self.observe(response, num_right)
        if response.root + num_right + 1 < len(response.tokens):
            response.rounds.append(self._records(response, num_right))
        path = response.kv_nodes[: num_right + 1]
        self.drafter.pool.commit(response.seq, path)
        if response.feeding is not None and self.drafter.states.keeps_all:
            response.feeding.stale = [response.root + 1 + index for index in range(num_right)]
        response.echo.extend(response.tokens[response.root + 1 : response.root + num_right + 2])
        response.root += num_right + 1
        response.guesses, response.kv_nodes, response.parts = [], [], []

    def _records(self, response: ChainedResponse, num_right: int) -> OutcomeRecords:
        candidates, size = concatenate(response.parts), self.k + 1
        said = response.tokens[response.root + 1 : response.root + 2 + num_right]
        labels = [label_of(ids_F, token) for ids_F, token in zip(candidates.token_ids_RF, said, strict=False)]
        best_R = candidates.scores_RF[:, 0]
        contexts = NodeContexts(
            temperature_R=np.full(size, response.row.temperature, np.float32),
            depth_R=np.arange(size, dtype=np.int32),
            log_path_confidence_R=np.concatenate([[0.0], np.cumsum(best_R[:-1])]).astype(np.float32),
            last_rank_R=np.zeros(size, np.int32),
            num_own_R=np.arange(size, dtype=np.int32) * (response.feeding is not None),
        )
        labels_R = np.full(size, UNKNOWN, np.int32)
        labels_R[: len(labels)] = labels
        echo_RF = np.stack(
            [
                response.echo.bits(response.guesses[:depth], ids_F)
                for depth, ids_F in enumerate(candidates.token_ids_RF)
            ]
        )
        roots_R = np.full(size, response.root)
        return make_records(response.row, roots_R, candidates, contexts, echo_RF, labels_R)
