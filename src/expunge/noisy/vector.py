"""The certified parameters of a network as one vector on a grid, and the few things a run does.

The vector is the trainable parameters in ``named_parameters`` order, tied weights once. It is kept
as float64 whole numbers ``k`` with ``x = centre + grid · k``; the module's parameters are that
value rounded to their own dtype. It is cut into chunks that fit in a cache, wherever that falls in
the tensors, and everything that crosses coordinates goes through a sum of squares.

Norms are float64 sums with a proven margin (:func:`clip_factor`): after clipping, the true norm
never exceeds the bound in exact arithmetic. Memory: ``k`` is two float32 vectors; all else is
worked through chunk by chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from expunge.accounting.precision import LARGEST_CELL, norm_margin
from expunge.noisy.noise import Array, NoiseStream

CHUNK = 1 << 17  # fits in a cache, and is long enough that calls are no cost
LOST = 2.0**-500  # a larger coordinate has a square that is not lost, even where denormals are
_LARGEST = 1e308
_SHORT, _LONG = 1 << 13, 1 << 15

# One call for a list of tensors; torch's own optimizers rest on it.
copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


class Update(NamedTuple):
    """One step of the recipe, as the vector sees it.

    ``x - c ← Π_radius((1 - γ λ)(x - c) - γ · clip · gradient) + N(0, noise_std² I)``; a ``clip``
    of 0 drops the gradient. ``number`` is the step in the noise stream: 0 is the start's.
    """

    learning_rate: float
    weight_decay: float
    clip: float
    radius: float
    noise_std: float
    number: int


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


class GridVector:
    """x = centre + grid · k; ``centre`` None is zero, ``noise`` is where its steps draw from.

    >>> weight = torch.tensor([3.0, 4.0])
    >>> vector = GridVector([weight], None, 2.0**-20)
    >>> vector.start(1.0), weight.round(decimals=4).tolist()
    (5.0, [0.6000000238418579, 0.800000011920929])
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        centre: Sequence[Tensor] | None,
        grid: float,
        noise: NoiseStream | None = None,
    ) -> None:
        self.parameters = [p.detach() for p in parameters]
        self.grid, self.noise = grid, noise
        self.device = self.parameters[0].device
        self.size = sum(p.numel() for p in self.parameters)
        self.cells = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        self._chunks = cut(self.cells, self.parameters, centre)
        self._drawn = np.empty(min(self.size, CHUNK))

    def start(self, radius: float, old: Sequence[Tensor] | None = None) -> float:
        """x_0 = Π_radius(old), then rounded towards the centre; returns ‖old - c‖.

        ``old`` None is what the parameters are now.
        """
        old = self.parameters if old is None else old
        squares: list[Any] = []
        for chunk in self._chunks:
            k = chunk.cells.copy_(chunk.gather(old))
            if chunk.centre:
                k -= chunk.gather_centre()
            squares.append(_square(k))
        norm = _root(squares)
        factor = self.clip_factor(norm, radius) / self.grid
        for chunk in self._chunks:
            _round(chunk.cells.mul_(factor), "zero").clamp_(-LARGEST_CELL, LARGEST_CELL)
            chunk.write(self.grid)
        return norm

    def gradient_norm(self, gradients: Sequence[Tensor]) -> float:
        """‖g‖ in float64; not finite if and only if some g_i is not (or overflows float64)."""
        return _root([_square(chunk.gather(gradients)) for chunk in self._chunks])

    def clip_factor(self, norm: float, bound: float) -> float:
        """What brings a vector of this norm and of this length within ``bound``."""
        return clip_factor(norm, bound, self.size)

    def step(self, gradients: Sequence[Tensor], update: Update) -> Norms:
        """k ← round(Π(ρ k - (γ/g) · clip · g)) + round(ξ/g), saturated; then the parameters."""
        rate = update.learning_rate * update.clip / self.grid
        decay = 1.0 - update.learning_rate * update.weight_decay
        projected = update.radius < math.inf
        squares: list[Any] = []
        noise = 0.0
        for chunk in self._chunks:
            k = chunk.cells
            if decay != 1:
                k *= decay
            if rate > 0:
                k -= chunk.gather(gradients).mul_(rate)
            if not projected:
                _round(k)
            squares.append(_square(k))
            if not projected:
                noise += self._finish(chunk, update, squares[-1])
        norm = _root(squares) * self.grid
        if projected:
            factor = self.clip_factor(norm, update.radius)
            for chunk in self._chunks:
                # A vector whose norm overflowed goes to the centre itself.
                _ = _round(chunk.cells.mul_(factor), "zero") if factor > 0 else chunk.cells.zero_()
                noise += self._finish(chunk, update, math.inf)
            norm = norm * factor if factor > 0 else 0.0
        return Norms(min(norm, _LARGEST), math.sqrt(noise) * self.grid)

    def perturb(self, number: int, noise_std: float) -> Norms:
        """x ← x + N(0, σ² I): the start noise, or output perturbation's one draw."""
        return self.step([], Update(0.0, 0.0, 0.0, math.inf, noise_std, number))

    def write(self) -> None:
        """The parameters of the present cells."""
        for chunk in self._chunks:
            chunk.write(self.grid)

    def _finish(self, chunk: Chunk, update: Update, square: Any) -> float:
        """Add the noise, saturate, write the parameters; returns ‖noise‖² in cells.

        ``square`` is ‖k‖² before the noise: no coordinate is beyond ‖k‖ + ‖noise‖.
        """
        noise = 0.0
        if update.noise_std > 0:
            assert self.noise is not None
            drawn, std = self._drawn[: chunk.stop - chunk.start], update.noise_std / self.grid
            self.noise.draw(drawn, step=update.number, position=chunk.start, std=std)
            noise = sum_squares(drawn)
            chunk.cells.add_(torch.from_numpy(drawn).to(self.device))
        if not (
            isinstance(square, float) and math.sqrt(square) + math.sqrt(noise) < LARGEST_CELL / 2
        ):
            chunk.cells.clamp_(-LARGEST_CELL, LARGEST_CELL)
        chunk.write(self.grid)
        return noise


