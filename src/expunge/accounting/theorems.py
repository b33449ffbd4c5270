"""One pure function per theorem: from a recipe to μ, or to log δ at ε.

    iterate   contraction with noise    μ² = min_τ W_τ²/V_τ              THEORY section 3
    mix       bounded steps with noise  δ_{t+1} = δ_t θ_{ε̃_t}(r_t)       THEORY section 4

``clip_gradients`` and ``clip_models`` apply them to the paper's two methods. ``starts`` is the
distance of the two starts in units of the start's radius: 2 against the retrained model, 1 against
the centre. ``rounding`` is what finite precision adds to the distance of two points in each step
that does not end in a projection (``expunge.accounting.precision``). Every number is rounded to the
safe side.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.accounting import gaussian
from expunge.recipes import GradientClipping, ModelClipping, list_restarts, schedule

Array = npt.NDArray[np.float64]
SMALLEST = 1e-300  # what a positive number too small for a float is rounded up to
ENOUGH = -1e299  # the smallest log δ that is returned, so that no float overflows


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
            noisy = np.flatnonzero(v > SMALLEST)
            up = 1 + _accumulated_error(start + 1 + noisy)
            found = np.min(w[noisy] / np.sqrt(v[noisy]) * up, initial=math.inf)
            best = min(best, max(float(found), SMALLEST))
            W, V = max(float(P[-1] * w[-1]), SMALLEST), float(P[-1] * P[-1] * v[-1])
            start = stop
    return best


def _accumulated_error(steps: Any) -> Any:
    """Relative rounding error of sums over so many steps, so that μ is never below the truth."""
    return 1e-13 + 5e-16 * steps


def mix(log_start: float, epsilon: float, ratios: Array) -> float:
    """log δ_T of  ε̃_t = log(1 + (e^ε - 1)/δ_t),  δ_{t+1} = δ_t θ_{ε̃_t}(r_t)  from log δ_0.

    Balle et al. 2019, Theorem 1, second statement; ``ratios`` are r_t = 2 C2/σ_t.

    >>> round(math.exp(mix(0.0, 1.0, np.full(6, 2.0))), 14)
    2.653411e-08
    """
    if epsilon == 0:
        return log_start + float(np.sum([gaussian.log_delta(0.0, r) for r in ratios.tolist()]))
    log_value = log_start
    log_expm1 = epsilon + math.log(-math.expm1(-epsilon))
    for r in ratios.tolist():
        if log_value == -math.inf or r == 0:
            return -math.inf
        if log_value <= ENOUGH:
            return ENOUGH
        x = log_expm1 - log_value
        inner = max(x, 0.0) + math.log1p(math.exp(-abs(x)))  # ε̃ = log(1 + e^x)
        log_value += gaussian.log_delta(inner, r)
    return max(log_value, ENOUGH)


def clip_gradients(recipe: GradientClipping, D: float, rounding: float) -> float:
    """THEORY section 3 with ρ_t = 1 - γ_t λ, s_t = 2 γ_t C1: the best of all prefixes.

    With projections onto radius R any step may restart the argument at D = 2R.
    γλ is rounded down and 2γC1 up by one float, so that neither product errs to the unsafe side.
    """
    T, R, C1 = recipe.steps, recipe.model_clip, recipe.grad_clip
    if D == 0:
        return 0.0  # the two runs have the same start and the same steps
    equal = isinstance(recipe.learning_rate, float) and isinstance(recipe.noise_std, float)
    gamma, sigma = schedule(recipe.learning_rate, T), schedule(recipe.noise_std, T)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        s = np.where((gamma > 0) & (C1 > 0), np.nextafter(2 * gamma * C1, math.inf), 0.0)
        s = np.full(T, math.inf) if math.isinf(C1) else s + rounding
        decay = np.nextafter(gamma * recipe.weight_decay, 0.0)
    best = iterate(decay, s, sigma, D, recipe.start_noise_std)
    if R is not None:
        for t in [0] if equal else list_restarts(T)[::-1]:  # of equal steps, the more the better
            rest = slice(t + 1, None)
            best = min(best, iterate(decay[rest], s[rest], sigma[rest], 2 * R, float(sigma[t])))
    return best


def clip_models(recipe: ModelClipping, epsilon: float, starts: float) -> float:
    """THEORY section 4: log δ_T of ``mix`` with r_t = 2 C2/σ_t.

    δ_0 = 1, or θ_ε(D/σ0) after initial noise. Compared to the centre the first step may instead
    be compared with the centre plus that step's noise: a distance of C2, not 2 C2.
    """
    C2 = recipe.model_clip
    start = 0.0
    if recipe.start_clip is not None:
        D = starts * recipe.start_clip
        start = gaussian.log_delta(epsilon, ratio(D, recipe.start_noise_std))
    sigma = schedule(recipe.noise_std, recipe.steps)
    ratios = np.array([ratio(2 * C2, noise) for noise in sigma.tolist()])
    value = mix(start, epsilon, ratios)
    if starts == 1:
        first = ratio(C2, float(sigma[0]))
        value = min(value, mix(gaussian.log_delta(epsilon, first), epsilon, ratios[1:]))
    return value
