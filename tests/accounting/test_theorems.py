"""The general inequalities against solvers that know nothing of them: a quadratic program over
the shifts, a convex minorant by definition, recursions in 60 digits; and at the edges of floats."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from expunge.accounting.theorems import ENOUGH, iterate, mix, ratio
from expunge.recipes import MAX_STEPS

fast = settings(max_examples=150, derandomize=True)


def solve_shifts(rho, s, sigma, D: float) -> float:
    """min Σ (a_t/σ_t)² over a ≥ 0 with z_{t+1} = ρ_t z_t + s_t - a_t ≥ 0, z_0 = D, z_T = 0."""
    T = len(rho)
    z0, gain = [D], [np.zeros(T)]
    for t in range(T):
        z0.append(rho[t] * z0[-1] + s[t])
        row = rho[t] * gain[-1]
        row[t] -= 1
        gain.append(row)
    z0, gain = np.array(z0[1:]), np.array(gain[1:])
    scale = z0.max()
    noisy = sigma > 0
    inverse = np.where(noisy, 1 / np.where(noisy, sigma, 1), 0.0) ** 2
    unit = inverse.max()
    answer = minimize(
        lambda a: np.sum(a * a * inverse) / unit,
        jac=lambda a: 2 * a * inverse / unit,
        x0=np.where(noisy, 0.1, 0.0),
        bounds=[(0, None) if n else (0, 0) for n in noisy],
        constraints=[
            {"type": kind, "fun": lambda a, r=rows: z0[r] / scale + gain[r] @ a}
            for kind, rows in (("ineq", slice(None, -1)), ("eq", slice(-1, None)))
        ],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )  # fmt: skip
    assert answer.success or answer.status == 8, answer.message
    return scale * math.sqrt(answer.fun * unit)


def convex_minorant_energy(x: np.ndarray, y: np.ndarray) -> float:
    """Σ (Δy)²/Δx of the greatest convex minorant of points from (0, 0) to the last: O(n²).

    From each vertex the next one is the point of least slope.
    """
    energy, i = 0.0, 0
    while i < len(x) - 1:
        slopes = (y[i + 1 :] - y[i]) / (x[i + 1 :] - x[i])
        j = i + 1 + int(np.argmin(slopes))
        energy += (y[j] - y[i]) ** 2 / (x[j] - x[i])
        i = j
    return energy


def points(rho, s, sigma, D: float) -> tuple[np.ndarray, np.ndarray]:
    w = np.array([np.prod(rho[t + 1 :]) for t in range(len(rho))])
    V = np.cumsum((w * sigma) ** 2)
    W = np.prod(rho) * D + np.cumsum(w * s)
    return np.concatenate([[0.0], V]), np.concatenate([[0.0], W])


def exact_best(decay, s, sigma, D, sigma_0=0.0) -> mpmath.mpf:
    """min over prefixes of W/√V, forwards in 60 digits."""
    with mpmath.workdps(60):
        W, V = mpmath.mpf(D), mpmath.mpf(sigma_0) ** 2
        best = W / mpmath.sqrt(V) if V > 0 else mpmath.inf
        for d, shift, noise in zip(decay, s, sigma, strict=True):
            rho = 1 - mpmath.mpf(float(d))
            W, V = rho * W + mpmath.mpf(float(shift)), rho**2 * V + mpmath.mpf(float(noise)) ** 2
            if V > 0:
                best = min(best, W / mpmath.sqrt(V))
        return best


def draw_schedule(rng, T: int):
    rho = rng.uniform(0.2, 1.0, T)
    s = rng.uniform(0, 0.5, T) * (rng.random(T) < 0.7)
    sigma = 10 ** rng.uniform(-1.5, 0.5, T)
    return rho, s, sigma, float(10 ** rng.uniform(-1.5, 1))


class TestBruteForce:
    @pytest.mark.parametrize("seed", range(30))
    def test_the_best_prefix_is_the_best_choice_over_all_prefixes(self, seed: int) -> None:
        """iterate's min W²/V is the least solved value over all prefixes."""
        rng = np.random.default_rng(1000 + seed)
        T = int(rng.integers(1, 7))
        rho, s, sigma, D = draw_schedule(rng, T)
        solved = min(solve_shifts(rho[:t], s[:t], sigma[:t], D) for t in range(1, T + 1))
        assert iterate(1 - rho, s, sigma, D) == pytest.approx(solved, rel=2e-6)

    @pytest.mark.parametrize("seed", range(20))
    def test_start_noise_is_one_more_step_in_front(self, seed: int) -> None:
        rng = np.random.default_rng(2000 + seed)
        rho, s, sigma, D = draw_schedule(rng, int(rng.integers(1, 5)))
        sigma_0 = float(rng.uniform(0.05, 2))
        front = np.array([[1.0, *rho], [0.0, *s], [sigma_0, *sigma]])
        solved = min(solve_shifts(*front[:, :t], D) for t in range(1, len(rho) + 2))
        assert iterate(1 - rho, s, sigma, D, sigma_0) == pytest.approx(solved, rel=2e-6)

    @pytest.mark.parametrize("seed", range(40))
    def test_the_best_prefix_by_definition(self, seed: int) -> None:
        rng = np.random.default_rng(3000 + seed)
        T = int(rng.integers(1, 60))
        rho, s, sigma, D = draw_schedule(rng, T)
        prefixes = [
            convex_minorant_energy(*points(rho[:t], s[:t], sigma[:t], D)) for t in range(1, T + 1)
        ]
        assert iterate(1 - rho, s, sigma, D) == pytest.approx(math.sqrt(min(prefixes)), rel=1e-11)

    def test_the_solver_would_notice_a_shift_of_one_percent(self) -> None:
        rho, s, sigma, D = draw_schedule(np.random.default_rng(7), 5)
        solved = min(solve_shifts(rho[:t], s[:t], sigma[:t], D) for t in range(1, 6))
        assert iterate(1 - rho, s, sigma * 1.01, D) < solved * 0.995


