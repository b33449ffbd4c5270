"""Batches of any examples, pass after pass, in an order that a seed decides."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from expunge.data.examples import find_kind, list_columns, map_columns
from expunge.errors import InputError, UnlearningError
from expunge.networks.randomness import derive_seed

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
        check_batch_size(batch_size)
        self.batch_size, self.seed, self.collate, self.loader = batch_size, seed, collate, loader
        self.kind = find_kind(examples)
        self.shuffle = shuffle and self.kind != "stream"
        if collate is None and loader is None:  # else rows stay of the kind they are
            if self.kind == "table" and examples.format["type"] is None:
                examples = examples.with_format("torch")
            if self.kind == "columns":
                examples = map_columns(getattr(examples, "tensors", examples), _to_column)
        self.examples = examples

    def __len__(self) -> int:
        if self.loader is not None or self.kind == "stream":
            return self._measured
        return len(self._cut(range(self._rows)))

    @functools.cached_property
    def _rows(self) -> int:
        columns = self.kind == "columns"
        return len(list_columns(self.examples)[0] if columns else self.examples)

    @property
    def _measured(self) -> int:
        """Batches of a pass that nobody can know without reading it."""
        if not hasattr(self, "_length"):
            made = self.loader(self.examples, self.seed) if self.loader is not None else None
            sized = made is not None and hasattr(made, "__len__")
            self._length = len(cast(Any, made)) if sized else sum(1 for _ in self.read(0))
        return self._length

    def read(self, number: int) -> Iterator[Any]:
        """The batches of pass ``number``."""
        seed = derive_seed("pass", self.seed, number)
        if self.loader is not None:
            return iter(self.loader(self.examples, seed))
        if self.kind in ("columns", "frame") and self.collate is None:
            return self._gather(seed)
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

    def _cut(self, order: Any) -> list[Any]:
        """Batches of places; a last one alone joins the batch before: BatchNorm takes no single."""
        size, starts = self.batch_size, list(range(0, len(order), self.batch_size))
        if len(order) % size == 1 and len(starts) > 1 and size > 1:
            starts.pop()
        return [order[a:b] for a, b in itertools.pairwise([*starts, len(order)])]

    def _gather(self, seed: int) -> Iterator[Any]:
        """One gather per batch of what lies in memory: always a copy."""
        for places in self._cut(self._draw(seed)):
            yield map_columns(self.examples, lambda c, p=places: _take(c, p))

    def _draw(self, seed: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(self._rows)
        return torch.randperm(self._rows, generator=torch.Generator().manual_seed(seed))

    def _load(self, seed: int) -> Iterable[Any]:
        examples: Any = self.examples
        if self.kind == "frame":
            examples = [examples.iloc[r] for r in range(self._rows)]
        if self.kind == "columns":
            columns = getattr(examples, "tensors", examples)
            examples = [map_columns(columns, lambda c, r=r: c[r]) for r in range(self._rows)]
        if self.kind == "stream":
            return DataLoader(examples, batch_size=self.batch_size, collate_fn=self.collate)
        places = [batch.tolist() for batch in self._cut(self._draw(seed))]
        return DataLoader(examples, batch_sampler=places, collate_fn=self.collate)


def check_batch_size(batch_size: object) -> None:
    """Refuse what is no whole number above 0."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError.of("batch_size", batch_size, "a whole number >= 1")


def _to_column(column: Any) -> Any:
    """A column as a tensor where it is numbers; float64 of NumPy is the default float of torch."""
    if isinstance(column, Tensor):
        return column
    if isinstance(column, str | bytes) or not hasattr(column, "__len__"):
        raise InputError.of("examples", type(column).__name__, "columns of tensors, arrays, lists")
    array = np.asarray(column) if _is_numeric(column) else None
    if array is None:
        return column
    made = torch.from_numpy(np.ascontiguousarray(array))
    return made.to(torch.get_default_dtype()) if array.dtype == np.float64 else made


def _is_numeric(column: Any) -> bool:
    if hasattr(column, "dtype"):
        return np.dtype(column.dtype).kind in "biuf"
    return all(isinstance(item, int | float) for item in column)


def _take(column: Any, places: Tensor) -> Any:
    if isinstance(column, Tensor):
        return column.index_select(0, places.to(column.device))
    if hasattr(column, "iloc"):
        return column.iloc[places.numpy()]
    return [column[place] for place in places.tolist()]


def map_tensors(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """The batch with every tensor changed; tuples, lists and mappings keep their kind."""
    match batch:
        case Tensor():
            return change(batch)
        case list() | tuple():
            changed = [map_tensors(item, change) for item in cast(Sequence[Any], batch)]
            if hasattr(cast(Any, batch), "_fields"):
                return type(batch)(*changed)
            return changed if isinstance(batch, list) else tuple(changed)
        case Mapping():
            items = cast(Mapping[str, Any], batch).items()
            return {key: map_tensors(value, change) for key, value in items}
        case _ if hasattr(batch, "to") and not isinstance(batch, type):
            return change(batch)  # packed sequences, encodings of tokenizers
        case _:
            return batch


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``."""
    return map_tensors(batch, lambda tensor: tensor.to(device))


def list_batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    found: list[Tensor] = []
    map_tensors(batch, lambda t: found.append(getattr(t, "data", t)))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance]


def count_examples(batch: Any) -> int:
    """How many examples a batch has: the length of its first tensor.

    >>> count_examples({"input_ids": torch.zeros(4, 7)}), count_examples((torch.zeros(3, 2), 1))
    (4, 3)
    """
    counts = (len(tensor) if tensor.ndim > 0 else 1 for tensor in list_batch_tensors(batch))
    return next((count for count in counts if count > 0), 0)
