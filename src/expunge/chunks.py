"""A certified vector in pieces that fit in a cache, and the arithmetic on one of them.

The vector is cut wherever that falls in the tensors it stands for. On the CPU the arithmetic is
numpy's, on the same memory as the tensors: after a forward and backward pass a call of it costs
half of one of torch, and a step makes a dozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from expunge.drawing import Array

# One call for a list of tensors; torch's own optimizers rest on it.
copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


_SHORT = 1 << 13


def sum_squares(v: Array) -> float:
    """‖v‖²; in pieces so short that no library starts a team of threads for them.

    >>> sum_squares(np.ones(10_000))
    10000.0
    """
    if v.size <= _SHORT:
        return float(np.dot(v, v))
    pieces = (v[start : start + _SHORT] for start in range(0, v.size, _SHORT))
    return float(sum(np.dot(piece, piece) for piece in pieces))


@dataclass(frozen=True)
class Part:
    """Coordinates [start, stop) of tensor ``index``, and their place in a work vector."""

    index: int
    start: int
    stop: int
    place: Tensor
    whole: bool

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """This part of one of ``tensors``, in the shape of ``place``."""
        tensor = tensors[self.index]
        return tensor if self.whole else tensor.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class Chunk:
    """Coordinates [start, stop) of the vector: ``cells`` there, and the parts of tensors.

    ``views`` are numpy's of both vectors, None where the vector is not on the CPU.
    """

    start: int
    stop: int
    cells: Tensor
    work: Tensor
    parts: tuple[Part, ...]
    views: tuple[Array, Array] | None = field(init=False)
    places: list[Tensor] = field(init=False)
    whole: bool = field(init=False)

    def __post_init__(self) -> None:
        views = (self.cells.numpy(), self.work.numpy()) if self.cells.is_cpu else None
        object.__setattr__(self, "views", views)
        object.__setattr__(self, "places", [part.place for part in self.parts])
        object.__setattr__(self, "whole", all(part.whole for part in self.parts))

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The chunk's coordinates of a list of tensors, in float64.

        A single tensor in the shape of the work vector is that vector, not in parts.
        """
        if len(tensors) == 1 and tensors[0].shape == self.work.shape:
            self.work.copy_(tensors[0])
        else:
            copy_all(self.places, self._select(tensors))
        return self.work

    def scatter(self, tensors: Sequence[Tensor]) -> None:
        """Write the work vector to the tensors, in their own dtypes."""
        copy_all(self._select(tensors), self.places)

    def _select(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.whole and len(self.parts) == len(tensors):
            return list(tensors)
        return [part.of(tensors) for part in self.parts]

    def scale(self, factor: float) -> None:
        """k ← factor · k."""
        if self.views is None:
            self.cells.mul_(factor)
        else:
            np.multiply(self.views[0], factor, out=self.views[0])

    def subtract(self, alpha: float) -> None:
        """k ← k - alpha · work; the work vector is used up."""
        if self.views is None:
            self.cells.add_(self.work, alpha=-alpha)
        else:
            k, work = self.views
            np.subtract(k, np.multiply(work, alpha, out=work), out=k)

    def round(self) -> None:
        """k ← the nearest whole numbers, ties to even."""
        if self.views is None:
            self.cells.round_()
        else:
            np.rint(self.views[0], out=self.views[0])

    def add(self, noise: Array) -> None:
        """k ← k + noise."""
        if self.views is None:
            self.cells.view(-1).add_(torch.from_numpy(noise).to(self.cells.device))
        else:
            k = self.views[0]
            np.add(k, noise.reshape(k.shape), out=k)

    def saturate(self, largest: float) -> None:
        """k ← k, no coordinate beyond ± ``largest``."""
        if self.views is None:
            self.cells.clamp_(-largest, largest)
        else:
            k = self.views[0]
            np.maximum(np.minimum(k, largest, out=k), -largest, out=k)

    def measure(self, grid: float) -> None:
        """work ← grid · k."""
        if self.views is None:
            torch.mul(self.cells, grid, out=self.work)
        else:
            np.multiply(self.views[0], grid, out=self.views[1])


def cut(cells: Tensor, shapes: Sequence[torch.Size], longest: int) -> list[Chunk]:
    """Cut the vector every ``longest`` coordinates, wherever that falls in the tensors.

    >>> chunks = cut(torch.zeros(6, dtype=torch.float64), [torch.Size([2, 2]), torch.Size([2])], 5)
    >>> [(chunk.start, chunk.stop, len(chunk.parts)) for chunk in chunks]
    [(0, 5, 2), (5, 6, 1)]
    """
    work = torch.empty(min(len(cells), longest), dtype=cells.dtype, device=cells.device)
    chunks: list[Chunk] = []
    parts: list[Part] = []
    start = position = 0
    for index, shape in enumerate(shapes):
        a, size = 0, shape.numel()
        while a < size:
            b = min(size, a + start + longest - position)
            place, whole = work[position - start : position - start + b - a], b - a == size
            parts.append(Part(index, a, b, place.view(shape) if whole else place, whole))
            position, a = position + b - a, b
            if position == min(start + longest, len(cells)):
                span = work[: position - start]
                chunks.append(Chunk(start, position, cells[start:position], span, tuple(parts)))
                start, parts = position, []
    return chunks
