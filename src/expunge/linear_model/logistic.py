"""Logistic regression by a deterministic solver on retained rows: (0, 0) (THEORY, section 11).

    F(W, b) = (1/n) Σ ℓ(W x_i + b, y_i) + ‖W‖² / (2 C n)        ℓ: softmax; two classes: logistic

It starts at the ridge solution of the retained sums, scaled, and goes on by L-BFGS whose first
inverse Hessian is the Cholesky factor of these sums. Rows come in an order that their content alone
decides, blocks are added in order whatever the number of threads: the same bits in one environment.
The release is a function of the retained rows whether or not the tolerance is reached.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import linalg
from scipy.special import softmax

from expunge.linear_model.ridge import Solution, one_thread
from expunge.linear_model.system import Moments, Reals, make_system

Array = npt.NDArray[Any]
Rows = tuple[Array, Array, float]  # in the order of content; the first times the last are columns
_ROWS = 512  # as many as stay in a cache between a product and its transpose
_SAMPLE = 4096
_CURVATURE = 0.05  # of a trained model, about; only the start and the speed depend on it
_MEMORY = 20
_LEAST_STEP = 2.0**-10
_COARSE = 1e-5  # gradients below this are computed in float64


class Objective:
    """F in the coordinates of the scaled normal equations, V = W / scale, and its gradient."""

    def __init__(self, rows: Rows, penalty: Reals, scale: Reals, moments: Moments) -> None:
        self.features, self.classes, self.unit = rows
        self.penalty, self.scale = penalty[:, None], scale
        self.means = moments.means[0]
        self.intercept = moments.intercept
        self.real: Any = np.float32 if self.features.dtype.kind == "i" else np.float64
        self.pool = ThreadPoolExecutor(os.cpu_count() or 1)

    def compute(self, V: Reals) -> tuple[float, Reals]:
        """(F, ∇F); V's last row is the intercept at the means of the columns."""
        W = V[:-1] * self.scale[:, None]
        weights = (W * self.unit).astype(self.real)
        offset = (V[-1] - self.means @ W).astype(self.real)
        n = len(self.classes)

        def work(at: int) -> tuple[float, Array, Array]:
            x = self.features[at : at + _ROWS].astype(self.real, copy=False)
            z = x @ weights
            z += offset
            loss, r = _find_residuals(z, self.classes[at : at + _ROWS])
            return loss, np.ascontiguousarray(r.T) @ x, r.sum(axis=0, dtype=np.float64)

        value, product, total = 0.0, np.zeros(W.T.shape), np.zeros(W.shape[1])
        for loss, part, summed in self.pool.map(work, range(0, n, _ROWS)):
            value += loss
            product += part
            total += summed
        g = (product.T * self.unit - np.outer(self.means, total)) / n + self.penalty * W
        last = total / n if self.intercept else np.zeros_like(total)
        gradient = np.concatenate([g * self.scale[:, None], last[None]])
        return value / n + float(np.vdot(self.penalty * W, W)) / 2, gradient


def _find_residuals(z: Array, classes: Array) -> tuple[float, Array]:
    """(Σ ℓ, ∂ℓ/∂z) of a block of rows; one column of z is the logistic loss of class 1."""
    if z.shape[1] == 1:
        sign = np.where(classes > 0, 1.0, -1.0).astype(z.dtype)
        margin = z[:, 0] * sign
        e = np.exp(-np.abs(margin))
        loss = np.maximum(-margin, 0.0) + np.log1p(e)
        p = np.where(margin >= 0, e, 1.0) / (1 + e)
        return float(loss.sum(dtype=np.float64)), -(sign * p)[:, None]
    z -= z.max(axis=1, keepdims=True)
    rows = np.arange(len(z))
    own = z[rows, classes]
    np.exp(z, out=z)
    total = z.sum(axis=1)
    z /= total[:, None]
    z[rows, classes] -= 1.0
    return float((np.log(total) - own).sum(dtype=np.float64)), z


