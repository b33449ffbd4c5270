"""Worst-case pairs for every method, and scores that tell what they release apart.

The starts are opposite ends of the ball (or one end and the centre) along one direction u. The
retained data are the same in both worlds, and as bad as retained data can be:

- *push*: every gradient drives the model away from a split, so that the two worlds part. One step
  attains the theorem exactly. In model clipping the splits are those that attain the recursion at
  a chosen ε (THEORY section 4): where P_t = e^ε Q_t.
- *lattice*: the last step moves the model to the nearest point of a lattice. Where the last noise
  is fresh this is useless; where a noise was used before, the model's place tells which noise comes
  next, and the released model gives the start away (erratum E7).

A convex head has no gradients to choose: the worlds are the exact solution and a point at the
distance τ/m from it, as far as the residual allows.

Scores are learned on some runs and used on others. A projection is the optimal test where the noise
is Gaussian and independent of the world. The residue of a coordinate modulo a small period is blind
to such noise, and sees what it should not: noise of too few bits (Mironov 2012), or noise that an
adversary could steer onto a lattice. A single bit of a single cell sees what was written there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from expunge.recipes import (
    ComparedTo,
    ConvexHeadRecipe,
    GradientClipping,
    ModelClipping,
    NoisyRecipe,
    OutputPerturbation,
    schedule,
)

Audited = NoisyRecipe | ConvexHeadRecipe

DIRECTION = (0.48, 0.64, 0.6)
NEAR, FAR = 1.5, 1e6
_SPLIT = 2


class Trials(nn.Module):
    """A tiny model per row: a weight of two numbers and a bias; the output is x - centre."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows[:, :_SPLIT].clone())
        self.bias = nn.Parameter(rows[:, _SPLIT:].clone())

    def forward(self, centre: Tensor) -> Tensor:
        return torch.cat([self.weight, self.bias], dim=1) - centre


@dataclass(frozen=True)
class Instructions:
    """The retained data: batch t is (centre, t)."""

    steps: int
    centre: Tensor

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for t in range(self.steps):
            yield self.centre, torch.tensor(t)