def _square(v: Tensor) -> Any:
    """‖v‖² of a chunk: a number on the CPU, else a tensor."""
    return sum_squares(v.numpy()) if v.is_cpu else torch.dot(v, v)


def _root(squares: Sequence[Any]) -> float:
    """The root of a sum of sums of squares; one transfer from the device."""
    return math.sqrt(float(sum(squares)))


def _round(cells: Tensor, towards: Literal["zero", "nearest"] = "nearest") -> Tensor:
    """To whole numbers, in place: the nearest (ties to even), or towards zero; by numpy on a CPU.

    torch hands ``round`` and ``trunc`` to a threaded library that starts a team of threads however
    short the vector is: on a busy machine that is a thousand times slower than the rounding.
    """
    if not cells.is_cpu:
        return cells.trunc_() if towards == "zero" else cells.round_()
    view = cells.numpy()
    (np.trunc if towards == "zero" else np.rint)(view, out=view)
    return cells


@np.errstate(over="ignore", invalid="ignore")
def sum_squares(v: Array) -> float:
    """‖v‖²; in pieces so short that no library starts a team of threads for them.

    >>> sum_squares(np.ones(10_000))
    10000.0
    """
    return _sum_pieces(v)


def _sum_pieces(v: Array) -> float:
    if v.size <= _SHORT:
        return float(np.dot(v, v))
    part = _SHORT if v.size <= _LONG else _LONG
    return sum([_sum_pieces(v[a : a + part]) for a in range(0, v.size, part)])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Coordinates [start, stop) of the vector: ``cells`` there, and where tensors have them.

    ``parts`` are (tensor, from, to); ``places`` their place in ``work``, one memory for all chunks;
    ``parameters`` and ``centre`` these parts of them (none: zero).
    """

    start: int
    stop: int
    cells: Tensor
    work: Tensor
    parts: list[tuple[int, int, int]]
    places: list[Tensor]
    parameters: list[Tensor]
    centre: list[Tensor]

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The chunk's coordinates of a list of tensors, in float64."""
        copy_all(self.places, [tensors[index].view(-1)[a:b] for index, a, b in self.parts])
        return self.work

    def gather_centre(self) -> Tensor:
        """The centre's."""
        copy_all(self.places, self.centre)
        return self.work

    def write(self, grid: float) -> None:
        """The parameters are centre + grid · k, rounded to their own dtype."""
        if self.centre:
            self.gather_centre().add_(self.cells, alpha=grid)
        else:
            torch.mul(self.cells, grid, out=self.work)
        copy_all(self.parameters, self.places)


def cut(
    cells: Tensor, parameters: Sequence[Tensor], centre: Sequence[Tensor] | None
) -> list[Chunk]:
    """Cut the vector every ``CHUNK`` coordinates, wherever that falls in the tensors.

    >>> chunks = cut(torch.zeros(6, dtype=torch.float64), [torch.ones(2, 2), torch.ones(2)], None)
    >>> [(chunk.start, chunk.stop, chunk.parts) for chunk in chunks]
    [(0, 6, [(0, 0, 4), (1, 0, 2)])]
    """
    work = torch.empty(min(len(cells), CHUNK), dtype=cells.dtype, device=cells.device)
    ends = list(itertools.accumulate(p.numel() for p in parameters))
    chunks: list[Chunk] = []
    for start in range(0, len(cells), CHUNK):
        stop = min(start + CHUNK, len(cells))
        parts = [
            (index, max(start - end + p.numel(), 0), min(stop - end, 0) + p.numel())
            for index, (p, end) in enumerate(zip(parameters, ends, strict=True))
            if end > start and end - p.numel() < stop
        ]
        span = work[: stop - start]
        places = list(span.split([b - a for _, a, b in parts]))
        own, public = (
            [tensors[index].detach().view(-1)[a:b] for index, a, b in parts] if tensors else []
            for tensors in (parameters, centre)
        )
        chunks.append(Chunk(start, stop, cells[start:stop], span, parts, places, own, public))
    return chunks
