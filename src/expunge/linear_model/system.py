"""The normal equations of ridge regression, from exact sums, and a right-hand side for each output.

With the intercept eliminated, in whole numbers and then rounded once (to sums of three float64):

    M = n G - s sᵀ + n P,     C = n B - s tᵀ,     M W = C,     intercept = (t - sᵀ W) / n

and without it M = G + P, C = B. P = α I, or α diag(v) where columns are standardised, v their
variances. Columns and outputs are scaled by powers of two, so that M has a diagonal about 1 and its
least eigenvalue is at least ``least``. All of it is a function of the sums, the same everywhere.

Wide whole numbers are arrays of digits in base 2^14, lowest first: Σ_m 2^(14 m) digits[m]. Digits
may be of any size that int64 holds; ``carry`` brings all but the highest to at most 2^13.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.linear_model.numbers import RADIX, Numbers
from expunge.linear_model.sums import TARGETS, Label, Sums

Digits = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Parts = tuple[Reals, ...]  # a sum: each is far below the one before
_HALF = 2 ** (RADIX - 1)
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
        squares = sums.square.diagonal(0, 1, 2)[:, 1:]
    else:
        s, B, t = _code_classes(sums, labels)
        et, squares = 0, np.full((1, B.shape[2]), n, np.int64)
    columns, outputs = to_floats(carry(s), ex), to_floats(carry(t), et)
    unit, s, t = (n, s, t) if intercept else (1, 0 * s, 0 * t)
    gram = _center(sums, unit, s, numbers)
    cross = to_floats(subtract_product(unit, B, s[:, :, None], t[:, None]), ex + et)
    spread = to_floats(subtract_product(unit, squares, t, t), 2 * et)[0]
    return Moments(n, gram, cross, columns, outputs, spread, intercept)


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


def _center(sums: Sums, unit: int, s: Digits, numbers: Numbers) -> Parts:
    """n G - s sᵀ; of one limb in int64, where everything fits."""
    if len(sums.gram) > 1 or sums.rows**2 * numbers.largest**2 >= 2**53:
        whole = subtract_product(unit, sums.gram, s[:, :, None], s[:, None])
        return to_floats(whole, 2 * numbers.exponent)
    G = sums.gram[0]
    found = np.empty(G.shape)
    for at in range(0, len(G), _TILE):
        part = G[at : at + _TILE] * unit
        part -= s[0, at : at + _TILE, None] * s[0]
        np.multiply(part, 2.0 ** (2 * numbers.exponent), out=found[at : at + _TILE])
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


def carry(digits: Digits) -> Digits:
    """The same numbers in digits of at most 2^13, with as many more digits as they need.

    >>> carry(np.array([[2**20], [-1]])).tolist()
    [[0], [63]]
    """
    found, rest = list[Digits](), np.zeros(digits.shape[1:], np.int64)
    for digit in digits:
        total = digit + rest
        rest = (total + _HALF) >> RADIX
        found.append(total - (rest << RADIX))
    while np.abs(rest).max(initial=0) > 0:
        higher = (rest + _HALF) >> RADIX
        found.append(rest - (higher << RADIX))
        rest = higher
    return np.stack(found) if found else digits


def subtract_product(count: int, whole: Digits, left: Digits, right: Digits) -> Digits:
    """count · whole - left · right, exactly; the operands are carried first.

    >>> subtract_product(7, np.array([[10]]), np.array([[3]]), np.array([[5]])).tolist()
    [[55]]
    """
    W, a, b = carry(whole), carry(left), carry(right)
    found = np.zeros((max(len(W), len(a) + len(b) - 1), *whole.shape[1:]), np.int64)
    found[: len(W)] = W * count
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            if one.any() and other.any():
                found[i + j] -= one * other
    return carry(found)


def to_floats(digits: Digits, exponent: int) -> tuple[Reals, Reals, Reals]:
    """Three float64, each far below the one before, of sum 2^exponent Σ 2^(14 m) digits[m].

    It is off by less than 2^-150 of it.
    """
    found = tuple(np.zeros(digits.shape[1:]) for _ in range(3))
    for m in reversed(range(len(digits))):
        found = add_to(found, digits[m] * 2.0 ** (exponent + RADIX * m))
    hi, lo = add_exactly(*found[:2])
    return hi, *add_exactly(lo, found[2])


def add_to(sums: tuple[Reals, ...], term: Reals) -> tuple[Reals, Reals, Reals]:
    """A sum in three float64 with one term more; only the lowest is rounded."""
    hi, error = add_exactly(sums[0], term)
    lo, error = add_exactly(sums[1], error)
    return hi, lo, sums[2] + error


def add_exactly(a: Any, b: Any) -> tuple[Any, Any]:
    """(s, e) with s + e = a + b, s the rounded sum (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def multiply_exactly(a: Reals, b: Reals) -> tuple[Reals, Reals]:
    """(p, e) with p + e = a b, p the rounded product (Dekker)."""
    p = a * b
    (a1, a2), (b1, b2) = _halve(a), _halve(b)
    return p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2


def _halve(a: Reals) -> tuple[Reals, Reals]:
    c = a * 134217729.0  # 2^27 + 1
    high = c - (c - a)
    return high, a - high
