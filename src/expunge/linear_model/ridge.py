"""Ridge regression with the same bits on every machine (THEORY 10, "Rounding").

A factor in whatever float and on whatever number of threads gives a first solution. Its residual is
then computed *exactly*, in whole numbers (:class:`~expunge.linear_model.system.Residual`). As no
eigenvalue of M is below ``least``,

    ‖W - W*‖ ≤ ‖C - M W‖ / least,

and W is refined until this is too small to matter for any rounding of W* to the grid 2^-48 (in
units in which columns and outputs are about 1: a function of the sums). Where a component stays
within the bound of the middle between two grid points, the one nearer zero is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import linalg
from threadpoolctl import ThreadpoolController

from expunge.linear_model.system import (
    Moments,
    Reals,
    Residual,
    System,
    find_intercept,
    make_system,
)

GRID = -48  # as a power of two
_SMALL = 384  # below this a float64 factor costs nothing
_REFINEMENTS = 6
_MOST = 2.0**400  # of a penalty, beyond which exact residuals overflow float64


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
    provable = system.least > len(system.right) * 2.0**-100 and alpha * moments.unit < _MOST
    found = _solve_rounded(moments, system) if provable else None
    W = (_solve_plain(system) if found is None else found) * system.scale[:, None] / system.outputs
    return Solution(W, find_intercept(moments, W), alpha, found is not None)


def choose_alpha(moments: Moments, alphas: Sequence[float], standardise: bool) -> float:
    """The α with the least GCV = (RSS/n) / (1 - df/n)², to six digits, ties to the largest.

    With G = V diag(e) Vᵀ and c = VᵀB, centred: df = 1 + Σ e/(e + α) and
    RSS = Q - Σ ‖c_j‖² (e_j + 2 α)/(e_j + α)².
    """
    n, unit = moments.rows, float(moments.unit)
    G, B = moments.gram / unit, moments.cross / unit
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


def _solve_rounded(moments: Moments, system: System) -> Reals | None:
    """W'' on its grid, proven; None where refining does not get there."""
    if not system.right.any():
        return np.zeros_like(system.right)
    for real in (np.float32, np.float64) if len(system.right) > _SMALL else (np.float64,):
        inverse = factor(system.matrix, real)
        if inverse is not None and (found := _refine(moments, system, inverse)) is not None:
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


def _approach(M: Reals, R: Reals, inverse: Callable[[Reals], Reals]) -> Reals | None:
    """M⁻¹ R to about float64, by residuals in float64; None where they do not shrink."""
    W, first = inverse(R), float(np.abs(R).max())
    last = math.inf
    for _ in range(_REFINEMENTS):
        rest = R - M @ W
        size = float(np.abs(rest).max()) / first
        if not math.isfinite(size) or (size >= last and size > 1e-6):
            return None
        if size >= last / 4 or size < 1e-13:
            break
        W, last = W + inverse(rest), size
    return W


def _refine(moments: Moments, system: System, inverse: Callable[[Reals], Reals]) -> Reals | None:
    """Corrections by exact residuals, and their bound, until every rounding is certain."""
    residual, before = Residual(moments, system), math.inf
    for _ in range(_REFINEMENTS):
        step = _approach(system.matrix, residual.read(), inverse)
        if step is None:
            return None
        with one_thread():
            residual.step(step)
        bound = np.linalg.norm(residual.read(), axis=0) / system.least * 1.0001
        largest = float(bound.max())
        found, certain = residual.round(bound, GRID)
        if certain:
            return found
        if not 0 < largest < before / 4:
            return found if largest < 2.0 ** (GRID - 20) else None
        before = largest
    return None


def _solve_plain(system: System) -> Reals:
    """Least squares of least norm, float64 on one thread: the same bits in one environment."""
    with one_thread():
        e, V = linalg.eigh(system.matrix, check_finite=False)
        keep = e > max(float(e.max(initial=0.0)), 0.0) * len(e) * 2.0**-50
        return V[:, keep] @ ((V[:, keep].T @ system.right) / e[keep, None])


@functools.cache
def _find_pools() -> ThreadpoolController:
    return ThreadpoolController()


def one_thread() -> Any:
    """LAPACK gives other bits with other numbers of threads: one, while this is entered."""
    return _find_pools().limit(limits=1, user_api="blas")


def count_threads() -> int:
    """How many threads BLAS has outside of :func:`one_thread`."""
    return max((pool["num_threads"] for pool in _find_pools().info()), default=1)
