"""The noise is Gaussian with the right scale and independent, and these tests would see otherwise.

Every check gives a p-value. The right noise must keep p above ``FALSE_ALARM``, so that all checks
on fresh system noise together fail less than once in a million runs; a scale 2 % off, or a planted
dependence, must push p below it, with room to spare at this number of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import special, stats

from expunge.noisy.noise import SeededNoise, SystemNoise

FALSE_ALARM = 1e-9
VALUES = 2_000_000
STD = 2.0**24


def draw(stream: Any, step: int) -> Any:
    out = np.empty(VALUES)
    stream.draw(out, step=step, position=0, std=STD)
    return out / STD


@pytest.fixture(scope="module", params=["system", "seeded"])
def sample(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """ξ in units of its standard deviation: two steps of one run, and one of another."""
    system = request.param == "system"
    one, two = (SystemNoise(), SystemNoise()) if system else (SeededNoise(0), SeededNoise(1))
    stream = one.begin()
    return draw(stream, 0), draw(stream, 1), draw(two.begin(), 0)


def check_kolmogorov_smirnov(x: Any) -> float:
    u, grid = special.ndtr(np.sort(x)), np.arange(x.size + 1) / x.size
    distance = max(np.max(grid[1:] - u), np.max(u - grid[:-1]))
    return float(stats.kstwobign.sf(distance * np.sqrt(x.size)))


def check_chi_square(x: Any) -> float:
    """256 cells of equal probability."""
    seen = np.bincount((special.ndtr(x) * 256).astype(int).clip(0, 255), minlength=256)
    return float(stats.chisquare(seen).pvalue)


def check_variance(x: Any) -> float:
    """Σ x² is χ² with n degrees of freedom."""
    total = float(np.sum(x * x))
    return float(2 * min(stats.chi2.cdf(total, x.size), stats.chi2.sf(total, x.size)))


def check_tails(x: Any) -> float:
    """How many values lie beyond three standard deviations."""
    beyond = int(np.count_nonzero(np.abs(x) > 3))
    return float(stats.binomtest(beyond, x.size, 2 * stats.norm.sf(3)).pvalue)


def check_sixth_moment(x: Any) -> float:
    """E ξ⁶ = 15, Var ξ⁶ = 10170."""
    z = (float(np.mean(x**6)) - 15) * np.sqrt(x.size / 10170)
    return float(2 * stats.norm.sf(abs(z)))


SCALE_CHECKS = [
    check_kolmogorov_smirnov, check_chi_square, check_variance, check_tails, check_sixth_moment,
]  # fmt: skip


@pytest.mark.parametrize("check", SCALE_CHECKS)
def test_the_right_scale_is_accepted_and_two_percent_off_is_rejected(
    sample: Any, check: Callable[[Any], float]
) -> None:
    assert check(sample[0]) > FALSE_ALARM
    for factor in (1.02, 1 / 1.02):
        assert check(sample[0] * factor) < FALSE_ALARM


@pytest.mark.parametrize("sign", [-1, 1])
def test_far_tails_are_there(sample: Any, sign: int) -> None:
    """Beyond 4.5 standard deviations a sampler that cuts, folds or clips its tail would show."""
    beyond = int(np.count_nonzero(sign * np.concatenate(sample[:2]) > 4.5))
    assert stats.binomtest(beyond, 2 * VALUES, stats.norm.sf(4.5)).pvalue > FALSE_ALARM
    assert stats.binomtest(0, 20 * VALUES, stats.norm.sf(4.5)).pvalue < FALSE_ALARM


def check_correlation(x: Any, y: Any) -> float:
    z = float(np.dot(x, y)) / np.sqrt(x.size)
    return float(2 * stats.norm.sf(abs(z)))


def check_squares(x: Any, y: Any) -> float:
    """x² and y² are uncorrelated: catches a shared radius, which correlation does not see."""
    z = float(np.dot(x * x - 1, y * y - 1)) / (2 * np.sqrt(x.size))
    return float(2 * stats.norm.sf(abs(z)))


def check_table(x: Any, y: Any) -> float:
    """χ² over 16 × 16 cells of equal probability."""
    cell = [(special.ndtr(v) * 16).astype(int).clip(0, 15) for v in (x, y)]
    return float(stats.chisquare(np.bincount(16 * cell[0] + cell[1], minlength=256)).pvalue)


PAIRS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "steps": lambda s: (s[0], s[1]),
    "runs": lambda s: (s[0], s[2]),
    "halves of a vector": lambda s: (s[0][: VALUES // 2], s[0][VALUES // 2 :]),
    "cosine and sine of one block": lambda s: (s[0][0::2], s[0][1::2]),
    "neighbouring blocks": lambda s: (s[0][1:-1:2], s[0][2::2]),
}


@pytest.mark.parametrize("check", [check_correlation, check_squares, check_table])
@pytest.mark.parametrize("pair", PAIRS)
def test_draws_are_independent_between(
    sample: Any, pair: str, check: Callable[[Any, Any], float]
) -> None:
    x, y = PAIRS[pair](sample)
    assert check(x, y) > FALSE_ALARM
    # Noise that is used twice, again with the other sign, or in part, is seen.
    assert check(x, x) < FALSE_ALARM
    assert check(x, -x) < FALSE_ALARM
    assert check(x, np.concatenate([x[: x.size // 10], y[x.size // 10 :]])) < FALSE_ALARM


def check_autocorrelation(x: Any) -> float:
    """Ljung-Box over the first 32 lags."""
    lags = [float(np.dot(x[lag:], x[:-lag])) ** 2 / (x.size - lag) for lag in range(1, 33)]
    return float(stats.chi2.sf(sum(lags), len(lags)))


def test_neighbours_are_uncorrelated(sample: Any) -> None:
    assert check_autocorrelation(sample[0]) > FALSE_ALARM
    leaky = sample[0].copy()
    leaky[29:] += 0.02 * sample[0][:-29]
    assert check_autocorrelation(leaky) < FALSE_ALARM
