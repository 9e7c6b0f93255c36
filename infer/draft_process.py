"""One running draft server, as its engine holds it: process, private folder, endpoint, log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from foredraft.infer.draft_server import USER_ERROR
from foredraft.infer.params import EngineConfig
from foredraft.infer.tracing import Trace

MAX_SOCKET_PATH = 100  # bytes; the system's limit is 107
LOG_LINES_SHOWN = 20
STOP_SECONDS = 3.0  # for writing the trace


class DraftServerError(RuntimeError):
    """The draft server did not start; the text ends with its log."""


def server_command(
    drafter: str,
    config: EngineConfig,
    *,
    target: str = "",
    target_tokenizer_sha256: str = "",
    predictor: str | None = None,
    record: Path | None = None,
    slow_factor: float = 1.0,
) -> list[str]:
    """The command line of a draft server, up to what each start adds to it.

    Args:
        drafter: folder of the drafter.
        config: as for the target; draft_device, draft_threads and dtype are used.
        target: its name, for messages.
        target_tokenizer_sha256: refuse a drafter with another tokenizer; empty: accept any.
        predictor: folder or Hub id of its outcome predictor.
        record: folder that gets outcome records.
        slow_factor: pretend a drafter that is this much slower (for tests).
    """
    command = [sys.executable, "-m", "foredraft.infer.draft_server", "--drafter", drafter]
    command += ["--engine-config", msgspec.json.encode(config).decode()]
    command += ["--target", target, "--target-tokenizer-sha256", target_tokenizer_sha256]
    command += ["--predictor", predictor] if predictor else []
    command += ["--record", str(record)] if record else []
    return command + (["--slow-factor", str(slow_factor)] if slow_factor != 1.0 else [])


class DraftProcess:
    """Starts the server, without waiting until it is ready. Its folder holds socket, log and trace part.

    Raises:
        ValueError: the folder for temporary files has too long a path for a socket.
        OSError: the command cannot be started.
    """

    def __init__(self, command: Sequence[str], trace: Trace) -> None:
        self._trace = trace
        self._writes_at_end = trace.is_on or "--record" in command
        self._folder = Path(tempfile.mkdtemp(prefix="foredraft-"))
        self._log = self._folder / "log"
        self._trace_part = self._folder / "trace"
        socket = self._folder / "socket"
        self.endpoint = f"ipc://{socket}"
        flags = [
            "--endpoint",
            self.endpoint,
            "--parent-pid",
            str(os.getpid()),
            "--scratch",
            str(self._folder),
        ]
        flags += ["--trace", str(self._trace_part)] if trace.is_on else []
        try:
            if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
                raise ValueError(
                    f"the path of a socket must be at most {MAX_SOCKET_PATH} bytes, got {socket}; "
                    "set TMPDIR to a shorter folder"
                )
            with self._log.open("wb") as log:
                # A process group of its own: Ctrl-C is for the engine, which ends the server in order.
                self._process = subprocess.Popen(
                    [*command, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
                )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended; a stopped one is alive."""
        return self._process.poll() is None

    @property
    def has_refused(self) -> bool:
        """It ended by itself with a user's error, so that starting it again is useless."""
        return self._process.poll() == USER_ERROR

    def failure(self) -> Exception:
        """Why it ended, in the words of its log: ValueError for a user's error, else DraftServerError."""
        lines = self._log.read_text(errors="replace").splitlines()
        if self.has_refused:
            reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
            return ValueError(reasons[-1] if reasons else "the draft server refused its arguments")
        shown = "\n  ".join(lines[-LOG_LINES_SHOWN:]) or "(its log is empty)"
        return DraftServerError(f"the draft server ended with code {self._process.poll()}:\n  {shown}")

    def kill(self) -> None:
        """End it at once, stopped or not; does not wait for the end: see `is_alive` and `remove`."""
        self._process.kill()

    def stop(self) -> None:
        """End it, with time to write what it has gathered, and remove what it leaves."""
        try:
            if self._writes_at_end:
                self._process.terminate()
                self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self.remove()

    def remove(self) -> None:
        """Wait for the end of a killed process, take over its trace and delete its folder."""
        self._process.wait()
        if self._trace.is_on:
            self._trace.absorb(self._trace_part)
        shutil.rmtree(self._folder, ignore_errors=True)
