"""The two inequalities everything rests on, for general steps.

Contraction with noise (THEORY section 3): ``iterate``, ``iterate_constant``, ``minorant_mu`` give a
Gaussian-differential-privacy parameter μ. Bounded steps with noise (THEORY section 4): ``mix``
gives δ at a fixed ε. Every result is rounded to the safe side.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from expunge import gaussian

Array = npt.NDArray[np.float64]
SMALLEST = 1e-300  # what a positive number too small for a float is rounded up to
ENOUGH = -5000.0  # log δ below which more steps are not worth counting: stopping early is sound


def ratio(distance: float, sigma: float) -> float:
    """distance/σ rounded up: 0 only without a distance, inf without noise."""
    if distance == 0:
        return 0.0
    if sigma == 0 or math.isinf(distance):
        return math.inf
    return max(distance / sigma * (1 + 4e-16), SMALLEST)


def iterate(decay: Array, s: Array, sigma: Array, D: float, sigma_0: float = 0.0) -> float:
    """μ of the general contraction ``‖ψ_t(x) - ψ_t(y)‖ ≤ (1 - decay_t) ‖x - y‖ + s_t``, noise σ_t.

    Steps after the τ-th are post-processing, so every prefix gives a bound. In units in which
    every step has ρ = 1, prefix τ has

        W_τ = D + Σ_{t<τ} s_t/P_{t+1},   V_τ = σ0² + Σ_{t<τ} (σ_t/P_{t+1})²,   P_t = Π_{k<t} ρ_k,

    and costs the energy of the greatest convex minorant of the points up to τ. The best prefix
    costs exactly

        μ² = min_τ W_τ² / V_τ:

    a straight line is never more than a minorant, and the line to the best τ passes below all
    earlier points, because one below it would be a better τ. The units are renewed whenever P has
    fallen by e^300, so that nothing overflows.

    >>> round(iterate(np.zeros(4), np.zeros(4), np.ones(4), 3.0), 12)  # D / (σ √T)
    1.5
    """
    if D == 0:
        return 0.0
    best = ratio(D, sigma_0)
    unit = max(float(np.max(sigma, initial=0.0)), sigma_0)
    if unit == 0 or math.isinf(D) or len(s) == 0:
        return best
    with np.errstate(over="ignore", under="ignore"):
        shift = np.where(s > 0, np.maximum(s / unit, SMALLEST), 0.0)
        noise = sigma / unit
        W, V = max(D / unit, SMALLEST), (sigma_0 / unit) ** 2
        log_p = -np.cumsum(np.log1p(-decay))
        start = 0
        while start < len(s):
            gone = log_p[start - 1] if start else 0.0
            stop = max(int(np.searchsorted(log_p, gone + 300.0)), start + 1)
            P = np.cumprod(1 - decay[start:stop])
            w = W + np.cumsum(shift[start:stop] / P)
            v = V + np.cumsum(np.square(noise[start:stop] / P))
            noisy = v > SMALLEST
            best = min(best, float(np.min(w[noisy] / np.sqrt(v[noisy]), initial=math.inf)))
            W, V = max(float(P[-1] * w[-1]), SMALLEST), float(P[-1] * P[-1] * v[-1])
            start = stop
    return max(best * (1 + _accumulated_error(len(s))), SMALLEST)


def iterate_constant(
    decay: float, s: float, sigma: float, steps: int, D: float, sigma_0: float = 0.0
) -> float:
    """``iterate`` for constant steps, in closed form whatever their number.

    With x = ρ^-τ, S = s/(1-ρ) and A = σ²/(1-ρ²), W = D - S + S x and V = σ0² - A + A x². Then
    W²/V has one critical point, x = (1 - σ0²/A)/(1 - D/S), a minimum if σ0²/A < D/S < 1; so the
    best prefix is next to it or at an end.

    >>> round(iterate_constant(0.0, 0.5, 1.0, 100, 2.0), 12)  # best prefix: τ = D/s = 4
    2.0
    """
    if D == 0:
        return 0.0
    at_start = ratio(D, sigma_0)
    if sigma == 0 or steps == 0:
        return at_start
    # In units of σ; a shift is rounded up, start noise beyond 1e150 is not counted.
    D, s = max(D / sigma, SMALLEST), max(s / sigma, SMALLEST) if s > 0 else 0.0
    sigma_0 = min(sigma_0 / sigma, 1e150)
    if math.isinf(D) or math.isinf(s):
        return at_start
    log_rho = math.log1p(-decay)
    best = float(steps)
    if s > 0 and decay == 0:
        best = D / s - 2 * sigma_0**2
    elif s > 0 and D / s * decay < 1:
        a, b = D / s * decay, sigma_0**2 * decay * (2 - decay)
        best = (math.log1p(-b) - math.log1p(-a)) / -log_rho if b < a else 0.0
    near = math.floor(min(max(best, 0.0), float(steps)))
    candidates = {min(max(tau, 1), steps) for tau in (near, near + 1, steps)}
    return min(
        at_start,
        *(_prefix_constant(log_rho, decay, s, tau, D, sigma_0) for tau in candidates),
    )


def _prefix_constant(
    log_rho: float, decay: float, s: float, tau: int, D: float, sigma_0: float
) -> float:
    """W/√V after τ ≥ 1 constant steps, in the units of the last step and of its noise."""
    p = math.exp(tau * log_rho)
    total = -math.expm1(tau * log_rho) / decay if decay > 0 else float(tau)
    squares = math.expm1(2 * tau * log_rho) / math.expm1(2 * log_rho) if decay > 0 else float(tau)
    W = max(p * D + s * total, SMALLEST)
    error = 1e-13 + 1e-15 * min(-tau * log_rho, 750.0)
    return max(W / math.hypot(p * sigma_0, math.sqrt(squares)) * (1 + error), SMALLEST)


def descend_constant(
    c: float, s: float, late: float, sigma: float, train_steps: int, steps: int
) -> float:
    """μ of T constant steps (c, s), then K steps (c, late ≤ s), from equal starts; c < 1.

    With c < 1 the slopes ΔW/ΔV fall from step to step, so the minorant is one straight line:
    W = s c^K Σ_{j<T} c^j + late Σ_{j<K} c^j,  V = σ² Σ_{j<T+K} c^{2j}.

    >>> round(descend_constant(0.5, 1.0, 0.0, 1.0, 1, 1), 10)  # (1/2) / sqrt(1 + 1/4)
    0.4472135955
    """
    log_c, total = math.log(c), train_steps + steps
    trained = math.exp(steps * log_c) * -math.expm1(train_steps * log_c) / (1 - c)
    W = max(s * trained, SMALLEST) + late * -math.expm1(steps * log_c) / (1 - c)
    squares = math.expm1(2 * total * log_c) / math.expm1(2 * log_c)
    return max(ratio(W, sigma) / math.sqrt(squares) * (1 + 2e-12), SMALLEST)


def _accumulated_error(steps: int) -> float:
    """Relative rounding error of the cumulative sums, so that μ is never below the truth."""
    return 1e-13 + 5e-16 * steps


def minorant_mu(rho: Array, s: Array, sigma: Array, D: float) -> float:
    """μ when *every* step counts (no prefix is post-processing): the greatest convex minorant.

    With w_t = Π_{k>t} ρ_k, ΔV_t = (w_t σ_t)² and ΔW_t = w_t s_t (and w_{-1} D in front),
    μ² = Σ (ΔW)²/ΔV over the segments of the greatest convex minorant of the points
    (0, 0), (V_0, W_0), …, (V_{T-1}, W_{T-1}): its slopes are the isotonic regression of ΔW/ΔV with
    weights ΔV. Domain: ρ > 0, σ_t > 0 at the last step (else there is no bound).

    >>> round(minorant_mu(np.ones(4), np.zeros(4), np.ones(4), 3.0), 12)
    1.5
    """
    from scipy.optimize import isotonic_regression

    if D == 0 and not np.any(s):
        return 0.0
    unit = float(np.max(sigma, initial=0.0))
    if unit == 0:
        return math.inf
    with np.errstate(over="ignore", under="ignore"):
        log_w = np.concatenate([np.cumsum(np.log(rho[::-1]))[::-1], [0.0]])
        w = np.exp(log_w - log_w.max())
        # Rounded up to a positive number: a shift that underflows is not a shift of 0.
        dW = np.where(s > 0, np.maximum(w[1:] * (s / unit), SMALLEST), 0.0)
        dW[0] += max(float(w[0]) * (D / unit), SMALLEST) if D > 0 else 0.0
        dV = np.square(w[1:] * (sigma / unit))
        # A step (almost) without noise cannot absorb its shift: the next one that can carries it.
        noisy = np.flatnonzero(dV > 1e-200)
        if not np.all(dW < 1e100) or np.any(dW[noisy[-1] + 1 :] > 0):
            return math.inf
        dW = np.add.reduceat(dW, np.concatenate([[0], noisy[:-1] + 1]))
        dV = dV[noisy]
        slopes = isotonic_regression(dW / dV, weights=dV).x
        mu = float(np.sqrt(np.sum(np.square(slopes) * dV)))
    error = _accumulated_error(len(rho)) * max(1.0, min(float(np.ptp(log_w)), 750.0))
    return max(mu * (1 + error), SMALLEST)


def mix(log_start: float, epsilon: float, ratios: Array) -> float:
    """log δ after the steps with ratios 2 C2/σ_t, from log δ_0 (Balle et al. 2019, Theorem 1).

    >>> round(math.exp(mix(0.0, 1.0, np.full(6, 2.0))), 14)
    2.653411e-08
    """
    if epsilon == 0:
        return log_start + float(np.sum(gaussian.log_delta(0.0, ratios)))
    log_value = log_start
    log_expm1 = epsilon + math.log(-math.expm1(-epsilon))
    for r in ratios.tolist():
        if log_value == -math.inf or r == 0:
            return -math.inf
        if log_value < ENOUGH:
            break
        x = log_expm1 - log_value
        inner = max(x, 0.0) + math.log1p(math.exp(-abs(x)))
        log_value += _log_theta(inner, r)
    return log_value


def _log_theta(epsilon: float, mu: float) -> float:
    """gaussian.log_delta for one pair; directly where θ is near 1, which is where runs are long."""
    if mu > 2 and 4 * epsilon < mu * mu and epsilon < 700:
        u, h = epsilon / mu, mu / 2
        bracket = 0.5 * math.erfc((h - u) * math.sqrt(0.5))
        bracket += 0.5 * math.exp(epsilon) * math.erfc((h + u) * math.sqrt(0.5))
        return math.log1p(-bracket * (1 - 1e-12))
    return float(gaussian.log_delta(epsilon, mu))
