"""Wide whole numbers: arrays of digits in base 2^14, and sums of three float64 close to them.

``digits[m]`` is the array of the m-th digits, lowest first: the value is Σ_m 2^(14 m) digits[m].
Digits may be of any size that int64 holds; ``carry`` brings all but the highest to at most 2^13.
Everything is done element by element, so every machine finds the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.linear_model.numbers import RADIX

Digits = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
_HALF = 2 ** (RADIX - 1)


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


def subtract_outer(count: int, whole: Digits, left: Digits, right: Digits) -> Digits:
    """count · whole - left rightᵀ, exactly; the operands are carried first.

    >>> one = np.array([[3]]), np.array([[5]])
    >>> subtract_outer(7, np.array([[[10]]]), *one).tolist()
    [[[55]]]
    """
    W, a, b = carry(whole), carry(left), carry(right)
    found = np.zeros((max(len(W), len(a) + len(b) - 1), *whole.shape[1:]), np.int64)
    found[: len(W)] = W * count
    for i, one in enumerate(a):
        if one.any():
            for j, other in enumerate(b):
                if other.any():
                    found[i + j] -= np.multiply.outer(one, other)
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
