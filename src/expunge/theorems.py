"""One pure function per theorem: from a recipe and its execution to μ, or to log δ at ε.

``starts`` is the distance of the two starts in units of the start's radius: 2 against the
retrained model, 1 against the centre. ``rounding`` is what finite precision adds to the distance
of two points in each step that does not end in a projection; a projection rounds towards the
centre and adds nothing (``expunge.precision``). Every number is rounded to the safe side.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from expunge import gaussian
from expunge.errors import InputError
from expunge.iteration import (
    SMALLEST,
    descend_constant,
    iterate,
    iterate_constant,
    minorant_mu,
    mix,
    ratio,
)
from expunge.recipes import (
    GradientClipping,
    GroupDPSGD,
    ModelClipping,
    NoisyDescent,
    RewindToDelete,
    schedule,
)

Array = npt.NDArray[np.float64]
MAX_MINORANT = 10**7
HUGE = 1e150


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
    if isinstance(recipe.learning_rate, float) and isinstance(recipe.noise_std, float):
        gamma, sigma = recipe.learning_rate, recipe.noise_std
        s = math.nextafter(2 * gamma * C1, math.inf) if gamma > 0 and C1 > 0 else 0.0
        s = math.inf if math.isinf(C1) else s + rounding
        decay = math.nextafter(gamma * recipe.weight_decay, 0.0)
        best = iterate_constant(decay, s, sigma, T, D, recipe.start_noise_std)
        if R is None:
            return best
        return min(best, iterate_constant(decay, s, sigma, T - 1, 2 * R, sigma))
    gamma, sigma = schedule(recipe.learning_rate, T), schedule(recipe.noise_std, T)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        s = np.where((gamma > 0) & (C1 > 0), np.nextafter(2 * gamma * C1, math.inf), 0.0)
        s = np.full(T, math.inf) if math.isinf(C1) else s + rounding
        decay = np.nextafter(gamma * recipe.weight_decay, 0.0)
    best = iterate(decay, s, sigma, D, recipe.start_noise_std)
    if R is not None:
        for t in _restarts(T):
            rest = slice(t + 1, None)
            best = min(best, iterate(decay[rest], s[rest], sigma[rest], 2 * R, float(sigma[t])))
    return best


def _restarts(steps: int) -> list[int]:
    """Steps at which the argument may restart: all of them up to 1,024, then evenly spaced ones.

    Each restart gives a valid bound, so leaving some out is sound; fewer the longer each takes.
    """
    count = min(steps, 1024, max(8, 10_000_000 // steps))
    return sorted({int(t) for t in np.linspace(0, steps - 1, count)}, reverse=True)


def bound_expansion(recipe: NoisyDescent | RewindToDelete) -> tuple[float, float]:
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
    if c < 1:
        return descend_constant(c, shift + rounding, rounding, sigma, T, K)
    if T + K > MAX_MINORANT:
        raise InputError.of(
            "train_steps + steps", T + K, f"at most {MAX_MINORANT} where a step is no contraction"
        )
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


def _geometric(c: float, count: int) -> float:
    """Σ_{j<count} c^j."""
    return float(count) if c == 1 else float(np.expm1(count * np.log(c))) / (c - 1)


def clip_models(recipe: ModelClipping, epsilon: float, starts: float) -> float:
    """log δ_T of  ε̃_t = log(1 + (e^ε - 1)/δ_t),  δ_{t+1} = δ_t θ_{ε̃_t}(2 C2/σ_t).

    δ_0 = 1, or θ_ε(D/σ0) after initial noise. Compared to the centre the first step may instead
    be compared with the centre plus that step's noise: a distance of C2, not 2 C2. Beyond 2^20
    constant steps the rest is not counted, which is sound: it is post-processing.
    """
    C2 = recipe.model_clip
    start = 0.0
    if recipe.start_clip is not None:
        D = starts * recipe.start_clip
        start = float(gaussian.log_delta(epsilon, ratio(D, recipe.start_noise_std)))
    counted = recipe.steps if isinstance(recipe.noise_std, tuple) else min(recipe.steps, 2**20)
    sigma = schedule(recipe.noise_std, counted)
    ratios = _ratios(2 * C2, sigma)
    value = mix(start, epsilon, ratios)
    if starts == 1:
        first = ratio(C2, float(sigma[0]))
        value = min(value, mix(float(gaussian.log_delta(epsilon, first)), epsilon, ratios[1:]))
    return value


def _ratios(distance: float, sigma: Array) -> Array:
    """``ratio`` for every step."""
    if distance == 0:
        return np.zeros_like(sigma)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        return np.maximum(distance / sigma * (1 + 4e-16), SMALLEST)
