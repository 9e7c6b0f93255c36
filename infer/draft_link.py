"""The engine's line to one running draft server: sends without waiting, takes in frames, judges health."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import zmq

from foredraft.infer import messages
from foredraft.infer.draft_process import DraftProcess
from foredraft.infer.tracing import Trace

RECONNECT_MS = 10  # the server binds when it is ready

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkLimits:
    """When a server counts as down."""

    start: float = 300.0  # seconds until it is ready
    silence: float = 5.0  # seconds without a sign of life while something is unanswered
    max_bad_frames: int = 8  # malformed messages in a row


class DraftLink:
    """Starts a server and connects to it; a server that fails is not repaired but replaced, with its link.

    Args:
        command: from `server_command`.
        vocab_size: of the target; a block with other ids is malformed.
        limits: when the server counts as down.
        context: of the engine's sockets.
        trace: of the engine; the server's events join it at the end.
    """

    def __init__(
        self,
        command: Sequence[str],
        vocab_size: int,
        limits: LinkLimits,
        context: zmq.Context,
        trace: Trace,
    ) -> None:
        self.ready: messages.Ready | None = None
        self.is_suspect = False  # an answer was late and nothing has been heard since
        self.process = DraftProcess(command, trace)
        self._vocab_size = vocab_size
        self._limits = limits
        self._started = time.monotonic()
        self._ready_since = 0.0
        self._unanswered_since: float | None = None
        self._num_bad_frames = 0
        self._num_pings = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(self.process.endpoint)
        self.ping()

    @property
    def seconds_up(self) -> float:
        """Since the server was ready; 0 before."""
        return time.monotonic() - self._ready_since if self.ready else 0.0

    def send(self, message: messages.Message) -> bool:
        """Send without waiting; False if the server has let its queue run full."""
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        if not isinstance(message, messages.Close) and self._unanswered_since is None:
            self._unanswered_since = time.monotonic()
        return True

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._num_pings += 1
        self.send(messages.Ping(round=self._num_pings))

    def suspect(self) -> None:
        """An answer is late."""
        if not self.is_suspect:
            self.is_suspect = True
            self.ping()

    def wait(self, seconds: float) -> None:
        """Sleep until something arrives, at most so long (and a millisecond)."""
        self._socket.poll(int(seconds * 1000) + 1)

    def receive(self) -> Iterator[messages.Message]:
        """What has arrived, without waiting; malformed frames are counted and left out."""
        while self._socket.poll(0):
            frame = self._socket.recv()
            try:
                message = self._decode(frame)
            except messages.MessageError as error:
                self._num_bad_frames += 1
                logger.debug("from the draft server: %s", error)
                continue
            self._num_bad_frames = 0
            self._unanswered_since = None
            self.is_suspect = False
            if isinstance(message, messages.Ready):
                self.ready = message
                self._ready_since = time.monotonic()
            yield message

    def _decode(self, frame: bytes) -> messages.Message:
        message = messages.decode(frame)
        if isinstance(message, messages.Open | messages.Outcome | messages.Close | messages.Ping):
            raise messages.MessageError(f"{type(message).__name__} is not for an engine")
        if isinstance(message, messages.Block) and any(token >= self._vocab_size for token in message.ids):
            raise messages.MessageError(f"expected ids below {self._vocab_size}, got {message.ids}")
        return message

    def trouble(self) -> str | None:
        """Why the server must be replaced; None: it seems well. Call after `receive`."""
        now, limits = time.monotonic(), self._limits
        if not self.process.is_alive:
            return str(self.process.failure())
        if self.ready is None:
            is_late = now > self._started + limits.start
            return f"the draft server was not ready after {limits.start:g} s" if is_late else None
        if self._num_bad_frames > limits.max_bad_frames:
            return f"the draft server sent {self._num_bad_frames} malformed messages"
        is_overdue = self._unanswered_since is not None and now > self._unanswered_since + limits.silence
        # If this process itself was stopped, an answer is about to come in.
        if is_overdue and not self._socket.poll(1):
            return f"the draft server has been silent for {limits.silence:g} s"
        return None

    def cut(self) -> None:
        """Kill the server and close the socket, without waiting for the process to end."""
        self.process.kill()
        self._socket.close(linger=0)
