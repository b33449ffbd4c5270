"""The normal equations of ridge regression, from exact sums, and a right-hand side for each output.

With the intercept eliminated, in whole numbers:

    M = n G - s sᵀ + n P,     C = n B - s tᵀ,     M W = C,     intercept = (t - sᵀ W) / n

and without it M = G + P, C = B. P = α I, or α diag(v) where columns are standardised, v their
variances. Columns and outputs are scaled by powers of two, so that M has a diagonal about 1 and its
least eigenvalue is at least ``least``. Factors are made of M rounded to float64; what is left of C
is computed exactly (:class:`Residual`).

Wide whole numbers are arrays of digits in base 2^14, lowest first: Σ_m 2^(14 m) digits[m], of any
size that int64 holds; what has few of them is in arrays of Python's own whole numbers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.linear_model.numbers import RADIX, Numbers
from expunge.linear_model.sums import TARGETS, Label, Sums

Digits = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Whole = npt.NDArray[np.object_]  # of int
_HALF = 2 ** (RADIX - 1)
_TILE = 32  # rows that stay in a cache
_DEPTH = 160  # bits of scaled weights below 1
_SPARE = 64  # below those, for pieces of weights that end between two units
_to_int: Any = np.frompyfunc(int, 1, 1)


@dataclass(frozen=True)
class Moments:
    """What centring leaves of the sums: M without its penalty, C, means and variances.

    G, s, t and C are exact: s in units of 2^exponents[0], t in 2^exponents[1], both 0 where there
    is no intercept; G and C in products of these.
    """

    rows: int
    intercept: bool
    exponents: tuple[int, int]
    G: Digits
    s: Whole
    t: Whole
    C: Whole
    gram: Reals
    diagonal: Reals
    target_squares: Reals

    @property
    def unit(self) -> int:
        """By what the normal equations are multiplied."""
        return self.rows if self.intercept else 1

    @property
    def cross(self) -> Reals:
        """C, rounded."""
        return to_floats(self.C, sum(self.exponents))

    @property
    def means(self) -> tuple[Reals, Reals]:
        """Of the columns and of the targets; 0 where there is no intercept."""
        ex, et = self.exponents
        return to_floats(self.s, ex) / self.rows, to_floats(self.t, et) / self.rows

    @property
    def variances(self) -> Reals:
        """Of the columns; mean squares where there is no intercept."""
        return self.diagonal / (float(self.rows) * self.unit)


@dataclass(frozen=True)
class System:
    """M W = C scaled: W = scale · W'' / outputs. ``penalty`` is not scaled."""

    matrix: Reals
    right: Reals
    penalty: Reals
    scale: Reals
    outputs: Reals
    least: float


def compute_moments(
    sums: Sums, numbers: Numbers, labels: Sequence[Label] | None, intercept: bool
) -> Moments:
    """Centred sums; ``labels`` are the classes (targets ±1, one column for two of them)."""
    n, ex = sums.rows, numbers.exponent
    if labels is None:
        columns, B = sums.cross[: numbers.limbs, :, 0], to_whole(sums.cross[:, :, 1:])
        t, et = to_whole(sums.square[: TARGETS.limbs, 0, 1:]), TARGETS.exponent
        squares = to_whole(sums.square.diagonal(0, 1, 2)[:, 1:])
    else:
        columns = sums.cross.sum(axis=2)
        B, t = _code_classes(sums, labels)
        et, squares = 0, to_whole(np.full((1, len(t)), n))
    unit = n if intercept else 1
    if not intercept:
        columns, t = 0 * columns, 0 * t
    s = to_whole(columns)
    return Moments(
        rows=n,
        intercept=intercept,
        exponents=(ex, et),
        G=sums.gram,
        s=s,
        t=t,
        C=unit * B - s[:, None] * t,
        gram=_center(sums.gram, unit, columns, 2 * ex),
        diagonal=to_floats(unit * to_whole(sums.gram.diagonal(0, 1, 2)) - s * s, 2 * ex),
        target_squares=to_floats(unit * squares - t * t, 2 * et),
    )


def _code_classes(sums: Sums, labels: Sequence[Label]) -> tuple[Whole, Whole]:
    """Σ φ tᵀ and Σ t for t = 2 · one-hot - 1; of two classes the second alone."""
    have = {label: place for place, label in enumerate(sums.labels or ())}
    places = [have.get(label, len(have)) for label in (labels[1:] if len(labels) == 2 else labels)]
    counts = np.append(sums.square[0].diagonal(), 0)[places]
    cross = np.append(sums.cross, 0 * sums.cross[:, :, :1], axis=2)[:, :, places]
    B = to_whole(2 * cross - sums.cross.sum(axis=2)[:, :, None])
    return B, to_whole((2 * counts - sums.rows)[None])


def _center(gram: Digits, unit: int, columns: Digits, exponent: int) -> Reals:
    """n G - s sᵀ in float64: of several limbs exact before it is rounded."""
    if len(gram) > 1:
        digits = subtract_product(unit, gram, columns[:, :, None], columns[:, None])
        return _round_digits(digits, exponent)
    found, s = np.empty(gram[0].shape), columns[0].astype(np.float64)
    for at in range(0, len(s), _TILE):
        rows = slice(at, at + _TILE)
        np.multiply(gram[0, rows], float(unit), out=found[rows])
        found[rows] -= s[rows, None] * s
        found[rows] *= 2.0**exponent
    return found


def make_system(moments: Moments, alpha: float, standardise: bool, reuse: bool = False) -> System:
    """The scaled system with penalty α; a column that is constant gets 0 in any case.

    ``reuse`` writes it where the moments' Gram matrix was.
    """
    diagonal, unit = moments.diagonal, float(moments.unit)
    penalty = np.full(len(diagonal), alpha * unit)
    if standardise:
        penalty = alpha * unit * np.where(diagonal > 0, moments.variances, 1.0)
    scale = _find_power(diagonal + penalty)
    outputs = _find_power(moments.target_squares)
    matrix = moments.gram if reuse else moments.gram.copy()
    for at in range(0, len(scale), _TILE):
        matrix[at : at + _TILE] *= scale[at : at + _TILE, None]
        matrix[at : at + _TILE] *= scale
    matrix[np.diag_indices_from(matrix)] = (diagonal + penalty) * scale * scale
    right = moments.cross * scale[:, None] * outputs
    least = float((penalty * scale * scale).min(initial=1.0))
    return System(matrix, right, penalty, scale, outputs, least)


def _find_power(squares: Reals) -> Reals:
    """2^-k with squares · 2^-2k between 1/2 and 2; 1 for 0."""
    _, exponent = np.frexp(np.where(squares > 0, squares, 1.0))
    return np.ldexp(1.0, -np.floor_divide(exponent, 2))


class Residual:
    """Weights W and what they leave of C, R = C - M W, both exact; W starts at 0."""

    def __init__(self, moments: Moments, system: System) -> None:
        self.moments, self.system = moments, system
        column, output = _find_exponents(system.scale), _find_exponents(system.outputs)
        ex, et = moments.exponents
        self.floor = min(2 * ex, int(np.frexp(system.penalty)[1].min(initial=0)) - 53)
        self.penalty: Whole = _to_int(np.ldexp(system.penalty, -self.floor))
        # M in units of 2^floor, W of 2^-depth, R of both; W'' = 1 is W = 2^ones.
        self.ones = column[:, None] - output
        self.depth = _DEPTH + _SPARE - int(self.ones.min(initial=0))
        self.balance = column[:, None] + output + (self.floor - self.depth)
        self.G = carry(moments.G) if len(moments.G) > 1 else moments.G
        self.W: Whole = 0 * moments.C
        self.R: Whole = moments.C << (ex + et + self.depth - self.floor)

    def read(self) -> Reals:
        """What is left of C'', rounded once."""
        return to_floats(self.R, self.balance)

    def step(self, found: Reals) -> None:
        """W'' grows by what was found, cut to about 45 bits."""
        ex, unit, G = self.moments.exponents[0], self.moments.unit, self.G
        largest = G if len(G) > 1 else G.diagonal(0, 1, 2)  # of one digit it is a square
        half = -(-int(np.abs(largest).max(initial=1)).bit_length() // 2)
        short = 53 - max(len(found) - 1, 1).bit_length() - half
        scale = _find_exponents(self.system.scale)
        spread = int(np.ptp(scale)) if len(scale) else 0
        bits = min(-(-(40 + spread) // short) * short - spread, 50)
        grain = np.maximum(_find_top(found) - bits, -_DEPTH)
        found = np.ldexp(np.rint(np.ldexp(found, -grain)), grain)
        if not found.any():  # below the last bit that is kept
            return
        left = np.ldexp(found, scale[:, None])
        top, pieces = _find_top(left), list[Reals]()
        while left.any():
            grid = top - short * (len(pieces) + 1)
            pieces.append(np.rint(np.ldexp(left, -grid)))
            left = left - np.ldexp(pieces[-1], grid)
        products = _multiply(G, pieces, half)
        change: Whole = _to_int(np.ldexp(found, self.ones + self.depth))
        lowest = top - _find_exponents(self.system.outputs) + self.depth
        product: Whole = 0 * change
        for k, whole in enumerate(products):
            product = product + (whole << (lowest - short * (k + 1)).astype(object))
        product = unit * product - self.moments.s[:, None] * (self.moments.s @ change)
        self.R = self.R - (product << (2 * ex - self.floor)) - self.penalty[:, None] * change
        self.W = self.W + change

    def round(self, bound: Reals, grid: int) -> tuple[Reals, bool]:
        """W'' in multiples of 2^grid, and whether nothing within ``bound`` has another."""
        shift = (self.ones + (grid + self.depth)).astype(object)
        found, certain = round_whole(self.W, shift, np.ldexp(bound, -grid))
        return np.ldexp(found, grid), certain


def _multiply(G: Digits, pieces: list[Reals], half: int) -> list[Whole]:
    """G times whole numbers: digits are halved, so that every product is one that float64 holds."""
    joined = np.concatenate(pieces, axis=1)
    found = np.empty((len(G), 2, *joined.shape))

    def work(at: int) -> None:
        rows = slice(at, at + _TILE)
        for m, digit in enumerate(G):
            low = digit[rows].astype(np.float64)
            high = np.rint(low * 2.0**-half)
            np.matmul(high, joined, out=found[m, 1, rows])
            high *= 2.0**half
            low -= high
            np.matmul(low, joined, out=found[m, 0, rows])

    if len(joined) <= _TILE:  # threads take longer to start than this
        work(0)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(work, range(0, len(joined), _TILE)))
    whole = found.astype(np.int64)
    products: Whole = to_whole(whole[:, 0]) + (to_whole(whole[:, 1]) << half)
    return np.split(products, len(pieces), axis=1)


def round_whole(W: Whole, shift: Any, bound: Reals) -> tuple[Reals, bool]:
    """W / 2^shift to whole numbers, and whether nothing within ``bound`` of it has another.

    What may lie on either side of the middle goes to the number nearer zero.
    """
    half = 1 << (shift - 1)
    nearest: Whole = (W + half) >> shift
    rest: Whole = W - (nearest << shift)
    narrow = to_floats(half - np.abs(rest), -shift.astype(np.int64)) <= bound * (1 + 2.0**-50)
    other = nearest + np.where(rest > 0, 1, -1)
    nearest = np.where(narrow & (np.abs(other) < np.abs(nearest)), other, nearest)
    return nearest.astype(np.float64), not narrow.any()


def find_intercept(moments: Moments, W: Reals) -> Reals:
    """(t - sᵀ W) / n, the sum rounded once: the same bits everywhere."""
    ex, et = moments.exponents
    depth = min(53 - int(np.frexp(W)[1].min(initial=0)), 900)
    total = (moments.t << (et - ex + depth)) - moments.s @ _to_int(np.ldexp(W, depth))
    return to_floats(total, ex - depth) / moments.rows


def _find_exponents(powers: Reals) -> npt.NDArray[np.int64]:
    """Of powers of two."""
    return np.frexp(powers)[1].astype(np.int64) - 1


def _find_top(values: Reals) -> npt.NDArray[np.int64]:
    """The power of two above each column."""
    return np.frexp(np.abs(values).max(axis=0, initial=0.0))[1].astype(np.int64)


def to_whole(digits: Digits) -> Whole:
    """The numbers of digits.

    >>> to_whole(np.array([[1, 2], [3, 0]])).tolist()
    [49153, 2]
    """
    found: Whole = digits[0].astype(object)
    for m, digit in enumerate(digits[1:], 1):
        found = found + (digit.astype(object) << (RADIX * m))
    return found


def to_floats(whole: Whole, exponent: Any) -> Reals:
    """Whole numbers times 2^exponent, rounded once.

    >>> to_floats(np.array([3, 2**53 + 1], object), -1).tolist()
    [1.5, 4503599627370496.0]
    """
    return np.ldexp(whole.astype(np.float64), exponent)


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


def _round_digits(digits: Digits, exponent: int) -> Reals:
    found, low = np.zeros(digits.shape[1:]), np.zeros(digits.shape[1:])
    for m in reversed(range(len(digits))):
        found, error = add_exactly(found, digits[m] * 2.0 ** (exponent + RADIX * m))
        low += error
    return found + low


def add_exactly(a: Any, b: Any) -> tuple[Any, Any]:
    """(s, e) with s + e = a + b, s the rounded sum (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)
