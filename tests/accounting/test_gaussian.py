"""θ_ε(μ) and its inverses against a 60-digit oracle, at the edges of floating point, and always on
the safe side."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from expunge.accounting import gaussian

TINY = float(np.finfo(float).tiny)
BELOW_ONE = float(np.nextafter(1.0, 0.0))
EPSILONS = st.one_of(
    st.just(0.0), st.floats(-9, 3).map(lambda x: 10.0**x), st.floats(0, 1e308, allow_nan=False)
)
MUS = st.one_of(
    st.just(0.0), st.floats(-6, 2).map(lambda x: 10.0**x), st.floats(0, 1e308, allow_nan=False)
)
DELTAS = st.one_of(
    st.floats(5e-324, BELOW_ONE),
    st.floats(-323, -1e-3).map(lambda x: max(10.0**x, 5e-324)),
    st.integers(1, 1000).map(lambda k: 1.0 - k * 2.0**-53),
    st.integers(1, 1000).map(lambda k: k * 5e-324),
)
DELTA, LOG_DELTA, EPSILON, MU = (
    np.vectorize(f, otypes=[float])
    for f in (gaussian.delta, gaussian.log_delta, gaussian.epsilon, gaussian.mu)
)
fast = settings(max_examples=300, derandomize=True)


def exact_theta(epsilon: float, mu: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """(θ, 1 - θ) to 60 digits: with ε/μ up to 1e9 the difference loses at most 40 of 150."""
    with mpmath.workdps(150):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        behind = mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        return mpmath.ncdf(m / 2 - e / m) - behind, mpmath.ncdf(e / m - m / 2) + behind


def exact_log_theta(epsilon: float, mu: float) -> mpmath.mpf:
    theta, rest = exact_theta(epsilon, mu)
    with mpmath.workdps(150):
        return mpmath.log(theta) if theta < 0.5 else mpmath.log1p(-rest)


def sample_pairs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Half over the whole rectangle, half where θ is neither 1 nor below the smallest float."""
    rng = np.random.default_rng(seed)
    mu = 10 ** rng.uniform(-6, 2, count)
    epsilon = 10 ** rng.uniform(-9, 3, count)
    near = mu * mu / 2 + mu * rng.uniform(-8, 38, count)
    inside = (np.arange(count) % 2 == 0) & (near > 1e-9) & (near < 1e3)
    return np.where(inside, near, epsilon), mu


