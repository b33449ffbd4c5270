"""What finite precision costs: the power-of-two grid a run lives on, accounted.

The certified vector is ``x = centre + g k`` with whole numbers ``k``. One noisy step is

    k_{t+1} = Q(ψ_t(k_t)) + round(ξ_t / g) = R(Q(ψ_t(k_t)) + ξ_t / g),

because the deterministic part ``Q(…)`` is whole: adding rounded noise *is* rounding the ideal
Gaussian mechanism. Two roundings remain, and each may move two runs apart by one cell in every
coordinate, ``‖R(y) - R(y')‖ ≤ ‖y - y'‖ + g√d``: ``Q`` before the noise, and ``R`` after it, which
is no contraction and so reaches the next step. With ψ_t contracting by ρ ≤ 1 the step's
sensitivity grows from s_t to at most ``s_t + (2 + 2e) g √d``, where ``e`` bounds the error of the
float64 arithmetic in cells. Projections are followed by rounding towards the centre, which never
leaves the ball: output perturbation and model clipping pay nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from expunge.accounting.guarantee import mu
from expunge.errors import InputError
from expunge.recipes import Execution, GradientClipping, NoisyRecipe, OutputPerturbation, schedule

# Coordinates saturate here: a projection onto a box, hence a contraction, hence free.
LARGEST_CELL = 2.0**44
COARSEST, FINEST = -24, -34
MOST_CELLS = 38  # the largest σ spans at most 2³⁸ cells: 64 standard deviations before saturation
RELATIVE_COST = 2e-4
_SMALLEST_EXPONENT = -600


@dataclass(frozen=True)
class Precision:
    """``grid`` is a power of two, or 0.0 for a run without noise, which needs none.

    ``rounding`` is what the grid adds to the sensitivity of every step.
    """

    grid: float
    rounding: float


def choose_precision(recipe: NoisyRecipe, size: int) -> Precision:
    """The coarsest grid of at most σ_min 2⁻²⁴ that raises μ by less than 0.02 %.

    Never finer than σ_min 2⁻³⁴, where a float64 still counts cells exactly.

    >>> recipe = OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
    >>> choose_precision(recipe, 1000) == Precision(grid=2.0**-28, rounding=0.0)
    True
    """
    levels = [sigma for sigma in list_levels(recipe) if sigma > 0]
    if not levels:
        return Precision(0.0, 0.0)
    smallest, largest = _exponent(min(levels)), _exponent(max(levels))
    floor = max(smallest + FINEST, largest - MOST_CELLS, _SMALLEST_EXPONENT)
    exponent = max(smallest + COARSEST, floor)
    while exponent > floor and not _is_cheap(recipe, math.ldexp(1.0, exponent), size):
        exponent -= 1
    grid = math.ldexp(1.0, exponent)
    if not math.isfinite(_largest_rate(recipe) / grid):
        raise InputError.of("learning_rate", _largest_rate(recipe), f"below {1e308 * grid:.0e}")
    return Precision(grid, bound_rounding(recipe, grid, size))


def bound_rounding(recipe: NoisyRecipe, grid: float, size: int) -> float:
    """(2 + 2e) g √d for gradient clipping, 0 where rounding towards the centre is free.

    >>> gentle = GradientClipping(start_clip=1.0, grad_clip=1.0, learning_rate=0.1,
    ...                           weight_decay=0.0, steps=4, noise_std=1.0)
    >>> 2.0 < bound_rounding(gentle, 2.0**-30, 10_000) / (2.0**-30 * 100) < 2.02
    True
    """
    if not isinstance(recipe, GradientClipping) or grid == 0:
        return 0.0
    reach = _largest_rate(recipe) * recipe.grad_clip / grid
    cells = LARGEST_CELL + (reach if math.isfinite(reach) else 0.0)
    e = 4 * cells * 2.0**-53
    cost = (2 + 2 * e) * grid * math.sqrt(size)
    if recipe.model_clip is not None and math.isfinite(recipe.model_clip):
        cost += 2 * norm_margin(size) * recipe.model_clip
    return cost * (1 + 2.0**-40)


def norm_margin(size: int) -> float:
    """A relative error no float64 norm of ``size`` numbers exceeds, whatever its order of adding.

    The classical bound is (size/2 + 2) 2⁻⁵³; the rest covers the few products that follow.
    """
    return (size + 64) * 2.0**-52


def list_levels(recipe: NoisyRecipe) -> list[float]:
    """The standard deviation of every noise by step number: 0 is the start's, t + 1 is step t's.

    >>> from expunge.recipes import ModelClipping
    >>> list_levels(ModelClipping(model_clip=1.0, learning_rate=0.1, weight_decay=0.0,
    ...                           noise_std=0.5, steps=2))
    [0.0, 0.5, 0.5]
    """
    if isinstance(recipe, OutputPerturbation):
        return [recipe.noise_std]
    return [recipe.start_noise_std, *schedule(recipe.noise_std, recipe.steps).tolist()]


def _largest_rate(recipe: NoisyRecipe) -> float:
    return 0.0 if isinstance(recipe, OutputPerturbation) else float(np.max(recipe.learning_rate))


def _exponent(sigma: float) -> int:
    """⌊log2 σ⌋."""
    return math.frexp(sigma)[1] - 1


def _is_cheap(recipe: NoisyRecipe, grid: float, size: int) -> bool:
    """Whether the rounding of this grid raises μ by less than 0.02 % on both sides."""
    rounding = bound_rounding(recipe, grid, size)
    if rounding == 0:
        return True
    if not math.isfinite(rounding):
        return False
    real = Execution(rounding=rounding)
    pairs = [
        (mu(recipe, compared_to=side, execution=real), mu(recipe, compared_to=side))
        for side in ("retrained", "centre")
    ]
    return all((found or 0.0) <= (ideal or 0.0) * (1 + RELATIVE_COST) for found, ideal in pairs)
