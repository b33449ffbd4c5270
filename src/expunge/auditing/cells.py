"""Every bit of a released cell against the law of the rounded Gaussian, over a whole long vector.

Trials of the mechanism audit have three numbers each. Here ``unlearn`` itself runs, again and
again, on a model of three chunks, whose old weights are all of one size and of known signs; world 0
has the opposite ones. There are no gradients (in model clipping: gradients that lead back to the
centre), so that what is released is known but for its noise: centre + g k with

    k_i = round(N(m_i, s²)),    m_i = ± Π_t ρ_t C0 / (g √d),    s² = Σ_t (σ_t Π_{k>t} ρ_k / g)²,

up to one cell per step, which is nothing beside s ≥ 2²⁰. Bit b of k_i is set with probability

    p_b(m) = Σ_j Φ((2^b (2j + 2) - 1/2 - m)/s) - Φ((2^b (2j + 1) - 1/2 - m)/s),

1/2 for all low bits, in every coordinate and run independently. (As k is nearly symmetric its bits,
in two's complement, hardly depend on s; so some high bits of |k| are counted too.) The bits of each
coordinate are counted over the runs of each world, which shows a single bit of a single cell that
something else decides; and over spans of coordinates, which shows noise that is missing or of
another law from some coordinate on. Exact binomial tails, times the number of counts of their kind,
give one p-value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import special
from torch import Tensor, nn

from expunge.accounting.precision import choose_precision
from expunge.auditing.attacks import Audited, find_reach, read_bits
from expunge.auditing.trials import choose_noise
from expunge.noisy.noise import Noise
from expunge.noisy.run import unlearn
from expunge.noisy.solutions import release_solution
from expunge.progress import show_progress
from expunge.recipes import (
    ConvexHeadRecipe,
    GradientClipping,
    ModelClipping,
    OutputPerturbation,
    schedule,
)

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
SHAPES = (256, 250), (6001,)
RUNS = 128  # of both worlds; that a bit never changes in 64 has a probability of 2⁻⁶³
SPANS = 16
BITS, HIGH_BITS = 48, 8  # of cells in two's complement, and of their magnitudes around s
COLUMNS = BITS + HIGH_BITS
MOST_STEPS = 2
STARTS = 1.5  # times the radius they are clipped to


@dataclass(frozen=True)
class CellCheck:
    """``p_value``: how often honest noise is as odd as the oddest of ``tests`` counts."""

    parameters: int
    runs: int
    tests: int
    p_value: float
    oddest: str


@dataclass(frozen=True)
class _Law:
    """k = round(N(± mean, spread²)), in cells of ``grid``."""

    grid: float
    mean: float
    spread: float

    @property
    def first(self) -> int:
        """The lowest of the high bits."""
        return max(math.frexp(self.spread)[1] - HIGH_BITS + 2, 0)

    def read(self, released: Array) -> npt.NDArray[np.uint8]:
        """A row per cell: its bits, and the high bits of its magnitude."""
        high = read_bits(np.abs(released), self.grid)[:, self.first : self.first + HIGH_BITS]
        return np.concatenate([read_bits(released, self.grid)[:, :BITS], high], axis=1)

    def name(self, column: int) -> str:
        if column < BITS:
            return f"bit {column}"
        return f"bit {column - BITS + self.first} of the magnitude"

    def chance(self, column: int, side: int) -> float:
        """How often this bit is set."""
        magnitude = column >= BITS
        width = 2.0 ** (column - BITS + self.first if magnitude else column)
        if not magnitude and 2 * width <= self.spread / 2:
            return 0.5  # up to exp(-2 π² 2²)
        m, reach = side * self.mean, (self.mean + 12 * self.spread) / (2 * width)
        j = np.arange(0 if magnitude else -math.ceil(reach) - 2, math.ceil(reach) + 2)
        low, high = width * (2 * j + 1) - 0.5, width * (2 * j + 2) - 0.5
        set_ = special.ndtr((high - m) / self.spread) - special.ndtr((low - m) / self.spread)
        if magnitude:
            set_ += special.ndtr((high + m) / self.spread) - special.ndtr((low + m) / self.spread)
        return float(np.sum(set_))


class _Wide(nn.Module):
    """A matrix and a vector; the output is scale · ‖x‖²/2, whose gradient is scale · x."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        matrix = math.prod(SHAPES[0])
        self.weight = nn.Parameter(weights[:matrix].reshape(SHAPES[0]).clone())
        self.bias = nn.Parameter(weights[matrix:].clone())

    def forward(self, scale: Tensor) -> Tensor:
        return scale * (self.weight.square().sum() + self.bias.square().sum()) / 2


def examine_cells(
    recipe: Audited, *, seed: int | None = None, runs: int = RUNS, progress: bool = False
) -> CellCheck | None:
    """The recipe's last steps on a long vector; None where the last of them adds no noise.

    >>> found = examine_cells(OutputPerturbation(start_clip=1.0, noise_std=1.0), seed=0, runs=8)
    >>> found.parameters, found.runs, found.p_value > 1e-3
    (70001, 8, True)
    """
    recipe = take_last_steps(recipe)
    steps = _list_steps(recipe)
    if steps[-1].sigma == 0:
        return None
    size = sum(math.prod(shape) for shape in SHAPES)
    signs = np.where(np.random.default_rng(0).random(size) < 0.5, -1, 1)
    starts = signs * (find_reach(recipe) / math.sqrt(size))
    law = _state_law(recipe, choose_precision(recipe, size).grid, size)
    counts = np.zeros((2, size, COLUMNS), np.uint8)
    for place in show_progress(range(runs), runs, "bits of cells", progress):
        world = place % 2
        noise = choose_noise(seed, (1 << 22) + place)
        counts[world] += law.read(_release(recipe, starts if world else -starts, steps, noise))
    return _judge(counts, signs, law, runs)


