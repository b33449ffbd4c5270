"""The certified parameters of a module as one vector, and the few operations a run needs.

The vector is the module's trainable parameters in ``named_parameters`` order, tied weights once.
:class:`GridVector` keeps it as float64 whole numbers ``k`` with ``x = centre + grid · k`` and lets
the module's parameters be that value rounded to their own dtype. :class:`FloatVector` is the run
without noise: no grid, plain floating point. Everything a run does to the vector goes through
``start``, ``gradient_norm``, ``step`` and ``state``/``load``, and everything that crosses
coordinates through a sum of squares, so that a replicated or sharded vector can stand in.

Norms are float64 sums with a proven margin (:func:`clip_factor`): after clipping, the true norm
never exceeds the bound in exact arithmetic. Memory: ``k`` is two float32 vectors; all else is
worked through in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expunge.precision import LARGEST_CELL, norm_margin
from expunge.prefetch import Prefetch

CHUNK = 1 << 16
_TINY = 2.0**-530
_LARGEST = 1e308


class Stream(Protocol):
    """One key's noise: whole numbers round(std · ξ), a pure function of (key, step, position)."""

    def draw(
        self, out: npt.NDArray[np.float64], *, step: int, position: int, std: float
    ) -> None: ...


@dataclass(frozen=True)
class Update:
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


@dataclass(frozen=True)
class Norms:
    """‖x - c‖ after the clips and before the noise, and ‖ξ‖ as it was drawn."""

    model: float
    noise: float


@dataclass(frozen=True)
class _Chunk:
    """Coordinates [start, stop) of the vector: parts [a, b) of tensors, by index."""

    start: int
    stop: int
    parts: tuple[tuple[int, int, int], ...]


def clip_factor(norm: float, bound: float, size: int) -> float:
    """min(1, bound/norm), rounded so that the true norm of factor · v never exceeds ``bound``.

    ``norm`` is the float64 norm of ``size`` floats; it errs by a relative ``norm_margin`` and by
    underflow at most. A norm that is not finite gives 0.

    >>> clip_factor(4.0, 1.0, 10) <= 0.25, clip_factor(0.5, 1.0, 10)
    (True, 1.0)
    """
    if not math.isfinite(norm):
        return 0.0
    largest = norm * (1 + norm_margin(size)) + math.sqrt(size) * _TINY
    return 1.0 if largest <= bound else bound / largest * (1 - 2.0**-50)


