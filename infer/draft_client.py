"""The engine's side of the draft server: asks, waits for a bounded time, and replaces a server that fails.

Nothing that the server does or fails to do can raise here after the first start, or stop the engine: at worst
there are no guesses. Used by one thread.
"""

from __future__ import annotations

import atexit
import logging
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq

from foredraft.infer import messages
from foredraft.infer.draft_link import DraftLink, LinkLimits
from foredraft.infer.draft_process import DraftProcess, DraftServerError
from foredraft.infer.params import SpeculationParams
from foredraft.infer.tracing import Trace

LOOK_SECONDS = 0.05  # longest sleep between looks at the server's health
VERIFY_TIMES_KEPT = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientLimits:
    """How long to wait, in seconds, and when to give up."""

    answer: float = 0.01  # for an answer that is given at once; 0.4 of a verification if that is longer
    first_draft: float = 1.0  # for a draft (on_miss=wait) before any verification was timed
    lockstep: float = 30.0
    max_restarts: int = 3  # in a row: go on without
    steady: float = 60.0  # a server that was up for so long has earned its restarts back
    link: LinkLimits = field(default_factory=LinkLimits)


class DraftClient:
    """Starts a draft server and speaks with it. A context manager: leaving it ends the server.

    Every open and outcome of a request must carry a higher round than the one before.

    Args:
        command: from `server_command`; endpoint, parent and trace flags are added.
        params: decide how long an answer is waited for.
        vocab_size: of the target; a block with other ids is malformed.
        limits: times and counts.
        trace: of the engine; gets the server's events when that ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        params: SpeculationParams,
        vocab_size: int,
        limits: ClientLimits | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.seconds_waiting = 0.0
        self.num_restarts = 0
        self.num_timeouts = 0
        self.refusals: dict[str, str] = {}  # open requests that the server will not serve, with its reason
        self._command = list(command)
        self._params = params
        self._vocab_size = vocab_size
        self._limits = limits or ClientLimits()
        self._trace = trace or Trace("engine", is_on=False)
        self._verify_seconds: deque[float] = deque(maxlen=VERIFY_TIMES_KEPT)
        self._opened: dict[str, int] = {}  # request -> round of its open
        self._blocks: dict[str, messages.Block] = {}  # newest of each open request
        self._stats: dict[str, dict[str, float]] = {}
        self._dying: list[DraftProcess] = []
        self._num_restarts_in_row = 0
        self._has_given_up = False
        self._context = zmq.Context()
        self._link = self._connect()
        atexit.register(self.shutdown)

    def __enter__(self) -> DraftClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # State

    @property
    def is_up(self) -> bool:
        """The server is ready, as far as is known."""
        return self._link.ready is not None and not self._has_given_up

    @property
    def has_given_up(self) -> bool:
        """There will be no server any more."""
        return self._has_given_up

    @property
    def server_pid(self) -> int:
        """Process id of the present or last server."""
        return self._link.process.pid

    def needs_open(self, request: str) -> bool:
        """The server is up and does not know the request: send `open` with all its tokens."""
        self._look()
        return self.is_up and request not in self._opened and request not in self.refusals

    def observe_verify(self, seconds: float) -> None:
        """Tell how long a verification took; waits are measured by it."""
        self._verify_seconds.append(seconds)

    def wait_ready(self) -> messages.Ready:
        """Wait for the first server to be ready; shut down if that fails.

        Raises:
            ValueError: the drafter cannot be served, in the server's words.
            DraftServerError: it did not start, or not in time.
        """
        while self._link.ready is None:
            self._drain()
            trouble = self._link.trouble()
            if trouble is not None:
                process = self._link.process
                failure = DraftServerError(trouble) if process.is_alive else process.failure()
                self.shutdown()
                raise failure
            self._link.wait(LOOK_SECONDS)
        return self._link.ready

    # Requests

    def open(self, message: messages.Open) -> bool:
        """Open a request, or open it again with all its tokens; False: not sent. Does not wait."""
        self._look()
        if not self.is_up or message.request in self.refusals:
            return False
        self._blocks.pop(message.request, None)
        self._opened[message.request] = message.round
        return self._link.send(message)

    def outcome(self, request: str, round_number: int, base_position: int, settled: Sequence[int]) -> bool:
        """Tell the outcome of a verification; False: not sent. Does not wait.

        Args:
            request: an open request.
            round_number: higher than that of any message before; the answer carries it.
            base_position: absolute position of settled[0].
            settled: accepted guesses and the target's own token.
        """
        self._look()
        message = messages.Outcome(
            request=request, round=round_number, base_position=base_position, settled=list(settled)
        )
        return request in self._opened and self._link.send(message)

    def states(self, request: str, round_number: int, base_position: int, bits_NS: np.ndarray) -> None:
        """Send states of the target in chunks. Does not wait.

        Args:
            request: an open request.
            round_number: of the last message.
            base_position: absolute position of the first row.
            bits_NS: uint16 [N, S].
        """
        if request not in self._opened:
            return
        num_rows = max(1, messages.MAX_STATE_BYTES // bits_NS[:1].nbytes) if len(bits_NS) else 1
        for start in range(0, len(bits_NS), num_rows):
            rows_NS = bits_NS[start : start + num_rows]
            message = messages.States(
                request=request,
                round=round_number,
                base_position=base_position + start,
                num_rows=len(rows_NS),
                bits=rows_NS.tobytes(),
            )
            self._link.send(message)

    def receive_block(
        self, request: str, round_number: int, timeout: float | None = None
    ) -> messages.Block | None:
        """The block that answers a round, waited for during `timeout` seconds; None: go on without.

        timeout None: what the policy allows. Blocks of other rounds are dropped. Returns early when the
        server fails or does not know the request.
        """
        start = time.monotonic()
        try:
            return self._wait_for_block(request, round_number, timeout)
        finally:
            self.seconds_waiting += time.monotonic() - start

    def close(self, request: str) -> None:
        """The request has ended."""
        self.refusals.pop(request, None)
        self._blocks.pop(request, None)
        if self._opened.pop(request, None) is not None:
            self._link.send(messages.Close(request=request))

    def stats(self, request: str = "", timeout: float = 0.2) -> dict[str, float]:
        """Counters of the server and of a request; empty if there is no answer in time."""
        self._look()
        self._stats.pop(request, None)
        if not self.is_up or not self._link.send(messages.Stats(request=request)):
            return {}
        deadline = time.monotonic() + timeout
        while request not in self._stats and self.is_up and time.monotonic() < deadline:
            self._link.wait(min(timeout, LOOK_SECONDS))
            self._look()
        return self._stats.pop(request, {})

    def shutdown(self) -> None:
        """End the server and remove its files; safe to call again."""
        atexit.unregister(self.shutdown)
        self._has_given_up = True
        for process in [self._link.process, *self._dying]:
            process.stop()
        self._dying.clear()
        self._opened.clear()
        self._context.destroy(linger=0)

    # Waiting

    def block_timeout(self) -> float:
        """Seconds that `receive_block` waits at most."""
        if self._params.lockstep:
            return self._limits.lockstep
        median = statistics.median(self._verify_seconds) if self._verify_seconds else 0.0
        if self._params.on_miss == "wait":
            return self._params.draft_timeout_ms / 1000 or 2 * median or self._limits.first_draft
        return max(self._limits.answer, 0.4 * median)

    def _wait_for_block(
        self, request: str, round_number: int, timeout: float | None
    ) -> messages.Block | None:
        start = time.monotonic()
        deadline = start + (self.block_timeout() if timeout is None else timeout)
        ping_interval = self._limits.link.silence / 4
        next_ping = start + ping_interval
        while True:
            self._look()
            block = self._blocks.get(request)
            if block is not None and block.round == round_number:
                return self._blocks.pop(request)
            if not self.is_up or request not in self._opened:
                return None
            now = time.monotonic()
            # After a time-out without a sign of life since, waiting once more would only cost time.
            if now >= deadline or self._link.is_suspect:
                self.num_timeouts += 1
                self._link.suspect()
                return None
            if now >= next_ping:
                self._link.ping()
                next_ping = now + ping_interval
            self._link.wait(min(deadline - now, LOOK_SECONDS))

    # The server

    def _connect(self) -> DraftLink:
        return DraftLink(self._command, self._vocab_size, self._limits.link, self._context, self._trace)

    def _look(self) -> None:
        """Take in what has arrived and replace a server that is in trouble; never waits."""
        if self._has_given_up:
            return
        self._drain()
        for process in [process for process in self._dying if not process.is_alive]:
            self._dying.remove(process)
            process.remove()
        trouble = self._link.trouble()
        if trouble is not None:
            self._replace(trouble)

    def _drain(self) -> None:
        for message in self._link.receive():
            self._take(message)

    def _take(self, message: messages.Message) -> None:
        request = message.request
        match message:
            case messages.Block():
                newest = self._blocks.get(request)
                if request in self._opened and (newest is None or newest.round < message.round):
                    self._blocks[request] = message
            case messages.Unknown():
                # One that was sent before the request was opened again says nothing.
                if self._opened.get(request, message.round) < message.round:
                    del self._opened[request]
            case messages.Error():
                if self._opened.pop(request, None) is not None:
                    self.refusals[request] = message.text
                    logger.warning("no guesses for request %s: %s", request, message.text)
            case messages.Stats():
                self._stats[request] = message.values

    def _replace(self, trouble: str) -> None:
        """Kill the server and start another one, without waiting for either."""
        has_refused = self._link.process.has_refused
        if self._link.seconds_up > self._limits.steady:
            self._num_restarts_in_row = 0
        self._link.cut()
        self._dying.append(self._link.process)
        self._opened.clear()
        self._blocks.clear()
        self._has_given_up = True
        if not has_refused and self._num_restarts_in_row < self._limits.max_restarts:
            self._num_restarts_in_row += 1
            self.num_restarts += 1
            try:
                self._link = self._connect()
                self._has_given_up = False
            except (OSError, ValueError) as error:
                logger.warning("%s", error)
        logger.warning(
            "%s; %s", trouble, "going on without it" if self._has_given_up else "starting it again"
        )
