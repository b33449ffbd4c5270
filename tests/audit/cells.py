"""The noise of a whole long vector, cell by cell and bit by bit, as ``unlearn`` releases it.

Trials have three numbers each. Here ``unlearn`` runs, again and again, on a model of three chunks,
whose old weights are all of one size and of known signs; world 0 has the opposite ones. There are
no gradients, so that what is released is known but for its noise: g k with

    k_i = round(N(m_i, s²)),    m_i = ± ρ C0 / (g √d),    s = σ/g,

up to one cell, which is nothing beside s ≥ 2²⁰. Let z_i = (k_i - m_i)/s. Of n of them the number
with a low bit set is binomial (n, 1/2), Σ z is N(0, n), and Σ z² is chi-squared with n degrees of
freedom: in every coordinate over the runs of each world, which shows a single bit of a single cell
that something else decides, and in spans and all of the vector, which shows noise that is missing
or of another law from some place on. Exact tails, times the number of them, give one p-value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import special
from torch import Tensor, nn

from expunge.accounting.precision import choose_precision, list_levels
from expunge.audit.attacks import Array, find_reach
from expunge.audit.trials import choose_noise, make_data
from expunge.errors import UnlearningError
from expunge.noisy.noise import Noise
from expunge.noisy.unlearn import unlearn
from expunge.recipes import GradientClipping, NoisyRecipe, OutputPerturbation, schedule

SHAPES = (256, 250), (6000,)
MATRIX, SIZE = math.prod(SHAPES[0]), sum(map(math.prod, SHAPES))
SPANS = 16
BITS = 18  # fair to exp(-2 π² 2²) where s ≥ 2²⁰
RUNS = 128  # of both worlds; that a bit never changes in 64 has a probability of 2⁻⁶³
RADIUS = 4.0  # at most so many σ: the last step alone must certify something, too


@dataclass(frozen=True)
class CellCheck:
    """``p_value``: how often honest noise is as odd as the oddest of ``tests`` counts and sums."""

    parameters: int
    runs: int
    tests: int
    p_value: float
    oddest: str


class Wide(nn.Module):
    """A matrix and a vector; the output is 0, and so is its gradient."""

    def __init__(self, weights: Array) -> None:
        super().__init__()
        row = torch.from_numpy(weights.copy())
        self.weight = nn.Parameter(row[:MATRIX].reshape(SHAPES[0]))
        self.bias = nn.Parameter(row[MATRIX:])

    def forward(self, _: Tensor) -> Tensor:
        return 0.0 * (self.weight.sum() + self.bias.sum())


def examine_cells(
    recipe: NoisyRecipe, *, seed: int | None = None, runs: int = RUNS
) -> CellCheck | None:
    """The recipe's last step on a long vector; None where it adds no noise."""
    if list_levels(recipe)[-1] == 0:
        return None
    recipe, norm, sigma = take_last_step(recipe)
    grid = choose_precision(recipe, SIZE).grid
    signs = np.where(np.random.default_rng(0).random(SIZE) < 0.5, -1.0, 1.0) / math.sqrt(SIZE)
    sums = np.zeros((2, SIZE, BITS + 2))
    for place in range(runs):
        side = signs if place % 2 else -signs
        noise = choose_noise(seed, (1 << 22) + place)
        try:
            x = _release(recipe, 1.5 * find_reach(recipe) * side, noise)
        except UnlearningError as error:
            return CellCheck(SIZE, runs, 0, 0.0, str(error))
        z = (x - norm * side) / sigma
        sums[place % 2, :, :BITS] += _read_bits(x, grid)
        sums[place % 2, :, BITS:] += np.stack([z, z * z], axis=1)
    return _judge(sums, runs)


def _release(recipe: NoisyRecipe, start: Array, noise: Noise) -> Array:
    release = unlearn(
        Wide(start), lambda: Wide(np.zeros(SIZE)), make_data(), forget=["gone"], recipe=recipe,
        loss=lambda output, target: output, noise=noise, centre="zero",
    )  # fmt: skip
    return torch.cat([p.detach().reshape(-1) for p in release.model.parameters()]).numpy()


def take_last_step(recipe: NoisyRecipe) -> tuple[NoisyRecipe, float, float]:
    """The last step alone, the norm it leaves of a start on its sphere, and its noise.

    Radii are at most ``RADIUS`` times the noise, and there are no gradients to clip.
    """
    if isinstance(recipe, OutputPerturbation):
        return recipe, recipe.start_clip, recipe.noise_std
    gamma, sigma = (
        float(schedule(v, recipe.steps)[-1]) for v in (recipe.learning_rate, recipe.noise_std)
    )
    radius, clip = min(find_reach(recipe), RADIUS * sigma), recipe.model_clip
    clip = None if clip is None else min(clip, RADIUS * sigma)
    last: dict[str, Any] = {"start_clip": radius, "model_clip": clip, "start_noise_std": 0.0}
    last |= {"steps": 1, "learning_rate": gamma, "noise_std": sigma}
    if isinstance(recipe, GradientClipping):
        last["grad_clip"] = 0.0
    norm = (1 - gamma * recipe.weight_decay) * radius
    return replace(recipe, **last), norm if clip is None else max(-clip, min(norm, clip)), sigma


def _read_bits(values: Array, grid: float) -> npt.NDArray[np.uint8]:
    """A row per value: the lowest bits of its whole number of cells."""
    octets = np.rint(values / grid).astype("<i8").view(np.uint8).reshape(len(values), 8)
    return np.unpackbits(octets, axis=1, count=BITS, bitorder="little")


def _judge(sums: Array, runs: int) -> CellCheck:
    """The oddest of all sums: those of coordinates, of spans, and of all, at even shares."""
    tests, oddest = 0, (1.0, "")
    for parts, name in ((SIZE, "coordinate"), (SPANS, "sixteenth"), (1, "vector")):
        found = list[tuple[float, str]]()
        for world, n in ((0, runs - runs // 2), (1, runs // 2)):
            tails = _find_tails(sums[world].reshape(parts, -1, BITS + 2).sum(1), n * SIZE // parts)
            row, column = divmod(int(np.argmin(tails)), BITS + 2)
            what = f"bit {column}" if column < BITS else ("mean", "length")[column - BITS]
            found.append((float(tails[row, column]), f"{what} of {name} {row + 1:,}"))
            tests += tails.size
        p, of = min(found)
        oddest = min(oddest, (3 * 2 * parts * (BITS + 2) * p, of))
    return CellCheck(SIZE, runs, tests, min(oddest[0], 1.0), oddest[1])


def _find_tails(sums: Array, n: int) -> Array:
    """Two-sided: of binomials (n, 1/2), then of N(0, n), then of chi-squared with n degrees."""
    counts, z, square = sums[:, :BITS].astype(np.int64), sums[:, BITS], sums[:, BITS + 1]
    fair = 2 * special.bdtr(np.arange(n // 2 + 1), n, 0.5)[np.minimum(counts, n - counts)]
    normal = 2 * special.ndtr(-np.abs(z) / math.sqrt(n))
    length = [special.gammainc(n / 2, square / 2), special.gammaincc(n / 2, square / 2)]
    return np.column_stack([np.minimum(fair, 1.0), normal, 2 * np.minimum(*length)])