class GridVector:
    """x = centre + grid · k: the certified vector of a noisy run."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        centre: Sequence[Tensor] | None,
        grid: float,
        stream: Stream | None = None,
    ) -> None:
        self.parameters = [p.detach() for p in parameters]
        self.grid, self.stream = grid, stream
        self.device = self.parameters[0].device
        self.size = sum(p.numel() for p in self.parameters)
        self._chunks = _cut([p.numel() for p in self.parameters])
        self._centre = None if centre is None else [c.detach().reshape(-1) for c in centre]
        self._flat = [p.view(-1) for p in self.parameters]
        longest = min(self.size, CHUNK)
        self._cells = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        self._work = torch.empty(longest, dtype=torch.float64, device=self.device)
        self._drawn = (np.empty(longest), np.empty(longest))
        self._ahead = Prefetch()
        self._held = False

    def start(self, radius: float) -> float:
        """x_0 = Π_radius(x̂), then rounded towards the centre; returns ‖x̂ - c‖."""
        squares: list[Tensor] = []
        for chunk in self._chunks:
            k = self._cells[chunk.start : chunk.stop].copy_(_gather(self._flat, chunk))
            if self._centre is not None:
                k.sub_(_gather(self._centre, chunk))
            squares.append(torch.dot(k, k))
        norm = _root(squares)
        factor = clip_factor(norm, radius, self.size) / self.grid
        for chunk in self._chunks:
            k = self._cells[chunk.start : chunk.stop]
            k.mul_(factor).trunc_().clamp_(-LARGEST_CELL, LARGEST_CELL)
            self._write(chunk, k)
        return norm

    def gradient_norm(self, gradients: Sequence[Tensor]) -> float:
        """‖g‖ in float64; not finite if and only if some g_i is not (or overflows float64)."""
        squares: list[Tensor] = []
        for chunk in self._chunks:
            g = self._load(gradients, chunk)
            squares.append(torch.dot(g, g))
        self._held = len(self._chunks) == 1
        return _root(squares)

    def prefetch(self, number: int, noise_std: float) -> None:
        """Begin to draw the noise of step ``number``, while the gradient is computed."""
        if noise_std > 0:
            self._begin(0, number, noise_std)

    def step(self, gradients: Sequence[Tensor], update: Update) -> Norms:
        """k ← round(Π(ρ k - (γ/g) · clip · g)) + round(ξ/g), saturated; then the parameters."""
        alpha = update.rate / self.grid
        squares: list[Tensor] = []
        noise = 0.0
        projected = update.radius < math.inf
        for i, chunk in enumerate(self._chunks):
            k = self._cells[chunk.start : chunk.stop]
            if update.decay != 1:
                k.mul_(update.decay)
            if alpha > 0:
                k.add_(self._load(gradients, chunk), alpha=-alpha)
            if not projected:
                k.round_()
            squares.append(torch.dot(k, k))
            if not projected:
                noise += self._finish(i, k, update)
        self._held = False
        norm = _root(squares) * self.grid
        if projected:
            factor = clip_factor(norm, update.radius, self.size)
            norm = norm * factor if factor > 0 else 0.0
            for i, chunk in enumerate(self._chunks):
                k = self._cells[chunk.start : chunk.stop]
                _ = k.mul_(factor).trunc_() if factor > 0 else k.zero_()
                noise += self._finish(i, k, update)
        return Norms(min(norm, _LARGEST), math.sqrt(noise) * self.grid)

    def perturb(self, number: int, noise_std: float) -> Norms:
        """x ← x + N(0, σ² I): the start noise, or output perturbation's one draw."""
        return self.step([], Update(0.0, 0.0, 0.0, math.inf, noise_std, number))

    def state(self) -> dict[str, Tensor]:
        """All that a run must keep to go on from here."""
        return {"cells": self._cells}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state``."""
        self._cells.copy_(state["cells"])
        for chunk in self._chunks:
            self._write(chunk, self._cells[chunk.start : chunk.stop])

    def close(self) -> None:
        """Stop drawing ahead."""
        self._ahead.close()

    def _load(self, gradients: Sequence[Tensor], chunk: _Chunk) -> Tensor:
        work = self._work[: chunk.stop - chunk.start]
        return work if self._held else work.copy_(_gather(gradients, chunk))

    def _finish(self, i: int, k: Tensor, update: Update) -> float:
        """Add the noise, saturate, write the parameters; returns ‖noise‖² in cells."""
        squares = 0.0
        if update.noise_std > 0:
            if not self._ahead.wait():
                self._begin(i, update.number, update.noise_std)
                self._ahead.wait()
            if i + 1 < len(self._chunks):
                self._begin(i + 1, update.number, update.noise_std)
            drawn = self._drawn[i % 2][: len(k)]
            squares = float(np.dot(drawn, drawn))
            k.add_(torch.from_numpy(drawn).to(self.device))
        k.clamp_(-LARGEST_CELL, LARGEST_CELL)
        self._write(self._chunks[i], k)
        return squares

    def _begin(self, i: int, number: int, noise_std: float) -> None:
        """Draw the noise of chunk ``i`` beside what happens next."""
        stream, chunk = self.stream, self._chunks[i]
        assert stream is not None
        out = self._drawn[i % 2][: chunk.stop - chunk.start]
        std, position = noise_std / self.grid, chunk.start
        self._ahead.begin(lambda: stream.draw(out, step=number, position=position, std=std))

    def _write(self, chunk: _Chunk, k: Tensor) -> None:
        value = torch.mul(k, self.grid, out=self._work[: chunk.stop - chunk.start])
        if self._centre is not None:
            value.add_(_gather(self._centre, chunk))
        offset = 0
        for index, a, b in chunk.parts:
            self._flat[index][a:b].copy_(value[offset : offset + b - a])
            offset += b - a


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

    def prefetch(self, number: int, noise_std: float) -> None:
        """Nothing is drawn."""

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

    def close(self) -> None:
        """Nothing was opened."""

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


def _cut(sizes: Sequence[int]) -> list[_Chunk]:
    """Cut the vector every CHUNK coordinates, wherever that falls in the tensors."""
    chunks: list[_Chunk] = []
    parts: list[tuple[int, int, int]] = []
    start = position = 0
    for index, size in enumerate(sizes):
        a = 0
        while a < size:
            b = min(size, a + start + CHUNK - position)
            parts.append((index, a, b))
            position, a = position + b - a, b
            if position == start + CHUNK:
                chunks.append(_Chunk(start, position, tuple(parts)))
                start, parts = position, []
    if parts:
        chunks.append(_Chunk(start, position, tuple(parts)))
    return chunks


def _gather(tensors: Sequence[Tensor], chunk: _Chunk) -> Tensor:
    """The chunk's coordinates of a list of tensors."""
    pieces: list[Tensor] = []
    for index, a, b in chunk.parts:
        t = tensors[index]
        pieces.append(t.reshape(-1)[a:b])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _root(squares: Sequence[Tensor]) -> float:
    """The root of a sum of sums of squares; one transfer from the device."""
    total = squares[0] if len(squares) == 1 else torch.stack(list(squares)).sum()
    return math.sqrt(float(total))


def _norm(tensors: Sequence[Tensor]) -> float:
    norms = [float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in tensors]
    return math.hypot(*norms)
