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
    """(retain, forget): a seeded ``fraction`` is forgotten, or all samples of these ``ids``.

    Each set is in the original order. With one seed a larger fraction contains the smaller one.
    An identifier that would stand in both sets is refused: it would void the certificate.

    >>> samples = Samples(torch.zeros(10, 4), torch.arange(10) % 2, number_ids("a/", np.arange(10)))
    >>> retain, forget = split_forget(samples, fraction=0.2)
    >>> len(retain), len(forget)
    (8, 2)
    >>> len(split_forget(samples, ids=["a/00003"])[1])
    1
    """
    if not 0 < fraction < 1:
        raise InputError.of("fraction", fraction, "a number between 0 and 1, both excluded")
    gone = np.isin(samples.ids, list(ids or ()))
    if ids is not None:
        unknown = [name for name in ids if name not in samples.ids]
        if unknown:
            raise InputError.of("ids", unknown[0], f"known, such as {str(samples.ids[0])!r}")
    count = round(fraction * len(samples)) if ids is None else int(gone.sum())
    if count == 0:
        raise InputError(f"the forget set is empty; it must hold 1 to {len(samples) - 1} samples")
    if count == len(samples):
        raise InputError(
            f"the forget set holds all {len(samples)} samples; at least one must be retained"
        )
    if ids is not None:
        return samples.take(np.flatnonzero(~gone)), samples.take(np.flatnonzero(gone))
    retain, forget = _split(samples, count, seed)
    both = np.intersect1d(retain.ids, forget.ids)
    if len(both):
        raise InputError(
            f"the identifier {str(both[0])!r} stands on samples that are kept and on samples that "
            "are forgotten; all of its samples must go, or none"
        )
    return retain, forget


def split_validation(
    samples: Samples, count: int, seed: int = VALIDATION_SEED
) -> tuple[Samples, Samples]:
    """(train, validation): ``count`` samples set apart by a fixed seed, both in original order."""
    if not 0 <= count < len(samples):
        raise InputError.of("validation", count, f"from 0 to {len(samples) - 1} samples")
    return _split(samples, count, seed)


def _split(samples: Samples, count: int, seed: int) -> tuple[Samples, Samples]:
    """The others, and those with the ``count`` smallest of n raw 64-bit numbers."""
    if isinstance(seed, bool) or not isinstance(cast(object, seed), int) or seed < 0:
        raise InputError.of("seed", seed, "an integer >= 0")
    order = np.argsort(np.random.PCG64(seed).random_raw(len(samples)), kind="stable")
    return samples.take(np.sort(order[count:])), samples.take(np.sort(order[:count]))
