"""Newton's method with conjugate gradients for F(W) = (1/n) Σ ℓ(φ_i W/U, t_i) + (m/2)‖W‖².

Gradients are float64 over whole-number features; directions need not be exact and use float32.
The preconditioner is ``c_k G/(n U²) + m`` for output k, where G is the exact Gram matrix of the
*retained* rows, from the store's sums, and c_k the mean curvature of that output: nothing of it saw
a forgotten row. It stops when ‖∇F‖ plus its rounding error is at most the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from scipy import linalg

from expunge.accounting.precision import norm_margin
from expunge.forgettable.losses import Loss, Sizes, bend, bound_error, evaluate

Array = npt.NDArray[np.float64]
Block = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
_FORCING = 0.1
_MOST_NEWTON, _MOST_CONJUGATE = 100, 500


@dataclass
class Objective:
    """F on some rows. ``half_passes`` counts products with the features or their transpose."""

    loss: Loss
    weight_decay: float
    unit: float
    blocks: Sequence[Block]
    gram: Array
    half_passes: int = 0
    rows: int = field(init=False)
    reach: float = field(init=False)

    def __post_init__(self) -> None:
        self.rows = sum(len(phi) for phi, _ in self.blocks)
        squares = [
            float(np.square(phi, dtype=np.float64).sum(axis=1).max()) for phi, _ in self.blocks
        ]
        self.reach = math.sqrt(max(squares)) / self.unit * (1 + 2.0**-40)

    def evaluate(self, W: Array) -> tuple[float, Array, float, list[Any]]:
        """(F, ∇F, an upper bound of the exact ‖∇F‖, curvature states)."""
        V, gradient = W / self.unit, np.zeros_like(W)
        value = residual = rate = 0.0
        states: list[Any] = []
        for phi, t in self.blocks:
            x = phi.astype(np.float64)
            part, r, state = evaluate(self.loss, x @ V, t.astype(np.float64))
            value += part
            residual += float(np.sqrt(np.square(r).sum(axis=1)).sum())
            rate += float(np.sqrt(np.square(state).sum(axis=1)).sum())
            gradient += x.T @ r
            states.append(state.astype(np.float32))
        self.half_passes += 2
        n, m = self.rows, self.weight_decay
        gradient = gradient / (self.unit * n) + m * W
        length = float(np.linalg.norm(W))
        longest = max(len(t) for _, t in self.blocks)
        sizes = Sizes(
            *cast(tuple[int, int], W.shape),
            rows=n,
            block=longest,
            reach=self.reach,
            length=length,
            residual=residual / n,
            rate=rate / n,
        )
        norm = float(np.linalg.norm(gradient)) * (1 + norm_margin(W.size))
        bound = norm + bound_error(self.loss, sizes, m)
        return value / n + m / 2 * length**2, gradient, bound, states

    def curve(self, states: Sequence[Any], D: Array) -> Array:
        """∇²F D, in float32 but for the ridge."""
        V, out = (D / self.unit).astype(np.float32), np.zeros_like(D)
        for (phi, _), state in zip(self.blocks, states, strict=True):
            out += phi.T @ bend(self.loss, state, phi @ V)
        self.half_passes += 2
        return out / (self.unit * self.rows) + self.weight_decay * D

    def precondition(self, states: Sequence[Any]) -> Callable[[Array], Array]:
        """R ↦ M⁻¹ R with M_k = c_k G/(n U²) + m, one factor per group of outputs of like c_k."""
        total = sum(_mean_curvature(self.loss, state).sum(axis=0) for state in states)
        c = np.maximum(np.asarray(total, np.float64) / self.rows, 1e-6)
        groups: dict[int, Any] = {}
        level = np.rint(np.log2(c) * 1.0).astype(int)
        scaled = self.gram / (self.rows * self.unit**2)
        for one in np.unique(level).tolist():
            M = scaled * float(np.exp(np.log(c[level == one]).mean()))
            M[np.diag_indices_from(M)] += self.weight_decay
            groups[one] = linalg.cho_factor(M, lower=True, check_finite=False, overwrite_a=True)

        def apply(R: Array) -> Array:
            out = np.empty_like(R)
            for one, factor in groups.items():
                out[:, level == one] = linalg.cho_solve(factor, R[:, level == one])
            return out

        return apply


def _mean_curvature(loss: Loss, state: Any) -> Any:
    return state * (1 - state) if loss == "softmax" else state


@dataclass(frozen=True)
class Solution:
    """W, whether the tolerance was reached, the bound on ‖∇F(W)‖ and what it took."""

    weights: Array
    reached: bool
    bound: float
    half_passes: int


def solve(objective: Objective, start: Array, tolerance: float) -> Solution:
    """Newton steps by preconditioned conjugate gradients, until ‖∇F‖ ≤ τ for certain."""
    W = start.copy()
    value, g, bound, states = objective.evaluate(W)
    best = Solution(W, bound <= tolerance, bound, objective.half_passes)
    for _ in range(_MOST_NEWTON):
        if best.reached or not math.isfinite(bound):
            break
        norm = float(np.linalg.norm(g))
        aim = max(_FORCING * norm, 0.3 * tolerance)
        D = _solve_direction(objective, states, g, aim)
        W, (value, g, bound, states) = _search(objective, W, D, value, g)
        if bound >= best.bound and norm <= 4 * tolerance:
            break
        best = Solution(W, bound <= tolerance, bound, objective.half_passes)
    return Solution(best.weights, best.reached, best.bound, objective.half_passes)


def _solve_direction(objective: Objective, states: Sequence[Any], g: Array, aim: float) -> Array:
    """D with ‖∇²F D + ∇F‖ ≤ aim."""
    apply = objective.precondition(states)
    D, r = np.zeros_like(g), -g
    z = apply(r)
    p, rz = z, float(np.vdot(r, z))
    for _ in range(_MOST_CONJUGATE):
        Hp = objective.curve(states, p)
        alpha = rz / float(np.vdot(p, Hp))
        D, r = D + alpha * p, r - alpha * Hp
        if float(np.linalg.norm(r)) <= aim:
            break
        z = apply(r)
        rz, before = float(np.vdot(r, z)), rz
        p = z + rz / before * p
    return D


def _search(objective: Objective, W: Array, D: Array, value: float, g: Array) -> tuple[Array, Any]:
    """The longest of the steps 1, 1/2, 1/4, … that lowers F enough, or the gradient."""
    slope, size, norm = float(np.vdot(g, D)), 1.0, float(np.linalg.norm(g))
    while True:
        found = objective.evaluate(W + size * D)
        lower = found[0] <= value + 1e-4 * size * slope
        if lower or float(np.linalg.norm(found[1])) <= 0.5 * norm or size < 1e-6:
            return W + size * D, found
        size /= 2
