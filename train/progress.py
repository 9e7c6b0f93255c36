"""Progress of a long run on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 15.0


class ProgressReport:
    """Context manager; silent in all processes but the first.

    Args:
        title: what is being done.
        total: number of steps.
        done: steps that an earlier run has finished.
        is_enabled: False in processes that must not print.
    """

    def __init__(self, title: str, total: int, *, done: int = 0, is_enabled: bool = True) -> None:
        self.title, self.total, self.done, self.is_enabled = title, total, done, is_enabled
        self.first_done, self.started, self.printed = done, time.monotonic(), time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self.is_bar = is_enabled and console.is_terminal
        self.bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)

    def __enter__(self) -> ProgressReport:
        if self.is_bar:
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total, completed=self.done, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_bar:
            self.bar.stop()

    def update(self, done: int, note: str = "") -> None:
        """Tell that `done` of the steps are finished; `note` is shown behind the bar."""
        self.done = done
        if self.is_bar:
            self.bar.update(self.task, completed=done, note=note)
        elif self.is_enabled and time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self.printed = time.monotonic()
            self.say(f"{self.title}: {done}/{self.total}, {self._remaining()} left  {note}")

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self.is_bar:
            self.bar.console.print(line, highlight=False)
        elif self.is_enabled:
            print(line, file=sys.stderr, flush=True)

    def _remaining(self) -> str:
        steps = self.done - self.first_done
        if steps == 0:
            return "?"
        seconds = (time.monotonic() - self.started) / steps * (self.total - self.done)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
