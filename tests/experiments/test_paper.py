"""The paper's formulas where they are sound; test_errata.py has where they are not."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import pytest
from dp_accounting import rdp
from mpmath import mp

import paper
from expunge import GradientClipping, ModelClipping, guarantee
from expunge.accounting import gaussian

DELTAS = (1e-12, 1e-5, 0.01, 0.5)


def theta(epsilon: float, mu: float) -> float:
    """θ_ε(μ) with 60 digits: an oracle that shares nothing with the module under test."""
    with mp.workdps(60):
        e, m = mp.mpf(epsilon), mp.mpf(mu)
        return float(mp.ncdf(m / 2 - e / m) - mp.exp(e) * mp.ncdf(-m / 2 - e / m))


@pytest.mark.parametrize("delta", DELTAS)
def test_theorem_1_with_decay_is_sound_in_all_of_its_printed_domain(delta: float) -> None:
    for decay, steps, share in itertools.product((0.51, 0.75, 0.99), (1, 2, 30), (0.01, 1, 2.99)):
        recipe = GradientClipping(1.0, 2.0, 0.1, decay / 0.1, steps, 0.0)
        epsilon = share * math.log(1 / delta)
        sigma = paper.theorem_1_noise_std(recipe, epsilon=epsilon, delta=delta)
        rho = 1 - decay
        distance = 2 * rho**steps + 0.4 * (1 - rho**steps) / decay
        mu = distance / (sigma * math.sqrt((1 - rho ** (2 * steps)) / (1 - rho**2)))
        assert theta(epsilon, mu) <= delta


@pytest.mark.parametrize("ratio", [0.5, 2.0, 3.9])
@pytest.mark.parametrize("start", [None, (0.5, 1.0)])
def test_theorem_2_steps_are_the_fewest_of_the_weak_recursion(
    ratio: float, start: tuple[float, float] | None
) -> None:
    C0, sigma_0 = start if start else (None, 0.0)
    first = theta(1.0, 2 * C0 / sigma_0) if C0 else 1.0
    recipe = ModelClipping(1.0, 0.1, 0.0, 2 / ratio, 1, C0, sigma_0)
    steps = paper.theorem_2_steps(recipe, epsilon=1.0, delta=1e-9)
    factor = theta(1.0, ratio)
    assert first * factor**steps <= 1e-9 < first * factor ** (steps - 1)
    strong = guarantee(ModelClipping(1.0, 0.1, 0.0, 2 / ratio, steps, C0, sigma_0), epsilon=1.0)
    assert strong.delta <= 1e-9


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.01])
def test_theorem_2_corrected_is_sound_by_its_own_weak_recursion(delta: float) -> None:
    for epsilon, steps, sigma_0 in itertools.product((0.01, 0.5, 1.0), (1, 2, 20), (0.0, 1.5)):
        recipe = ModelClipping(2.0, 0.1, 0.0, 0.0, steps, 1.0, sigma_0)
        sigma = paper.theorem_2_noise_std(recipe, epsilon=epsilon, delta=delta, algebra="corrected")
        first = theta(epsilon, 2.0 / sigma_0) if sigma_0 else 1.0
        assert first * theta(epsilon, 4.0 / sigma) ** steps <= delta


@pytest.mark.parametrize("delta", [*DELTAS, 0.99])
@pytest.mark.parametrize("epsilon", [1e-3, 0.3, 1.0])
def test_classical_noise_is_sound_and_never_less_than_exact(epsilon: float, delta: float) -> None:
    sigma = paper.classical_noise_std(distance=2.0, epsilon=epsilon, delta=delta)
    assert theta(epsilon, 2.0 / sigma) <= delta
    assert sigma >= 2.0 / float(gaussian.mu(epsilon, delta))


@pytest.mark.parametrize("mu", [0.01, 0.3, 2**0.5, 5.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_sound_renyi_conversion_lies_above_the_exact_value(mu: float, delta: float) -> None:
    renyi = paper.epsilon_from_renyi(mu, delta)
    assert theta(renyi, mu) <= delta
    accountant = rdp.RdpAccountant().compose(dp_accounting.GaussianDpEvent(1 / mu))
    assert renyi <= accountant.get_epsilon(delta) * (1 + 1e-6)  # fewer orders there
    if delta <= 1e-5:  # not vacuous either; for large δ the Rényi route is several times looser
        assert renyi < 1.6 * float(gaussian.epsilon(mu, delta))
