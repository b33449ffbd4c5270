"""The worst pair of runs, simulated: the stated δ is reached, and 5 % less noise is noticed.

Runs are one-dimensional, along the direction u in which the two starts differ. A is the best test:
δ = P(X ∈ A) - e^ε P(X' ∈ A). Both probabilities get Clopper–Pearson intervals, so the δ of a run
whose noise is as stated lies in the interval, and that of a run with less noise above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scipy.stats import binomtest

from expunge.accounting import gaussian
from expunge.accounting.guarantee import guarantee, mu
from expunge.recipes import GradientClipping, ModelClipping, schedule

RUNS = 400_000
CONFIDENCE = 0.9995


def bound_delta(
    inside: np.ndarray, inside_other: np.ndarray, epsilon: float
) -> tuple[float, float]:
    """The interval of P(A) - e^ε P'(A)."""
    first, second = (
        binomtest(int(hits.sum()), hits.size).proportion_ci(CONFIDENCE)
        for hits in (inside, inside_other)
    )
    factor = math.exp(epsilon)
    return first.low - factor * second.high, first.high - factor * second.low


def list_steps(recipe: GradientClipping) -> Iterator[tuple[float, float]]:
    """Learning rate and noise of every step."""
    columns = (schedule(v, recipe.steps) for v in (recipe.learning_rate, recipe.noise_std))
    return zip(*columns, strict=True)


def check_noise(run: Callable[..., np.ndarray], stated: float, epsilon: float, seed: int) -> None:
    """``run(side, noise_factor, rng)``: the stated δ with all of the noise, more with 95 %."""
    found = {}
    for factor in (1.0, 0.95):
        rng = np.random.default_rng(seed)
        ahead, behind = (run(side, factor, rng) for side in (1.0, -1.0))
        found[factor] = bound_delta(ahead, behind, epsilon)
    assert found[1.0][0] <= stated <= found[1.0][1]
    assert stated < found[0.95][0]


def run_gradient_clipping(
    recipe: GradientClipping, side: float, noise_factor: float, rng: np.random.Generator
) -> np.ndarray:
    """From side · C0, every gradient as large as allowed and pushing further to the same side."""
    push = math.copysign(recipe.grad_clip, side)
    x = np.full(RUNS, side * recipe.start_clip)
    x += noise_factor * recipe.start_noise_std * rng.standard_normal(RUNS)
    for gamma, sigma in list_steps(recipe):
        x = x - gamma * (-push + recipe.weight_decay * x)
        x = x + noise_factor * sigma * rng.standard_normal(RUNS)
    return x


def law_of_gradient_clipping(recipe: GradientClipping, side: float) -> tuple[float, float]:
    """Mean and variance of the last iterate."""
    mean, variance = side * recipe.start_clip, recipe.start_noise_std**2
    push = math.copysign(recipe.grad_clip, side)
    for gamma, sigma in list_steps(recipe):
        rho = 1 - gamma * recipe.weight_decay
        mean, variance = rho * mean + gamma * push, rho**2 * variance + sigma**2
    return mean, variance


