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
from dataclasses import dataclass
from typing import Literal

import zmq

from foredraft.infer import messages
from foredraft.infer.draft_process import DraftProcess, DraftServerError
from foredraft.infer.params import SpeculationParams
from foredraft.infer.trace import Trace

POLL_SECONDS = 0.05  # longest sleep between looks at the process
VERIFY_TIMES_KEPT = 64

State = Literal["starting", "up", "gone"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientLimits:
    """How long to wait and when to give up; seconds unless said otherwise."""

    start: float = 300.0  # until the server is ready
    silence: float = 5.0  # nothing heard for so long while something is unanswered: the server is down
    answer: float = (
        0.01  # for an answer that is given at once; or a quarter of a verification, if that is longer
    )
    first_draft: float = 1.0  # for a draft (on_miss=wait) before any verification was timed
    lockstep: float = 30.0
    max_bad_frames: int = 8  # in a row: the server is down
    max_restarts: int = 3  # in a row: go on without
    steady: float = 60.0  # a server that was up for so long has earned its restarts back


class DraftClient:
    """Starts a draft server and speaks with it. A context manager: leaving it ends the server.

    Every open and outcome of a request must carry a higher round than the one before.

    Args:
        command: from `server_command`; endpoint, parent and trace flags are added.
        params: decide how long an answer is waited for.
        vocab_size: of the target; a block with other ids is malformed.
        limits: times and counts.
        trace: gets a span for every wait, and the server's events when that ends.
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
        self.ready: messages.Ready | None = None  # of the present server
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
        self._num_pings = 0
        self._context = zmq.Context()
        self._start()
        atexit.register(self.shutdown)

    def __enter__(self) -> DraftClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # State

    @property
    def is_up(self) -> bool:
        """The server is ready, as far as is known."""
        return self._state == "up"

    @property
    def has_given_up(self) -> bool:
        """There will be no server any more."""
        return self._state == "gone"

    @property
    def server_pid(self) -> int:
        """Process id of the present or last server."""
        return self._process.pid

    def needs_open(self, request: str) -> bool:
        """The server is up and does not know the request: send `open` with all its tokens."""
        self._look()
        return self.is_up and request not in self._opened and request not in self.refusals

    def observe_verify(self, seconds: float) -> None:
        """Tell how long a verification took; waits are measured by it."""
        self._verify_seconds.append(seconds)

    def wait_ready(self) -> messages.Ready:
        """Wait for the first server to be ready.

        Raises:
            ValueError: the drafter cannot be served, in the server's words.
            DraftServerError: it did not start, or not in time.
        """
        deadline = time.monotonic() + self._limits.start
        while self.ready is None:
            self._drain()
            if not self._process.is_alive:
                raise self._process.failure()
            if time.monotonic() > deadline:
                raise DraftServerError(f"the draft server was not ready after {self._limits.start:g} s")
            self._socket.poll(POLL_SECONDS * 1000)
        return self.ready

    # Requests

    def open(self, message: messages.Open) -> bool:
        """Open a request, or open it again with all its tokens; False: not sent. Does not wait."""
        self._look()
        if not self.is_up or message.request in self.refusals:
            return False
        self._blocks.pop(message.request, None)
        self._opened[message.request] = message.round
        return self._send(message)

    def outcome(self, request: str, round_number: int, base_position: int, settled: list[int]) -> bool:
        """Tell the outcome of a verification; False: not sent. Does not wait.

        Args:
            request: an open request.
            round_number: higher than that of any message before; the answer carries it.
            base_position: absolute position of settled[0].
            settled: accepted guesses and the target's own token.
        """
        self._look()
        if request not in self._opened:
            return False
        return self._send(
            messages.Outcome(
                request=request, round=round_number, base_position=base_position, settled=settled
            )
        )

    def receive_block(
        self, request: str, round_number: int, timeout: float | None = None
    ) -> messages.Block | None:
        """The block that answers a round, waited for during `timeout` seconds; None: go on without.

        timeout None: what the policy allows. Blocks of other rounds are dropped. Returns early when the
        server fails or does not know the request.
        """
        start_ns = time.monotonic_ns()
        try:
            return self._wait_for_block(request, round_number, timeout)
        finally:
            end_ns = time.monotonic_ns()
            self.seconds_waiting += (end_ns - start_ns) / 1e9
            self._trace.record("wait", start_ns, end_ns, request=request, round=round_number)

    def close(self, request: str) -> None:
        """The request has ended."""
        self.refusals.pop(request, None)
        self._blocks.pop(request, None)
        if self._opened.pop(request, None) is not None:
            self._send(messages.Close(request=request))

    def stats(self, request: str = "", timeout: float = 0.2) -> dict[str, float]:
        """Counters of the server and of a request; empty if there is no answer in time."""
        self._look()
        self._stats.pop(request, None)
        if not self.is_up or not self._send(messages.Stats(request=request)):
            return {}
        deadline = time.monotonic() + timeout
        while request not in self._stats and self.is_up and time.monotonic() < deadline:
            self._socket.poll(POLL_SECONDS * 1000)
            self._look()
        return self._stats.pop(request, {})

    def shutdown(self) -> None:
        """End the server and remove its files; safe to call again."""
        atexit.unregister(self.shutdown)
        self._state = "gone"
        for process in [self._process, *self._dying]:
            process.stop()
        self._dying.clear()
        self._context.destroy(linger=0)

    # Waiting

    def block_timeout(self) -> float:
        """Seconds that `receive_block` waits at most."""
        if self._params.lockstep:
            return self._limits.lockstep
        median = statistics.median(self._verify_seconds) if self._verify_seconds else 0.0
        if self._params.on_miss == "wait":
            return self._params.draft_timeout_ms / 1000 or 2 * median or self._limits.first_draft
        return max(self._limits.answer, 0.25 * median)

    def _wait_for_block(
        self, request: str, round_number: int, timeout: float | None
    ) -> messages.Block | None:
        start = time.monotonic()
        deadline = start + (self.block_timeout() if timeout is None else timeout)
        next_ping = start + self._limits.silence / 4
        while True:
            self._look()
            block = self._blocks.get(request)
            if block is not None and block.round == round_number:
                return self._blocks.pop(request)
            if not self.is_up or request not in self._opened:
                return None
            now = time.monotonic()
            # After a time-out without a sign of life since, waiting once more would only cost time.
            if now >= deadline or self._is_suspect:
                self._note_timeout()
                return None
            if now >= next_ping:
                self._ping()
                next_ping = now + self._limits.silence / 4
            self._socket.poll(max(1.0, min(deadline - now, POLL_SECONDS) * 1000))

    def _note_timeout(self) -> None:
        self.num_timeouts += 1
        if not self._is_suspect:
            self._is_suspect = True
            self._ping()

    # Messages

    def _send(self, message: messages.Message) -> bool:
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # a stopped server has let its queue run full
            return False
        if not isinstance(message, messages.Close):
            self._unanswered_since = self._unanswered_since or time.monotonic()
        return True

    def _ping(self) -> None:
        self._num_pings += 1
        self._send(messages.Ping(round=self._num_pings))

    def _drain(self) -> None:
        """Take in all that has arrived."""
        while self._socket.poll(0):
            frame = self._socket.recv()
            try:
                message = messages.decode(frame)
                self._take(message)
            except messages.MessageError as error:
                self._num_bad_frames += 1
                logger.debug("from the draft server: %s", error)
                continue
            self._num_bad_frames = 0
            self._unanswered_since = None
            self._is_suspect = False

    def _take(self, message: messages.Message) -> None:
        request = message.request
        match message:
            case messages.Block():
                if not all(token < self._vocab_size for token in message.ids):
                    raise messages.MessageError(f"ids below {self._vocab_size} expected, got {message.ids}")
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
            case messages.Ready():
                self.ready = message
                self._state = "up"
                self._up_since = time.monotonic()
            case messages.Pong():
                pass
            case _:
                raise messages.MessageError(f"{type(message).__name__} is not for an engine")

    # Health

    def _start(self) -> None:
        self._state: State = "starting"
        self._started = time.monotonic()
        self._up_since = 0.0
        self._unanswered_since: float | None = None
        self._is_suspect = False
        self._num_bad_frames = 0
        self._process = DraftProcess(self._command, self._trace)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms; the server binds when it is ready
        self._socket.connect(self._process.endpoint)
        self._ping()

    def _look(self) -> None:
        """Take in what has arrived and judge the server's health; never waits."""
        if self._state == "gone":
            return
        self._drain()
        for process in [process for process in self._dying if not process.is_alive]:
            self._dying.remove(process)
            process.remove()
        trouble = self._trouble(time.monotonic())
        if trouble is not None:
            self._replace(trouble)

    def _trouble(self, now: float) -> str | None:
        if not self._process.is_alive:
            return str(self._process.failure())
        if self._state == "starting":
            late = now > self._started + self._limits.start
            return f"the draft server was not ready after {self._limits.start:g} s" if late else None
        is_overdue = (
            self._unanswered_since is not None and now > self._unanswered_since + self._limits.silence
        )
        # If this process itself was stopped, an answer is about to come in.
        if is_overdue and not self._socket.poll(1):
            return f"the draft server has been silent for {self._limits.silence:g} s"
        if self._num_bad_frames > self._limits.max_bad_frames:
            return f"the draft server sent {self._num_bad_frames} malformed messages"
        return None

    def _replace(self, trouble: str) -> None:
        """Kill the server and start another one, without waiting for either."""
        is_final = self._process.has_refused
        if self._up_since and time.monotonic() > self._up_since + self._limits.steady:
            self._num_restarts_in_row = 0
        self._process.kill()
        self._dying.append(self._process)
        self._socket.close(linger=0)
        self._opened.clear()
        self._blocks.clear()
        if is_final or self._num_restarts_in_row >= self._limits.max_restarts:
            self._state = "gone"
            logger.warning("%s; going on without it", trouble)
            return
        self._num_restarts_in_row += 1
        self.num_restarts += 1
        logger.warning("%s; starting it again", trouble)
        try:
            self._start()
        except (OSError, ValueError) as error:
            self._state = "gone"
            logger.warning("%s; going on without it", error)
