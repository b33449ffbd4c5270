"""How to tell two worlds of released models apart: scores, learned on some runs, used on others.

A projection is the optimal test where the noise is Gaussian and independent of the world. The
residue of a coordinate modulo a small period is blind to such noise, and sees what it should not:
noise of too few bits (Mironov 2012), or noise that an adversary could steer onto a lattice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Projection:
    """⟨x, w⟩: a likelihood ratio if the worlds are Gaussians with one covariance."""

    weights: tuple[float, ...]


@dataclass(frozen=True)
class Residue:
    """log(p₁/p₀) of ⟨x, w⟩ modulo ``period``, from a histogram of equal bins."""

    weights: tuple[float, ...]
    period: float
    log_ratios: tuple[float, ...]


Statistic = Projection | Residue


def score(statistic: Statistic, points: Array) -> Array:
    """One number per row: the larger, the more it looks like world 1.

    >>> score(Projection((1.0, 0.0)), np.array([[3.0, 9.0]])).tolist()
    [3.0]
    >>> score(Residue((1.0,), 1.0, (0.0, 7.0)), np.array([[5.25], [5.75]])).tolist()
    [0.0, 7.0]
    """
    along = points @ np.array(statistic.weights)
    match statistic:
        case Projection():
            return along
        case Residue(period=period, log_ratios=log_ratios):
            return np.array(log_ratios)[_place(along, period, len(log_ratios))]


def fit_projection(zero: Array, one: Array) -> Projection:
    """w = S⁻¹ (m₁ - m₀), Fisher's discriminant; finds directions that the noise left out.

    >>> rng = np.random.default_rng(0)
    >>> zero, one = rng.normal(0, (1, 0.1), (99, 2)), rng.normal(1, (1, 0.1), (99, 2))
    >>> w = fit_projection(zero, one).weights
    >>> w[1] > 20 * abs(w[0])
    True
    """
    spread = np.std(np.concatenate([zero, one]), axis=0)
    unit = np.where(spread > 0, spread, 1.0)
    a, b = zero / unit, one / unit
    covariance = np.cov(a.T).reshape(a.shape[1], -1) + np.cov(b.T).reshape(a.shape[1], -1)
    ridge = 1e-12 * np.eye(len(unit)) * max(float(np.trace(covariance)), 1e-300)
    w = np.linalg.solve(covariance + ridge, b.mean(axis=0) - a.mean(axis=0))
    length = float(np.linalg.norm(w / unit)) or 1.0
    return Projection(tuple((w / unit / length).tolist()))


def fit_residue(zero: Array, one: Array, weights: Sequence[float], period: float) -> Residue:
    """The histogram of both worlds' residues, each bin smoothed by one run.

    >>> zero, one = np.zeros((64, 1)) + 0.1, np.zeros((64, 1)) + 0.6
    >>> score(fit_residue(zero, one, (1.0,), 1.0), np.array([[7.1], [7.6]])).round(2).tolist()
    [-4.17, 4.17]
    """
    bins = int(np.clip(min(len(zero), len(one)) // 16, 4, 512))
    w = np.array(weights)
    counts = [
        np.bincount(_place(points @ w, period, bins), minlength=bins) + 1.0
        for points in (zero, one)
    ]
    return Residue(tuple(weights), period, tuple(np.log(counts[1] / counts[0]).tolist()))


def describe(statistic: Statistic) -> str:
    """A few words for a report."""
    match statistic:
        case Projection():
            return "projection"
        case Residue(period=period):
            return f"residue modulo {period:.3g}"


def _place(along: Array, period: float, bins: int) -> npt.NDArray[np.intp]:
    turns = along / period
    places = np.floor((turns - np.floor(turns)) * bins).astype(np.intp)
    return np.clip(places, 0, bins - 1)
