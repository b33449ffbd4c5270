"""The data of a job, split by identifiers into what is kept, what is forgotten, and a test set.

Identifiers are text in Unicode's NFC. One may stand on many samples: it names a person, not a row,
and forgetting it forgets every sample that carries it, in the test set too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from expunge.certificates import identifiers
from expunge.errors import InputError
from expunge.training.batches import Batches, find_ids

LOG = logging.getLogger("expunge")
_KEYS = ("train", "ids", "test", "test_ids", "collate")


Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False)
class Split:
    """Some samples of a data set by their positions; ``tensors`` if they are in memory as two."""

    dataset: Any
    positions: tuple[int, ...]
    ids: tuple[str, ...]
    collate: Collate | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def count_people(self) -> int:
        """How many identifiers stand on these samples."""
        return len(set(self.ids))

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        pair = None if self.collate is not None else find_tensors(self.dataset)
        if pair is None or len(self) == len(pair[0]):
            return pair
        x, y = pair
        places = torch.tensor(self.positions, dtype=torch.int64)
        return x.index_select(0, places.to(x.device)), y.index_select(0, places.to(y.device))

    def first(self, count: int | None) -> Split:
        """At most the first ``count`` samples."""
        if count is None or count >= len(self):
            return self
        return replace(self, positions=self.positions[:count], ids=self.ids[:count])


@dataclass(frozen=True, eq=False)
class Splits:
    """``retain`` and ``forget`` are disjoint and come from ``train``; ``test`` may be missing."""

    retain: Split
    forget: Split
    test: Split | None


def split_data(loaded: object, forget: Iterable[str], forgotten: Iterable[str] = ()) -> Splits:
    """Split what a job's ``load()`` returned by the identifiers to forget.

    ``forgotten`` are identifiers of earlier requests: they are left out wherever they still are.
    Who is forgotten leaves the test set too, where its identifiers are known.

    >>> data = {"train": (torch.eye(5), torch.arange(5)), "ids": ["a", "b", "c", "d", "b"]}
    >>> splits = split_data(data, ["b"], ["d", "gone"])
    >>> splits.retain.ids, splits.forget.ids, splits.test
    (('a', 'c'), ('b', 'b'), None)
    """
    train, ids, test, collate = open_data(loaded)
    wanted = set(identifiers.read_ids(forget))
    leaving = wanted.union(identifiers.read_ids(forgotten))
    unknown = sorted(wanted.difference(ids))
    if unknown:
        raise InputError(
            f"data.forget names {len(unknown)} unknown samples, the first is {unknown[0]!r}; each "
            f"must be one of the identifiers of the {len(ids)} training samples, such as {ids[0]!r}"
        )
    kept = tuple(i for i, name in enumerate(ids) if name not in leaving)
    gone = tuple(i for i, name in enumerate(ids) if name in wanted)
    if not kept or not gone:
        raise InputError(
            f"data.forget names {len(gone)} of the {len(gone) + len(kept)} samples that are left; "
            "at least one must be forgotten and at least one kept"
        )
    retain = Split(train, kept, tuple(ids[i] for i in kept), collate)
    for name, like in identifiers.find_lookalikes(wanted, retain.ids)[:1]:
        LOG.warning(
            "%r is forgotten and %r is kept: if they are one person, name both in data.forget",
            name, like,
        )  # fmt: skip
    return Splits(
        retain=retain,
        forget=Split(train, gone, tuple(ids[i] for i in gone), collate),
        test=None if test is None else _leave_out(test, _find_tested(loaded), leaving, collate),
    )


def _find_tested(loaded: object) -> list[str] | None:
    """The identifiers of the test set, if ``load()`` or the test set itself tells them."""
    data = cast(Mapping[str, Any], loaded)
    given, test = data.get("test_ids"), data["test"]
    if given is None and find_ids(test) is None:
        return None
    return _list_ids(given, test, count_samples(test, "data.load: test"), "test_ids")


def _leave_out(
    test: Any, ids: list[str] | None, leaving: set[str], collate: Collate | None
) -> Split:
    """The test set without the samples of people who are forgotten."""
    count = count_samples(test, "data.load: test")
    if ids is None:
        return Split(test, tuple(range(count)), (), collate)
    stay = tuple(i for i, name in enumerate(ids) if name not in leaving)
    if len(stay) < count:
        LOG.info(
            "%d samples of the test set are of forgotten people and left out", count - len(stay)
        )
    return Split(test, stay, tuple(ids[i] for i in stay), collate)


def open_data(
    loaded: object, name: str = "data.load"
) -> tuple[Any, list[str], Any, Collate | None]:
    """What a job's ``load()`` returned: train, one identifier per sample, test and collate."""
    if not isinstance(loaded, Mapping) or "train" not in loaded:
        raise InputError(
            f"{name} returned a {type(loaded).__name__}; it must return a mapping with the key "
            "'train', and optionally 'ids', 'test', 'test_ids' and 'collate'"
        )
    data = cast(Mapping[str, Any], loaded)
    unknown = sorted(set(map(str, data)).difference(_KEYS))
    if unknown:
        raise InputError(f"{name} returned the key {unknown[0]!r}; it may have {', '.join(_KEYS)}")
    train = data["train"]
    ids = _list_ids(data.get("ids"), train, count_samples(train, f"{name}: train"))
    return train, ids, data.get("test"), data.get("collate")


