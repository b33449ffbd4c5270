"""The grid: cheap, sound, and the cost it records is both enough and needed."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge import GradientClipping, InputError, ModelClipping, OutputPerturbation, guarantee
from expunge.accounting.precision import LARGEST_CELL, bound_rounding, choose_precision, list_levels
from expunge.recipes import Execution

NOISY = {
    "gradient-clipping": GradientClipping(
        start_clip=1.0, grad_clip=1.0, learning_rate=0.1, weight_decay=1.0, steps=5, noise_std=0.5
    ),
    "scheduled": GradientClipping(
        start_clip=1.0, grad_clip=0.5, learning_rate=[0.1, 0.2, 0.05], weight_decay=0.5, steps=3,
        noise_std=[0.3, 0.6, 0.1], start_noise_std=0.2, model_clip=2.0,
    ),
    "model-clipping": ModelClipping(
        model_clip=1.0, learning_rate=0.1, weight_decay=1.0, noise_std=0.5, steps=5
    ),
    "output-perturbation": OutputPerturbation(start_clip=1.0, noise_std=0.5),
}  # fmt: skip
SIZES = [1, 4_000, 20_042, 11_000_000, 100_000_000]
GENTLE = GradientClipping(
    start_clip=0.01, grad_clip=1.0, learning_rate=1e-4, weight_decay=10.0, steps=100, noise_std=0.01
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", [*NOISY.values(), GENTLE], ids=[*NOISY, "gentle"])
def test_grid_is_a_power_of_two_that_costs_less_than_a_tenth_of_a_percent(recipe, size):
    precision = choose_precision(recipe, size)
    assert math.frexp(precision.grid)[0] == 0.5
    levels = [level for level in list_levels(recipe) if level > 0]
    assert min(levels) * 2.0**-35 < precision.grid <= min(levels) * 2.0**-24
    assert max(levels) * 64 <= LARGEST_CELL * precision.grid
    execution = Execution(rounding=precision.rounding)
    for side in ("retrained", "centre"):
        ideal = guarantee(recipe, delta=1e-5, compared_to=side).epsilon
        real = guarantee(recipe, delta=1e-5, compared_to=side, execution=execution).epsilon
        assert ideal <= real <= ideal * 1.001


def test_projections_are_free_and_without_noise_there_is_no_grid():
    for recipe in (NOISY["model-clipping"], NOISY["output-perturbation"]):
        assert choose_precision(recipe, 1000).rounding == 0
    silent = replace(NOISY["gradient-clipping"], noise_std=0.0)
    assert choose_precision(silent, 1000) == choose_precision(silent, 10)
    assert choose_precision(silent, 10).grid == 0


def test_wide_schedules_keep_the_largest_noise_within_range():
    recipe = ModelClipping(
        model_clip=1.0, learning_rate=0.1, weight_decay=0.0, noise_std=[1e-9, 1e3], steps=2
    )
    precision = choose_precision(recipe, 10)
    assert 1e3 / precision.grid <= 2.0**39


def test_a_learning_rate_that_overflows_is_refused():
    recipe = GradientClipping(
        start_clip=1.0, grad_clip=1.0, learning_rate=1e300, weight_decay=0.0, steps=1,
        noise_std=1e-5,
    )  # fmt: skip
    with pytest.raises(InputError, match="learning_rate"):
        choose_precision(recipe, 10)


def apply(y, gradient, rho, gamma, grid):
    """φ(y) = Q(ψ(R(y))): the noise of the step before is rounded, then the step itself."""
    k = np.rint(y / grid)
    return grid * np.rint(rho * k - gamma * gradient / grid)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**31), rho=st.sampled_from([1.0, 0.9, 0.5]), d=st.integers(1, 40))
def test_recorded_rounding_bounds_the_step(seed, rho, d):
    """‖φ(y) - φ(y')‖ ≤ ρ ‖y - y'‖ + 2 γ C1 + rounding, for pairs made to be bad."""
    rng = np.random.default_rng(seed)
    grid, gamma, clip = 2.0**-10, 0.1, 0.01
    recipe = GradientClipping(
        start_clip=1.0, grad_clip=clip, learning_rate=gamma, weight_decay=(1 - rho) / gamma,
        steps=1, noise_std=1.0,
    )  # fmt: skip
    y = grid * (rng.integers(-50, 50, d) + 0.5)
    first, second = y - 1e-9, y + 1e-9 + grid * rng.uniform(0, 0.1)
    g, h = (clip * v / np.linalg.norm(v) for v in rng.normal(size=(2, d)))
    moved = np.linalg.norm(apply(first, g, rho, gamma, grid) - apply(second, h, rho, gamma, grid))
    allowed = rho * np.linalg.norm(first - second) + 2 * gamma * clip
    assert moved <= allowed + bound_rounding(recipe, grid, d)


def test_one_cell_per_coordinate_would_not_be_enough():
    """R is no contraction: two runs a hair apart end up two cells apart in every coordinate."""
    d, grid, gamma = 100, 2.0**-10, 1.0
    hair = 1e-6 * grid
    first, second = np.full(d, 0.5 * grid - hair), np.full(d, 0.5 * grid + hair)
    g, h = np.full(d, -0.5 * grid + hair), np.full(d, -0.5 * grid - hair)
    moved = np.linalg.norm(apply(first, g, 1.0, gamma, grid) - apply(second, h, 1.0, gamma, grid))
    shift = np.linalg.norm(first - second) + gamma * np.linalg.norm(g - h)
    assert shift < 1e-3 * grid
    assert 1.99 * grid * math.sqrt(d) < moved <= shift + 2 * grid * math.sqrt(d)