@dataclass(frozen=True)
class Adversary:
    """``splits`` says where the worlds are parted at each step: at all of them in a push, at the
    first ones, if any, before a lattice of ``period``."""

    kind: Literal["push", "lattice"]
    recipe: Audited
    compared_to: ComparedTo
    splits: tuple[float, ...]
    period: float = 0.0
    ahead: float = 0.0

    def describe(self) -> str:
        """A few words for a report."""
        if isinstance(self.recipe, ConvexHeadRecipe):
            return "two solutions at the distance tolerance / weight_decay"
        return "starts apart, " + ("gradients push apart" if self.kind == "push" else "lattice")

    def start(self, trials: int) -> Tensor:
        """One row per trial, around the centre: world 1 in even rows, world 0 in odd ones.

        Half of the starts are just outside the ball and half are far outside: a clip must bring
        both to the same place. A convex head's are where they are: nothing clips them.
        """
        radius, solved = find_reach(self.recipe), isinstance(self.recipe, ConvexHeadRecipe)
        row = torch.arange(trials)
        outside = torch.where((row // 2) % 2 == 0, NEAR, FAR).double()
        length = torch.full_like(outside, radius) if solved else radius * outside
        opposite = self.compared_to == "retrained" and not solved
        side = torch.where(row % 2 == 0, 1.0, -1.0 if opposite else 0.0)
        return (length * side)[:, None] * torch.tensor(DIRECTION, dtype=torch.float64)

    def loss(self, offsets: Tensor, step: Tensor) -> Tensor:
        """Σ_i ⟨x_i, g_i⟩, whose gradient is g whatever x is."""
        return (offsets * self.gradient(offsets.detach(), int(step))).sum()

    def gradient(self, offsets: Tensor, t: int) -> Tensor:
        """The adversary's choice of g at step t, as a function of where each trial stands."""
        recipe = self.recipe
        assert not isinstance(recipe, OutputPerturbation | ConvexHeadRecipe)
        u = torch.tensor(DIRECTION, dtype=torch.float64)
        along = offsets @ u
        gamma = float(schedule(recipe.learning_rate, recipe.steps)[t])
        rho = 1 - gamma * recipe.weight_decay
        if isinstance(recipe, GradientClipping):
            near = (torch.arange(len(along)) // 4) % 2 == 0
            drive = recipe.grad_clip * torch.where(near, NEAR, FAR).double()
        else:  # beside it everything else is small
            drive = torch.full_like(along, FAR**2 * recipe.model_clip / max(gamma, 1e-100))
        if t == 0 and replaces_first_step(recipe, self.compared_to):
            # World 1 goes to C2 u and world 0 to the centre: the reference's x_1 is c + ξ.
            world = torch.arange(len(along))[:, None] % 2 == 0
            return torch.where(world, -drive[:, None] * u, offsets * (rho / max(gamma, 1e-100)))
        if t < len(self.splits):
            return torch.where(along >= self.splits[t], -drive, drive)[:, None] * u
        if t + 1 < recipe.steps or gamma == 0:
            return torch.zeros_like(offsets)
        goal = (along * (rho + self.ahead) / self.period).round() * self.period
        goal -= along * self.ahead
        if isinstance(recipe, GradientClipping):
            return ((along * rho - goal) / gamma)[:, None] * u
        return (offsets * rho - goal[:, None] * u) / gamma


def replaces_first_step(recipe: Audited, compared_to: ComparedTo) -> bool:
    """Model clipping against the centre: the reference is c + ξ_0 after the first step, and goes
    on as the run does (THEORY section 4); it takes no first step of its own."""
    return isinstance(recipe, ModelClipping) and compared_to == "centre"


def find_reach(recipe: Audited) -> float:
    """The radius of the ball the start is clipped to; the model's where there is none; τ/m."""
    if isinstance(recipe, ConvexHeadRecipe):
        return recipe.tolerance / recipe.weight_decay
    if isinstance(recipe, ModelClipping) and (
        recipe.start_clip is None or math.isinf(recipe.start_clip)
    ):
        return recipe.model_clip
    return float(recipe.start_clip or 0.0)


def list_adversaries(
    recipe: Audited, compared_to: ComparedTo, epsilons: Sequence[float] = (0.0, 1.0)
) -> list[Adversary]:
    """All that are worth a try; ``epsilons`` are where model clipping is attacked.

    >>> one = GradientClipping(start_clip=1.0, grad_clip=1.0, learning_rate=0.1,
    ...                        weight_decay=0.0, steps=1, noise_std=1.0)
    >>> [adversary.kind for adversary in list_adversaries(one, "retrained")]
    ['push']
    """
    match recipe:
        case OutputPerturbation() | ConvexHeadRecipe():
            return [Adversary("push", recipe, compared_to, ())]
        case GradientClipping():
            found = [Adversary("push", recipe, compared_to, _split_gradients(recipe, compared_to))]
        case ModelClipping():
            splits = {_split_models(recipe, compared_to, epsilon) for epsilon in epsilons}
            found = [Adversary("push", recipe, compared_to, s) for s in sorted(splits)]
    if recipe.steps > 1:
        found += _lay_lattice(recipe, compared_to)
    return found


def _split_gradients(recipe: GradientClipping, compared_to: ComparedTo) -> tuple[float, ...]:
    """The middle of the two worlds' means."""
    middle = 0.0 if compared_to == "retrained" else recipe.start_clip / 2
    rates = schedule(recipe.learning_rate, recipe.steps)
    kept = np.cumprod(np.concatenate([[1.0], 1 - rates[:-1] * recipe.weight_decay]))
    return tuple((middle * kept).tolist())


def _split_models(
    recipe: ModelClipping, compared_to: ComparedTo, epsilon: float
) -> tuple[float, ...]:
    """Where P_t = e^ε Q_t, with P_t and Q_t mixtures of N(±C2, σ²) that the splits before made.

    With weights a and b on +C2: e^(2 C2 x/σ²) (a - e^ε b) = e^ε (1 - b) - (1 - a).
    """
    C2, T = recipe.model_clip, recipe.steps
    sigmas, far = schedule(recipe.noise_std, T), find_reach(recipe)
    if compared_to == "centre":
        split, a, b = _part(C2, 0.0, float(sigmas[0]), epsilon)
    else:
        split, a, b = _part(far, -far, recipe.start_noise_std, epsilon)
    splits = [0.0, split] if compared_to == "centre" else [split]
    for t in range(len(splits), T):
        sigma, weight = float(sigmas[t - 1]), math.exp(epsilon)
        gap = a - weight * b
        if gap <= 0 or sigma == 0 or C2 == 0:
            splits.append(0.0)
            continue
        x = sigma**2 / (2 * C2) * math.log((weight * (1 - b) - (1 - a)) / gap)
        splits.append(x)
        high, below = _tail((x - C2) / sigma), _tail((x + C2) / sigma)
        a, b = a * high + (1 - a) * below, b * high + (1 - b) * below
    return tuple(splits[:T])


def _part(high: float, low: float, sigma: float, epsilon: float) -> tuple[float, float, float]:
    """Where N(high, σ²) = e^ε N(low, σ²), and how much of each lies above."""
    middle, distance = (high + low) / 2, high - low
    if sigma == 0 or distance == 0:
        return middle, 1.0, 0.0
    split = middle + epsilon * sigma**2 / distance
    return split, _tail((split - high) / sigma), _tail((split - low) / sigma)


def _lay_lattice(
    recipe: GradientClipping | ModelClipping, compared_to: ComparedTo
) -> list[Adversary]:
    """x_{T-1} = a + c ξ with a different a in each world, so that ξ = (x_{T-1} - a)/c comes next.

    The last step makes (ρ + 1/c) x_{T-1} + v a lattice point; the released x_T is that point - a/c.
    """
    T = recipe.steps
    if isinstance(recipe, ModelClipping):
        splits = _split_models(recipe, compared_to, 0.0)[:-1]
        c, apart = 1.0, 2 * recipe.model_clip
    else:
        rho = 1 - schedule(recipe.learning_rate, T)[: T - 1] * recipe.weight_decay
        sigma = schedule(recipe.noise_std, T)
        kept = np.concatenate([np.cumprod(rho[::-1])[::-1], [1.0]])
        noise = sigma[: T - 1] / sigma[-1] if sigma[-1] > 0 else np.ones(T - 1)
        c = float(np.sum(kept[1:] * noise))
        apart = recipe.start_clip * float(kept[0]) * (2 if compared_to == "retrained" else 1)
        splits = ()
    if c <= 0 or apart <= 0:
        return []
    return [Adversary("lattice", recipe, compared_to, splits, 2 * apart / c, 1 / c)]


def _tail(x: float) -> float:
    """Φ(-x)."""
    return 0.5 * math.erfc(x / math.sqrt(2))


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


@dataclass(frozen=True)
class Bit:
    """Bit ``place`` of a coordinate's cell, in two's complement: 1 or 0, times ``sign``."""

    coordinate: int
    place: int
    grid: float
    sign: int


Statistic = Projection | Residue | Bit


def score(statistic: Statistic, points: Array) -> Array:
    """One number per row: the larger, the more it looks like world 1.

    >>> score(Projection((1.0, 0.0)), np.array([[3.0, 9.0]])).tolist()
    [3.0]
    >>> score(Residue((1.0,), 1.0, (0.0, 7.0)), np.array([[5.25], [5.75]])).tolist()
    [0.0, 7.0]
    """
    match statistic:
        case Projection(weights):
            return points @ np.array(weights)
        case Residue(weights, period, log_ratios):
            along = points @ np.array(weights)
            return np.array(log_ratios)[_place(along, period, len(log_ratios))]
        case Bit(coordinate, place, grid, sign):
            return sign * read_bits(points[:, coordinate], grid)[:, place].astype(np.float64)


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


def fit_bit(zero: Array, one: Array, grid: float) -> Bit:
    """The bit of all cells that is set most unlike in the two worlds.

    >>> zero, one = np.array([[4.0], [8.0]]), np.array([[5.0], [9.0]])
    >>> fit_bit(zero, one, 1.0)
    Bit(coordinate=0, place=0, grid=1.0, sign=1)
    """
    rates = [
        np.stack([read_bits(points[:, i], grid).mean(axis=0) for i in range(points.shape[1])])
        for points in (zero, one)
    ]
    apart = rates[1] - rates[0]
    coordinate, place = np.unravel_index(int(np.argmax(np.abs(apart))), apart.shape)
    sign = -1 if apart[coordinate, place] < 0 else 1
    return Bit(int(coordinate), int(place), grid, sign)


def describe(statistic: Statistic) -> str:
    """A few words for a report."""
    match statistic:
        case Projection():
            return "projection"
        case Residue(period=period):
            return f"residue modulo {period:.3g}"
        case Bit(coordinate, place):
            return f"bit {place} of coordinate {coordinate}"


def read_bits(values: Array, grid: float) -> npt.NDArray[np.uint8]:
    """A row per value: the bits of its whole number of cells, the lowest first."""
    cells = np.rint(values / grid).astype("<i8")
    octets = cells.view(np.uint8).reshape(len(values), 8)
    return np.unpackbits(octets, axis=1, bitorder="little")


def _place(along: Array, period: float, bins: int) -> npt.NDArray[np.intp]:
    turns = along / period
    places = np.floor((turns - np.floor(turns)) * bins).astype(np.intp)
    return np.clip(places, 0, bins - 1)
