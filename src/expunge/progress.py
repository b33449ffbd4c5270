"""A progress bar on stderr, where there is a terminal to show it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator


def show_progress(
    items: Iterable[int], total: int, title: str, wanted: bool = True
) -> Iterator[int]:
    """The same items; a bar beside them if it is wanted and stderr is a terminal.

    >>> list(show_progress(range(3), 3, "unlearning", False))
    [0, 1, 2]
    """
    if not (wanted and sys.stderr.isatty()):
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        for item in items:
            bar.update(task, completed=item)
            yield item
