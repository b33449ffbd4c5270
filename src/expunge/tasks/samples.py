"""Samples in memory with stable identifiers, and the split into what is kept and what is forgotten.

An identifier names a sample by its place in the official file (``mnist/train/00042``), so it stays
the same whatever split the sample falls in. Splits follow the raw PCG64 stream, which NumPy keeps
fixed across versions: the same seed gives the same split everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expunge.errors import InputError

Ids = npt.NDArray[np.str_]
Indices = Sequence[int] | npt.NDArray[np.int64] | Tensor

FORGET_FRACTION = 0.1
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

    def normalised(self, mean: Sequence[float], std: Sequence[float]) -> Samples:
        """The same samples with float32 inputs; ``normalise`` does it batch by batch instead."""
        return Samples(normalise(self.inputs, mean, std), self.targets, self.ids)

    def to(self, device: torch.device | str) -> Samples:
        """The same samples with both tensors on ``device``."""
        return Samples(self.inputs.to(device), self.targets.to(device), self.ids)


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
    scale, shift = _scale_and_shift(tuple(mean), tuple(std), unit, inputs.ndim, inputs.device)
    return inputs.to(torch.float32, copy=True).mul_(scale).add_(shift)


@lru_cache(maxsize=32)
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], unit: float, ndim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """1/(unit · std) and -mean/std, shaped to go with the channels."""
    shape = (-1,) + (1,) * max(ndim - 2, 0)
    with torch.inference_mode(False):
        scale = torch.tensor([1 / (unit * s) for s in std], device=device)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)
        return scale.view(shape), shift.view(shape)


def number_ids(prefix: str, positions: npt.NDArray[np.int64], width: int = 5) -> Ids:
    """Identifiers ``prefix`` + position with leading zeros, built column by column.

    >>> number_ids("mnist/train/", np.array([42, 59_999])).tolist()
    ['mnist/train/00042', 'mnist/train/59999']
    """
    if len(positions) and not 0 <= positions.min() <= positions.max() < 10**width:
        raise InputError.of("largest position", int(positions.max()), f"below {10**width}")
    digits = positions[:, None] // 10 ** np.arange(width)[::-1] % 10
    codes = np.empty((len(positions), len(prefix) + width), dtype=np.uint32)
    codes[:, : len(prefix)] = np.array([ord(letter) for letter in prefix], dtype=np.uint32)
    codes[:, len(prefix) :] = digits + ord("0")
    return codes.view(f"=U{codes.shape[1]}")[:, 0]


def split_forget(
    samples: Samples,
    fraction: float | None = None,
    seed: int = 0,
    *,
    ids: Iterable[str] | None = None,
    classes: Iterable[int] | None = None,
) -> tuple[Samples, Samples]:
    """(retain, forget): disjoint, together all samples, each in the original order.

    What is forgotten is a seeded ``fraction`` (0.1 unless told), or all samples with these ``ids``
    (one identifier may stand on many), or all samples of these ``classes``. With one seed a larger
    fraction contains the smaller one.

    >>> samples = Samples(torch.zeros(10, 4), torch.arange(10) % 2, number_ids("a/", np.arange(10)))
    >>> retain, forget = split_forget(samples, ids=["a/00003"])
    >>> len(retain), forget.targets.tolist()
    (9, [1])
    >>> split_forget(samples, classes=[7])
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: classes names 7; it must be among the classes present, from 0 to 1
    """
    if sum(given is not None for given in (fraction, ids, classes)) > 1:
        raise InputError("more than one of fraction, ids and classes is given; only one may be")
    if ids is not None:
        chosen = _mark_ids(samples, ids)
    elif classes is not None:
        chosen = _mark_classes(samples, classes)
    else:
        chosen = _mark_fraction(
            len(samples), FORGET_FRACTION if fraction is None else fraction, seed
        )
    if not chosen.any():
        raise InputError(f"the forget set is empty; it must hold 1 to {len(samples) - 1} samples")
    if chosen.all():
        raise InputError(
            f"the forget set holds all {len(samples)} samples; at least one must be retained"
        )
    _check_apart(samples.ids, chosen)
    return samples.take(np.flatnonzero(~chosen)), samples.take(np.flatnonzero(chosen))


def split_validation(
    samples: Samples, count: int, seed: int = VALIDATION_SEED
) -> tuple[Samples, Samples]:
    """(train, validation): ``count`` samples set apart by a fixed seed, both in original order."""
    if not 0 <= count < len(samples):
        raise InputError.of("validation", count, f"from 0 to {len(samples) - 1} samples")
    chosen = np.zeros(len(samples), dtype=bool)
    chosen[_shuffle(len(samples), seed)[:count]] = True
    return samples.take(np.flatnonzero(~chosen)), samples.take(np.flatnonzero(chosen))


def _shuffle(count: int, seed: int) -> npt.NDArray[np.int64]:
    """A permutation of 0 … count-1: the order of ``count`` raw 64-bit numbers."""
    if isinstance(seed, bool) or not isinstance(cast(object, seed), int) or seed < 0:
        raise InputError.of("seed", seed, "an integer >= 0")
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


def _mark_fraction(total: int, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    if not 0 < fraction < 1:
        raise InputError.of("fraction", fraction, "a number between 0 and 1, both excluded")
    chosen = np.zeros(total, dtype=bool)
    chosen[_shuffle(total, seed)[: round(fraction * total)]] = True
    return chosen


def _mark_ids(samples: Samples, ids: Iterable[str]) -> npt.NDArray[np.bool_]:
    if isinstance(ids, str):
        raise InputError.of("ids", ids, "a list of identifiers")
    names = list(ids)
    for name in names:
        if not isinstance(cast(object, name), str) or "\0" in name:
            raise InputError.of("an identifier in ids", name, "a text without NUL")
    wanted, counts = np.unique(np.array(names, dtype=np.str_), return_counts=True)
    if (counts > 1).any():
        raise InputError(
            f"ids names {str(wanted[counts > 1][0])!r} more than once; each may be named once"
        )
    unknown = wanted[~np.isin(wanted, samples.ids)]
    if len(unknown):
        raise InputError(
            f"ids names {len(unknown)} unknown samples, the first is {str(unknown[0])!r}; "
            f"each must be one of the {len(samples)} identifiers, such as {str(samples.ids[0])!r}"
        )
    return np.isin(samples.ids, wanted)


def _mark_classes(samples: Samples, classes: Iterable[int]) -> npt.NDArray[np.bool_]:
    targets = samples.targets.cpu().numpy()
    present = np.unique(targets)
    wanted = list(classes)
    for number in wanted:
        if isinstance(number, bool) or number not in present:
            raise InputError(
                f"classes names {number!r}; it must be among the classes present, "
                f"from {present[0]} to {present[-1]}"
            )
    if len(set(wanted)) != len(wanted):
        raise InputError.of("classes", wanted, "each class once")
    return np.isin(targets, wanted)


def _check_apart(ids: Ids, chosen: npt.NDArray[np.bool_]) -> None:
    """A sample that stays under a forgotten identifier would void the certificate."""
    both = np.intersect1d(ids[chosen], ids[~chosen])
    if len(both):
        raise InputError(
            f"the identifier {str(both[0])!r} stands on samples that are kept and on samples that "
            "are forgotten; name it in ids, then all of its samples go"
        )
