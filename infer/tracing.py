"""What both processes did, on one clock (CLOCK_MONOTONIC), as a Chrome trace that Perfetto opens.

Processes `engine` and `draft-server`; spans prefill, verify, expand, wait; instants hit, leaf, miss. The
server appends its events to a part file, the engine absorbs the parts and writes the whole.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.infer.atomic import write_text_atomic

Event = dict[str, Any]
Intervals = list[tuple[float, float]]  # (start, end) in microseconds
_NO_SPAN = nullcontext()


class Trace:
    """Collects the events of this process; when off, every call returns at once. Any thread may record."""

    def __init__(self, process: str, *, is_on: bool) -> None:
        self.process = process
        self.is_on = is_on
        self._records: list[tuple[str, int, int | None, int, str, dict[str, Any]]] = []
        self._absorbed: list[Event] = []

    def span(self, name: str, **details: object) -> AbstractContextManager[None]:
        """Record the time that the body of a `with` takes; details must be JSON values."""
        return self._timed(name, details) if self.is_on else _NO_SPAN

    @contextmanager
    def _timed(self, name: str, details: dict[str, Any]) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(name, start_ns, time.monotonic_ns(), **details)

    def record(self, name: str, start_ns: int, end_ns: int | None, **details: object) -> None:
        """Record a span measured by the caller in monotonic_ns; end_ns None: an instant."""
        if self.is_on:
            thread = threading.current_thread()
            self._records.append((name, start_ns, end_ns, thread.native_id or 0, thread.name, details))

    def instant(self, name: str, **details: object) -> None:
        """Record a moment."""
        self.record(name, time.monotonic_ns(), None, **details)

    def _take(self) -> list[Event]:
        records, self._records = self._records, []
        pid = os.getpid()
        threads = {thread_id: thread_name for _, _, _, thread_id, thread_name, _ in records}
        events: list[Event] = [_metadata("process_name", pid, 0, self.process)] if records else []
        events += [_metadata("thread_name", pid, thread_id, name) for thread_id, name in threads.items()]
        for name, start_ns, end_ns, thread_id, _, details in records:
            kind = {"ph": "i", "s": "p"} if end_ns is None else {"ph": "X", "dur": (end_ns - start_ns) / 1000}
            events.append(
                {"name": name, "pid": pid, "tid": thread_id, "ts": start_ns / 1000, "args": details, **kind}
            )
        return events

    def flush(self, part: Path) -> None:
        """Append the events so far to a part file, a JSON object a line: a later kill cannot lose them."""
        events = self._take()
        if events:
            with part.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(event) + "\n" for event in events)

    def absorb(self, part: Path) -> None:
        """Add the events of another process; the line that a kill cut short is left out."""
        if not part.exists():
            return
        for line in part.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                self._absorbed.append(json.loads(line))
            except json.JSONDecodeError:
                continue

    def write(self, path: Path) -> None:
        """Write all events so far, own and absorbed, atomically. OSError if the folder cannot be written."""
        self._absorbed += self._take()
        write_text_atomic(path, json.dumps({"traceEvents": self._absorbed, "displayTimeUnit": "ms"}))


def _metadata(kind: str, pid: int, thread_id: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": thread_id, "args": {"name": name}}


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Seconds per kind of span over both processes, and how much drafting ran under a verification."""

    seconds_verify: float
    seconds_expand: float
    seconds_expand_in_verify: float
    seconds_wait: float
    num_hits: int
    num_leaves: int
    num_misses: int

    @property
    def overlap(self) -> float:
        """Share of the expand time that lies inside verify spans; 0 if nothing was expanded."""
        return self.seconds_expand_in_verify / self.seconds_expand if self.seconds_expand else 0.0


def summarise(path: Path) -> TraceSummary:
    """Read a trace file. ValueError if it is not a Chrome trace."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a JSON object with traceEvents: {error!r}") from error
    verify, expand, wait = (_spans(events, name) for name in ("verify", "expand", "wait"))
    instants = [event["name"] for event in events if event["ph"] == "i"]
    return TraceSummary(
        seconds_verify=_seconds(verify),
        seconds_expand=_seconds(expand),
        seconds_expand_in_verify=_seconds(_intersection(expand, _union(verify))),
        seconds_wait=_seconds(wait),
        num_hits=instants.count("hit"),
        num_leaves=instants.count("leaf"),
        num_misses=instants.count("miss"),
    )


def _spans(events: list[Event], name: str) -> Intervals:
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"] == name)


def _seconds(spans: Intervals) -> float:
    return sum(end - start for start, end in spans) / 1e6


def _union(spans: Intervals) -> Intervals:
    """Disjoint intervals that cover the same time; spans sorted by start."""
    union: Intervals = []
    for start, end in spans:
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _intersection(spans: Intervals, disjoint: Intervals) -> Intervals:
    """The parts of the spans that lie inside the disjoint intervals; both sorted by start."""
    parts: Intervals = []
    first = 0
    for start, end in spans:
        while first < len(disjoint) and disjoint[first][1] <= start:
            first += 1
        for other_start, other_end in disjoint[first:]:
            if other_start >= end:
                break
            parts.append((max(start, other_start), min(end, other_end)))
    return parts