def sample_usable(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ε, μ, δ) of those whose δ is a normal float below 1."""
    epsilons, mus = sample_pairs(500, seed)
    deltas = DELTA(epsilons, mus)
    usable = (deltas > TINY) & (deltas < 1)
    return epsilons[usable], mus[usable], deltas[usable]


class TestOracle:
    @pytest.mark.parametrize("count", [400, pytest.param(1600, marks=pytest.mark.slow)])
    def test_delta_and_log_delta(self, count: int) -> None:
        """1e-9 relative wherever δ is a normal float, log δ relative beyond; never below."""
        epsilons, mus = sample_pairs(count, seed=1)
        deltas, logs = DELTA(epsilons, mus), LOG_DELTA(epsilons, mus)
        normal = 0
        for e, m, d, log_d in zip(epsilons, mus, deltas, logs, strict=True):
            theta, rest = exact_theta(e, m)
            exact_log = exact_log_theta(e, m)
            assert mpmath.mpf(float(d)) >= theta, (e, m)
            assert mpmath.mpf(float(log_d)) >= exact_log, (e, m)
            if theta >= TINY:
                normal += 1
                assert mpmath.mpf(float(d)) - theta <= 1e-11 * theta, (e, m)
                assert 1 - mpmath.mpf(float(d)) >= rest * (1 - 2e-12) - 2**-52, (e, m)
                assert mpmath.mpf(float(log_d)) - exact_log <= 1e-11, (e, m)
            else:
                assert d <= TINY
                assert mpmath.mpf(float(log_d)) - exact_log <= -1e-14 * exact_log, (e, m)
        assert normal > 700 * count // 1600

    @pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.1, 1.9999, 2.0, 2.0001, 5.0, 30.0, 100.0])
    def test_corners_and_seams_between_formulas(self, mu: float) -> None:
        """Where one formula takes over from the next: u = h, u = 4h, u = 30, ε = 1e-9, 1e3."""
        h = mu / 2
        for u in (1e-9 / mu, h, h * (1 - 1e-12), 4 * h, 4 * h * (1 + 1e-12), 29.0, h + 30, 31.0):
            e = u * mu
            log_d, exact = float(gaussian.log_delta(e, mu)), exact_log_theta(e, mu)
            assert 0 <= mpmath.mpf(log_d) - exact <= 1e-11 + 1e-14 * abs(exact), (e, mu)

    def test_epsilon_inverse(self) -> None:
        """Never below the exact ε, and above it by at most 1e-9 relative.

        Where ε hangs on the last digits of δ (δ near θ_0(μ)), no float formula can do better than
        reproduce δ: there the exact δ at our ε must be δ up to 1e-12 of min(δ, 1 - δ).
        """
        _, mus, deltas = sample_usable(seed=2)
        close = 0
        for m, d, ours in zip(mus, deltas, EPSILON(mus, deltas), strict=True):
            target, ours = mpmath.mpf(float(d)), mpmath.mpf(float(ours))
            theta, _ = exact_theta(ours, m)
            assert theta <= target, (m, d)
            if exact_theta(ours * (1 - 1e-9), m)[0] >= target:
                close += 1
            else:
                assert target - theta <= 1e-12 * min(target, 1 - target) + 2**-53 * target, (m, d)
        assert close > 0.75 * len(mus)
        assert len(mus) > 200

    def test_mu_inverse(self) -> None:
        """Never above the exact μ, and below it by at most 1e-9 relative."""
        epsilons, _, deltas = sample_usable(seed=3)
        for e, d, ours in zip(epsilons, deltas, MU(epsilons, deltas), strict=True):
            target, ours = mpmath.mpf(float(d)), mpmath.mpf(float(ours))
            assert exact_theta(e, ours)[0] <= target, (e, d)
            assert exact_theta(e, ours * (1 + 1e-9))[0] >= target, (e, d)
        assert len(epsilons) > 200

    @pytest.mark.parametrize("mu", [1e3, 1.7e4, 3.3e6, 1.1e8, 7e10])
    def test_far_beyond_the_range_rounding_of_the_ratio_stays_safe(self, mu: float) -> None:
        """ε is about μ²/2 here, and one float of ε/μ moves δ by a visible amount."""
        for delta in (1e-200, 1e-5, 0.3, 0.5, 0.9, 1 - 1e-9):
            ours = mpmath.mpf(float(gaussian.epsilon(mu, delta)))
            assert exact_theta(ours, mu)[0] <= delta
            assert exact_theta(ours * (1 - 1e-14), mu)[0] >= delta
            for nudge in (-3e-16, 1e-15, 3e-15):
                near = float(ours * (1 + nudge))
                assert gaussian.delta(near, mu) >= exact_theta(near, mu)[0]

    @pytest.mark.parametrize("mu", [3.0, 20.0, 100.0])
    @pytest.mark.parametrize("k", [1, 2, 1000])
    def test_delta_next_to_one_keeps_its_digits(self, mu: float, k: int) -> None:
        d = 1.0 - k * 2.0**-53
        ours = float(gaussian.epsilon(mu, d))
        assert exact_theta(ours, mu)[0] <= mpmath.mpf(d)
        if ours > 0:
            assert exact_theta(ours * (1 - 1e-9), mu)[0] >= mpmath.mpf(d)


class TestSafeSide:
    @fast
    @given(MUS, DELTAS)
    @example(1e160, 1e-5)  # μ² overflows: the answer is inf, not a start value
    @example(1e154, 0.5)
    @example(1.0, 5e-324)
    @example(20.0, BELOW_ONE)
    @example(0.5, 0.19741265136584729)  # θ_0(0.5): ε is at the edge of 0
    def test_epsilon_meets_delta(self, mu: float, delta: float) -> None:
        epsilon = float(gaussian.epsilon(mu, delta))
        assert epsilon >= 0
        assert gaussian.delta(epsilon, mu) <= delta
        assert gaussian.log_delta(epsilon, mu) <= math.log(delta)

    @fast
    @given(EPSILONS, DELTAS)
    @example(1e308, 0.5)
    @example(0.0, 5e-324)
    def test_mu_meets_delta(self, epsilon: float, delta: float) -> None:
        mu = float(gaussian.mu(epsilon, delta))
        assert 0 <= mu < math.inf
        assert gaussian.delta(epsilon, mu) <= delta
        assert gaussian.log_delta(epsilon, mu) <= math.log(delta)

    @fast
    @given(EPSILONS, st.floats(5e-324, 1e308))
    @example(0.0, 5e-324)
    @example(1e300, 3.0)
    @example(1e19, 3.0)  # M(u - h) - M(u + h) cancels completely here
    @example(1.0, 1e200)
    def test_zero_and_one_are_never_invented(self, epsilon: float, mu: float) -> None:
        assert gaussian.delta(epsilon, mu) > 0
        assert -math.inf < gaussian.log_delta(epsilon, mu) <= 0
        assert gaussian.delta(epsilon, mu) <= 1


class TestLimits:
    def test_epsilon_zero_is_total_variation(self) -> None:
        mu = np.array([1e-300, 1e-9, 0.1, 1.0, 5.0])
        np.testing.assert_allclose(
            DELTA(0.0, mu), [math.erf(m / math.sqrt(8)) for m in mu], rtol=2e-12
        )

    def test_no_distance_is_perfect_and_infinite_distance_is_none(self) -> None:
        assert gaussian.delta(0.0, 0.0) == gaussian.delta(3.0, 0.0) == 0
        assert gaussian.log_delta(3.0, 0.0) == -math.inf
        assert gaussian.epsilon(0.0, 0.0) == gaussian.epsilon(0.0, 1e-5) == 0
        assert gaussian.delta(3.0, math.inf) == 1
        assert gaussian.log_delta(3.0, math.inf) == 0
        assert gaussian.epsilon(math.inf, 0.5) == math.inf
        assert gaussian.epsilon(math.inf, 1.0) == 0

    def test_delta_zero_and_one(self) -> None:
        assert gaussian.epsilon(1e-300, 0.0) == math.inf
        assert gaussian.mu(5.0, 0.0) == 0
        assert gaussian.epsilon(1e300, 1.0) == 0
        assert gaussian.mu(0.0, 1.0) == math.inf
        assert gaussian.mu(math.inf, 0.5) == math.inf
        assert gaussian.mu(math.inf, 0.0) == 0
        assert gaussian.delta(math.inf, 5.0) == 0

    def test_no_number_in_no_number_out(self) -> None:
        for pair in ((math.nan, 1), (1, math.nan), (-1, 1), (1, -1), (math.inf, math.inf)):
            assert math.isnan(gaussian.delta(*pair))
            assert math.isnan(gaussian.log_delta(*pair))
        for pair in ((math.nan, 0.1), (1, math.nan), (-1, 0.1), (1, -0.1)):
            assert math.isnan(gaussian.epsilon(*pair))
            assert math.isnan(gaussian.mu(*pair))

    @pytest.mark.parametrize("mu", [1e-5, 0.3, 2.0, 40.0])
    def test_inverse_is_zero_exactly_when_total_variation_suffices(self, mu: float) -> None:
        at_zero = float(gaussian.delta(0.0, mu))
        assert gaussian.epsilon(mu, at_zero) == 0
        assert gaussian.epsilon(mu, at_zero * (1 - 1e-9)) > 0


class TestShape:
    def test_delta_falls_with_epsilon_and_grows_with_mu(self) -> None:
        epsilon = np.linspace(0, 60, 401)[:, None]
        mu = 10 ** np.linspace(-2, 1.5, 176)[None, :]
        table = LOG_DELTA(epsilon, mu)
        assert table.shape == (401, 176)
        assert np.all(np.diff(table, axis=0) <= 0)
        assert np.all(np.diff(table, axis=1) >= 0)
        strict = table[1:] < -1e-3
        assert np.all(np.diff(table, axis=0)[strict] < 0)

    @pytest.mark.slow
    def test_inverses_are_monotone(self) -> None:
        mu, delta = 10 ** np.linspace(-4, 2, 61)[:, None], 10 ** np.linspace(-20, -0.1, 40)
        table = EPSILON(mu, delta)
        assert np.all(np.diff(table, axis=0) >= 0)
        assert np.all(np.diff(table, axis=1) <= 0)
        table = MU(10 ** np.linspace(-4, 2.8, 61)[:, None], delta)
        assert np.all(np.diff(table, axis=0) > 0)
        assert np.all(np.diff(table, axis=1) > 0)
