"""Noisy descent and rewind-to-delete: by hand, on losses that attain the bounds, by brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import descent
from expunge.accounting import gaussian
from tests.accounting.test_theorems import convex_minorant_energy

SMOOTH: dict[str, Any] = {
    "learning_rate": 0.1, "noise_std": 0.2, "gradient_bound": 3.0, "smoothness": 0.25,
    "strong_convexity": 0.4, "examples": 100, "group_size": 4,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_minorant_by_definition(seed: int) -> None:
    rng = np.random.default_rng(3000 + seed)
    T, c = int(rng.integers(1, 60)), float(rng.uniform(0.7, 1.2))
    s = rng.uniform(0, 0.5, T) * (rng.random(T) < 0.7)
    w = np.array([c ** (T - 1 - t) for t in range(T)])
    V = np.concatenate([[0.0], np.cumsum(w**2)])
    W = np.concatenate([[0.0], np.cumsum(w * s)])
    expected = math.sqrt(convex_minorant_energy(V, W))
    assert descent.minorant_mu(c, s) == pytest.approx(expected, rel=1e-9)


# Linear losses with gradients +G for the forgotten and -G for the retained examples attain every
# inequality: the laws are computed exactly.
PROBLEM: dict[str, Any] = {
    "learning_rate": 0.3, "gradient_bound": 2.0, "smoothness": 0.0, "strong_convexity": 0.5,
    "examples": 50, "group_size": 5, "noise_std": 0.2,
}  # fmt: skip


def descend(x: float, steps: int, *, retained_only: bool) -> float:
    mean_gradient = -2.0 if retained_only else -2.0 + 2 * 2.0 * 5 / 50
    for _ in range(steps):
        x = x - 0.3 * (mean_gradient + 0.5 * x)
    return x


@pytest.mark.parametrize(("T", "K"), [(1, 1), (20, 1), (3, 40)])
def test_noisy_descent_is_exact_on_linear_losses(T: int, K: int) -> None:
    on_all = descend(descend(0.0, T, retained_only=False), K, retained_only=True)
    on_retained = descend(0.0, T + K, retained_only=True)
    variance = 0.2**2 * sum((1 - 0.3 * 0.5) ** (2 * j) for j in range(T + K))
    exact = abs(on_all - on_retained) / math.sqrt(variance)
    found = descent.mu(descent.NoisyDescent(train_steps=T, steps=K, **PROBLEM))
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-9)


@pytest.mark.parametrize(("T", "K"), [(2, 1), (20, 5), (30, 30)])
def test_rewind_to_delete_is_exact_on_linear_losses(T: int, K: int) -> None:
    checkpoint = descend(0.0, T - K, retained_only=False)
    distance = abs(descend(checkpoint, K, retained_only=True) - descend(0.0, T, retained_only=True))
    found = descent.mu(descent.RewindToDelete(train_steps=T, steps=K, **PROBLEM))
    assert distance / 0.2 * (1 - 1e-12) <= found <= distance / 0.2 * (1 + 1e-9)


def test_without_convexity_the_noise_of_rewinding_is_exponential_in_the_smoothness() -> None:
    def log_mu(smoothness: float) -> float:
        problem = PROBLEM | {"smoothness": smoothness, "convex": False}
        return math.log(descent.mu(descent.RewindToDelete(train_steps=100, steps=50, **problem)))

    assert log_mu(3.0) - log_mu(1.0) > 90 * math.log((1 + 0.3 * 3.5) / (1 + 0.3 * 1.5))


@pytest.mark.parametrize("kind", [descent.NoisyDescent, descent.RewindToDelete])
def test_the_noise_just_meets_the_target(kind: type[descent.Descent]) -> None:
    problem = {k: v for k, v in SMOOTH.items() if k != "noise_std"} | {"train_steps": 9, "steps": 4}
    found = descent.calibrate_descent(
        lambda s: kind(noise_std=s, **problem), epsilon=1.0, delta=1e-5
    )
    assert 1 - 1e-9 < float(gaussian.epsilon(descent.mu(found), 1e-5)) <= 1.0


@pytest.mark.parametrize("kind", [descent.NoisyDescent, descent.RewindToDelete])
def test_what_the_forgotten_move_is_within_the_bound(kind: type[descent.Descent]) -> None:
    """Two runs with the same noise, one that never saw them: never further apart than z."""
    generator = torch.Generator().manual_seed(3)
    x = 3 * torch.randn(40, 5, generator=generator)
    y = torch.randint(0, 3, (40,), generator=generator)
    given = {"learning_rate": 0.7, "noise_std": 0.05, "train_steps": 30, "steps": 10}
    given |= {"strong_convexity": 0.1, "examples": 40, "group_size": 4} | descent.softmax_constants(
        1.0
    )
    recipe = kind(**given)
    start = descent.SoftmaxRegression(5, 3, feature_clip=1.0)
    old = descent.forget(start, x, y, 4, recipe, seed=1).weight
    fresh = descent.forget(start, x[4:], y[4:], 0, recipe, seed=1).weight
    c, shift = descent.bound_expansion(recipe)
    z, early = 0.0, 20 if kind is descent.RewindToDelete else 30
    for t in range(early + 10):
        z = c * z + (shift if t < early else 0.0)
    assert 0 < float((old - fresh).detach().norm()) <= z
