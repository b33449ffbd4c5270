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
ENOUGH = -5000.0  # log δ below which more steps are not worth counting: stopping early is sound


def ratio(distance: float, sigma: float) -> float:
    if distance == 0:
        return 0.0
    return math.inf if sigma == 0 or math.isinf(distance) else distance / sigma * (1 + 4e-16)


def iterate(decay: Array, s: Array, sigma: Array, D: float, sigma_0: float = 0.0) -> float:
    """μ of the general contraction ``‖ψ_t(x) - ψ_t(y)‖ ≤ (1 - decay_t) ‖x - y‖ + s_t``, noise σ_t.

    Steps after the τ-th are post-processing, so every prefix gives a bound. In units in which
    every step has ρ = 1, prefix τ has

        W_τ = D + Σ_{t<τ} s_t/P_{t+1},   V_τ = σ0² + Σ_{t<τ} (σ_t/P_{t+1})²,   P_t = Π_{k<t} ρ_k,

    and costs the energy of the greatest convex minorant of the points up to τ. The best prefix
    costs exactly

        μ² = min_τ W_τ² / V_τ:

    a straight line is never more than a minorant, and the line to the best τ passes below all
    earlier points, because one below it would be a better τ. Computed in log space.

    >>> round(iterate(np.zeros(4), np.zeros(4), np.ones(4), 3.0), 12)  # D / (σ √T)
    1.5
    """
    if D == 0:
        return 0.0
    with np.errstate(divide="ignore"):
        log_p = np.concatenate([[0.0], np.cumsum(np.log1p(-decay))])
        log_w = np.logaddexp.accumulate(np.concatenate([[np.log(D)], np.log(s) - log_p[1:]]))
        log_v = np.logaddexp.accumulate(
            np.concatenate([[2 * np.log(sigma_0)], 2 * (np.log(sigma) - log_p[1:])])
        )
    usable = np.isfinite(log_v) & np.isfinite(log_w)
    if not np.any(usable):
        return math.inf
    log_mu = float(np.min(log_w[usable] - 0.5 * log_v[usable]))
    return max(math.exp(min(log_mu, 700.0) + _accumulated_error(len(decay))), 1e-300)


def iterate_constant(
    decay: float, s: float, sigma: float, steps: int, D: float, sigma_0: float = 0.0
) -> float:
    """``iterate`` for constant steps, in closed form whatever their number.

    With p = ρ^τ and S = s/(1-ρ): W = S + p (D - S), V = A + B p², A = σ²/(1-ρ²), B = σ0² - A.
    W²/V has one critical point, p = A (D - S)/(S B), so the best prefix is next to it or at an end.

    >>> round(iterate_constant(0.0, 0.5, 1.0, 100, 2.0), 12)  # best prefix: τ = D/s = 4
    2.0
    """
    if D == 0:
        return 0.0
    if math.isinf(D) or math.isinf(s):
        return ratio(D, sigma_0)
    if sigma == 0:
        return ratio(D, sigma_0)
    log_rho = math.log1p(-decay)
    best = 0.0
    if decay == 0:
        best = D / s - 2 * (sigma_0 / sigma) ** 2 if s > 0 else math.inf
    else:
        S = s / decay
        A = sigma**2 / -math.expm1(2 * log_rho)
        p = A * (D - S) / (S * (sigma_0**2 - A)) if S > 0 and sigma_0**2 != A else 0.0
        best = math.log(p) / log_rho if 0 < p <= 1 else math.inf
    best = min(max(best, 0.0), float(steps))
    return min(
        _prefix_constant(log_rho, decay, s, sigma, tau, D, sigma_0)
        for tau in {0, math.floor(best), min(math.ceil(best), steps), steps}
    )


def _prefix_constant(
    log_rho: float, decay: float, s: float, sigma: float, tau: int, D: float, sigma_0: float
) -> float:
    """W/√V after τ constant steps, in the units of the last step."""
    p = math.exp(tau * log_rho)
    lost = -math.expm1(tau * log_rho)
    total = lost / decay if decay > 0 else float(tau)
    squares = -math.expm1(2 * tau * log_rho) / -math.expm1(2 * log_rho) if decay > 0 else float(tau)
    W = max(p * D + s * total, 5e-324)
    V = (p * sigma_0) ** 2 + sigma**2 * squares
    return math.inf if V == 0 else W / math.sqrt(V) * (1 + 1e-13)


def _accumulated_error(steps: int) -> float:
    """Relative rounding error of the cumulative sums, so that μ is never below the truth."""
    return 1e-13 + 4e-16 * steps


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

    log_w = np.concatenate([np.cumsum(np.log(rho[::-1]))[::-1], [0.0]])
    log_w -= log_w.max()
    w = np.exp(log_w)
    dW, dV = w[1:] * s, np.square(w[1:] * sigma)
    dW[0] += w[0] * D
    if dW.sum() == 0:
        return 0.0
    # A step without noise cannot absorb its shift: it is carried to the next one that can.
    noisy = np.flatnonzero(dV > 0)
    if len(noisy) == 0 or np.any(dW[noisy[-1] + 1 :] > 0):
        return math.inf
    total = np.concatenate([[0.0], np.cumsum(dW)[noisy]])
    dW, dV = np.diff(total), dV[noisy]
    slopes = isotonic_regression(dW / dV, weights=dV).x
    return float(np.sqrt(np.sum(np.square(slopes) * dV))) * (1 + _accumulated_error(len(rho)))


def mix(log_start: float, epsilon: float, ratios: Array) -> float:
    """log δ after the steps with ratios 2 C2/σ_t, from log δ_0 (Balle et al. 2019, Theorem 1).

    >>> round(math.exp(mix(0.0, 1.0, np.full(6, 2.0))), 14)
    2.653e-08
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
