"""Batches in memory without per-sample Python, and any iterable of batches over and over.

What a model is given is always a copy: a forward pass that writes into its input must not write
into the data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from expunge.certificates.identifiers import check_ordered
from expunge.errors import InputError, UnlearningError
from expunge.training.randomness import capture_random, restore_random

Augment = Callable[[Tensor, torch.Generator], Tensor]


class Batches:
    """Batches of tensors in memory: one gather per batch, shuffled anew each pass.

    Order and augmentation come from ``generator``; without one the order is that of the tensors.
    ``augment(inputs, generator)`` sees the batch as it is stored, ``prepare(inputs)`` turns it into
    what the model takes (uint8 pixels to normalised floats). A loader like any other, which also
    carries the samples' identifiers.

    >>> batches = Batches(torch.arange(6.0).view(6, 1), torch.arange(6), batch_size=4)
    >>> [len(y) for x, y in batches], len(batches)
    ([4, 2], 2)
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_size: int,
        generator: torch.Generator | None = None,
        augment: Augment | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        drop_last: bool = False,
        ids: Sequence[str] | None = None,
    ) -> None:
        if len(inputs) != len(targets):
            raise InputError.of(
                "number of targets", len(targets), f"{len(inputs)}, as many as inputs"
            )
        check_ordered(ids)
        if ids is not None and len(ids) != len(inputs):
            raise InputError.of("number of ids", len(ids), f"{len(inputs)}, as many as inputs")
        if batch_size != int(batch_size) or batch_size < 1:
            raise InputError.of("batch_size", batch_size, "a whole number >= 1")
        if augment is not None and generator is None:
            raise InputError("augment needs a generator to draw from; give generator too")
        self.inputs, self.targets, self.ids = inputs, targets, ids
        self.batch_size, self.generator = int(batch_size), generator
        self.augment, self.prepare, self.drop_last = augment, prepare, drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(self.inputs), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._draw_order()
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            chosen = slice(start, start + self.batch_size)
            if order is None:
                x, y = self.inputs[chosen].clone(), self.targets[chosen].clone()
            else:
                places = order[chosen]
                x = self.inputs.index_select(0, places)
                y = self.targets.index_select(0, places.to(self.targets.device))
            if self.augment is not None and self.generator is not None:
                x = self.augment(x, self.generator)
            yield x if self.prepare is None else self.prepare(x), y

    def _draw_order(self) -> Tensor | None:
        """The order of a new pass; None is that of the tensors."""
        if self.generator is None:
            return None
        device = self.generator.device
        order = torch.randperm(len(self.inputs), generator=self.generator, device=device)
        return order.to(self.inputs.device)


