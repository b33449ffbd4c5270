"""Worst-case pairs for every noisy method, and statistics by which what is released differs.

The starts of the two worlds, old model and retrained one, are opposite ends of the ball along one
direction u. The retained data are the same in both, and as bad as they can be:

- *push*: every gradient drives the model away from the middle. One step attains the theorem; in
  model clipping many steps do, at ε = 0 (THEORY section 4).
- *lattice*: the last step moves the model to the nearest point of a lattice. Where the last noise
  is fresh this is useless; where a noise was used before, the model's place says which noise comes
  next, and the released model gives the start away (erratum E7).

A projection is the optimal test where the noise is Gaussian and independent of the world. A residue
modulo a small period is blind to such noise, and sees noise of too few bits (Mironov 2012).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expunge.accounting.precision import list_levels
from expunge.recipes import (
    GradientClipping,
    ModelClipping,
    NoisyRecipe,
    OutputPerturbation,
    schedule,
)

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

DIRECTION = (0.48, 0.64, 0.6)
NEAR, FAR = 1.5, 1e6
_U = np.array(DIRECTION)


@dataclass(frozen=True)
class Adversary:
    """A push; with a ``period`` the last step leads to a lattice, by a noise that is ``ahead``.

    Row r of many trials is of world 1 if r is even, else of world 0. Half of the starts and of the
    gradients are just outside their ball and half are far outside: a clip must bring both to the
    same place.
    """

    recipe: NoisyRecipe
    period: float = 0.0
    ahead: float = 0.0

    def __str__(self) -> str:
        return "lattice" if self.period else "push"

    @property
    def centre(self) -> Array:
        """A public centre that is not zero."""
        return np.array([0.3, -0.2, 0.1]) * find_reach(self.recipe)

    def start(self, rows: Rows) -> Array:
        length = find_reach(self.recipe) * np.where((rows // 2) % 2 == 0, NEAR, FAR)
        return np.where(rows % 2 == 0, length, -length)[:, None] * _U

    def gradient(self, offsets: Array, t: int, rows: Rows) -> Array:
        """The choice of g at step t, as a function of where each row is around the centre."""
        recipe = self.recipe
        assert not isinstance(recipe, OutputPerturbation)
        clips = isinstance(recipe, GradientClipping)
        gamma = float(schedule(recipe.learning_rate, recipe.steps)[t])
        rho, along = 1 - gamma * recipe.weight_decay, offsets @ _U
        if clips:
            drive = recipe.grad_clip * np.where((rows // 4) % 2 == 0, NEAR, FAR)
        else:  # beside it everything else is small
            drive = np.full(len(rows), FAR**2 * recipe.model_clip / max(gamma, 1e-100))
        if not self.period or (t + 1 < recipe.steps and not clips):
            return np.where(along >= 0, -drive, drive)[:, None] * _U
        if t + 1 < recipe.steps or gamma == 0:
            return np.zeros_like(offsets)
        goal = np.rint(along * (rho + self.ahead) / self.period) * self.period - along * self.ahead
        if clips:
            return ((along * rho - goal) / gamma)[:, None] * _U
        return (offsets * rho - goal[:, None] * _U) / gamma


def find_reach(recipe: NoisyRecipe) -> float:
    """The radius of the ball the start is clipped to; the model's where there is none.

    A ball of radius 0 is reached from a start at a distance of 1 too.
    """
    radius = recipe.start_clip
    if isinstance(recipe, ModelClipping) and (radius is None or math.isinf(radius)):
        radius = recipe.model_clip
    return radius or 1.0


def list_adversaries(recipe: NoisyRecipe) -> list[Adversary]:
    """All that are worth a try.

    >>> four = GradientClipping(start_clip=1.0, grad_clip=1.0, learning_rate=0.1,
    ...                         weight_decay=0.0, steps=4, noise_std=1.0)
    >>> [str(adversary) for adversary in list_adversaries(four)]
    ['push', 'lattice']
    """
    push = Adversary(recipe)
    if isinstance(recipe, OutputPerturbation) or recipe.steps == 1:
        return [push]
    T, rates = recipe.steps, schedule(recipe.learning_rate, recipe.steps)
    # x_{T-1} = a + c ξ with a different a in each world, so that ξ = (x_{T-1} - a)/c comes next.
    # The last step makes (ρ + 1/c) x_{T-1} + v a lattice point; x_T is that point - a/c.
    if isinstance(recipe, ModelClipping):
        c, distance = 1.0, 2 * recipe.model_clip
    else:
        kept = np.append(np.cumprod((1 - rates[: T - 1] * recipe.weight_decay)[::-1])[::-1], 1.0)
        sigma = schedule(recipe.noise_std, T)
        c = float(np.sum(kept[1:] * sigma[:-1])) / float(sigma[-1] or 1.0)
        distance = recipe.start_clip * float(kept[0]) * 2
    if c <= 0 or distance <= 0:
        return [push]
    return [push, Adversary(recipe, 2 * distance / c, 1 / c)]


@dataclass(frozen=True)
class Statistic:
    """⟨x, w⟩, which is a likelihood ratio if the worlds are Gaussians with one covariance; with a
    ``period``, log(p₁/p₀) of ⟨x, w⟩ modulo it, from a histogram of equal bins."""

    weights: tuple[float, ...]
    period: float = 0.0
    log_ratios: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"residue modulo {self.period:.3g}" if self.period else "projection"

    def score(self, points: Array) -> Array:
        """One number per row: the larger, the more it looks like world 1.

        >>> Statistic((1.0,), 1.0, (0.0, 7.0)).score(np.array([[5.25], [5.75]])).tolist()
        [0.0, 7.0]
        """
        along = points @ np.array(self.weights)
        if not self.period:
            return along
        return np.array(self.log_ratios)[_find_bins(along, self.period, len(self.log_ratios))]


def fit_statistics(adversary: Adversary, zero: Array, one: Array) -> Iterator[Statistic]:
    """All that are worth a try: first what theory would choose."""
    yield Statistic(DIRECTION)
    yield fit_projection(zero, one)
    yield Statistic((0.0, 1.0, 0.0))  # noise of another shape shows most in a single coordinate
    if adversary.period:
        yield fit_residue(zero, one, DIRECTION, adversary.period)
    sigma = next(s for s in reversed(list_levels(adversary.recipe)) if s > 0)
    for unit in dict.fromkeys((sigma, math.ldexp(1.0, math.frexp(sigma)[1]))):
        for bits in (8, 14):
            yield fit_residue(zero, one, (1.0, 0.0, 0.0), math.ldexp(unit, -bits))


def fit_projection(zero: Array, one: Array) -> Statistic:
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
    covariance = np.cov(a.T) + np.cov(b.T)
    ridge = 1e-12 * np.eye(len(unit)) * max(float(np.trace(covariance)), 1e-300)
    w = np.linalg.solve(covariance + ridge, b.mean(axis=0) - a.mean(axis=0)) / unit
    return Statistic(tuple((w / (float(np.linalg.norm(w)) or 1.0)).tolist()))


def fit_residue(zero: Array, one: Array, weights: Sequence[float], period: float) -> Statistic:
    """The histogram of both worlds' residues, each bin smoothed by one run."""
    bins, w = int(np.clip(min(len(zero), len(one)) // 16, 4, 512)), np.array(weights)
    counts = [
        np.bincount(_find_bins(points @ w, period, bins), minlength=bins) + 1.0
        for points in (zero, one)
    ]
    return Statistic(tuple(weights), period, tuple(np.log(counts[1] / counts[0]).tolist()))


def _find_bins(along: Array, period: float, bins: int) -> npt.NDArray[np.intp]:
    turns = along / period
    return np.clip(np.floor((turns - np.floor(turns)) * bins).astype(np.intp), 0, bins - 1)
