"""Asynchronous guessing: the draft server works while the target verifies; nothing here waits unboundedly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from foredraft.infer import messages
from foredraft.infer.draft_client import DraftClient
from foredraft.infer.draft_process import server_command
from foredraft.infer.guessers import Guess, Guesser, NgramGuesser, PlainGuesser
from foredraft.infer.identity import tokenizer_sha256
from foredraft.infer.params import EngineConfig
from foredraft.infer.request import Request
from foredraft.infer.target import Target
from foredraft.infer.tracing import Trace
from foredraft.infer.tree import Block


class RemoteGuesser:
    """Guesses come from the draft server where it has some, else from the miss policy.

    Args:
        drafter: folder or Hub id that the server loads.
        target: whose requests are served.
        config: engine settings; the miss policy and the timeouts are those of its `speculation`.
        predictor: folder or Hub id of the drafter's outcome predictor.
        record: folder that gets outcome records.
        trace: gets the server's events too.
        slow_factor: pretend a drafter that is this much slower (for tests).

    Raises:
        ValueError: the server cannot serve the drafter, in its own words.
        DraftServerError: the server did not start.
    """

    def __init__(
        self,
        drafter: str,
        target: Target,
        config: EngineConfig,
        trace: Trace,
        *,
        predictor: str | None = None,
        record: Path | None = None,
        slow_factor: float = 1.0,
    ) -> None:
        self.params = config.speculation
        self.eos_ids = sorted(target.eos_ids)
        command = server_command(
            drafter,
            config,
            target=target.source,
            target_tokenizer_sha256=tokenizer_sha256(target.tokenizer),
            predictor=predictor,
            record=record,
            slow_factor=slow_factor,
        )
        self.client = DraftClient(command, self.params, target.model.vocab_size, trace=trace)
        self.client.wait_ready()
        self.on_miss: Guesser = (
            NgramGuesser(self.params.k) if self.params.on_miss == "ngram" else PlainGuesser()
        )
        self.round = 0  # of the request's last message
        self.num_outcomes = 0  # outcomes that followed a verification
        self.num_sent = 0  # positions whose states the server has
        self.guessed_at = 0.0

    def prepare(self, request: Request) -> None:
        """Open the request before its prefill, so that the drafter reads the prompt meanwhile.

        Not in lockstep, whose rounds begin with the first token, as in synchronous decoding.
        """
        self.on_miss.prepare(request)
        self.round = self.num_outcomes = 0
        if not request.speculation.lockstep:
            self.send_open(request)

    def open(self, request: Request) -> None:
        """Tell the first token."""
        self.on_miss.open(request)
        self.send_states(request)
        self.send_outcome(request, 1)

    def guess(self, request: Request) -> Guess:
        """The server's block; without one, what the miss policy says."""
        if self.client.needs_open(request.id):
            self.send_open(request)
        answer = self.client.receive_block(request.id, self.round)
        outcome = None
        if answer is not None and answer.kind != "open" and self.num_outcomes:
            outcome = answer.kind
        self.guessed_at = time.perf_counter()
        if answer is not None and answer.is_ready:
            nodes = list(range(len(answer.ids)))
            block = Block(nodes, answer.ids, answer.parents, answer.path_probs, answer.laws)
            return Guess(block, answer.source, outcome)
        fallback = self.on_miss.guess(request)
        return Guess(fallback.block, fallback.source, outcome)

    def outcome(self, request: Request, settled: Sequence[int]) -> None:
        """Tell the server what the round settled."""
        self.num_outcomes += 1
        self.send_states(request)
        self.send_outcome(request, len(settled))
        self.client.observe_verify(time.perf_counter() - self.guessed_at)

    def close(self, request: Request) -> int:
        """End the request at the server."""
        counters = self.client.stats(request.id)
        self.client.close(request.id)
        return int(counters.get("draft_tokens_recomputed", 0))

    def shutdown(self) -> None:
        """End the server."""
        self.client.shutdown()

    def send_open(self, request: Request) -> None:
        """Open, or open again, with all tokens so far."""
        self.round += 1
        self.client.open(
            messages.Open(
                request=request.id,
                round=self.round,
                token_ids=request.tokens,
                sampling=request.params,
                max_tokens=request.num_remaining,
                eos_ids=self.eos_ids,
                num_prompt=request.num_prompt,
                speculation=request.speculation,
            )
        )
        self.num_sent = 0
        self.send_states(request)

    def send_states(self, request: Request) -> None:
        """The target's states that a drafter which feeds on them does not have yet."""
        if request.states is None:
            return
        bits_NS = request.states.since(self.num_sent)
        self.client.states(request.id, self.round, request.states.num - len(bits_NS), bits_NS)
        self.num_sent = request.states.num
        request.stats.state_bytes += bits_NS.nbytes

    def send_outcome(self, request: Request, num_settled: int) -> None:
        """The last `num_settled` tokens of the request, to a server that knows the ones before."""
        self.round += 1
        base_position = len(request.tokens) - num_settled
        self.client.outcome(request.id, self.round, base_position, request.tokens[base_position:])
