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

Full-batch descent rests on constants besides: ``‖∇f_i‖ ≤ G``, ``f_i`` ``L_f``-smooth, and convexity
(THEORY section 5). For softmax regression over feature vectors clipped to norm B they are
*computed*: with probabilities p, one-hot label e and features a,

    ∇f = (p - e) ⊗ a,                    ‖∇f‖ ≤ √2 B             ‖p - e‖₂ ≤ √2
    ∇²f = (diag p - p pᵀ) ⊗ a aᵀ,        0 ≤ ∇²f ≤ B²/2           λ_max(diag p - p pᵀ) ≤ 1/2

For any other model they are *assumed*: the user states them and the certificate says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expunge.accounting.guarantee import mu
from expunge.accounting.theorems import bound_expansion
from expunge.errors import InputError
from expunge.recipes import (
    IDEAL,
    ComparedTo,
    ConvexHeadRecipe,
    DescentRecipe,
    Execution,
    GradientClipping,
    ModelClipping,
    NoisyRecipe,
    OutputPerturbation,
    Problem,
    check_value,
    schedule,
)

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


def choose_precision(recipe: NoisyRecipe | ConvexHeadRecipe, size: int) -> Precision:
    """The coarsest grid of at most σ_min 2⁻²⁴ that raises μ by less than 0.02 %.

    Never finer than σ_min 2⁻³⁴, where a float64 still counts cells exactly.

    >>> recipe = OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
    >>> choose_precision(recipe, 1000) == Precision(grid=2.0**-28, rounding=0.0)
    True
    """
    if isinstance(recipe, ConvexHeadRecipe):
        return choose_solution_precision(recipe, size)
    levels = [sigma for sigma in list_levels(recipe) if sigma > 0]
    if not levels:
        return Precision(0.0, 0.0)
    smallest, largest = _exponent(min(levels)), _exponent(max(levels))
    floor = max(smallest + FINEST, largest - MOST_CELLS, _SMALLEST_EXPONENT)
    coarsest = max(smallest + COARSEST, floor)
    grid = _search_grid(recipe, coarsest, floor, lambda grid: bound_rounding(recipe, grid, size))
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


def choose_solution_precision(recipe: ConvexHeadRecipe, size: int) -> Precision:
    """A grid of σ 2⁻²⁴, coarser where weights as long as the bound √(2 log 2^10/m) need the room.

    The solution is rounded to the grid once, before the noise, which moves it by at most
    ``g √d / 2``; rounding after the noise is done to both sides alike.

    >>> recipe = ConvexHeadRecipe(weight_decay=1e-5, tolerance=1e-9, noise_std=3.73e-4)
    >>> choose_solution_precision(recipe, 12810).grid == 2.0**-33
    True
    """
    if recipe.noise_std == 0:
        return Precision(0.0, 0.0)
    reach = math.sqrt(2 * math.log(1024.0) / recipe.weight_decay)
    room = math.frexp(reach / LARGEST_CELL)[1]
    exponent = max(_exponent(recipe.noise_std) + COARSEST, room, _SMALLEST_EXPONENT)
    grid = math.ldexp(1.0, exponent)
    return Precision(grid, bound_solution_rounding(grid, size))


def bound_solution_rounding(grid: float, size: int) -> float:
    """g √d / 2, and what dividing by the grid may add to the last digit of a coordinate."""
    return grid * math.sqrt(size) * (0.5 + 2.0**-8) * (1 + 2.0**-40)


def norm_margin(size: int) -> float:
    """A relative error no float64 norm of ``size`` numbers exceeds, whatever its order of adding.

    The classical bound is (size/2 + 2) 2⁻⁵³; the rest covers the few products that follow.
    """
    return (size + 64) * 2.0**-52


def list_levels(recipe: NoisyRecipe | ConvexHeadRecipe) -> list[float]:
    """The standard deviation of every noise by step number: 0 is the start's, t + 1 is step t's.

    >>> list_levels(ModelClipping(model_clip=1.0, learning_rate=0.1, weight_decay=0.0,
    ...                           noise_std=0.5, steps=2))
    [0.0, 0.5, 0.5]
    """
    match recipe:
        case OutputPerturbation(noise_std=sigma) | ConvexHeadRecipe(noise_std=sigma):
            return [sigma]
        case GradientClipping(noise_std=sigma) | ModelClipping(noise_std=sigma):
            return [recipe.start_noise_std, *schedule(sigma, recipe.steps).tolist()]


