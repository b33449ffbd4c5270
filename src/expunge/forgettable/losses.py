"""Convex losses of scores z = (φ/U) W: value, residual ∂ℓ/∂z, curvature, and their rounding.

Each is convex in z, hence in W. ``t`` are whole-number targets, one-hot for classes (one against
the rest for the logistic loss and the squared hinge).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from expunge.errors import InputError

Array = npt.NDArray[np.floating[Any]]
Loss = Literal["softmax", "logistic", "squared-hinge", "poisson"]
LOSSES: tuple[Loss, ...] = ("softmax", "logistic", "squared-hinge", "poisson")
UNIT = 2.0**-53


def check_loss(loss: str) -> Loss:
    """One of the four."""
    if loss not in LOSSES:
        raise InputError.of("loss", loss, "one of " + ", ".join(LOSSES))
    return loss


def check_targets(loss: Loss, targets: npt.NDArray[Any]) -> None:
    """Poisson regression is of counts.

    >>> check_targets("poisson", np.array([[0], [7]]))
    """
    if loss == "poisson" and targets.size and targets.min() < 0:
        raise InputError.of("targets", int(targets.min()), "counts, >= 0, for Poisson regression")


def evaluate(loss: Loss, z: Array, t: Array) -> tuple[float, Array, Array]:
    """(Σ ℓ, residuals, curvature state) of a block of rows.

    The state is p for softmax, whose curvature is diag(p) - p pᵀ, and the diagonal for the others.

    >>> value, r, _ = evaluate("softmax", np.zeros((1, 2)), np.array([[1.0, 0.0]]))
    >>> round(value, 6), r.tolist()
    (0.693147, [[-0.5, 0.5]])
    """
    match loss:
        case "softmax":
            top = z.max(axis=1, keepdims=True)
            e = np.exp(z - top)
            total = e.sum(axis=1, keepdims=True)
            p = e / total
            value = float((np.log(total) + top).sum() - (t * z).sum())
            return value, p - t, p
        case "logistic":
            p = special.expit(z)
            return float((np.logaddexp(0.0, z) - t * z).sum()), p - t, p * (1 - p)
        case "squared-hinge":
            sign = 2 * t - 1
            gap = np.maximum(1 - sign * z, 0.0)
            return float(np.square(gap).sum()), -2 * sign * gap, 2.0 * (gap > 0)
        case "poisson":
            rate = np.exp(np.minimum(z, 700.0))
            return float((rate - t * z).sum()), rate - t, rate


def bend(loss: Loss, state: Array, z: Array) -> Array:
    """The curvature times a direction, row by row."""
    if loss == "softmax":
        bent = state * z
        bent -= state * bent.sum(axis=1, keepdims=True)
        return bent
    return state * z


def add_curvature(loss: Loss, state: Array) -> Array:
    """Σ C_i of a block: ∂²ℓ/∂z² is diag(p) - p pᵀ for softmax, diagonal for the others."""
    total = np.diag(state.sum(axis=0))
    return total - state.T @ state if loss == "softmax" else total


@dataclass(frozen=True)
class Sizes:
    """What the error of a float64 gradient depends on.

    ``width`` p, ``outputs`` q, ``depth`` the longest block and how many there are (no number is
    added more often), ``reach`` max ‖φ_i‖/U,
    ``length`` ‖W‖, ``residual`` the mean of ‖r_i‖, ``rate`` that of ‖e^{z_i}‖ (Poisson only).
    """

    width: int
    outputs: int
    depth: int
    reach: float
    length: float
    residual: float
    rate: float = 0.0


def bound_error(loss: Loss, sizes: Sizes, weight_decay: float) -> float:
    """How far a float64 ∇F(W), summed in blocks, can be from the exact one, in norm.

    With u = 2⁻⁵³, a = max ‖φ‖/U and s = a ‖W‖ (no score is larger): scores err by
    e_z = (p + 4) u s; residuals by e_r, below; the mean over rows by (depth + 8) u times
    the mean of a ‖r‖; the ridge by 4 u m ‖W‖. 10 % covers second-order terms. In softmax both the
    shifted scores, at most √2 s, and their exponentials are rounded above and below the fraction,
    and ‖∂p/∂z‖ ≤ 1/2; in the others no ∂r/∂z is above 1/4, 2 and e^z.

        softmax        e_r = 2 e_z + (2 s + q + 16) u       logistic   e_r = e_z + 16 u √q
        squared hinge  e_r = 2 e_z + 8 u (√q + s)           Poisson    e_r = ‖e^z‖ (e_z + 16 u)
    """
    s, q = sizes.reach * sizes.length, sizes.outputs
    scores = (sizes.width + 4) * UNIT * s
    match loss:
        case "softmax":
            residual = 2 * scores + (2 * s + q + 16) * UNIT
        case "logistic":
            residual = scores + 16 * UNIT * math.sqrt(q)
        case "squared-hinge":
            residual = 2 * scores + 8 * UNIT * (math.sqrt(q) + s)
        case "poisson":
            grown = math.expm1(scores) if scores < 1 else math.inf
            residual = sizes.rate * (grown + 16 * UNIT)
    adding = (sizes.depth + 8) * UNIT * sizes.residual
    ridge = 4 * UNIT * weight_decay * sizes.length
    return 1.1 * (sizes.reach * (residual + adding) + ridge)
