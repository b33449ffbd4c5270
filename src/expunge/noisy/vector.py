"""The certified parameters of a module as one vector, and the few operations a run needs.

The vector is the module's trainable parameters in ``named_parameters`` order, tied weights once.
:class:`GridVector` keeps it as float64 whole numbers ``k`` with ``x = centre + grid · k`` and lets
the module's parameters be that value rounded to their own dtype. :class:`FloatVector` is the run
without noise: no grid, plain floating point. Everything a run does to the vector goes through
``start``, ``gradient_norm``, ``clip_factor``, ``step`` and ``state``/``load``, and everything that
crosses coordinates through a sum of squares, so that a replicated or sharded vector can stand in,
or the stack of many vectors that an audit runs (``expunge.auditing.trials``).

Norms are float64 sums with a proven margin (:func:`clip_factor`): after clipping, the true norm
never exceeds the bound in exact arithmetic. Memory: ``k`` is two float32 vectors; all else is
worked through in chunks.

The vector is cut into chunks that fit in a cache, wherever that falls in the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from expunge.accounting.precision import LARGEST_CELL, norm_margin
from expunge.noisy.noise import Array, NoiseStream, StepNoise

CHUNK = 1 << 15  # as long as torch works on in one thread
LOST = 2.0**-500  # a larger coordinate has a square that is not lost, even where denormals are
_LARGEST = 1e308


class Update(NamedTuple):
    """One step of the recipe, as the vector sees it.

    ``x - c ← Π_radius(decay · (x - c) - rate · gradient) + N(0, noise_std² I)``; ``rate`` includes
    the clip factor, 0 drops the gradient; ``learning_rate`` and ``weight_decay`` are what plain
    SGD, which has no other clip, is written with.
    """

    learning_rate: float
    weight_decay: float
    clip: float
    radius: float
    noise_std: float
    number: int

    @property
    def decay(self) -> float:
        return 1.0 - self.learning_rate * self.weight_decay

    @property
    def rate(self) -> float:
        return self.learning_rate * self.clip


class Norms(NamedTuple):
    """‖x - c‖ after the clips and before the noise, and ‖ξ‖ as it was drawn."""

    model: float
    noise: float


def clip_factor(norm: float, bound: float, size: int) -> float:
    """min(1, bound/norm), rounded so that the true norm of factor · v never exceeds ``bound``.

    ``norm`` is the float64 norm of ``size`` floats; it errs by a relative ``norm_margin`` and by
    underflow at most. A norm that is not finite gives 0.

    >>> clip_factor(4.0, 1.0, 10) <= 0.25, clip_factor(0.5, 1.0, 10)
    (True, 1.0)
    """
    if not math.isfinite(norm):
        return 0.0
    largest = norm * (1 + norm_margin(size)) + math.sqrt(size) * LOST
    return 1.0 if largest <= bound else bound / largest * (1 - 2.0**-50)


def round_cells(cells: Tensor, towards: Literal["zero", "nearest"] = "nearest") -> Tensor:
    """To whole numbers, in place: the nearest (ties to even), or towards zero; by numpy on a CPU.

    torch hands ``round`` and ``trunc`` to a threaded library that starts a team of threads however
    short the vector is: on a busy machine that is a thousand times slower than the rounding.

    >>> round_cells(torch.tensor([0.5, 1.5, -0.4], dtype=torch.float64), "zero")
    tensor([0., 1., -0.], dtype=torch.float64)
    """
    if cells.device.type != "cpu":
        return cells.trunc_() if towards == "zero" else cells.round_()
    view = cells.numpy()
    (np.trunc if towards == "zero" else np.rint)(view, out=view)
    return cells


class GridVector:
    """x = centre + grid · k: the certified vector of a noisy run."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        centre: Sequence[Tensor] | None,
        grid: float,
        noise: StepNoise | None = None,
    ) -> None:
        self.parameters = [p.detach() for p in parameters]
        self.grid, self.noise = grid, noise
        self.device = self.parameters[0].device
        self.size = sum(p.numel() for p in self.parameters)
        self._centre = None if centre is None else [c.detach() for c in centre]
        self._cells = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        self._chunks = cut(self._cells, [p.shape for p in self.parameters], CHUNK)

    def start(self, radius: float) -> float:
        """x_0 = Π_radius(x̂), then rounded towards the centre; returns ‖x̂ - c‖."""
        squares: list[Any] = []
        for chunk in self._chunks:
            k = chunk.cells.copy_(chunk.gather(self.parameters))
            if self._centre is not None:
                k.sub_(chunk.gather(self._centre))
            squares.append(self._square(k))
        norm = self._root(squares)
        factor = self.clip_factor(norm, radius) / self.grid
        for chunk in self._chunks:
            round_cells(chunk.cells.mul_(factor), "zero").clamp_(-LARGEST_CELL, LARGEST_CELL)
            self._write(chunk)
        return norm

    def gradient_norm(self, gradients: Sequence[Tensor]) -> float:
        """‖g‖ in float64; not finite if and only if some g_i is not (or overflows float64)."""
        squares = [self._square(chunk.gather(gradients)) for chunk in self._chunks]
        return self._root(squares)

    def clip_factor(self, norm: float, bound: float) -> float:
        """What brings a vector of this norm and of this length within ``bound``."""
        return clip_factor(norm, bound, self.size)

    def make_noise(self, stream: NoiseStream, levels: Sequence[float]) -> StepNoise:
        """The noise of this vector's positions; ``levels`` in cells."""
        return StepNoise(stream, levels, min(self.size, CHUNK))

    def step(self, gradients: Sequence[Tensor], update: Update) -> Norms:
        """k ← round(Π(ρ k - (γ/g) · clip · g)) + round(ξ/g), saturated; then the parameters."""
        alpha, decay = update.rate / self.grid, update.decay
        projected = update.radius < math.inf
        squares: list[Any] = []
        noise = 0.0
        for chunk in self._chunks:
            if decay != 1:
                chunk.cells.mul_(decay)
            self._descend(chunk, gradients, alpha)
            if not projected:
                round_cells(chunk.cells)
            squares.append(self._square(chunk.cells))
            if not projected:
                noise += self._finish(chunk, update, squares[-1])
        norm, factor = self._root(squares) * self.grid, 1.0
        if projected:
            factor = self.clip_factor(norm, update.radius)
            for chunk in self._chunks:
                self._shrink(chunk.cells, factor)
                noise += self._finish(chunk, update, math.inf)
        return self._tell(norm, factor, noise)

    def perturb(self, number: int, noise_std: float) -> Norms:
        """x ← x + N(0, σ² I): the start noise, or output perturbation's one draw."""
        return self.step([], Update(0.0, 0.0, 0.0, math.inf, noise_std, number))

    def write(self) -> None:
        """The parameters of the present cells."""
        for chunk in self._chunks:
            self._write(chunk)

    def state(self) -> dict[str, Tensor]:
        """All that a run must keep to go on from here."""
        return {"cells": self._cells}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state``."""
        self._cells.copy_(state["cells"])
        self.write()

    def _square(self, v: Tensor) -> Any:
        """‖v‖² of a chunk: a number on the CPU, else a tensor."""
        return sum_squares(v.numpy()) if v.is_cpu else torch.dot(v, v)

    def _root(self, squares: Sequence[Any]) -> float:
        """The root of a sum of sums of squares; one transfer from the device."""
        return math.sqrt(float(sum(squares)))

    def _descend(self, chunk: Chunk, gradients: Sequence[Tensor], alpha: float) -> None:
        if alpha > 0:
            chunk.cells.sub_(chunk.gather(gradients).mul_(alpha))

    def _shrink(self, cells: Tensor, factor: float) -> None:
        """Towards the centre; a vector whose norm overflowed goes to the centre itself."""
        _ = round_cells(cells.mul_(factor), "zero") if factor > 0 else cells.zero_()

    def _tell(self, norm: float, factor: float, noise: float) -> Norms:
        norm = norm * factor if factor > 0 else 0.0
        return Norms(min(norm, _LARGEST), math.sqrt(noise) * self.grid)

    def _finish(self, chunk: Chunk, update: Update, square: Any) -> float:
        """Add the noise, saturate, write the parameters; returns ‖noise‖² in cells.

        ``square`` is ‖k‖² before the noise: no coordinate is beyond ‖k‖ + ‖noise‖.
        """
        noise = 0.0
        if update.noise_std > 0:
            assert self.noise is not None
            drawn = self.noise.take(update.number, chunk.start, chunk.stop)
            noise = sum_squares(drawn)
            chunk.cells.view(-1).add_(torch.from_numpy(drawn).to(self.device))
        if not (
            isinstance(square, float) and math.sqrt(square) + math.sqrt(noise) < LARGEST_CELL / 2
        ):
            chunk.cells.clamp_(-LARGEST_CELL, LARGEST_CELL)
        self._write(chunk)
        return noise

    def _write(self, chunk: Chunk) -> None:
        """The parameters are centre + grid · k, rounded to their own dtype."""
        if self._centre is None:
            torch.mul(chunk.cells, self.grid, out=chunk.work)
        else:
            chunk.gather(self._centre).add_(chunk.cells, alpha=self.grid)
        chunk.scatter(self.parameters)


class FloatVector:
    """The certified vector of a run without noise: plain SGD, bit for bit, where nothing clips."""

    grid = 0.0

    def __init__(self, parameters: Sequence[Tensor], centre: Sequence[Tensor] | None) -> None:
        self.parameters = [p.detach() for p in parameters]
        self.centre = None if centre is None else [c.detach() for c in centre]
        self.device = self.parameters[0].device
        self.size = sum(p.numel() for p in self.parameters)

    def start(self, radius: float) -> float:
        """x_0 = Π_radius(x̂); returns ‖x̂ - c‖."""
        norm = _norm(self._offsets())
        self._project(norm, radius)
        return norm

    def gradient_norm(self, gradients: Sequence[Tensor]) -> float:
        """‖g‖ in float64."""
        return _norm(gradients)

    def clip_factor(self, norm: float, bound: float) -> float:
        """What brings a vector of this norm and of this length within ``bound``."""
        return clip_factor(norm, bound, self.size)

    def step(self, gradients: Sequence[Tensor], update: Update) -> Norms:
        """x ← Π(x - γ (clip · g + λ (x - c))), in the parameters' own arithmetic."""
        for i, p in enumerate(self.parameters):
            g = torch.zeros_like(p) if update.clip == 0 else gradients[i]
            if 0 < update.clip < 1:
                g = g * update.clip
            if update.weight_decay != 0:
                offset = p if self.centre is None else p - self.centre[i]
                g = g.add(offset, alpha=update.weight_decay)
            p.add_(g, alpha=-update.learning_rate)
        norm = _norm(self._offsets())
        self._project(norm, update.radius)
        return Norms(min(norm, update.radius, _LARGEST), 0.0)

    def write(self) -> None:
        """The parameters are the vector."""

    def perturb(self, number: int, noise_std: float) -> Norms:
        """Without noise there is nothing to add."""
        return Norms(_norm(self._offsets()), 0.0)

    def state(self) -> dict[str, Tensor]:
        """All that a run must keep to go on from here."""
        return {f"parameter.{i}": p for i, p in enumerate(self.parameters)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state``."""
        for i, p in enumerate(self.parameters):
            p.copy_(state[f"parameter.{i}"])

    def _offsets(self) -> list[Tensor]:
        if self.centre is None:
            return self.parameters
        return [p - c for p, c in zip(self.parameters, self.centre, strict=True)]

    def _project(self, norm: float, radius: float) -> None:
        factor = clip_factor(norm, radius, self.size)
        if factor == 1:
            return
        for i, p in enumerate(self.parameters):
            c = torch.zeros_like(p) if self.centre is None else self.centre[i]
            p.copy_(c if factor == 0 else c + (p - c) * factor)


CertifiedVector = GridVector | FloatVector


def make_vector(
    parameters: Sequence[Tensor], centre: Sequence[Tensor] | None, grid: float
) -> CertifiedVector:
    """On a grid, or without one where nothing is noisy."""
    return GridVector(parameters, centre, grid) if grid > 0 else FloatVector(parameters, centre)


def _norm(tensors: Sequence[Tensor]) -> float:
    norms = [float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in tensors]
    return math.hypot(*norms)


# One call for a list of tensors; torch's own optimizers rest on it.
copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


_SHORT = 1 << 13


def sum_squares(v: Array) -> float:
    """‖v‖²; in pieces so short that no library starts a team of threads for them.

    >>> sum_squares(np.ones(10_000))
    10000.0
    """
    pieces = (v[start : start + _SHORT] for start in range(0, v.size, _SHORT))
    with np.errstate(over="ignore", invalid="ignore"):
        return float(sum(np.dot(piece, piece) for piece in pieces))


@dataclass(frozen=True)
class TensorPart:
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
    """Coordinates [start, stop) of the vector: ``cells`` there, and the parts of tensors."""

    start: int
    stop: int
    cells: Tensor
    work: Tensor
    parts: tuple[TensorPart, ...]

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The chunk's coordinates of a list of tensors, in float64."""
        copy_all([part.place for part in self.parts], [part.of(tensors) for part in self.parts])
        return self.work

    def scatter(self, tensors: Sequence[Tensor]) -> None:
        """Write the work vector to the tensors, in their own dtypes."""
        copy_all([part.of(tensors) for part in self.parts], [part.place for part in self.parts])


def cut(cells: Tensor, shapes: Sequence[torch.Size], longest: int) -> list[Chunk]:
    """Cut the vector every ``longest`` coordinates, wherever that falls in the tensors.

    >>> chunks = cut(torch.zeros(6, dtype=torch.float64), [torch.Size([2, 2]), torch.Size([2])], 5)
    >>> [(chunk.start, chunk.stop, len(chunk.parts)) for chunk in chunks]
    [(0, 5, 2), (5, 6, 1)]
    """
    work = torch.empty(min(len(cells), longest), dtype=cells.dtype, device=cells.device)
    chunks: list[Chunk] = []
    parts: list[TensorPart] = []
    start = position = 0
    for index, shape in enumerate(shapes):
        a, size = 0, shape.numel()
        while a < size:
            b = min(size, a + start + longest - position)
            place, whole = work[position - start : position - start + b - a], b - a == size
            parts.append(TensorPart(index, a, b, place.view(shape) if whole else place, whole))
            position, a = position + b - a, b
            if position == min(start + longest, len(cells)):
                span = work[: position - start]
                chunks.append(Chunk(start, position, cells[start:position], span, tuple(parts)))
                start, parts = position, []
    return chunks