def _release(recipe: Audited, starts: Array, steps: list[_Step], noise: Noise) -> Array:
    if isinstance(recipe, ConvexHeadRecipe):
        return release_solution(starts, recipe, noise).weights
    model = _Wide(torch.from_numpy(STARTS * starts))
    batches = [(torch.tensor([s.scale], dtype=torch.float64), torch.zeros(1)) for s in steps]
    run = unlearn(model, batches, recipe, loss_fn=_add_up, noise=noise, centre="zero")
    return torch.cat([p.detach().reshape(-1) for p in run.model.parameters()]).numpy()


def _add_up(output: Tensor, _: object) -> Tensor:
    return output.sum()


def take_last_steps(recipe: Audited) -> Audited:
    """Steps whose outcome is known but for its noise: one, where gradients cannot lead back from a
    projection; else at most ``MOST_STEPS``.

    >>> take_last_steps(ModelClipping(1.0, 0.1, 0.0, [1.0, 2.0, 3.0, 4.0, 5.0], 5)).noise_std
    (4.0, 5.0)
    """
    if isinstance(recipe, OutputPerturbation | ConvexHeadRecipe):
        return recipe
    rates, sigmas = (
        schedule(v, recipe.steps)[-MOST_STEPS:] for v in (recipe.learning_rate, recipe.noise_std)
    )
    leads_back = isinstance(recipe, ModelClipping) and bool(np.all(rates > 0))
    projects = recipe.model_clip is not None and math.isfinite(recipe.model_clip)
    kept = len(rates) if leads_back or not projects else 1
    return replace(
        recipe,
        steps=kept,
        learning_rate=tuple(rates[-kept:].tolist()),
        noise_std=tuple(sigmas[-kept:].tolist()),
        start_noise_std=recipe.start_noise_std if kept == recipe.steps else 0.0,
    )


class _Step(NamedTuple):
    """The gradient in units of x, how much of x is left after it, and the noise."""

    scale: float
    kept: float
    sigma: float


def _list_steps(recipe: Audited) -> list[_Step]:
    """No gradients; in model clipping those that lead to the centre: x - γ (g + λ x) = 0."""
    if isinstance(recipe, OutputPerturbation | ConvexHeadRecipe):
        return [_Step(0.0, 1.0, recipe.noise_std)]
    rates, sigmas = (
        schedule(v, recipe.steps).tolist() for v in (recipe.learning_rate, recipe.noise_std)
    )
    steps, decay = zip(rates, sigmas, strict=True), recipe.weight_decay
    if isinstance(recipe, GradientClipping):
        return [_Step(0.0, 1 - gamma * decay, sigma) for gamma, sigma in steps]
    return [_Step(1 / g - decay, 0.0, s) if g > 0 else _Step(0.0, 1.0, s) for g, s in steps]


def _state_law(recipe: Audited, grid: float, size: int) -> _Law:
    """What the steps make of a start on its sphere, and of its noise."""
    mean, variance, clip = find_reach(recipe), 0.0, math.inf
    if not isinstance(recipe, OutputPerturbation | ConvexHeadRecipe):
        variance = recipe.start_noise_std**2
        clip = math.inf if recipe.model_clip is None else recipe.model_clip
    for _, kept, sigma in _list_steps(recipe):
        mean, variance = min(kept * mean, clip), kept**2 * variance + sigma**2
    return _Law(grid, mean / math.sqrt(size) / grid, math.sqrt(variance) / grid)


def _judge(counts: npt.NDArray[np.uint8], signs: Counts, law: _Law, runs: int) -> CellCheck:
    """The oddest of all counts: those of coordinates, and those of spans, at even shares."""
    size, bits = len(signs), np.arange(COLUMNS)
    tests, oddest = [0, 0], [(1.0, ""), (1.0, "")]
    for world, n in ((0, runs - runs // 2), (1, runs // 2)):
        for side in (-1, 1):
            chosen = np.flatnonzero(signs * (2 * world - 1) == side)
            chances = np.array([law.chance(bit, side) for bit in range(COLUMNS)])
            part, where = counts[world][chosen], chosen * SPANS // size
            spans = [part[where == span].sum(axis=0, dtype=np.int64) for span in range(SPANS)]
            lengths = [*np.bincount(where, minlength=SPANS), len(chosen)]
            table = _tail(np.arange(n + 1)[:, None], n, chances)
            totals = np.stack([*spans, np.sum(spans, axis=0)])
            names = [*(f"sixteenth {span + 1} of the vector" for span in range(SPANS)), "all cells"]
            for kind, tails in enumerate(
                (table[part, bits], _tail(totals, n * np.array(lengths)[:, None], chances))
            ):
                tests[kind] += tails.size
                row, bit = np.unravel_index(int(np.argmin(tails)), tails.shape)
                name = names[row] if kind else f"coordinate {chosen[row]:,}"
                oddest[kind] = min(
                    oddest[kind], (float(tails[row, bit]), f"{law.name(int(bit))} of {name}")
                )
    p, name = min((2 * count * p, name) for count, (p, name) in zip(tests, oddest, strict=True))
    return CellCheck(size, runs, sum(tests), min(p, 1.0), name)


def _tail(counts: Counts, trials: Any, chances: Array) -> Array:
    """min(1, 2 min(P[X ≤ count], P[X ≥ count])) of a binomial X, exactly."""
    low = special.bdtr(counts, trials, chances)
    high = np.where(counts > 0, special.bdtrc(np.maximum(counts - 1, 0), trials, chances), 1.0)
    return np.minimum(2 * np.minimum(low, high), 1.0)