GRADIENT_CASES = {
    "constant": GradientClipping(
        start_clip=1.0, grad_clip=0.5, learning_rate=0.1, weight_decay=3.0, steps=4, noise_std=0.4
    ),
    "one step of the paper": GradientClipping(
        start_clip=0.01, grad_clip=100.0, learning_rate=1e-4, weight_decay=10.0, steps=1,
        noise_std=0.02827,
    ),
    "start noise": GradientClipping(
        start_clip=1.0, grad_clip=0.2, learning_rate=0.05, weight_decay=2.0, steps=3,
        noise_std=0.3, start_noise_std=1.2,
    ),
    "schedule": GradientClipping(
        start_clip=2.0, grad_clip=0.3, learning_rate=[0.05, 0.2, 0.1], weight_decay=4.0, steps=3,
        noise_std=[0.3, 0.2, 0.6],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENT_CASES)
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_gradient_clipping_reaches_its_delta(name: str, epsilon: float) -> None:
    recipe = GRADIENT_CASES[name]
    stated = guarantee(recipe, epsilon=epsilon).delta
    mean, variance = law_of_gradient_clipping(recipe, 1.0)
    assert mu(recipe) == pytest.approx(2 * mean / math.sqrt(variance), rel=1e-9)
    threshold = epsilon * variance / (2 * mean)
    check_noise(lambda *how: run_gradient_clipping(recipe, *how) > threshold, stated, epsilon, 20)


def test_compared_to_the_centre_the_other_start_is_zero() -> None:
    """Half the start distance, the same gradients ±C1 u."""
    recipe, epsilon = GRADIENT_CASES["constant"], 0.5
    stated = guarantee(recipe, epsilon=epsilon, compared_to="centre").delta
    mean, variance = law_of_gradient_clipping(recipe, 1.0)
    other = law_of_gradient_clipping(recipe, -1.0)[0] + 0.7**4 * recipe.start_clip
    assert mu(recipe, compared_to="centre") == pytest.approx(
        (mean - other) / math.sqrt(variance), rel=1e-9
    )
    threshold = (mean + other) / 2 + epsilon * variance / (mean - other)
    rng = np.random.default_rng(21)
    ahead = run_gradient_clipping(recipe, 1.0, 1.0, rng) > threshold
    behind = run_gradient_clipping(recipe, -1.0, 1.0, rng) + 0.7**4 * recipe.start_clip > threshold
    low, high = bound_delta(ahead, behind, epsilon)
    assert low <= stated <= high


def mixing_thresholds(recipe: ModelClipping, epsilon: float) -> list[float]:
    """τ_t = ε̃_t σ_t²/(2 C2), where P_t's density passes e^ε times that of Q_t; with δ_0 = 1."""
    delta, thresholds = 1.0, []
    for sigma in schedule(recipe.noise_std, recipe.steps):
        inner = math.log1p(math.expm1(epsilon) / delta)
        thresholds.append(inner * sigma**2 / (2 * recipe.model_clip))
        delta *= float(gaussian.delta(inner, 2 * recipe.model_clip / sigma))
    return thresholds


def run_model_clipping(
    recipe: ModelClipping,
    thresholds: list[float],
    side: float,
    noise_factor: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Every step sends what lies beyond its threshold to +C2 and the rest to -C2, then adds noise.

    One and the same map for both runs: what a loss chosen by an adversary can do.
    """
    place = np.full(RUNS, side * recipe.model_clip)
    x = place
    for sigma, threshold in zip(schedule(recipe.noise_std, recipe.steps), thresholds, strict=True):
        x = place + noise_factor * sigma * rng.standard_normal(RUNS)
        place = np.where(x > threshold, recipe.model_clip, -recipe.model_clip)
    return x > thresholds[-1]


@pytest.mark.parametrize("noise", [0.5, [0.6, 0.3, 0.5]], ids=["constant", "schedule"])
@pytest.mark.parametrize("epsilon", [0.0, 0.7])
def test_model_clipping_reaches_its_delta(noise, epsilon: float) -> None:
    recipe = ModelClipping(
        model_clip=0.5, learning_rate=0.1, weight_decay=0.0, noise_std=noise, steps=3
    )
    stated = guarantee(recipe, epsilon=epsilon).delta
    thresholds = mixing_thresholds(recipe, epsilon)
    check_noise(lambda *how: run_model_clipping(recipe, thresholds, *how), stated, epsilon, 22)


@pytest.mark.parametrize("seed", range(6))
def test_no_adversary_does_better(seed: int) -> None:
    """Random maps of the state, random tests: never above the stated δ."""
    rng = np.random.default_rng(100 + seed)
    recipe, epsilon = GRADIENT_CASES["schedule"], 0.4
    stated = guarantee(recipe, epsilon=epsilon).delta
    bends, runs = rng.uniform(-3, 3, (recipe.steps, 2)), []
    for side in (1.0, -1.0):
        x = np.full(RUNS, side * recipe.start_clip)
        for gamma, sigma, (scale, shift) in zip(
            recipe.learning_rate, recipe.noise_std, bends, strict=True
        ):
            gradient = -recipe.grad_clip * np.tanh(3 * scale * (x - shift / 3))
            x = x - gamma * (gradient + recipe.weight_decay * x)
            x = x + sigma * rng.standard_normal(RUNS)
        runs.append(x)
    for threshold in np.quantile(runs[0], [0.1, 0.4, 0.6, 0.8]):
        low, _ = bound_delta(runs[0] > threshold, runs[1] > threshold, epsilon)
        assert low <= stated
