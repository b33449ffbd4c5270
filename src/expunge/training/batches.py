"""Batches in memory without per-sample Python, and any iterable of batches turned into a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

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

    def __iter__(self) -> Pass:
        return Pass(self)

    def draw_order(self) -> Tensor | None:
        """The order of a new pass; None is that of the tensors."""
        if self.generator is None:
            return None
        device = self.generator.device
        order = torch.randperm(len(self.inputs), generator=self.generator, device=device)
        return order.to(self.inputs.device)

    def fetch(self, order: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """The batch that starts at place ``start`` of the order: gathered and augmented."""
        stop = start + self.batch_size
        if order is None:
            x, y = self.inputs[start:stop], self.targets[start:stop]
        else:
            chosen = order[start:stop]
            x = self.inputs.index_select(0, chosen)
            y = self.targets.index_select(0, chosen.to(self.targets.device))
        if self.augment is not None and self.generator is not None:
            x = self.augment(x, self.generator)
        return x, y

    def fetch_several(
        self, order: Tensor | None, start: int, count: int
    ) -> list[tuple[Tensor, Tensor]]:
        """``count`` whole batches from there on, in one gather if nothing is augmented."""
        size = self.batch_size
        if order is None or self.augment is not None:
            return [self.fetch(order, start + i * size) for i in range(count)]
        chosen = order[start : start + count * size]
        x = self.inputs.index_select(0, chosen).split(size)
        y = self.targets.index_select(0, chosen.to(self.targets.device)).split(size)
        return list(zip(x, y, strict=True))

    def make_ready(self, inputs: Tensor) -> Tensor:
        """A fetched batch as the model takes it."""
        return inputs if self.prepare is None else self.prepare(inputs)


class Pass(Iterator[tuple[Tensor, Tensor]]):
    """One pass over batches in memory, in an order of its own from the first batch on.

    >>> one = iter(Batches(torch.arange(7.0).view(7, 1), torch.arange(7), batch_size=2))
    >>> [y.tolist() for _, y in one.take(2)], one.take(2), [y.tolist() for _, y in one]
    ([[0, 1], [2, 3]], [], [[4, 5], [6]])
    """

    def __init__(self, batches: Batches) -> None:
        self._batches, self._start = batches, 0
        self._stop = len(batches) * batches.batch_size
        self._order: Tensor | None = None

    @property
    def ended(self) -> bool:
        """Whether every batch was taken."""
        return self._start >= self._stop

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.ended:
            raise StopIteration
        x, y = self._batches.fetch(self._find_order(), self._start)
        self._start += self._batches.batch_size
        return self._batches.make_ready(x), y

    def take(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """The next ``count`` batches in one gather, not made ready yet; nothing if so many whole
        ones are not left.
        """
        stop = self._start + count * self._batches.batch_size
        if stop > len(self._batches.inputs):
            return []
        found = self._batches.fetch_several(self._find_order(), self._start, count)
        self._start = stop
        return found

    def _find_order(self) -> Tensor | None:
        if self._start == 0:
            self._order = self._batches.draw_order()
        return self._order


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
        if isinstance(self.loader, Iterator):
            raise UnlearningError(
                f"the loader ended after {self.taken} batches and cannot be read again; "
                "give a loader or list that can, or one batch per step"
            )
        self._begin_again()
        return self.take()

    def take_several(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """The next ``count`` batches in memory, not made ready yet; nothing where ``Pass`` has
        nothing."""
        if not isinstance(self._batches, Pass):
            return []
        if self._batches.ended and self.taken > 0:
            self._begin_again()
        found = self._batches.take(count)
        self.taken += len(found)
        return found

    def place(self) -> dict[str, Tensor]:
        """The random state at the start of this pass and now, and the batches taken in between."""
        place = {f"pass.{name}": tensor for name, tensor in self._pass_start.items()}
        place |= {f"now.{name}": t for name, t in capture_random(self._generator).items()}
        return place | {"taken": torch.tensor(self.taken)}

    def _begin_again(self) -> None:
        self.taken = 0
        self._batches = self._begin()

    def _begin(self) -> Iterator[Any]:
        if self.keep:
            self._pass_start = capture_random(self._generator)
        return iter(self.loader)


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on ``device``; tuples, lists and mappings keep their kind."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple | list):
        moved = [move_batch(item, device) for item in cast(Sequence[Any], batch)]
        return moved if isinstance(batch, list) else tuple(moved)
    if isinstance(batch, Mapping):
        items = cast(Mapping[str, Any], batch).items()
        return {key: move_batch(value, device) for key, value in items}
    return batch


def count_examples(batch: Any) -> int:
    """The length of the first tensor in a batch.

    >>> count_examples({"input_ids": torch.zeros(4, 7)}), count_examples((torch.zeros(3, 2), 1))
    (4, 3)
    """
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim > 0 else 1
    if isinstance(batch, tuple | list):
        parts: Iterable[Any] = cast(Sequence[Any], batch)
    elif isinstance(batch, Mapping):
        parts = cast(Mapping[str, Any], batch).values()
    else:
        return 0
    return next((n for n in map(count_examples, parts) if n > 0), 0)
