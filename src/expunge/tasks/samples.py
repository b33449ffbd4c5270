"""Samples in memory with stable identifiers, and the split into what is kept and what is forgotten.

An identifier names a sample by its place in the official file (``mnist/train/00042``), so it stays
the same whatever split the sample falls in. Splits follow the raw PCG64 stream, which NumPy keeps
fixed across versions: the same seed gives the same split everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expunge.certificates.identifiers import read_ids
from expunge.errors import InputError

Ids = npt.NDArray[np.str_]
Indices = Sequence[int] | npt.NDArray[np.int64] | Tensor

VALIDATION_SEED = 250_606_985


@dataclass(frozen=True, eq=False)
class Samples:
    """n samples: ``inputs`` [n, ...] (uint8 pixels or float features), int64 ``targets``, ``ids``.

    It is also a map-style data set: ``samples[i]`` is the pair (input, target).

    >>> samples = Samples(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1]),
    ...                   number_ids("toy/train/", np.arange(3)))
    >>> len(samples), samples.take([2, 0]).ids.tolist()
    (3, ['toy/train/00002', 'toy/train/00000'])
    """

    inputs: Tensor
    targets: Tensor
    ids: Ids

    def __post_init__(self) -> None:
        counts = (len(self.inputs), len(self.targets), len(self.ids))
        if len(set(counts)) != 1:
            raise InputError.of("number of (inputs, targets, ids)", counts, "three equal numbers")
        if self.targets.dtype != torch.int64 or self.targets.ndim != 1:
            raise InputError.of("targets", self.targets.dtype, "one int64 class per sample")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def take(self, indices: Indices) -> Samples:
        """The samples at these positions, in this order."""
        places = torch.as_tensor(indices, dtype=torch.int64)
        return Samples(
            self.inputs.index_select(0, places.to(self.inputs.device)),
            self.targets.index_select(0, places.to(self.targets.device)),
            self.ids[places.cpu().numpy()],
        )


@dataclass(frozen=True, eq=False)
class Task:
    """Three disjoint sets of samples, the class names, and published normalisation constants."""

    name: str
    train: Samples
    validation: Samples
    test: Samples
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, inputs: Tensor) -> Tensor:
        """A batch of this task's raw inputs as the float32 input of a network."""
        return normalise(inputs, self.mean, self.std)


def normalise(inputs: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(p/255 - mean_c) / std_c for bytes p of channel c, (x - mean_c) / std_c for floats; float32.

    >>> normalise(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), (0.5,), (0.5,)).tolist()
    [[[[-1.0, 1.0]]]]
    """
    channels = inputs.shape[1] if inputs.ndim > 1 else 1
    if len(mean) != len(std) or len(mean) not in (1, channels):
        raise InputError.of(
            "lengths of (mean, std)", (len(mean), len(std)), f"both 1 or both {channels}"
        )
    if min(std) <= 0:
        raise InputError.of("std", tuple(std), "numbers > 0")
    unit = 255.0 if inputs.dtype == torch.uint8 else 1.0
    shape = (-1,) + (1,) * max(inputs.ndim - 2, 0)
    scale = torch.tensor([1 / (unit * s) for s in std], device=inputs.device).view(shape)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=inputs.device)
    return inputs.to(torch.float32, copy=True).mul_(scale).add_(shift.view(shape))


def number_ids(prefix: str, positions: npt.NDArray[np.int64], width: int = 5) -> Ids:
    """Identifiers ``prefix`` + position with leading zeros.

    >>> number_ids("mnist/train/", np.array([42, 59_999])).tolist()
    ['mnist/train/00042', 'mnist/train/59999']
    """
    if len(positions) and not 0 <= positions.min() <= positions.max() < 10**width:
        raise InputError.of("largest position", int(positions.max()), f"below {10**width}")
    return np.array([f"{prefix}{position:0{width}}" for position in positions], dtype=np.str_)


def split_forget(
    samples: Samples,
    fraction: float = 0.1,
    seed: int = 0,
    *,
    ids: Sequence[str] | None = None,
) -> tuple[Samples, Samples]:
    """(retain, forget): a seeded ``fraction`` of the people, or these ``ids``, with all samples.

    An identifier names a person, who is kept or forgotten as a whole. Each set is in the original
    order. With one seed a larger fraction contains the smaller one.

    >>> samples = Samples(torch.zeros(10, 4), torch.arange(10) % 2, number_ids("a/", np.arange(10)))
    >>> retain, forget = split_forget(samples, fraction=0.2)
    >>> len(retain), len(forget)
    (8, 2)
    >>> twice = Samples(torch.zeros(10, 4), torch.arange(10) % 2, samples.ids[np.arange(10) // 2])
    >>> retain, forget = split_forget(twice, fraction=0.2)
    >>> len(set(forget.ids)), len(forget), len(split_forget(twice, ids=["a/00003"])[1])
    (1, 2, 2)
    """
    if not 0 < fraction < 1:
        raise InputError.of("fraction", fraction, "a number between 0 and 1, both excluded")
    names = np.array(read_ids(samples.ids, ordered=True), dtype=np.str_)
    people, first = np.unique(names, return_index=True)
    people = people[np.argsort(first)]
    if len(people) < 2:
        raise InputError(f"all {len(samples)} samples are of one person, {str(people[0])!r}")
    if ids is not None:
        chosen, known = list(read_ids(ids)), set(people.tolist())
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise InputError.of("ids", unknown[0], f"known, such as {str(people[0])!r}")
    else:
        chosen = people[_choose(len(people), round(fraction * len(people)), seed)]
    gone = np.isin(names, chosen)
    if not gone.any():
        raise InputError(
            f"the forget set is empty; it must hold 1 to {len(people) - 1} of the people"
        )
    if gone.all():
        raise InputError(
            f"the forget set holds all {len(samples)} samples; at least one must be retained"
        )
    return samples.take(np.flatnonzero(~gone)), samples.take(np.flatnonzero(gone))


def split_validation(
    samples: Samples, count: int, seed: int = VALIDATION_SEED
) -> tuple[Samples, Samples]:
    """(train, validation): ``count`` samples set apart by a fixed seed, both in original order.

    Nobody may stand in both: who is forgotten must not have chosen the model either.
    """
    if not 0 <= count < len(samples):
        raise InputError.of("validation", count, f"from 0 to {len(samples) - 1} samples")
    chosen = np.zeros(len(samples), dtype=np.bool_)
    chosen[_choose(len(samples), count, seed)] = True
    train, held = samples.take(np.flatnonzero(~chosen)), samples.take(np.flatnonzero(chosen))
    both = np.intersect1d(train.ids, held.ids)
    if len(both):
        raise InputError(
            f"the identifier {str(both[0])!r} stands on samples for training and for validation; "
            "set people apart, not samples"
        )
    return train, held


def _choose(total: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """The places, in order, of the ``count`` smallest of so many raw 64-bit numbers."""
    if isinstance(seed, bool) or not isinstance(cast(object, seed), int) or seed < 0:
        raise InputError.of("seed", seed, "an integer >= 0")
    order = np.argsort(np.random.PCG64(seed).random_raw(total), kind="stable")
    return np.sort(order[:count])
