"""How far something has come: a bar on stderr where that is a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def open_bar(total: int, title: str, wanted: bool = True) -> Generator[Callable[[int], object]]:
    """``update(done)`` of a bar of ``total``.

    >>> with open_bar(2, "slices", wanted=False) as update:
    ...     update(1)
    """
    if not (wanted and sys.stderr.isatty()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def show_progress(items: Iterable[int], total: int, title: str, wanted: bool) -> Iterator[int]:
    """The same items, with a bar beside them.

    >>> list(show_progress(range(3), 3, "unlearning", False))
    [0, 1, 2]
    """
    with open_bar(total, title, wanted) as update:
        for item in items:
            update(item)
            yield item