def _largest_rate(recipe: NoisyRecipe) -> float:
    return 0.0 if isinstance(recipe, OutputPerturbation) else float(np.max(recipe.learning_rate))


def _exponent(sigma: float) -> int:
    """⌊log2 σ⌋."""
    return math.frexp(sigma)[1] - 1


def _search_grid(
    recipe: NoisyRecipe | DescentRecipe, coarsest: int, floor: int, bound: Callable[[float], float]
) -> float:
    """The coarsest power of two whose rounding raises μ by less than 0.02 % on both sides."""
    sides: tuple[ComparedTo, ...] = ("retrained", "centre")

    def prove(execution: Execution) -> list[float]:  # model clipping has no μ
        return [mu(recipe, compared_to=side, execution=execution) or 0.0 for side in sides]

    for exponent in range(coarsest, floor, -1):
        rounding = bound(math.ldexp(1.0, exponent))
        if rounding == 0:
            return math.ldexp(1.0, exponent)
        if math.isfinite(rounding):
            found = zip(prove(Execution(rounding=rounding)), prove(IDEAL), strict=True)
            if all(real <= ideal * (1 + RELATIVE_COST) for real, ideal in found):
                return math.ldexp(1.0, exponent)
    return math.ldexp(1.0, floor)


_UNIT = 2.0**-53  # relative error of one float64 operation


def softmax_constants(feature_clip: float) -> dict[str, Any]:
    """G = √2 B, L_f = B²/2, convex: arguments of both recipes, rounded up.

    >>> from expunge import NoisyDescent
    >>> recipe = NoisyDescent(learning_rate=0.5, noise_std=0.1, train_steps=100, steps=10,
    ...                       strong_convexity=0.01, examples=1300, group_size=13,
    ...                       **softmax_constants(feature_clip=1.0))
    >>> round(recipe.gradient_bound, 6), round(recipe.smoothness, 6), recipe.convex
    (1.414214, 0.5, True)
    """
    check_value("positive", "feature_clip", feature_clip)
    return {
        "gradient_bound": math.sqrt(2.0) * feature_clip * (1 + 4e-16),
        "smoothness": feature_clip**2 / 2 * (1 + 4e-16),
        "convex": True,
    }


def find_disagreements(recipe: DescentRecipe, problem: Problem, size: int) -> list[str]:
    """Where a recipe claims better constants than its problem has; nothing to say of stated ones.

    >>> from expunge import NoisyDescent
    >>> recipe = NoisyDescent(learning_rate=0.5, noise_std=0.1, train_steps=100, steps=10,
    ...                       strong_convexity=0.01, examples=1300, group_size=13,
    ...                       gradient_bound=1.0, smoothness=0.5)
    >>> find_disagreements(recipe, Problem("softmax-regression", 1.0, 65, 10), 650)
    ['gradient_bound is 1.0; features clipped to 1.0 give 1.4142135623730958']
    """
    if problem.feature_clip is None:
        return []
    found = [
        f"{name} is {getattr(recipe, name)!r}; features clipped to {problem.feature_clip!r} "
        f"give {least!r}"
        for name, least in softmax_constants(problem.feature_clip).items()
        if name != "convex" and getattr(recipe, name) < least * (1 - 1e-15)
    ]
    if problem.size != size:
        found.append(
            f"parameters is {size}; {problem.classes} classes of {problem.features} features "
            f"have {problem.size}"
        )
    return found


def bound_gradient_error(problem: Problem, examples: int, grid: float) -> float:
    """How far a float64 gradient of softmax regression is from the exact one, in norm.

    Coordinates are at most 2⁴⁴ cells, so a logit is at most r = B √d · 2⁴⁴ g. With u = 2⁻⁵³:
    logits err by (d + 1) u r; probabilities, relatively, by twice that and (2 r + C + 16) u (the
    shift by the largest logit, exp good to 4 units, the sum, the division); the mean of n
    gradients of norm √2 B adds (n + 4) u √2 B, in whatever order it is taken. 10 % on top covers
    second-order terms; where those are not small there is no bound.

    >>> problem = Problem("softmax-regression", feature_clip=1.0, features=65, classes=10)
    >>> bound_gradient_error(problem, 1300, 2.0**-34) < 1e-9
    True
    """
    if problem.feature_clip is None or problem.features is None or problem.classes is None:
        return 0.0
    B, d, C = problem.feature_clip, problem.features, problem.classes
    r = B * math.sqrt(d) * LARGEST_CELL * grid
    relative = (2 * (d + 1) * r + 2 * r + C + 16) * _UNIT
    if not relative + examples * _UNIT < 0.01:
        return math.inf
    return 1.1 * (B * relative + (examples + 4) * _UNIT * math.sqrt(2.0) * B)