class Cycle:
    """The batches of a loader, over and over; ``place`` is where it stands, for a checkpoint.

    >>> cycle = Cycle([(1,), (2,)])
    >>> [cycle.take() for _ in range(3)]
    [(1,), (2,), (1,)]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        place: Mapping[str, Tensor] | None = None,
        *,
        keep: bool = False,
    ) -> None:
        self.loader, self.keep, self.taken = loader, keep, 0
        found: object = getattr(loader, "generator", None)
        self._generator = found if isinstance(found, torch.Generator) else None
        self._pass_start: dict[str, Tensor] = {}
        if place is not None:
            now = {name[4:]: t for name, t in place.items() if name.startswith("now.")}
            then = {name[5:]: t for name, t in place.items() if name.startswith("pass.")}
            restore_random(then or now, self._generator)
            self._batches = self._begin()
            for _ in range(int(place["taken"])):
                self.take()
            restore_random(now, self._generator)
        else:
            self._batches = self._begin()

    def take(self) -> Any:
        """The next batch; a new pass when the loader is through, an error if it gives nothing."""
        for batch in self._batches:
            self.taken += 1
            return batch
        if self.taken == 0:
            raise UnlearningError("the loader yields no batches; it must yield at least one")
        if isinstance(getattr(self.loader, "loader", self.loader), Iterator):
            raise UnlearningError(
                f"the loader ended after {self.taken} batches and cannot be read again; "
                "give a loader or list that can, or one batch per step"
            )
        self.taken = 0
        self._batches = self._begin()
        return self.take()

    def place(self) -> dict[str, Tensor]:
        """The random state at the start of this pass and now, and the batches taken in between."""
        place = {f"pass.{name}": tensor for name, tensor in self._pass_start.items()}
        place |= {f"now.{name}": t for name, t in capture_random(self._generator).items()}
        return place | {"taken": torch.tensor(self.taken)}

    def _begin(self) -> Iterator[Any]:
        if self.keep:
            self._pass_start = capture_random(self._generator)
        return iter(self.loader)


def map_tensors(
    batch: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda item: item
) -> Any:
    """The batch with every tensor changed, and by ``other`` every other leaf.

    Tuples, lists and mappings keep their kind.
    """
    match batch:
        case Tensor():
            return change(batch)
        case list() | tuple():
            changed = [map_tensors(item, change, other) for item in cast(Sequence[Any], batch)]
            return changed if isinstance(batch, list) else tuple(changed)
        case Mapping():
            items = cast(Mapping[str, Any], batch).items()
            return {key: map_tensors(value, change, other) for key, value in items}
        case _:
            return other(batch)


def move_batch(batch: Any, device: torch.device) -> Any:
    """A copy of the batch, its tensors on ``device``; what else it holds is copied too."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True, copy=True)

    return map_tensors(batch, move, copy.deepcopy)


def find_tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found


def count_samples(data: object) -> int | None:
    """How many samples a data set or loader holds, where it says so.

    >>> count_samples(Batches(torch.zeros(3, 1), torch.zeros(3), batch_size=2)), count_samples([1])
    (3, 0)
    """
    if isinstance(data, list | tuple):
        return sum(map(count_examples, cast(Sequence[Any], data)))
    held = getattr(data, "inputs", getattr(data, "dataset", None))
    return len(cast(Any, held)) if hasattr(held, "__len__") else None


def gives_all(loader: object) -> bool:
    """Whether a loader gives each sample that it holds once, and nothing of its own decides.

    >>> rows = torch.utils.data.TensorDataset(torch.zeros(3, 1))
    >>> [gives_all(DataLoader(rows, sampler=sampler)) for sampler in (None, [2, 0])]
    [True, False]
    """
    if type(loader) is not DataLoader or cast(Any, loader).batch_size is None:
        return type(loader) is Batches
    given = cast(Any, loader)
    sampler, whole = given.sampler, not isinstance(given.dataset, IterableDataset)
    if type(sampler) is RandomSampler:
        whole = whole and not sampler.replacement and sampler.num_samples == len(given.dataset)
    kinds = (SequentialSampler, RandomSampler)
    return whole and type(sampler) in kinds and sampler.data_source is given.dataset


def find_ids(data: object) -> Any:
    """The identifiers that a loader, its data set or a subset of one carries; None for none.

    >>> held = Batches(torch.zeros(3, 1), torch.zeros(3), batch_size=2, ids=["a", "b", "b"])
    >>> find_ids(torch.utils.data.Subset(held, [2, 0])), find_ids([1])
    (['b', 'a'], None)
    """
    own = getattr(data, "ids", None)
    if own is not None:
        return own
    inner = getattr(data, "dataset", None)
    found = None if inner is None else find_ids(inner)
    if found is None or not isinstance(data, Subset):
        return found
    check_ordered(found)
    listed = found.tolist() if hasattr(found, "tolist") else list(found)
    return [listed[at] for at in cast(Subset[Any], data).indices]


def count_examples(batch: Any) -> int:
    """The length of the first tensor in a batch.

    >>> count_examples({"input_ids": torch.zeros(4, 7)}), count_examples((torch.zeros(3, 2), 1))
    (4, 3)
    """
    counts = (len(tensor) if tensor.ndim > 0 else 1 for tensor in find_tensors(batch))
    return next((count for count in counts if count > 0), 0)
