"""The I/O thread of the draft server: answers outcomes at once, from trees that a worker keeps growing.

It owns the socket and the speculator's bookkeeping and sleeps in one poller; the worker thread runs the
drafter. So an outcome that arrives in the middle of a forward is answered without waiting for its end.
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import zmq

from foredraft.infer import messages
from foredraft.infer.draft_worker import Drafting, DraftWorker, Finished, Job
from foredraft.infer.kv_pool import PoolExhausted
from foredraft.infer.params import SpeculationParams
from foredraft.infer.tracing import Trace

MAX_MESSAGES_PER_TURN = 64  # then the worker gets its next job
MAX_PEERS = 4096
# A miss is answered after one expansion where that is expected within this share of a verification.
GRACE_SHARE, MAX_GRACE_SECONDS = 0.3, 0.04

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """How the server lives; nothing here changes what it answers."""

    lease_seconds: float = 60.0  # a request that is silent for so long is closed
    parent_pid: int = 0  # the server ends when this is no longer its parent; 0: it serves until it is stopped
    slow_factor: float = 1.0  # pretend a drafter that is this much slower (for tests)
    tick_seconds: float = 0.5  # longest sleep between looks at leases and parent
    trace_part: Path | None = None  # file that gets the trace events


@dataclass(slots=True, eq=False)
class Lease:
    """An open request: who asked, which round is to be answered, and how many expansions before that."""

    key: str  # unique over all engines
    peer: bytes
    request: str
    params: SpeculationParams
    expires: float = 0.0
    round: int = 0
    kind: messages.OutcomeKind = "open"
    num_due: int = 0  # expansions before the answer; 0: answered
    deadline: float = math.inf  # then it is answered whatever is due
    answered: float = 0.0  # when the last block was sent

    def begin_round(self, round_number: int, kind: messages.OutcomeKind, seconds_to_expand: float) -> None:
        """A new round overtakes what was still to be answered."""
        self.round, self.kind, self.deadline = round_number, kind, math.inf
        if self.params.lockstep or kind == "hit":
            self.num_due = self.params.lockstep
        elif self.params.on_miss == "wait":
            self.num_due = self.params.k
        else:
            now = time.monotonic()
            grace = min(GRACE_SHARE * (now - self.answered), MAX_GRACE_SECONDS)
            self.num_due, self.deadline = int(seconds_to_expand <= grace), now + grace


@dataclass(slots=True)
class Counters:
    """What `stats` reports of the server as a whole."""

    num_bad_messages: int = 0
    num_expired: int = 0
    num_failed: int = 0
    num_jobs: int = 0
    seconds_busy: float = 0.0


class DraftLoop:
    """Serves a speculator on a ZeroMQ endpoint until it is stopped or its engine is gone.

    Args:
        speculator: what is served; from now on nobody else may use it.
        ready: what every engine is told first.
        endpoint: ipc:// or tcp:// address to bind.
        options: how the server lives.
        trace: gets a span for every job and an instant for every outcome.
    """

    def __init__(
        self,
        speculator: Drafting,
        ready: messages.Ready,
        endpoint: str,
        options: ServerOptions,
        trace: Trace,
    ) -> None:
        self.counters = Counters()
        self._speculator = speculator
        self._ready = ready
        self._options = options
        self._trace = trace
        self._leases: dict[str, Lease] = {}
        self._greeted: set[bytes] = set()
        self._in_flight: tuple[Lease, int] | None = None  # with the round in which the job was planned
        self._is_stopped = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
        self._socket.bind(endpoint)
        self._worker = DraftWorker(
            speculator.run, self._context, slow_factor=options.slow_factor, trace=trace
        )

    def serve(self) -> None:
        """Answer until `stop`, or until the engine is gone."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._worker.wake, zmq.POLLIN)
        while not self._is_stopped and self._has_parent:
            self._dispatch()
            poller.poll(self._sleep_ms())
            for finished in self._worker.collect():  # before the outcomes: what is ready now is a hit
                self._merge(finished)
            for _ in range(MAX_MESSAGES_PER_TURN):
                if not self._socket.poll(0):
                    break
                self._receive()
            self._answer_overdue()
            self._expire_leases()

    def stop(self) -> None:
        """Make `serve` return within a tick; may be called by another thread."""
        self._is_stopped = True

    def close(self) -> None:
        """Free sockets and thread, after the job that is running."""
        self._worker.close()
        self._socket.close(linger=0)
        self._context.term()

    def _sleep_ms(self) -> int:
        """Until the next look at leases and parent, or the next deadline of an answer."""
        deadlines = [lease.deadline for lease in self._leases.values() if lease.num_due]
        seconds = min(deadlines, default=math.inf) - time.monotonic()
        return math.ceil(1000 * max(0.0, min(seconds, self._options.tick_seconds)))

    @property
    def _has_parent(self) -> bool:
        return self._options.parent_pid in (0, os.getppid())

    # Work for the drafter

    def _dispatch(self) -> None:
        """Give an idle worker the best job; without one, the server sleeps until a message comes."""
        if self._worker.is_busy:
            return
        try:
            job = self._plan()
        except Exception as error:  # planning goes over all requests: which one is broken is not known
            for lease in list(self._leases.values()):
                self._fail(lease, error)
            return
        if job is not None:
            lease = self._leases[job.request_id]
            self._in_flight = (lease, lease.round)
            self._worker.submit(job)

    def _plan(self) -> Job | None:
        """Requests that an engine waits for come first, in order of opening; then the best guess of all."""
        for lease in list(self._leases.values()):
            if lease.num_due:
                job = self._speculator.next_job(lease.key)
                if job is not None:
                    return job
                self._answer(lease)  # nothing is left to expand
        free_running = [lease for lease in self._leases.values() if not lease.params.lockstep]
        if len(free_running) == len(self._leases):
            return self._speculator.next_job()
        return next(filter(None, (self._speculator.next_job(lease.key) for lease in free_running)), None)

    def _merge(self, finished: Finished) -> None:
        assert self._in_flight is not None, "a job has finished that nobody started"
        lease, round_number = self._in_flight
        self.counters.num_jobs += 1
        self.counters.seconds_busy += finished.seconds
        # A request that was closed and opened again has another tree, with the same node ids.
        if self._leases.get(lease.key) is not lease:
            return
        try:
            if finished.error is not None:
                raise finished.error
            self._speculator.merge(finished.job, finished.result)
        except Exception as error:
            self._fail(lease, error)
            return
        if finished.job.kind == "expand" and lease.num_due and lease.round == round_number:
            lease.num_due -= 1
            if not lease.num_due:
                self._answer(lease)

    # Messages

    def _receive(self) -> None:
        peer, *frames = self._socket.recv_multipart()
        if peer not in self._greeted:
            if len(self._greeted) >= MAX_PEERS:
                self._greeted.clear()
            self._greeted.add(peer)
            self._send(peer, self._ready)
        try:
            if len(frames) != 1:
                raise messages.MessageError(f"expected one frame, got {len(frames)}")
            message = messages.decode(frames[0])
        except messages.MessageError as error:
            self.counters.num_bad_messages += 1
            logger.warning("ignored: %s", error)
            return
        key = f"{peer.hex()}/{message.request}"
        try:
            self._handle(key, peer, message)
        except Exception as error:
            self._fail(self._leases.get(key), error)

    def _handle(self, key: str, peer: bytes, message: messages.Message) -> None:
        lease = self._leases.get(key)
        if lease is not None:
            lease.expires = time.monotonic() + self._options.lease_seconds
        match message:
            case messages.Outcome():
                self._on_outcome(lease, peer, message)
            case messages.States():
                self._on_states(lease, message)
            case messages.Open():
                self._on_open(key, peer, message)
            case messages.Close():
                self._drop(lease)
            case messages.Ping():
                self._send(peer, messages.Pong(request=message.request, round=message.round))
            case messages.Stats():
                values = self._statistics(lease)
                self._send(peer, messages.Stats(request=message.request, round=message.round, values=values))
            case _:
                self.counters.num_bad_messages += 1

    def _on_open(self, key: str, peer: bytes, message: messages.Open) -> None:
        self._drop(self._leases.get(key))
        try:
            self._speculator.open(
                key,
                message.token_ids,
                message.sampling,
                message.speculation,
                message.max_tokens,
                message.num_prompt,
            )
        except (ValueError, PoolExhausted) as error:
            refusal = messages.Error(
                request=message.request, round=message.round, code="refused", text=str(error)
            )
            self._send(peer, refusal)
            return
        expires = time.monotonic() + self._options.lease_seconds
        lease = self._leases[key] = Lease(key, peer, message.request, message.speculation, expires)
        self._begin_round(lease, message.round, "open")

    def _on_states(self, lease: Lease | None, message: messages.States) -> None:
        """Take in states; where some are missing, the request is closed and the outcome's answer says so."""
        if lease is None:
            return
        bits_NS = np.frombuffer(message.bits, np.uint16).reshape(message.num_rows, -1)
        try:
            self._speculator.feed(lease.key, message.base_position, bits_NS)
        except KeyError:
            self._drop(lease)

    def _on_outcome(self, lease: Lease | None, peer: bytes, message: messages.Outcome) -> None:
        if lease is not None:
            try:
                kind = self._speculator.advance(lease.key, message.base_position, message.settled)
            except KeyError:  # an outcome was lost
                self._drop(lease)
            else:
                self._begin_round(lease, message.round, kind)
                self._trace.instant(kind, request=lease.request, round=message.round)
                return
        self._send(peer, messages.Unknown(request=message.request, round=message.round))

    def _begin_round(self, lease: Lease, round_number: int, kind: messages.OutcomeKind) -> None:
        lease.begin_round(round_number, kind, self._worker.seconds_to_expand())
        if not lease.num_due:
            self._answer(lease)

    def _answer(self, lease: Lease) -> None:
        lease.num_due, lease.answered = 0, time.monotonic()
        block = self._speculator.block(lease.key)
        answer = messages.Block(
            request=lease.request,
            round=lease.round,
            kind=lease.kind,
            ids=block.tokens,
            parents=block.parents,
            path_probs=block.path_probs,
            laws=block.laws,
        )
        self._send(lease.peer, answer)

    def _answer_overdue(self) -> None:
        now = time.monotonic()
        for lease in self._leases.values():
            if lease.num_due and lease.deadline <= now:
                self._answer(lease)

    def _send(self, peer: bytes, message: messages.Message) -> None:
        # A ROUTER drops what a peer cannot take, so this never waits.
        self._socket.send_multipart([peer, messages.encode(message)])

    def _statistics(self, lease: Lease | None) -> dict[str, float]:
        server = {name: float(value) for name, value in asdict(self.counters).items()}
        request = self._speculator.stats(lease.key) if lease else {}
        return {**server, "num_open": len(self._leases), **request}

    # Ends of requests

    def _drop(self, lease: Lease | None) -> None:
        if lease is not None:
            del self._leases[lease.key]
            self._speculator.close(lease.key)
            if self._options.trace_part is not None:
                self._trace.flush(self._options.trace_part)

    def _fail(self, lease: Lease | None, error: Exception) -> None:
        """The drafter raised: the engine goes on without it, the others are served as before."""
        self.counters.num_failed += 1
        logger.error("request %s", lease.request if lease else "not open", exc_info=error)
        if lease is not None:
            text = f"{type(error).__name__}: {error}"
            self._drop(lease)
            self._send(
                lease.peer, messages.Error(request=lease.request, round=lease.round, code="failed", text=text)
            )

    def _expire_leases(self) -> None:
        now = time.monotonic()
        for lease in [lease for lease in self._leases.values() if lease.expires < now]:
            self.counters.num_expired += 1
            self._drop(lease)
