"""Ridge regression with the same bits on every machine (THEORY 10, "Rounding").

A factor in whatever float and on whatever number of threads gives a first solution. Its residual is
then computed *exactly*: M and W are cut into slices so short that every product of slices is a
whole number float64 holds. As no eigenvalue of M is below ``least``,

    ‖W - W*‖ ≤ ‖C - M W‖ / least,

and W is refined until this is too small to matter for any rounding of W* to the grid 2^-48 (in
units in which columns and outputs are about 1: a function of the sums). Where a component stays
within the bound of the middle between two grid points, the one nearer zero is taken.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import linalg
from threadpoolctl import ThreadpoolController

from expunge.linear_model.system import (
    Moments,
    Reals,
    System,
    add_exactly,
    add_to,
    find_intercept,
    make_system,
    multiply_exactly,
)

GRID = 2.0**-48
_SMALL = 384  # below this a float64 factor costs nothing
_TILE = 32  # rows that stay in a cache
_RESIDUALS = 3
_REFINEMENTS = 6
_ROUND = 2.0**-53


@dataclass(frozen=True)
class Solution:
    """Weights [p, q], intercepts [q], the penalty, whether the rounding is proven, the classes."""

    weights: Reals
    intercept: Reals
    alpha: float
    proven: bool
    labels: tuple[Any, ...] = ()
    iterations: int = 1

    def place(self, present: Sequence[Any], labels: Sequence[Any]) -> Solution:
        """With a column for each of ``labels``; one that has no rows is never predicted."""
        if tuple(present) == tuple(labels):
            return replace(self, labels=tuple(labels))
        W, b = self.weights, self.intercept
        if len(present) == 2:  # one column stands for two
            W, b = np.concatenate([-W / 2, W / 2], axis=1), np.concatenate([-b / 2, b / 2])
        places = [labels.index(label) for label in present]
        weights = np.zeros((len(W), len(labels)))
        intercept = np.full(len(labels), -np.inf)
        weights[:, places], intercept[places] = W, b
        return replace(self, weights=weights, intercept=intercept, labels=tuple(labels))


def solve_ridge(moments: Moments, alphas: Sequence[float], standardise: bool) -> Solution:
    """Coefficients of the retained sums, rounded to their grid."""
    alpha = alphas[0] if len(alphas) == 1 else choose_alpha(moments, alphas, standardise)
    system = make_system(moments, alpha, standardise, reuse=True)
    found = _solve_rounded(system) if system.least > 0 else None
    W = (_solve_plain(system) if found is None else found) * system.scale[:, None] / system.outputs
    return Solution(W, find_intercept(moments, W), alpha, found is not None)


def choose_alpha(moments: Moments, alphas: Sequence[float], standardise: bool) -> float:
    """The α with the least GCV = (RSS/n) / (1 - df/n)², to six digits, ties to the largest.

    With G = V diag(e) Vᵀ and c = VᵀB, centred: df = 1 + Σ e/(e + α) and
    RSS = Q - Σ ‖c_j‖² (e_j + 2 α)/(e_j + α)².
    """
    n, unit = moments.rows, float(moments.unit)
    G, B = moments.gram[0] / unit, moments.cross[0] / unit
    if standardise:
        inverse = 1 / np.sqrt(np.where(moments.variances > 0, moments.variances, 1.0))
        G, B = G * inverse[:, None] * inverse, B * inverse[:, None]
    with one_thread():
        e, V = linalg.eigh(G, check_finite=False)
        c = np.square(V.T @ B).sum(axis=1)
    e, Q = np.maximum(e, 0.0), float(moments.target_squares.sum()) / unit
    scores: list[tuple[float, float]] = []
    for alpha in alphas:
        s = np.maximum(e + alpha, 1e-300)
        rss = max(Q - float((c * (e + 2 * alpha) / np.square(s)).sum()), 0.0)
        freedom = 1 - (float((e / s).sum()) + moments.intercept) / n
        score = rss / max(freedom, 1e-9) ** 2
        scores.append((float(f"{score:.5e}"), -alpha))
    return -min(scores)[1]


def _solve_rounded(system: System) -> Reals | None:
    """W'' on its grid, proven; None where refining does not get there."""
    right = system.right[0]
    if not right.any():
        return np.zeros_like(right)
    for real in (np.float32, np.float64) if len(right) > _SMALL else (np.float64,):
        inverse = factor(system.matrix[0], real)
        if inverse is not None:
            W = _approach(system, inverse)
            found = None if W is None else _refine(system, inverse, W)
            if found is not None:
                return found
    return None


def factor(matrix: Reals, real: type[Any]) -> Callable[[Reals], Reals] | None:
    """R ↦ M⁻¹ R by Cholesky in ``real``, on all cores; None where it fails."""
    try:
        held = linalg.cho_factor(matrix.T.astype(real), overwrite_a=True, check_finite=False)
    except linalg.LinAlgError:
        return None

    def solve(R: Reals) -> Reals:
        size = np.abs(R).max(axis=0, initial=0.0)
        size = np.where(size > 0, size, 1.0)
        found = linalg.cho_solve(held, (R / size).astype(real), check_finite=False)
        return found.astype(np.float64) * size

    return solve


def _approach(system: System, inverse: Callable[[Reals], Reals]) -> Reals | None:
    """A solution to about float64, by residuals in float64; None where they do not shrink."""
    M, C = system.matrix[0], system.right[0]
    W, last = inverse(C), math.inf
    for _ in range(_REFINEMENTS):
        R = C - M @ W
        size = float(np.abs(R).max())
        if not math.isfinite(size) or (size >= last and size > 1e-6):
            return None
        if size >= last / 4 or size < 1e-13:
            break
        W, last = W + inverse(R), size
    return W


def _refine(system: System, inverse: Callable[[Reals], Reals], W: Reals) -> Reals | None:
    """Exact residuals, corrections to them, and the bound, until every rounding is certain."""
    M, sums = system.matrix[0], tuple(part.copy() for part in system.right)
    length = float(np.linalg.norm(M))
    slip = (len(M) + 5) * _ROUND * length  # of one product M δ in float64, for ‖δ‖ = 1
    hi, R, exact = _subtract(system, sums, W)
    lo, q, bound = np.zeros_like(W), W, np.full(W.shape[1], math.inf)
    for _ in range(_RESIDUALS):
        rest, error = np.zeros_like(W), exact + 2 * _ROUND * np.linalg.norm(R, axis=0)
        for _ in range(_REFINEMENTS):
            step = inverse(R)
            rest = rest + step
            R = R - M @ step
            error = error + slip * np.linalg.norm(step, axis=0)
            error = error + _ROUND * length * np.linalg.norm(rest, axis=0)
            size = np.linalg.norm(R, axis=0)
            before, bound = bound, (size + error) / system.least * 1.0001
            q, certain = _round(hi, lo, rest, bound)
            if certain:
                return q
            if (size < 8 * error).all() or not (bound < before / 4).any():
                break
        part, R, error = _subtract(system, sums, rest)
        lo, exact = lo + part, exact + error
    return q if float(bound.max()) < GRID * 2.0**-20 else None


def _round(hi: Reals, lo: Reals, rest: Reals, bound: Reals) -> tuple[Reals, bool]:
    """The nearest grid points, and whether nothing within ``bound`` could have others."""
    q = np.rint(hi / GRID)
    r = (hi - q * GRID) + lo + rest
    shift = np.rint(r / GRID)
    r = r - shift * GRID
    margin = GRID / 2 - np.abs(r)
    narrow = margin <= bound + 2.0**-50 * (GRID + np.abs(lo) + np.abs(rest))
    total = q + shift
    other = total + np.sign(r)
    total = np.where(narrow & (np.abs(other) < np.abs(total)), other, total)
    return total * GRID, not narrow.any()


def _cut(values: Reals, unit: Any, bits: int, count: int) -> tuple[list[Reals], Reals]:
    """values = Σ_t 2^(-bits (t+1)) unit · slices[t] + what is left; slices are at most 2^bits."""
    slices, left = list[Reals](), values.copy()
    while len(slices) < count and left.any():
        grid = unit * 2.0 ** (-bits * (len(slices) + 1))
        whole = left / grid  # by a power of two: exact, as all of this is
        np.rint(whole, out=whole)
        slices.append(whole)
        left -= whole * grid
    return slices, left


def _subtract(system: System, sums: tuple[Reals, ...], W: Reals) -> tuple[Reals, Reals, Reals]:
    """Take M W' from ``sums``, W' about W: (W', what is left, how far each column may be off).

    A slice of M times one of W is a whole number: bits of both and of the number of rows are 53.
    """
    p, q = W.shape
    room = 53 - max(p - 1, 1).bit_length()
    long = -(-2 * room // 3)
    short = room - long
    unit = np.ldexp(1.0, np.frexp(np.abs(W).max(axis=0, initial=0.0))[1])
    pieces, left = _cut(W, unit, short, 3)
    W = W - left
    joined = np.concatenate([np.zeros((p, 0)), *pieces], axis=1)

    def subtract(rows: slice, term: Reals) -> None:
        for total, part in zip(sums, add_to(tuple(s[rows] for s in sums), -term), strict=True):
            total[rows] = part

    def work(at: int) -> float:
        rows, tail = slice(at, at + _TILE), 0.0
        for k, matrix in enumerate(system.matrix):
            small = 2.0 ** (1 - 52 * k)
            slices, left = _cut(matrix[rows], small, long, 4)
            tail += float(np.abs(left).max(initial=0.0))
            for whole in slices:
                products, small = whole @ joined, small * 2.0**-long
                for t in range(len(pieces)):
                    grid = unit * (small * 2.0 ** (-short * (t + 1)))
                    subtract(rows, products[:, t * q : (t + 1) * q] * grid)
        return tail

    with one_thread(), ThreadPoolExecutor(os.cpu_count()) as pool:
        tail = max(pool.map(work, range(0, p, _TILE)))
    for term in multiply_exactly(system.rest[:, None], W):
        subtract(slice(None), term)
    top, low = add_exactly(sums[0], sums[1])
    error = p * (np.linalg.norm(W, axis=0) + 1) * (tail + 2.0**-140)
    return W, top + (low + sums[2]), error


def _solve_plain(system: System) -> Reals:
    """Least squares of least norm, float64 on one thread: the same bits in one environment."""
    with one_thread():
        e, V = linalg.eigh(system.matrix[0], check_finite=False)
        keep = e > max(float(e.max(initial=0.0)), 0.0) * len(e) * 2.0**-50
        return V[:, keep] @ ((V[:, keep].T @ system.right[0]) / e[keep, None])


@functools.cache
def _find_pools() -> ThreadpoolController:
    return ThreadpoolController()


def one_thread() -> Any:
    """LAPACK gives other bits with other numbers of threads: one, while this is entered."""
    return _find_pools().limit(limits=1, user_api="blas")


def count_threads() -> int:
    """How many threads BLAS has outside of :func:`one_thread`."""
    return max((pool["num_threads"] for pool in _find_pools().info()), default=1)
