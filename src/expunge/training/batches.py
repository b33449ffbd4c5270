"""Batches of any examples, pass after pass, in an order that a seed decides."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from expunge.data.examples import Kind, count, find_kind, map_columns, read_one, select
from expunge.errors import UnlearningError
from expunge.networks.randomness import derive_seed
from expunge.recipes import check_value

Collate = Callable[[list[Any]], Any]
Loader = Callable[[Any, int], Iterable[Any]]


class Batches:
    """The batches of ``examples``; pass p is in an order that follows from ``seed`` and p alone.

    ``loader(examples, seed)`` makes the batches of one pass in its own way instead: samplers,
    workers, mixing. Streams keep their own order.

    >>> batches = Batches((torch.arange(6.0), torch.arange(6)), batch_size=4, seed=0)
    >>> [len(y) for x, y in batches.read(0)], len(batches)
    ([4, 2], 2)
    """

    def __init__(
        self,
        examples: Any,
        *,
        batch_size: int,
        seed: int,
        collate: Collate | None = None,
        loader: Loader | None = None,
        shuffle: bool = True,
    ) -> None:
        self.batch_size: int = check_value("whole", "batch_size", batch_size)
        self.seed, self.collate, self.loader = seed, collate, loader
        self.kind: Kind = find_kind(examples)
        self.shuffle = shuffle and self.kind != "stream"
        if collate is None and loader is None:  # else rows stay of the kind they are
            if self.kind == "table" and examples.format["type"] is None:
                examples = examples.with_format("torch")
            if self.kind == "columns":
                examples = map_columns(getattr(examples, "tensors", examples), _to_column)
        self.examples = examples

    @functools.cached_property
    def _rows(self) -> int:
        return count(self.examples, self.kind)

    @functools.cached_property
    def _length(self) -> int:
        """Batches of a pass; where nobody can know that without reading it, it is read."""
        if self.loader is None and self.kind != "stream":
            return len(self._cut(self._rows))
        made = self.read(0) if self.loader is None else self.loader(self.examples, self.seed)
        try:
            return len(cast(Any, made))
        except TypeError:  # also that of a DataLoader over a stream
            return sum(1 for _ in made)

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> Iterator[Any]:
        """The batches of pass ``number``."""
        seed = derive_seed("pass", self.seed, number)
        if self.loader is not None:
            return iter(self.loader(self.examples, seed))
        if self.kind in ("columns", "frame") and self.collate is None:
            return (select(self.examples, self.kind, places) for places in self._draw(seed))
        return iter(self._load(seed))

    def repeat(self, taken: int = 0) -> Iterator[Any]:
        """Pass after pass without end, from the batch after the first ``taken`` on.

        >>> batches = Batches(torch.arange(3), batch_size=2, seed=0)
        >>> stream, later = batches.repeat(), batches.repeat(taken=3)
        >>> [next(stream) for _ in range(3)] and torch.equal(next(stream), next(later))
        True
        """
        number, skip = divmod(taken, len(self)) if taken else (0, 0)
        for number in itertools.count(number):  # noqa: B020
            empty = True
            for batch in itertools.islice(self.read(number), skip, None):
                empty = False
                yield batch
            if empty and not skip:
                raise UnlearningError("the data give no batch; there must be at least one example")
            skip = 0

    def _cut(self, rows: int) -> list[tuple[int, int]]:
        """Where batches begin and end; a last row alone joins the batch before: BatchNorm takes no
        single."""
        size, starts = self.batch_size, list(range(0, rows, self.batch_size))
        if rows % size == 1 and len(starts) > 1 and size > 1:
            starts.pop()
        return list(itertools.pairwise([*starts, rows]))

    def _draw(self, seed: int) -> list[Tensor]:
        """The places of each batch."""
        order = torch.arange(self._rows)
        if self.shuffle:
            order = torch.randperm(self._rows, generator=torch.Generator().manual_seed(seed))
        return [order[a:b] for a, b in self._cut(self._rows)]

    def _load(self, seed: int) -> Iterable[Any]:
        examples: Any = self.examples
        if self.kind == "stream":
            return DataLoader(examples, batch_size=self.batch_size, collate_fn=self.collate)
        if self.kind in ("columns", "frame"):
            examples = [read_one(examples, self.kind, place) for place in range(self._rows)]
        places = [batch.tolist() for batch in self._draw(seed)]
        return DataLoader(examples, batch_sampler=places, collate_fn=self.collate)


def _to_column(column: Any) -> Any:
    """A column as a tensor where it is numbers; float64 of NumPy is the default float of torch."""
    if isinstance(column, Tensor):
        return column
    numbers = hasattr(column, "dtype") or all(isinstance(item, int | float) for item in column)
    array = np.asarray(column) if numbers else None
    if array is None or array.dtype.kind not in "biuf":
        return column
    made = torch.from_numpy(np.ascontiguousarray(array))
    return made.to(torch.get_default_dtype()) if array.dtype == np.float64 else made


def map_tensors(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with every tensor changed, and what else can be moved to a device (packed
    sequences); tuples, lists and mappings keep their kind."""

    def visit(part: Any) -> Any:
        if isinstance(part, list):
            return [map_tensors(item, change) for item in cast(list[Any], part)]
        return change(part) if hasattr(part, "to") and not isinstance(part, type) else part

    return map_columns(batch, visit)


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``."""
    return map_tensors(batch, lambda tensor: tensor.to(device))


def copy_batch(batch: Any, device: torch.device) -> Any:
    """A copy on ``device``: a ``forward`` that writes into its input must not write into the data.

    >>> copy_batch([torch.ones(2), "a"], torch.device("cpu"))
    [tensor([1., 1.]), 'a']
    """

    def copy(tensor: Any) -> Any:  # what is no tensor knows no copy=
        return tensor.to(device, copy=True) if isinstance(tensor, Tensor) else tensor.to(device)

    return map_tensors(batch, copy)


def count_examples(batch: Any) -> int:
    """How many examples a batch has: the length of its first tensor.

    >>> count_examples({"input_ids": torch.zeros(4, 7)}), count_examples((torch.zeros(3, 2), 1))
    (4, 3)
    """
    found: list[Any] = []
    map_tensors(batch, lambda tensor: found.append(getattr(tensor, "data", tensor)))
    counts = (len(t) if t.ndim > 0 else 1 for t in found if isinstance(t, Tensor))
    return next((number for number in counts if number > 0), 0)


def split_batch(batch: Any, rank: int, size: int) -> tuple[Any, float]:
    """What process ``rank`` of ``size`` takes of a batch, and its weight: count / total; None for a
    share of nothing.

    Process r of n takes examples ⌊r b/n⌋ to ⌊(r + 1) b/n⌋ of a batch of b, in order.

    >>> share, weight = split_batch((torch.eye(5), torch.arange(5)), 1, 2)
    >>> share[1].tolist(), weight
    ([2, 3, 4], 0.6)
    """
    if size == 1:
        return batch, 1.0
    total = count_examples(batch)
    if total < 1:
        raise UnlearningError("a batch has no tensor to split between processes")
    start, stop = rank * total // size, (rank + 1) * total // size

    def cut(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or (tensor.ndim > 0 and len(tensor) != total):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UnlearningError(
                f"a batch of {total} examples has a tensor of shape {shape}; to be split between "
                "processes, every tensor must have the examples first"
            )
        return tensor[start:stop] if tensor.ndim > 0 else tensor

    return (map_tensors(batch, cut), (stop - start) / total) if stop > start else (None, 0.0)