def find_tensors(dataset: Any) -> tuple[Tensor, Tensor] | None:
    """(inputs, targets) of a data set that is both in memory; None for any other.

    >>> [len(t) for t in find_tensors(TensorDataset(torch.eye(3), torch.arange(3)))]
    [3, 3]
    """
    match dataset:
        case TensorDataset():
            pair: tuple[Any, ...] = dataset.tensors
        case tuple() | list():
            pair = tuple(cast(Sequence[Any], dataset))
        case _:
            pair = getattr(dataset, "inputs", None), getattr(dataset, "targets", None)
    if len(pair) != 2 or not all(isinstance(t, Tensor) and t.ndim > 0 for t in pair):
        return None
    return cast(tuple[Tensor, Tensor], pair)


def make_loader(
    split: Split, batch_size: int, *, seed: int | None = None, workers: int = 0
) -> Batches | DataLoader[Any]:
    """Batches of a split, shuffled anew each pass if ``seed`` is given.

    A last batch of a single sample is left out of shuffled passes: batch normalisation in training
    mode cannot take it.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    drop = seed is not None and len(split) > batch_size and len(split) % batch_size == 1
    if split.tensors is not None:
        x, y = split.tensors
        return Batches(x, y, batch_size=batch_size, generator=generator, drop_last=drop)
    return DataLoader(
        Subset(split.dataset, split.positions),
        batch_size=batch_size,
        shuffle=generator is not None,
        generator=generator,
        num_workers=workers,
        collate_fn=split.collate,
        drop_last=drop,
    )


def count_samples(dataset: Any, what: str) -> int:
    """The number of samples; a data set without one cannot be parted by identifiers."""
    pair = find_tensors(dataset)
    if pair is not None:
        if len(pair[0]) != len(pair[1]):
            raise InputError(
                f"{what} has {len(pair[0])} inputs and {len(pair[1])} targets; "
                "there must be as many of both"
            )
        return len(pair[0])
    indexable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset | Mapping | str) or not indexable:
        raise InputError(
            f"{what} is a {type(dataset).__name__}; it must be a data set with a length and "
            "samples by position, or a pair of tensors"
        )
    return len(dataset)


def _list_ids(given: Any, held: Any, count: int, key: str = "ids") -> list[str]:
    """One identifier per sample; positions if there are none."""
    if given is None:
        given = find_ids(held)
    if given is None:
        return [str(i) for i in range(count)]
    try:
        names = identifiers.read_ids(given, ordered=True)
    except InputError as error:
        raise InputError(f"data.load: {key}{str(error).removeprefix('ids')}") from None
    if len(names) != count:
        valid = f"{count}, as many as samples"
        raise InputError.of(f"data.load: the number of {key}", len(names), valid)
    return list(names)
