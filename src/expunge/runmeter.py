"""How far many runs have come, on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any, Self


class Meter:
    """Counts what is done, failed and left; ``shown=False`` counts in silence.

    >>> meter = Meter(3, kept=1, shown=False)
    >>> meter.count(done=True)
    >>> meter.describe(seconds=60.0)
    '2 of 3 done, 1 left, about 60 s to go'
    >>> meter.count(done=False)
    >>> meter.describe(seconds=80.0)
    '2 of 3 done, 1 failed, 0 left'
    """

    def __init__(self, total: int, *, kept: int = 0, shown: bool = True) -> None:
        self.total, self.kept, self.done, self.failed = total, kept, kept, 0
        self._shown, self._started, self._bar = shown, time.monotonic(), None

    def __enter__(self) -> Self:
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            text = TextColumn("{task.description}", markup=False)
            self._bar: Any = Progress(BarColumn(), text, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=self.total)
            self._bar.start()
        self._show()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def left(self) -> int:
        return self.total - self.done - self.failed

    def count(self, *, done: bool, line: str | None = None) -> None:
        """One more that is done or failed; ``line`` says which and how."""
        if done:
            self.done += 1
        else:
            self.failed += 1
        if line is not None:
            self.tell(line)
        self._show()

    def tell(self, line: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        elif self._shown:
            print(line, file=sys.stderr, flush=True)

    def describe(self, seconds: float) -> str:
        """The counts ``seconds`` after the start, and the time left if the rest is like it."""
        failed = f", {self.failed} failed" if self.failed else ""
        found = f"{self.done} of {self.total} done{failed}, {self.left} left"
        ran = self.done + self.failed - self.kept
        if ran == 0 or self.left == 0:
            return found
        return f"{found}, about {describe_seconds(seconds / ran * self.left)} to go"

    def _show(self) -> None:
        text = self.describe(time.monotonic() - self._started)
        if self._bar is not None:
            ended = self.done + self.failed
            self._bar.update(self._task, completed=ended, description=text, refresh=True)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)


def describe_seconds(seconds: float) -> str:
    """A length of time as people say it.

    >>> [describe_seconds(s) for s in (0.2, 59, 61, 7000, 200_000)]
    ['1 s', '59 s', '2 min', '2 h', '3 days']
    """
    for unit, length, most in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48)):
        if seconds <= most * length:
            return f"{max(math.ceil(seconds / length), 1)} {unit}"
    return f"{math.ceil(seconds / 86400)} days"