class TestConstant:
    @fast
    @given(
        st.sampled_from([0.0, 1e-300, 1e-20, 1e-12, 1e-5, 0.03, 0.5, 0.99, 1 - 2**-53]),
        st.floats(0, 3),
        st.floats(0.01, 3),
        st.integers(0, 60),
        st.floats(1e-3, 30),
        st.one_of(st.just(0.0), st.floats(0.01, 10)),
    )
    def test_equal_steps_in_sixty_digits(self, decay, s, sigma, steps, D, sigma_0) -> None:
        schedule = [np.full(steps, value) for value in (decay, s, sigma)]
        general = iterate(*schedule, D, sigma_0)
        exact = exact_best(*schedule, D, sigma_0)
        above = max(exact * (1 + mpmath.mpf("1e-11")), mpmath.mpf("1.1e-300"))  # never below 1e-300
        assert exact <= general <= above or exact == general == math.inf

    def test_the_paper_s_line(self) -> None:
        """μ = (ρ^T D + s Σ ρ^k) / (σ sqrt(Σ ρ^{2k})) while more steps still help."""
        rho, s, sigma, D = 0.9, 0.01, 0.5, 4.0
        for T in (1, 2, 10, 30):
            W = rho**T * D + s * sum(rho**k for k in range(T))
            V = sigma**2 * sum(rho ** (2 * k) for k in range(T))
            ours = iterate(np.full(T, 1 - rho), np.full(T, s), np.full(T, sigma), D)
            assert ours == pytest.approx(W / math.sqrt(V))

    @pytest.mark.parametrize("decay", [0.0, 1e-15, 1e-9, 0.1])
    @pytest.mark.parametrize("s", [0.0, 1e-9, 0.2])
    @pytest.mark.parametrize("sigma_0", [0.0, 3.0])
    def test_more_steps_never_hurt_up_to_the_largest_number(self, decay, s, sigma_0) -> None:
        values = [
            iterate(np.full(steps, decay), np.full(steps, s), np.ones(steps), 2.0, sigma_0)
            for steps in (0, 1, 2, 10, 1000, MAX_STEPS)
        ]
        assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(values))
        assert values[-1] > 0

    def test_limits_of_many_steps(self) -> None:
        many = MAX_STEPS
        none, noise = np.zeros(many), np.ones(many)
        # Without shift: D/(σ√T), exact.
        assert iterate(none, none, noise, 5.0) == pytest.approx(5e-3, rel=1e-9)
        # With shift and no decay the best prefix is τ = D/s.
        found = iterate(none, np.full(many, 1e-3), noise, 5.0)
        assert found == pytest.approx(10 / math.sqrt(5000), rel=1e-9)
        # A contraction without shift forgets everything a float can hold, but never says 0.
        assert 0 < iterate(np.full(many, 0.1), none, noise, 5.0) <= 1e-299


