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
WRONG = [1.02, 1 / 1.02]


class Sample:
    """ξ in units of its standard deviation: two steps of two runs, the runs' positions shared."""

    def __init__(self, noise: Any, other: Any) -> None:
        first, second = noise.begin(), other.begin()
        self.steps = [self._draw(first, step) for step in (0, 1)]
        self.other = self._draw(second, 0)

    @staticmethod
    def _draw(stream: Any, step: int) -> Any:
        out = np.empty(VALUES)
        stream.draw(out, step=step, position=0, std=STD)
        return out / STD


@pytest.fixture(scope="module", params=["system", "seeded"])
def sample(request: pytest.FixtureRequest) -> Sample:
    if request.param == "system":
        return Sample(SystemNoise(), SystemNoise())
    return Sample(SeededNoise(0), SeededNoise(1))


# ------------------------------------------------------------------ one-sample checks


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


SCALE_CHECKS = [check_kolmogorov_smirnov, check_chi_square, check_variance, check_tails]


@pytest.mark.parametrize("check", SCALE_CHECKS)
def test_the_right_scale_is_accepted_and_two_percent_off_is_rejected(
    sample: Sample, check: Callable[[Any], float]
) -> None:
    x = sample.steps[0]
    assert check(x) > FALSE_ALARM
    for factor in WRONG:
        assert check(x * factor) < FALSE_ALARM


def test_the_realised_norm_gives_the_scale_to_half_a_percent(sample: Sample) -> None:
    assert abs(float(np.sqrt(np.mean(np.square(sample.steps[1])))) - 1) < 0.005


MOMENTS = {1: (0, 1), 3: (0, 15), 4: (3, 96), 5: (0, 945), 6: (15, 10170)}


@pytest.mark.parametrize("power", MOMENTS)
def test_moments_are_those_of_the_normal_law(sample: Sample, power: int) -> None:
    """E ξᵖ and Var ξᵖ are in the table; a shift or a scale of 2 % is seen in every one of them."""
    mean, variance = MOMENTS[power]

    def check(x: Any) -> float:
        z = (float(np.mean(x**power)) - mean) * np.sqrt(x.size / variance)
        return float(2 * stats.norm.sf(abs(z)))

    x = sample.steps[0]
    assert check(x) > FALSE_ALARM
    assert check(x + 0.02 if power % 2 else x * 1.02) < FALSE_ALARM


@pytest.mark.parametrize("sign", [-1, 1])
def test_far_tails_are_there(sample: Sample, sign: int) -> None:
    """Beyond 4.5 standard deviations a sampler that cuts, folds or clips its tail would show."""
    beyond = int(np.count_nonzero(sign * np.concatenate(sample.steps) > 4.5))
    assert stats.binomtest(beyond, 2 * VALUES, stats.norm.sf(4.5)).pvalue > FALSE_ALARM
    assert stats.binomtest(0, 20 * VALUES, stats.norm.sf(4.5)).pvalue < FALSE_ALARM


# ------------------------------------------------------------------ independence


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


PAIR_CHECKS = [check_correlation, check_squares, check_table]
PAIRS: dict[str, Callable[[Sample], tuple[Any, Any]]] = {
    "steps": lambda s: (s.steps[0], s.steps[1]),
    "runs": lambda s: (s.steps[0], s.other),
    "shards": lambda s: (s.steps[0][: VALUES // 2], s.steps[0][VALUES // 2 :]),
    "cosine and sine of one block": lambda s: (s.steps[0][0::2], s.steps[0][1::2]),
    "neighbouring blocks": lambda s: (s.steps[0][1:-1:2], s.steps[0][2::2]),
}


@pytest.mark.parametrize("check", PAIR_CHECKS)
@pytest.mark.parametrize("pair", PAIRS)
def test_draws_are_independent_between(
    sample: Sample, pair: str, check: Callable[[Any, Any], float]
) -> None:
    x, y = PAIRS[pair](sample)
    assert check(x, y) > FALSE_ALARM
    # Noise that is used twice, or used again with the other sign, is seen.
    assert check(x, x) < FALSE_ALARM
    assert check(x, -x) < FALSE_ALARM


@pytest.mark.parametrize("check", PAIR_CHECKS)
def test_noise_reused_in_part_is_seen(sample: Sample, check: Callable[[Any, Any], float]) -> None:
    x, y = sample.steps[0], sample.steps[1].copy()
    y[: VALUES // 10] = x[: VALUES // 10]
    assert check(x, y) < FALSE_ALARM


def check_autocorrelation(x: Any) -> float:
    """Ljung-Box over the first 32 lags."""
    lags = [float(np.dot(x[lag:], x[:-lag])) ** 2 / (x.size - lag) for lag in range(1, 33)]
    return float(stats.chi2.sf(sum(lags), len(lags)))


def test_neighbours_are_uncorrelated(sample: Sample) -> None:
    x = sample.steps[0]
    assert check_autocorrelation(x) > FALSE_ALARM
    leaky = x.copy()
    leaky[29:] += 0.02 * x[:-29]
    assert check_autocorrelation(leaky) < FALSE_ALARM


def test_p_values_over_many_short_runs_are_uniform() -> None:
    """A thousand steps of a small vector, each its own sample: their p-values spread evenly."""
    stream, out = SeededNoise(5).begin(), np.empty(4001)
    p = []
    for step in range(1000):
        stream.draw(out, step=step, position=0, std=STD)
        p.append(check_variance(out / STD))
    assert stats.kstest(p, "uniform").pvalue > 1e-4
    assert stats.kstest(np.square(p), "uniform").pvalue < 1e-4


def test_equal_values_are_as_rare_as_birthdays() -> None:
    """P[k = k'] is about 1/(2 √π std); a stream of too few bits, or one that cycles, shows."""
    out = np.empty(500_000)
    SystemNoise().begin().draw(out, step=0, position=0, std=2.0**30)
    same = out.size - np.unique(out).size
    expected = out.size**2 / 2 / (2 * np.sqrt(np.pi) * 2.0**30)
    assert min(stats.poisson.cdf(same, expected), stats.poisson.sf(same - 1, expected)) > 1e-9
    assert stats.poisson.cdf(0, expected) < 1e-9
