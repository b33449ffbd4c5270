"""Ridge regression from exact sums, without torch: W = (G + n λ U² I)⁻¹ B U.

LAPACK gives other bits with other numbers of threads, so it runs on one; the factor is computed
from the integers every time and the solution is checked by its normal equations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import linalg
from threadpoolctl import ThreadpoolController

from expunge.errors import UnlearningError
from expunge.forgettable.sums import Sums

Weights = npt.NDArray[np.float64]
GRID = tuple(10.0 ** (k / 2) for k in range(-14, 1))
_WORST_RESIDUAL = 1e-9


def solve_ridge(sums: Sums, candidates: Sequence[float], unit: float) -> tuple[Weights, float]:
    """W = (G + n λ U² I)⁻¹ B U by Cholesky on one thread, checked by its normal equations."""
    G, B = sums.gram.astype(np.float64), sums.cross.astype(np.float64)
    with one_thread():
        chosen = candidates[0]
        if len(candidates) > 1:
            chosen = choose_regularisation(sums, candidates, unit)
        penalty = sums.rows * chosen * unit**2
        G[np.diag_indices_from(G)] += penalty
        try:
            factor = linalg.cho_factor(G.T, lower=True, check_finite=False)
        except linalg.LinAlgError:
            raise UnlearningError(
                f"the normal equations cannot be solved with regularisation {chosen}; "
                "it must be larger"
            ) from None
        V = linalg.cho_solve(factor, B, check_finite=False)
        residual = float(np.abs(G @ V - B).max(initial=0.0))
    largest = float(G.diagonal().max(initial=0.0))  # no entry of a Gram matrix is beyond
    size = largest * float(np.abs(V).max(initial=0.0)) * len(G) + float(np.abs(B).max(initial=1.0))
    if not residual <= _WORST_RESIDUAL * size:
        raise UnlearningError(
            f"the solution leaves a residual of {residual:.1e} in the normal equations; "
            "regularisation must be larger"
        )
    return V * unit, chosen


def choose_regularisation(sums: Sums, candidates: Sequence[float], unit: float) -> float:
    """argmin over λ of GCV(λ) = (RSS(λ)/n) / (1 - df(λ)/n)², from n, G, B and Q alone.

    With G = V diag(e) Vᵀ, c = VᵀB and s = n λ U²:  df = Σ e/(e + s) and
    RSS = Q - Σ ‖c_j‖² (e_j + 2 s)/(e_j + s)².
    """
    e, V = linalg.eigh(sums.gram.astype(np.float64), check_finite=False)
    e = np.maximum(e, 0.0)
    c = np.square(V.T @ sums.cross.astype(np.float64)).sum(axis=1)
    n = sums.rows
    scores: list[float] = []
    for value in candidates:
        s = n * value * unit**2
        rss = float(sums.square) - float((c * (e + 2 * s) / np.square(e + s)).sum())
        freedom = 1 - float((e / (e + s)).sum()) / n
        scores.append(max(rss, 0.0) / n / max(freedom, 1e-12) ** 2)
    return candidates[int(np.argmin(scores))]


@functools.cache
def _find_pools() -> ThreadpoolController:
    return ThreadpoolController()


def one_thread() -> Any:
    """LAPACK gives other bits with other numbers of threads: one, while this is entered."""
    return _find_pools().limit(limits=1, user_api="blas")