def bound_descent_rounding(
    recipe: DescentRecipe, problem: Problem, grid: float, size: int
) -> float:
    """What finite precision adds to each step's sensitivity: (1 + max(c, 1) + 2e) g √d + 2 η e_G.

    One rounding before the noise, one after it that the next step expands by c, ``e`` cells of
    float64 arithmetic; and the gradient's own error ``e_G`` in each of the two runs. For
    stated constants e_G is not known and counts as 0, which is assumed.
    """
    c, _ = bound_expansion(recipe)
    reach = recipe.learning_rate * recipe.gradient_bound / grid
    e = 4 * (LARGEST_CELL * max(c, 1.0) + reach) * _UNIT
    gradient = 2 * recipe.learning_rate * bound_gradient_error(problem, recipe.examples, grid)
    return ((1 + max(c, 1.0) + 2 * e) * grid * math.sqrt(size) + gradient) * (1 + 2.0**-40)


def choose_descent_precision(recipe: DescentRecipe, problem: Problem, size: int) -> Precision:
    """The coarsest grid of at most σ 2⁻²⁴ that raises μ by less than 0.02 %.

    Never finer than σ 2⁻³⁴, nor so fine that the weights a noiseless run can reach, at most
    ``G/m`` or ``η G`` times the steps, would leave the 2⁴⁴ cells on either side of zero.
    """
    sigma, steps = recipe.noise_std, recipe.train_steps + recipe.steps
    if sigma == 0:
        return Precision(0.0, 0.0)
    smallest = _exponent(sigma)
    G, m = recipe.gradient_bound, recipe.strong_convexity
    reached = min(G / m if m > 0 else math.inf, recipe.learning_rate * G * steps)
    room = math.frexp(2 * reached / LARGEST_CELL)[1] if reached > 0 else _SMALLEST_EXPONENT
    coarsest = smallest + COARSEST
    floor = min(max(smallest + FINEST, room, _SMALLEST_EXPONENT), coarsest)

    def bound(grid: float) -> float:
        return bound_descent_rounding(recipe, problem, grid, size)

    grid = _search_grid(recipe, coarsest, floor, bound)
    rounding = bound(grid)
    if not math.isfinite(rounding):
        raise InputError.of("noise_std", sigma, "small enough that float64 still has digits left")
    return Precision(grid, rounding)


DPSGD_ASSUMPTIONS = (
    "computed: every clipped gradient was cut to a grid and summed without rounding, and every "
    "batch was a Poisson sample from a secret stream of its own.",
    "assumed: an example's gradient depends on the example and on the weights alone, to its last "
    "digit, and not on the rest of the batch; all batches had one shape, and it did not when that "
    "was checked before the first step.",
    "assumed: the start, the learning rates and the number that sums were divided by do not depend "
    "on the forget set.",
)


def describe_assumptions(recipe: DescentRecipe, problem: Problem) -> Sequence[str]:
    """Every constant the guarantee rests on, each marked "computed" or "assumed"."""
    G, L_f = recipe.gradient_bound, recipe.smoothness
    shape = "convex and " if recipe.convex else ""
    if problem.feature_clip is not None:
        B = problem.feature_clip
        return (
            f"computed: softmax regression with {problem.classes} classes; every feature vector, "
            f"its bias included, was clipped to the public norm {B!r}.",
            f"computed: the gradient of each example's loss is at most {G!r} long "
            f"(at least sqrt(2) times that norm).",
            f"computed: each example's loss is {shape}{L_f!r}-smooth "
            f"(at least half the square of that norm).",
            "computed: the rounding of every gradient and every step is counted in "
            "finite_precision.rounding.",
        )
    return (
        f"assumed: the gradient of each example's loss is at most {G!r} long, everywhere.",
        f"assumed: each example's loss is {shape}{L_f!r}-smooth, everywhere.",
        "assumed: the gradients that were computed are the exact ones; only the rounding of the "
        "steps is counted in finite_precision.rounding.",
    )
