"""The normal equations of ridge regression, from exact sums, and a right-hand side for each output.

With the intercept eliminated, in whole numbers and then rounded once (to sums of three float64):

    M = n G - s sᵀ + n P,     C = n B - s tᵀ,     M W = C,     intercept = (t - sᵀ W) / n

and without it M = G + P, C = B. P = α I, or α diag(v) where columns are standardised, v their
variances. Columns and outputs are scaled by powers of two, so that M has a diagonal about 1 and its
least eigenvalue is at least ``least``. All of it is a function of the sums, the same everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.linear_model.numbers import Numbers
from expunge.linear_model.sums import TARGETS, Label, Sums
from expunge.linear_model.wide import (
    add_exactly,
    carry,
    multiply_exactly,
    subtract_outer,
    to_floats,
)

Reals = npt.NDArray[np.float64]
Parts = tuple[Reals, ...]  # a sum: each is far below the one before
_TILE = 128


@dataclass(frozen=True)
class Moments:
    """What centring leaves of the sums: M without its penalty, C, means and variances."""

    rows: int
    gram: Parts
    cross: Parts
    columns: Parts
    outputs: Parts
    target_squares: Reals
    intercept: bool

    @property
    def unit(self) -> int:
        """By what the normal equations are multiplied."""
        return self.rows if self.intercept else 1

    @property
    def variances(self) -> Reals:
        """Of the columns; mean squares where there is no intercept."""
        return self.gram[0].diagonal() / (float(self.rows) * self.unit)

    @property
    def means(self) -> Reals:
        """Of the columns."""
        return self.columns[0] / self.rows


@dataclass(frozen=True)
class System:
    """M W = C scaled: W = scale · W'' / outputs. ``rest`` is the lower half of M's diagonal."""

    matrix: Parts
    rest: Reals
    right: Parts
    scale: Reals
    outputs: Reals
    least: float


def compute_moments(
    sums: Sums, numbers: Numbers, labels: Sequence[Label] | None, intercept: bool
) -> Moments:
    """Centred sums; ``labels`` are the classes (targets ±1, one column for two of them)."""
    n, ex = sums.rows, numbers.exponent
    if labels is None:
        s, B = sums.cross[: numbers.limbs, :, 0], sums.cross[:, :, 1:]
        t, et = sums.square[: TARGETS.limbs, 0, 1:], TARGETS.exponent
        squares = to_floats(carry(sums.square), 2 * et)[0].diagonal()[1:]
        Q = np.stack([digit.diagonal()[1:] for digit in sums.square])
    else:
        s, B, t = _code_classes(sums, labels)
        et, Q = 0, np.full((1, B.shape[2]), n, np.int64)
        squares = np.full(B.shape[2], float(n))
    columns, outputs = to_floats(carry(s), ex), to_floats(carry(t), et)
    if not intercept:
        gram, cross = to_floats(carry(sums.gram), 2 * ex), to_floats(carry(B), ex + et)
        return Moments(n, gram, cross, columns, outputs, squares, False)
    gram = _center(n, sums.gram, s, 2 * ex, numbers)
    cross = to_floats(subtract_outer(n, B, s, t), ex + et)
    spread = [
        subtract_outer(n, Q[:, k, None, None], t[:, [k]], t[:, [k]]) for k in range(len(squares))
    ]
    squares = np.array([to_floats(digits, 2 * et)[0][0, 0] for digits in spread])
    return Moments(n, gram, cross, columns, outputs, squares, True)


def _code_classes(sums: Sums, labels: Sequence[Label]) -> tuple[Any, Any, Any]:
    """s, Σ φ tᵀ and Σ t for t = 2 · one-hot - 1; of two classes the second alone."""
    s, have = sums.cross.sum(axis=2), list(sums.labels or ())
    wanted = labels[1:] if len(labels) == 2 else labels
    B = np.empty((*s.shape, len(wanted)), np.int64)
    t = np.empty((1, len(wanted)), np.int64)
    for k, label in enumerate(wanted):
        place = have.index(label) if label in have else None
        B[:, :, k] = (0 if place is None else 2 * sums.cross[:, :, place]) - s
        t[0, k] = (0 if place is None else 2 * sums.square[0, place, place]) - sums.rows
    return s, B, t


def _center(n: int, gram: Any, s: Any, exponent: int, numbers: Numbers) -> Parts:
    """n G - s sᵀ; of one limb in int64, where everything fits."""
    if len(gram) > 1 or n * n * numbers.largest**2 >= 2**53:
        return to_floats(subtract_outer(n, gram, s, s), exponent)
    G, found, unit = gram[0], np.empty(gram[0].shape), 2.0**exponent
    for at in range(0, len(G), _TILE):
        part = G[at : at + _TILE] * n
        part -= s[0, at : at + _TILE, None] * s[0]
        np.multiply(part, unit, out=found[at : at + _TILE])
    return (found,)  # exact


def make_system(moments: Moments, alpha: float, standardise: bool, reuse: bool = False) -> System:
    """The scaled system with penalty α; a column that is constant gets 0 in any case.

    ``reuse`` writes it where the moments' Gram matrix was.
    """
    hi = moments.gram[0]
    diagonal = np.maximum(hi.diagonal(), 0.0)
    unit = float(moments.unit)
    penalty = np.full(len(hi), alpha * unit)
    if standardise:
        penalty = alpha * unit * np.where(diagonal > 0, moments.variances, 1.0)
    scale = _find_power(diagonal + penalty)
    outputs = _find_power(np.maximum(moments.target_squares, 0.0))
    matrix = moments.gram if reuse else tuple(part.copy() for part in moments.gram)
    for part in matrix:
        for at in range(0, len(hi), _TILE):
            part[at : at + _TILE] *= scale[at : at + _TILE, None]
            part[at : at + _TILE] *= scale
    added, rest = add_exactly(matrix[0].diagonal(), penalty * scale * scale)
    matrix[0][np.diag_indices_from(hi)] = added
    right = tuple(part * scale[:, None] * outputs for part in moments.cross)
    least = float((penalty * scale * scale).min(initial=1.0)) * (1 - 2.0**-50)
    return System(matrix, rest, right, scale, outputs, least - len(hi) * 2.0**-100)


def _find_power(squares: Reals) -> Reals:
    """2^-k with squares · 2^-2k between 1/2 and 2; 1 for 0."""
    _, exponent = np.frexp(np.where(squares > 0, squares, 1.0))
    return np.ldexp(1.0, -np.floor_divide(exponent, 2))


def find_intercept(moments: Moments, W: Reals) -> Reals:
    """(t - sᵀ W) / n, the sum rounded once: the same bits everywhere."""
    q = W.shape[1]
    if not moments.intercept:
        return np.zeros(q)
    found, (s, *rest) = np.empty(q), moments.columns
    for k in range(q):
        p, e = multiply_exactly(s, -W[:, k])
        terms = [p, e, *(-part * W[:, k] for part in rest), [part[k] for part in moments.outputs]]
        found[k] = math.fsum(itertools.chain(*terms)) / moments.rows
    return found