def fit_logistic(
    rows: Rows, moments: Moments, C: float, tol: float, max_iter: int, standardise: bool
) -> tuple[Solution, float]:
    """Minimise F until no component of its gradient, with columns of variance 1, is above tol.

    Returns the largest component that is left too.
    """
    n, q = moments.rows, len(moments.t)
    system = make_system(moments, 1 / (C * _CURVATURE), standardise)
    with one_thread(), np.errstate(over="ignore", under="ignore"):
        factor = linalg.cho_factor(system.matrix.astype(np.float64), check_finite=False)
        start = linalg.cho_solve(factor, system.right, check_finite=False) / system.outputs
        penalty = moments.variances if standardise else np.ones(len(start))
        objective = Objective(rows, penalty / (C * n), system.scale, moments)
        V = np.concatenate([start, moments.means[1][None]])
        curvature, V = _scale_start(objective, V)
        unit = curvature / (float(n) * moments.unit)

        def precondition(R: Reals) -> Reals:
            body = linalg.cho_solve(factor, R[:-1], check_finite=False)
            return np.concatenate([body / unit, R[-1:] / curvature])

        deviation = np.sqrt(np.maximum(moments.variances, 0.0)) * system.scale
        weigh = np.append(1 / np.where(deviation > 0, deviation, np.inf), 1.0)[:, None]
        V, taken, left = _descend(objective, V, precondition, weigh, tol, max_iter)
        objective.pool.shutdown()
        W = V[:-1] * system.scale[:, None]
        intercept = V[-1] - objective.means @ W
        if q > 1 and moments.intercept:
            intercept -= intercept.mean()  # any constant gives the same model
    return Solution(W, intercept, 1 / C, False, (), taken), left


def _scale_start(objective: Objective, V: Reals) -> tuple[float, Reals]:
    """The multiple of V that fits the first rows best, and the mean curvature there."""
    W, x = V[:-1] * objective.scale[:, None], objective.features[:_SAMPLE].astype(np.float64)
    scores = x @ (W * objective.unit) + (V[-1] - objective.means @ W)
    classes = objective.classes[:_SAMPLE]
    tries = [2.0 ** (k / 2) for k in range(-2, 11)]
    losses = [_find_residuals(scores * t, classes)[0] for t in tries]
    best = tries[int(np.argmin(losses))]
    z = scores * best
    p = 1 / (1 + np.exp(-z)) if z.shape[1] == 1 else softmax(z, axis=1)
    return 2 * max(float((p * (1 - p)).mean()), 1e-4), V * best


def _descend(
    objective: Objective, V: Reals, precondition: Callable[[Reals], Reals], weigh: Reals,
    tol: float, max_iter: int,
) -> tuple[Reals, int, float]:  # fmt: skip
    """L-BFGS: (V, gradients computed, the largest weighed component left)."""
    value, g = objective.compute(V)
    pairs, taken = deque[tuple[Reals, Reals, float]](maxlen=_MEMORY), 1
    length = 1.0  # of a first direction: a step that was cut shortens those after it too
    for _ in range(max_iter):
        left = float(np.abs(g * weigh).max())
        if left <= tol:
            break
        coarse = objective.real is np.float32
        if coarse and left <= _COARSE:
            objective.real = np.float64
            value, g = objective.compute(V)
            pairs.clear()
            continue
        d, along = -g, list[float]()
        for s, y, bent in reversed(pairs):
            along.append(float(np.vdot(s, d)) / bent)
            d = d - along[-1] * y
        d = length * precondition(d)
        for (s, y, bent), a in zip(pairs, reversed(along), strict=True):
            d += (a - float(np.vdot(y, d)) / bent) * s
        slope, step = float(np.vdot(g, d)), 1.0
        noise = abs(value) * (3e-7 if coarse else 1e-15)
        while step > _LEAST_STEP:
            found, h = objective.compute(V + step * d)
            taken += 1
            # Where rounding hides what a step gains, its slope still shows it (Hager, Zhang).
            flat = found <= value + noise and float(np.vdot(h, d)) <= -0.8 * slope
            if flat or found <= value + 1e-4 * step * slope:
                break
            step /= 2
        else:
            if not coarse:
                break
            objective.real = np.float64  # what float32 can do is done
            value, g = objective.compute(V)
            pairs.clear()
            continue
        length *= step
        s, y = step * d, h - g
        bent = float(np.vdot(s, y))
        if bent > 0:
            pairs.append((s, y, bent))
        V, value, g = V + s, found, h
    return V, taken, float(np.abs(g * weigh).max())
