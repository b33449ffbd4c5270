"""The noise of a run, drawn for several small steps at a time.

A draw right after a forward and backward pass finds cold caches and costs half as much again as
one of a series, so short vectors have the noise of their next steps drawn in one go, and steps of
one standard deviation are rounded together. What is drawn for a step that never runs is dropped:
it was never added to anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from expunge.errors import UnlearningError

Array = npt.NDArray[np.float64]
AHEAD = 1 << 16


class Stream(Protocol):
    """One key's noise: whole numbers round(std · ξ), a pure function of (key, step, position).

    The rows of a two-dimensional ``out`` are those of consecutive steps.
    """

    def draw(self, out: Array, *, step: int, position: int, std: float) -> None: ...


class Drawing:
    """Cells of noise by step number; ``levels[n]`` is the standard deviation of step n, in cells.

    >>> from expunge.noise import SeededNoise
    >>> drawing = Drawing(SeededNoise(0).begin(), [0.0, 9.0, 9.0], size=4, longest=4)
    >>> first, second = drawing.take(1, 0, 4).copy(), drawing.take(2, 0, 4)
    >>> bool((first == second).all())
    False
    """

    def __init__(self, stream: Stream, levels: Sequence[float], size: int, longest: int) -> None:
        self._stream, self._levels, self._size = stream, levels, size
        rows = max(1, min(AHEAD // longest, len(levels))) if longest == size else 1
        self._rows = np.empty((rows, longest))
        self._first = self._last = self._next = 0

    def take(self, number: int, start: int, stop: int) -> Array:
        """The noise of coordinates [start, stop) of step ``number``; it may be taken once."""
        if stop - start < self._size:
            out = self._rows[0, : stop - start]
            self._stream.draw(out, step=number, position=start, std=self._levels[number])
            return out
        if number < self._next:
            raise UnlearningError(
                f"the noise of step {number} was taken already; none is used twice"
            )
        self._next = number + 1
        if number >= self._last:
            self._draw_ahead(number)
        return self._rows[number - self._first]

    def preview(self, number: int, count: int) -> Array:
        """The noise of steps ``number`` to ``number + count``, one row each, before it is taken."""
        assert self._rows.shape[1] == self._size, "only whole steps are previewed"
        assert number >= self._next, "the noise of a step that was taken is not shown again"
        if number + count > self._last:
            held = self._rows[number - self._first : self._last - self._first].copy()
            if len(self._rows) < count:
                self._rows = np.empty((count, self._size))
            self._rows[: len(held)] = held
            self._draw_ahead(number, len(held))
        start = number - self._first
        return self._rows[start : start + count]

    def _draw_ahead(self, number: int, held: int = 0) -> None:
        """As many rows as there are, from step ``number`` on; steps without noise have zeros.

        The first ``held`` rows are there already: no value is drawn twice.
        """
        self._first, self._last = number, number + held
        end = min(number + len(self._rows), len(self._levels))
        start = held
        for std, group in itertools.groupby(self._levels[number + held : end]):
            stop = start + len(list(group))
            rows = self._rows[start:stop]
            if std > 0:
                self._stream.draw(rows, step=number + start, position=0, std=std)
            else:
                rows.fill(0.0)
            start, self._last = stop, number + stop
