"""The thread of the draft server that runs the drafter: one job at a time, in order."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import zmq

from foredraft.infer.params import SamplingParams, SpeculationParams
from foredraft.infer.tracing import Trace
from foredraft.infer.tree import Block

_WAKE_ADDRESS = "inproc://finished"
_NEWEST_WEIGHT = 0.2  # of the moving average of an expansion's time


class Job(Protocol):
    """Planned work of one request, as the worker and the server see it."""

    @property
    def request_id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def num_rows(self) -> int: ...


class Drafting(Protocol):
    """What the server drives: infer/speculator.py, or a stand-in without a model.

    The I/O thread calls all but `run`, and they touch bookkeeping only; the worker thread calls `run`.
    """

    def open(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        params: SpeculationParams,
        max_tokens: int | None = None,
        num_prompt: int | None = None,
    ) -> None: ...
    def close(self, request_id: str) -> None: ...
    def advance(
        self, request_id: str, base_position: int, settled: Sequence[int]
    ) -> Literal["hit", "leaf", "miss"]: ...
    def feed(self, request_id: str, base_position: int, bits_NS: np.ndarray) -> None: ...
    def block(self, request_id: str) -> Block: ...
    def next_job(self, request_id: str | None = None) -> Any: ...
    def run(self, job: Any) -> Any: ...
    def merge(self, job: Any, result: Any) -> None: ...
    def stats(self, request_id: str) -> dict[str, int]: ...
    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A job with its result, or with the exception that it raised."""

    job: Job
    result: Any
    error: Exception | None
    seconds: float


class DraftWorker:
    """Runs jobs in a thread and wakes the I/O thread's poller through `wake`: neither side ever spins.

    Args:
        run: what runs a job.
        context: of the I/O thread's sockets.
        slow_factor: pretend a drafter that is this much slower, by sleeping after each job (for tests).
        trace: gets a span for every job.
    """

    def __init__(
        self, run: Callable[[Any], Any], context: zmq.Context, *, slow_factor: float, trace: Trace
    ) -> None:
        self.wake: zmq.Socket = context.socket(zmq.PULL)
        self.wake.bind(_WAKE_ADDRESS)
        self.is_busy = False
        self._expand_seconds: float | None = None  # moving average
        self._submitted = 0.0
        self._run = run
        self._context = context
        self._slow_factor = slow_factor
        self._trace = trace
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="drafter", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Start a job; only when not busy."""
        assert not self.is_busy, "one job at a time"
        self.is_busy = True
        self._submitted = time.monotonic()
        self._jobs.put(job)

    def collect(self) -> Iterator[Finished]:
        """What has finished since the last call; never waits."""
        while self.wake.poll(0):
            self.wake.recv()
            self.is_busy = False
            finished = self._finished.get()
            if finished.job.kind == "expand":
                past = finished.seconds if self._expand_seconds is None else self._expand_seconds
                self._expand_seconds = past + _NEWEST_WEIGHT * (finished.seconds - past)
            yield finished

    def seconds_to_expand(self) -> float:
        """Expected time until an expansion that is planned now is done; infinite before the first one."""
        if self._expand_seconds is None:
            return math.inf
        running = self._expand_seconds - (time.monotonic() - self._submitted) if self.is_busy else 0.0
        # a job that is late already says nothing of when it will end
        return self._expand_seconds + running if running >= 0.0 else math.inf

    def close(self) -> None:
        """End the thread after the job that it is in."""
        self._jobs.put(None)
        self._thread.join()
        self.wake.close(linger=0)

    def _loop(self) -> None:
        wake = self._context.socket(zmq.PUSH)
        wake.connect(_WAKE_ADDRESS)
        while (job := self._jobs.get()) is not None:
            self._finished.put(self._timed(job))
            wake.send(b"")
        wake.close(linger=0)

    def _timed(self, job: Job) -> Finished:
        start_ns = time.monotonic_ns()
        result, error = None, None
        try:
            result = self._run(job)
        except Exception as raised:  # whatever it is, it concerns one request and must not end the server
            error = raised
        if self._slow_factor > 1.0:
            time.sleep((self._slow_factor - 1.0) * (time.monotonic_ns() - start_ns) / 1e9)
        end_ns = time.monotonic_ns()
        request = job.request_id.rpartition("/")[2]  # as the engine calls it
        self._trace.record(job.kind, start_ns, end_ns, request=request, rows=job.num_rows)
        return Finished(job, result, error, (end_ns - start_ns) / 1e9)
