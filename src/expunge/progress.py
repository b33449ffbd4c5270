"""How far something has come, on stderr: a bar on a terminal, plain lines or nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Self


class Bar:
    """``title`` beside a bar of ``total``; off a terminal every title is a line, if ``lines``.

    >>> with Bar(2, "0 of 2", wanted=False) as bar:
    ...     bar.update(1, "1 of 2")
    """

    def __init__(self, total: int, title: str, *, wanted: bool = True, lines: bool = False) -> None:
        self._total, self._title = total, title
        self._drawn = wanted and sys.stderr.isatty()
        self._lines = wanted and lines and not self._drawn
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._drawn:
            from rich.console import Console
            from rich.progress import Progress

            self._bar: Any = self._stack.enter_context(
                Progress(console=Console(stderr=True), transient=True)
            )
            self._task = self._bar.add_task(self._title, total=self._total)
        self.update(0, self._title)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def update(self, done: int, title: str | None = None) -> None:
        """So much is done; ``title`` is what stands beside the bar from now on."""
        self._title = title or self._title
        if self._drawn:
            self._bar.update(self._task, completed=done, description=self._title)
        elif self._lines:
            print(self._title, file=sys.stderr, flush=True)

    def write(self, line: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self._drawn:
            self._bar.console.print(line, markup=False, highlight=False)
        elif self._lines:
            print(line, file=sys.stderr, flush=True)


def show_progress(
    items: Iterable[int], total: int, title: str, wanted: bool = True
) -> Iterator[int]:
    """The same items, with a bar beside them if it is wanted and stderr is a terminal.

    >>> list(show_progress(range(3), 3, "unlearning", False))
    [0, 1, 2]
    """
    with Bar(total, title, wanted=wanted) as bar:
        for item in items:
            bar.update(item)
            yield item
