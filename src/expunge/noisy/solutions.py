"""The noise of a solved head: ``W + N(0, σ²I)`` on the grid (THEORY, section 11).

Heads release through it and the audit attacks it. What it returns is a function of W, the recipe
and fresh noise; every coordinate by itself, so rows of trials may be perturbed together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expunge.accounting.precision import LARGEST_CELL, choose_solution_precision
from expunge.errors import InputError
from expunge.noisy.noise import Noise
from expunge.recipes import ConvexHeadRecipe

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Perturbed:
    """What is released, the grid it lies on and what that costs; ``noise_norm`` is private."""

    weights: Array
    grid: float
    rounding: float
    noise_norm: float


def release_solution(weights: Array, recipe: ConvexHeadRecipe, noise: Noise) -> Perturbed:
    """g (round(W/g) + k) with k = round(N(0, σ²/g²)), kept inside the box of the grid.

    >>> from expunge.noisy.noise import SeededNoise
    >>> recipe = ConvexHeadRecipe(weight_decay=1e-5, tolerance=1e-9, noise_std=2.0**-11)
    >>> found = release_solution(np.ones((100, 3)), recipe, SeededNoise(0))
    >>> found.grid == 2.0**-33, bool(0.9 < np.std(found.weights) * 2**11 < 1.1)
    (True, True)
    """
    precision = choose_solution_precision(recipe, weights.size)
    if not precision.grid > 0:
        valid = "so small that float64 holds the noise, tolerance/weight_decay, too"
        raise InputError.of("weight_decay", recipe.weight_decay, valid)
    cells = np.empty(weights.size)
    noise.begin().draw(cells, step=0, position=0, std=recipe.noise_std / precision.grid)
    norm = float(np.linalg.norm(cells)) * precision.grid
    cells += np.rint(weights.ravel() / precision.grid)
    np.clip(cells, -LARGEST_CELL, LARGEST_CELL, out=cells)
    released = (cells * precision.grid).reshape(weights.shape)
    return Perturbed(released, precision.grid, precision.rounding, norm)
