"""One pure function per theorem: from a recipe and its execution to μ, or to log δ at ε.

Two inequalities carry them all, for general steps: contraction with noise (THEORY section 3:
``iterate`` and ``minorant_mu`` give μ) and bounded steps with noise (section 4: ``mix`` gives δ at
a fixed ε). ``starts`` is the distance of the two starts in units of the start's
radius: 2 against the retrained model, 1 against the centre. ``rounding`` is what finite precision
adds to the distance of two points in each step that does not end in a projection; a projection
rounds towards the centre and adds nothing (``expunge.accounting.precision``). Every number is
rounded to the safe side.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.accounting import gaussian
from expunge.recipes import (
    ConvexHeadRecipe,
    DescentRecipe,
    GradientClipping,
    GroupDPSGD,
    ModelClipping,
    NoisyDescent,
    RewindToDelete,
    list_restarts,
    schedule,
)

Array = npt.NDArray[np.float64]
HUGE = 1e150
SMALLEST = 1e-300  # what a positive number too small for a float is rounded up to
ENOUGH = -1e299  # the smallest log δ that is told, so that no float overflows


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
        if log_value <= ENOUGH:
            return ENOUGH
        x = log_expm1 - log_value
        inner = max(x, 0.0) + math.log1p(math.exp(-abs(x)))
        log_value += float(gaussian.log_delta(inner, r))
    return max(log_value, ENOUGH)


def round_group(recipe: GroupDPSGD, rounding: float) -> GroupDPSGD:
    """Every sampled example moves the sum by at most clip + rounding."""
    if rounding == 0:
        return recipe
    multiplier = recipe.noise_multiplier * (recipe.clip / (recipe.clip + rounding))
    return replace(recipe, noise_multiplier=multiplier * (1 - 1e-15))


def clip_gradients(recipe: GradientClipping, D: float, rounding: float) -> float:
    """THEORY section 3: the best of all prefixes, and with projections of all restarts.

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


def bound_expansion(recipe: DescentRecipe) -> tuple[float, float]:
    """(c, ηΔ): one full-batch step's expansion, and its shift when k of n examples go.

    Both rounded up: c by two units of the largest number in it, ηΔ never to 0.
    """
    eta, m = recipe.learning_rate, recipe.strong_convexity
    L = recipe.smoothness + m
    c = max(abs(1 - eta * m), abs(1 - eta * L)) if recipe.convex else 1 + eta * L
    c += 5e-16 * max(1.0, eta * L)
    share = recipe.group_size / recipe.examples
    shift = max(2 * share * eta, SMALLEST) * recipe.gradient_bound * (1 + 1e-15)
    return c, max(shift, SMALLEST) if recipe.gradient_bound > 0 else 0.0


def descend_with_noise(recipe: NoisyDescent, rounding: float) -> float:
    """Training steps (c, ηΔ), unlearning steps (c, 0), D = 0; training is not post-processing."""
    c, shift = bound_expansion(recipe)
    T, K, sigma = recipe.train_steps, recipe.steps, recipe.noise_std
    if shift == 0:
        return 0.0  # the forgotten examples never moved anything
    if sigma == 0 or c > HUGE:
        return math.inf
    s = np.concatenate([np.full(T, shift), np.zeros(K)]) + rounding
    return minorant_mu(np.full(T + K, c), s, np.full(T + K, sigma), 0.0)


def rewind_and_perturb(recipe: RewindToDelete, rounding: float) -> float:
    """z = c^K ηΔ Σ_{j<T-K} c^j,  μ = z/σ; each of the T steps may be rounded apart on top."""
    c, shift = bound_expansion(recipe)
    K, before = recipe.steps, recipe.train_steps - recipe.steps
    if before == 0 or shift == 0:
        return 0.0
    if c > HUGE:
        return math.inf
    with np.errstate(over="ignore", under="ignore"):
        again = max(float(np.exp(K * np.log(c))), SMALLEST)
        z = again * _geometric(c, before) * (shift + rounding)
        z += rounding * _geometric(c, K) if rounding > 0 else 0.0
    return ratio(max(z, SMALLEST), recipe.noise_std) * (1 + 1e-12)


def perturb_solution(recipe: ConvexHeadRecipe, rounding: float) -> float:
    """‖w - w*‖ ≤ τ/m by strong convexity,  μ = (τ/m + rounding)/σ.

    >>> recipe = ConvexHeadRecipe(weight_decay=1e-5, tolerance=1e-9, noise_std=1e-3)
    >>> round(perturb_solution(recipe, 0.0), 12)
    0.1
    """
    apart = max(recipe.tolerance / recipe.weight_decay, SMALLEST) + rounding
    return ratio(apart, recipe.noise_std) * (1 + 1e-15)


def _geometric(c: float, count: int) -> float:
    """Σ_{j<count} c^j."""
    return float(count) if c == 1 else float(np.expm1(count * np.log(c))) / (c - 1)


def clip_models(recipe: ModelClipping, epsilon: float, starts: float) -> float:
    """log δ_T of  ε̃_t = log(1 + (e^ε - 1)/δ_t),  δ_{t+1} = δ_t θ_{ε̃_t}(2 C2/σ_t).

    δ_0 = 1, or θ_ε(D/σ0) after initial noise. Compared to the centre the first step may instead
    be compared with the centre plus that step's noise: a distance of C2, not 2 C2.
    """
    C2 = recipe.model_clip
    start = 0.0
    if recipe.start_clip is not None:
        D = starts * recipe.start_clip
        start = float(gaussian.log_delta(epsilon, ratio(D, recipe.start_noise_std)))
    sigma = schedule(recipe.noise_std, recipe.steps)
    ratios = np.array([ratio(2 * C2, noise) for noise in sigma.tolist()])
    value = mix(start, epsilon, ratios)
    if starts == 1:
        first = ratio(C2, float(sigma[0]))
        value = min(value, mix(float(gaussian.log_delta(epsilon, first)), epsilon, ratios[1:]))
    return value