class TestRounding:
    @pytest.mark.parametrize(
        "decay",
        [1e-4, *(pytest.param(decay, marks=pytest.mark.slow) for decay in (0.0, 1e-7, 0.02, 0.7))],
    )
    def test_long_schedules_stay_above_and_close(self, decay: float) -> None:
        """60,000 steps against the same recursion in 60 digits."""
        rng = np.random.default_rng(5)
        T = 60_000
        decays = rng.uniform(0, 2 * decay, T) if decay < 0.5 else np.full(T, decay)
        s, sigma, D = rng.uniform(0, 1e-3, T), rng.uniform(0.1, 1, T), 3.0
        ours = iterate(decays, s, sigma, D, 0.5)
        exact = exact_best(decays, s, sigma, D, 0.5)
        assert exact <= ours <= exact * (1 + mpmath.mpf("6e-11"))

    @fast
    @given(
        st.sampled_from([0.0, 1e-20, 1e-10, 0.5, 1 - 2**-53]),
        *[st.floats(0, 1.7e308) for _ in range(3)],
        st.floats(5e-324, 1.7e308),
        st.integers(1, 6),
    )
    @example(1e-10, 8.1e199, 6.8e153, 0.0, 1.3e308, 4)  # σ² overflowed: μ was 0
    @example(0.5, 0.9, 1.26e-162, 7.4e153, 5e-324, 6)  # D/σ0 underflowed: μ was 0
    @example(0.0, 0.0, 1.6e-162, 0.0, 1.6e-162, 3)  # σ² rounded up twofold: μ was too small
    @example(0.9, 5e-324, 6.5e299, 0.0, 0.74, 5)  # σ² was a bare OverflowError
    @example(0.0, 5e-324, 8.5e-163, 8.8e299, 8e19, 5)  # inf - inf was a bare ValueError
    def test_never_below_the_truth_at_any_scale(self, decay, s, sigma, sigma_0, D, steps) -> None:
        schedule = [np.full(steps, value) for value in (decay, s, sigma)]
        exact = exact_best(*schedule, D, sigma_0)
        ours = iterate(*schedule, D, sigma_0)
        assert ours > 0
        assert mpmath.mpf(ours) >= exact
        if mpmath.mpf("1e-290") < exact < mpmath.mpf("1e140") and 1e-140 < sigma < 1e140:
            assert ours <= exact * (1 + mpmath.mpf("1e-11")) or sigma_0 > 1e140 * sigma

    def test_what_underflows_is_not_nothing(self) -> None:
        assert ratio(1e-200, 1e200) > 0
        assert ratio(0.0, 0.0) == 0
        assert ratio(1.0, 0.0) == ratio(math.inf, 1.0) == math.inf
        assert iterate(np.zeros(1), np.zeros(1), np.zeros(1), 1.0) == math.inf
        assert iterate(np.zeros(0), np.zeros(0), np.zeros(0), 1.0, 2.0) == pytest.approx(0.5)
        assert iterate(np.zeros(2), np.full(2, np.inf), np.ones(2), 1.0, 2.0) == pytest.approx(0.5)


class TestMixing:
    @pytest.mark.parametrize("epsilon", [0.0, 1e-9, 0.3, 1.0, 20.0, 300.0])
    @pytest.mark.parametrize("ratios", [[2.0] * 8, [0.2, 3.0], [5.0, 1.0, 4.0, 2.5], [40.0] * 3])
    def test_recursion_in_sixty_digits(self, epsilon: float, ratios: list[float]) -> None:
        with mpmath.workdps(400):
            delta, e = mpmath.mpf(1), mpmath.mpf(epsilon)
            for r in map(mpmath.mpf, ratios):
                if mpmath.log(delta) < -1e140:
                    break  # beyond what mpmath's erfc can do
                inner = mpmath.log(1 + mpmath.expm1(e) / delta)
                delta *= mpmath.ncdf(r / 2 - inner / r) - mpmath.exp(inner) * mpmath.ncdf(
                    -r / 2 - inner / r
                )
            exact = mpmath.log(delta)
            ours = mpmath.mpf(mix(0.0, epsilon, np.array(ratios)))
            assert ours <= exact + 1e-9 + 1e-11 * abs(exact)
            assert ours >= exact or ours == ENOUGH

    def test_edges(self) -> None:
        assert mix(0.0, 1.0, np.array([])) == 0
        assert mix(-math.inf, 1.0, np.array([2.0])) == -math.inf
        assert mix(0.0, 1.0, np.array([2.0, 0.0])) == -math.inf
        assert mix(0.0, 1.0, np.array([math.inf, math.inf])) == 0
        one = mix(0.0, 1.0, np.array([2.0]))
        assert mix(0.0, 1.0, np.array([2.0, math.inf])) == pytest.approx(one)

    def test_no_budget_is_too_small_to_be_counted(self) -> None:
        """Counting stopped at log δ < -5000: δ fell to 10^-682816, then rose to 10^-2274."""
        for steps in (3, 4, 9):
            ratios = np.full(steps, 2 * 0.5 / 3.0)
            found = [mix(0.0, float(epsilon), ratios) for epsilon in np.linspace(0.0, 40.0, 161)]
            assert all(b <= a + 1e-11 * abs(a) for a, b in itertools.pairwise(found))
            assert all(b < a or b == ENOUGH for a, b in itertools.pairwise(found))
        assert mix(0.0, 1.0, np.full(10**6, 0.01)) == ENOUGH > -math.inf
