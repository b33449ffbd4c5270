"""Samples in memory with stable identifiers, and their splits.

An identifier names a sample by its place in the official file (``mnist/train/00042``). Splits
follow the raw PCG64 stream, which NumPy keeps fixed: one seed gives one split everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expunge import Data

Ids = npt.NDArray[np.str_]
Indices = Sequence[int] | npt.NDArray[np.int64]
VALIDATION_SEED = 250_606_985


@dataclass(frozen=True, eq=False)
class Samples:
    """n samples: ``inputs`` [n, ...] (bytes or float features), int64 ``targets``, ``ids``.

    >>> samples = Samples(torch.zeros(3, 4), torch.tensor([0, 1, 1]), number_ids("toy/", 3))
    >>> len(samples), samples.take([2, 0]).ids.tolist()
    (3, ['toy/00002', 'toy/00000'])
    """

    inputs: Tensor
    targets: Tensor
    ids: Ids

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    @property
    def data(self) -> Data:
        """The samples as expunge takes them."""
        return Data(self.pair, ids=self.ids.tolist(), exact_names=True)

    def take(self, indices: Indices) -> Samples:
        """The samples at these positions, in this order."""
        places = torch.as_tensor(indices, dtype=torch.int64)
        return Samples(self.inputs[places], self.targets[places], self.ids[places.numpy()])


def number_ids(prefix: str, count: int) -> Ids:
    """``prefix`` and five digits, of every position."""
    return np.array([f"{prefix}{position:05}" for position in range(count)], dtype=np.str_)


def order_names(ids: Ids, seed: int) -> Ids:
    """Every identifier once, in an order that the seed fixes.

    >>> order_names(np.array(["b", "a", "b", "c"]), seed=0).tolist()
    ['c', 'b', 'a']
    """
    names = np.unique(ids)
    return names[np.argsort(np.random.PCG64(seed).random_raw(len(names)), kind="stable")]


def take_names(samples: Samples, names: Ids) -> Samples:
    """All samples of these identifiers, in the original order."""
    return samples.take(np.flatnonzero(np.isin(samples.ids, names)))


def split_validation(
    samples: Samples, count: int, seed: int = VALIDATION_SEED
) -> tuple[Samples, Samples]:
    """(rest, ``count`` of them chosen by a fixed seed), both in the original order."""
    order = np.argsort(np.random.PCG64(seed).random_raw(len(samples)), kind="stable")
    chosen = np.zeros(len(samples), dtype=np.bool_)
    chosen[order[:count]] = True
    return samples.take(np.flatnonzero(~chosen)), samples.take(np.flatnonzero(chosen))
