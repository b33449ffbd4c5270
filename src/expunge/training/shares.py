"""Every process's share of every batch: the same batches as one process sees, split in order.

Process r of n takes examples ⌊r b/n⌋ to ⌊(r + 1) b/n⌋ of a batch of b. Which examples are in the
batch follows from the loader's seed, the pass and the number of retained examples; whose they are
follows from the rank and the number of processes. Neither can depend on what is forgotten.

The last batch of a pass may have fewer examples than there are processes. A process with none then
runs one that is another's with weight 0, because sharded models need every process in every pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from expunge.errors import InputError, UnlearningError
from expunge.processes.group import Processes
from expunge.training.batches import count_examples, count_samples, map_tensors


@dataclass(frozen=True)
class Share:
    """``count`` of the ``total`` examples of a batch; 0 if ``batch`` only stands in."""

    batch: Any
    count: int
    total: int

    @property
    def weight(self) -> float:
        """The part that this share's mean gradient has in that of the batch."""
        return self.count / self.total if self.total > 0 else 1.0


def locate_share(total: int, rank: int, size: int) -> tuple[int, int, int]:
    """[start, stop) of a rank's examples, and how many of them count.

    >>> [locate_share(7, rank, 2) for rank in range(2)], locate_share(1, 0, 2)
    ([(0, 3, 3), (3, 7, 4)], (0, 1, 0))
    """
    start, stop = rank * total // size, (rank + 1) * total // size
    return (start, stop, stop - start) if stop > start else (0, 1, 0)


def split_batch(batch: Any, rank: int, size: int) -> Share:
    """A rank's share of a whole batch.

    >>> share = split_batch((torch.eye(5), torch.arange(5)), rank=1, size=2)
    >>> share.batch[1].tolist(), share.count, share.total
    ([2, 3, 4], 3, 5)
    """
    total = count_examples(batch)
    if total < 1:
        raise UnlearningError("a batch holds no tensor to split between processes")
    start, stop, count = locate_share(total, rank, size)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim > 0 and len(tensor) != total:
            raise UnlearningError(
                f"a batch of {total} examples holds a tensor of shape {tuple(tensor.shape)}; to be "
                "split between processes, every tensor must have the examples first"
            )
        return tensor[start:stop] if tensor.ndim > 0 else tensor

    return Share(map_tensors(batch, cut), count, total)


def check_shares(loader: object, processes: Processes) -> None:
    """Refuse what cannot be split evenly: a batch size that the processes do not divide."""
    size = getattr(loader, "batch_size", None)
    if isinstance(size, int) and size % processes.size != 0:
        raise InputError.of(
            "batch_size",
            size,
            f"a multiple of {processes.size}, the number of processes, so that every process "
            "takes as many examples",
        )
    count = count_samples(loader)
    if count is not None and count < processes.size:
        raise InputError(
            f"there are {count} retained examples and {processes.size} processes; there must be "
            "at least as many examples as processes"
        )


class Shares:
    """This process's shares of the batches of a loader: a loader like any other."""

    def __init__(self, loader: Iterable[Any], processes: Processes, *, even: bool = True) -> None:
        if even:
            check_shares(loader, processes)
        self.loader, self.processes = loader, processes
        found: object = getattr(loader, "generator", None)
        self.generator = found if isinstance(found, torch.Generator) else None

    def __len__(self) -> int:
        return len(cast(Any, self.loader))

    def __iter__(self) -> Iterator[Share]:
        rank, size = self.processes.rank, self.processes.size
        if size == 1:
            counted = ((batch, count_examples(batch)) for batch in self.loader)
            return (Share(batch, count, count) for batch, count in counted)
        loader = cast(Any, self.loader)
        by_place = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
        if by_place and isinstance(loader.batch_sampler, BatchSampler):
            return self._read_own(loader)
        return (split_batch(batch, rank, size) for batch in self.loader)

    def _read_own(self, loader: DataLoader[Any]) -> Iterator[Share]:
        """Only the samples of this process's share are read."""
        sampler = _OwnBatches(cast(Any, loader.batch_sampler), self.processes)
        own: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=cast(Any, sampler),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
        )
        for batch in own:
            yield Share(batch, *sampler.told.popleft())


class _OwnBatches:
    """The places of a batch sampler that are this process's; ``told`` is (count, total) of each."""

    def __init__(self, batches: Iterable[Sequence[int]], processes: Processes) -> None:
        self.batches, self.processes = batches, processes
        self.told: deque[tuple[int, int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for places in self.batches:
            rank, size = self.processes.rank, self.processes.size
            start, stop, count = locate_share(len(places), rank, size)
            self.told.append((count, len(places)))
            yield list(places)[start:stop]

    def __len__(self) -> int:
        return len(cast(Any, self.batches))
