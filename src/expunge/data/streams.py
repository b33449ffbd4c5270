"""A stream without some people's examples: an IterableDataset where it was one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from expunge.data.people import Names


class FilteredStream(IterableDataset[Any]):
    """The examples of ``stream`` that stay; ``owners(example)`` are the names on one of them.

    >>> stream = FilteredStream([("ann", 1), ("bob", 2)], lambda e: (e[0],), {"ann"}, keep=False)
    >>> list(stream)
    [('bob', 2)]
    """

    def __init__(
        self, stream: Any, owners: Callable[[Any], Names], names: Collection[str], *, keep: bool
    ) -> None:
        self.stream, self.owners, self.names, self.keep = stream, owners, frozenset(names), keep

    def stays(self, example: Any) -> bool:
        """Whether this example is one of them."""
        return self.keep != self.names.isdisjoint(self.owners(example))

    def __iter__(self) -> Iterator[Any]:
        return filter(self.stays, self.stream)
