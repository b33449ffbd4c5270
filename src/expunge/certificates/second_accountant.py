"""The guarantee computed a second time, another way, by code that shares nothing with the first.

``expunge.accounting`` sums in log space, in floats, rounded up, and is never imported here. This
iterates the theorems as they stand (THEORY sections 2 to 5) with mpmath and decimals of 50 digits:

    gradient clipping    W ← ρ_t W + s_t,  V ← ρ_t² V + σ_t²,  μ² = min over prefixes of W²/V
    model clipping       γ ← 1 + (e^ε - 1)/δ,  δ ← δ θ_{log γ}(2 C2/σ_t)
    output perturbation  μ = D/σ
"""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
from mpmath import MPContext

from expunge.recipes import (
    ComparedTo,
    Execution,
    GradientClipping,
    ModelClipping,
    OutputPerturbation,
    Recipe,
    list_restarts,
    schedule,
)

Array = npt.NDArray[np.float64]
_DECIMAL = decimal.Context(
    prec=50, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[decimal.InvalidOperation]
)
# An mpmath number; the library has no types.
Number = Any


def make_context() -> MPContext:
    """An mpmath context of our own, so that nobody else's precision changes ours."""
    context = MPContext()
    context.dps = 50
    return context


def recompute(
    recipe: Recipe, compared_to: ComparedTo, execution: Execution
) -> tuple[Number | None, Callable[[Number], Number]]:
    """μ of the whole run (None for model clipping, which is not accounted in GDP), and δ as a
    function of ε, with the sampler's tail: δ + n (1 + e^ε) tail.

    δ is remembered for every ε it was asked at.

    >>> from expunge.recipes import IDEAL
    >>> recipe = OutputPerturbation(start_clip=0.5, noise_std=2**-0.5)
    >>> mu, delta_at = recompute(recipe, "retrained", IDEAL)
    >>> round(float(mu), 9), round(float(delta_at(1.0)), 9)
    (1.414213562, 0.286208212)
    """
    mp, n = make_context(), execution.releases
    starts = 2 if compared_to == "retrained" else 1
    match recipe:
        case ModelClipping():
            mu = None
        case OutputPerturbation(start_clip=C0, noise_std=sigma):
            mu = mp.sqrt(n) * _divide(mp, starts * mp.mpf(C0), mp.mpf(sigma))
        case GradientClipping():
            with decimal.localcontext(_DECIMAL):
                square = _gradient_clipping(recipe, starts, execution.rounding)
            mu = mp.inf if square.is_infinite() else mp.sqrt(n * mp.mpf(str(square)))
        case _:  # exact
            return mp.mpf(0), lambda _: mp.mpf(0)

    @functools.cache
    def delta_at(epsilon: Number) -> Number:
        epsilon = mp.mpf(epsilon)
        if isinstance(recipe, ModelClipping):
            value = n * _model_clipping(mp, recipe, epsilon / n, starts)
        else:
            value = theta(mp, epsilon, mu)
        return min(value + (1 + mp.exp(epsilon)) * n * mp.mpf(execution.tail_delta), mp.mpf(1))

    return mu, delta_at


def theta(mp: MPContext, epsilon: Number, r: Number) -> Number:
    """θ_ε(r) = Φ(r/2 - ε/r) - e^ε Φ(-r/2 - ε/r), with more digits where the two terms are close.

    >>> mp = make_context()
    >>> mp.nstr(theta(mp, mp.mpf(1), mp.mpf("0.1")), 6)
    '1.23084e-25'
    """
    if r == 0 or mp.isinf(r):
        return mp.mpf(0 if r == 0 else 1)
    if epsilon / r - r / 2 > 10**6:
        return mp.mpf(10) ** -(10**11)  # e^(-5e11) at most
    digits = mp.dps
    while True:
        with mp.workdps(digits):
            first = mp.ncdf(r / 2 - epsilon / r)
            value = first - mp.exp(epsilon) * mp.ncdf(-r / 2 - epsilon / r)
            if value > first * mp.mpf(10) ** (20 - digits):
                return +value
        digits *= 2


def _divide(mp: MPContext, top: Number, bottom: Number) -> Number:
    if top == 0:
        return mp.mpf(0)
    return mp.inf if bottom == 0 or mp.isinf(top) else top / bottom


def _gradient_clipping(recipe: GradientClipping, starts: int, rounding: float) -> Decimal:
    """μ² of one run: the best prefix, and with projections the best restart too.

    s_t = 2 γ_t C1 + rounding; without a clip there is no bound, whatever γ_t is.
    """
    T, R, D = recipe.steps, recipe.model_clip, starts * Decimal(recipe.start_clip)
    if D == 0:
        return D
    rates = [Decimal(rate) for rate in schedule(recipe.learning_rate, T).tolist()]
    decay, clip = Decimal(recipe.weight_decay), Decimal(recipe.grad_clip)
    rho = [1 - rate * decay for rate in rates]
    s = [clip if clip.is_infinite() else 2 * r * clip + Decimal(rounding) for r in rates]
    variances = [Decimal(sigma) ** 2 for sigma in schedule(recipe.noise_std, T).tolist()]
    best = _best_prefix(rho, s, variances, D, Decimal(recipe.start_noise_std) ** 2)
    if R is not None and math.isfinite(R):
        equal = isinstance(recipe.learning_rate, float) and isinstance(recipe.noise_std, float)
        floats = (np.array([float(x) for x in column]) for column in (rho, s, variances))
        first, last = (0, T - 1) if equal else _find_restart(*floats, R=R)
        rest = slice(first + 1, last + 1)
        again = (rho[rest], s[rest], variances[rest], 2 * Decimal(R), variances[first])
        best = min(best, _best_prefix(*again))
    return best


def _best_prefix(
    rho: list[Decimal], s: list[Decimal], variances: list[Decimal], D: Decimal, start: Decimal
) -> Decimal:
    """min over prefixes of W²/V, one forward pass."""
    W, V = D, start
    best = Decimal("inf") if V == 0 else W * W / V
    for ρ, shift, variance in zip(rho, s, variances, strict=True):
        W, V = ρ * W + shift, ρ * ρ * V + variance
        if V > 0:
            best = min(best, W * W / V)
        if shift.is_infinite():
            break
    return best


def _find_restart(rho: Array, s: Array, variances: Array, *, R: float) -> tuple[int, int]:
    """The (restart, end) with the least W²/V, searched in floats over the allowed restarts.

    Every pair gives a valid bound, so an error of the search can only make the result larger.
    """
    T = len(rho)
    restarts = np.array(list_restarts(T))
    W, V = np.full(len(restarts), 2 * R), np.zeros(len(restarts))
    best, found, active = math.inf, (T - 1, T - 1), 0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for t in range(T):
            W[:active] = rho[t] * W[:active] + s[t]
            V[:active] = rho[t] ** 2 * V[:active] + variances[t]
            if active < len(restarts) and restarts[active] == t:
                V[active] = variances[t]
                active += 1
            if active == 0:
                continue
            values = np.nan_to_num(W[:active] / np.sqrt(V[:active]), nan=math.inf)
            place = int(np.argmin(values))
            if values[place] < best:
                best, found = float(values[place]), (int(restarts[place]), t)
    return found


def _model_clipping(mp: MPContext, recipe: ModelClipping, epsilon: Number, starts: int) -> Number:
    """δ_T of one run at ε: the recursion, and against the centre also from its first step.

    With r = 2 C2/σ_t; δ_0 = 1, or θ_ε(D/σ0) after initial noise; θ_ε(C2/σ_0) against the centre.
    """
    C2, sigmas = mp.mpf(recipe.model_clip), schedule(recipe.noise_std, recipe.steps).tolist()
    ratios = [_divide(mp, 2 * C2, mp.mpf(sigma)) for sigma in sigmas]
    start = mp.mpf(1)
    if recipe.start_clip is not None:
        D, sigma = starts * mp.mpf(recipe.start_clip), mp.mpf(recipe.start_noise_std)
        start = theta(mp, epsilon, _divide(mp, D, sigma))
    value = _mix(mp, start, epsilon, ratios)
    if starts == 1:
        first = theta(mp, epsilon, ratios[0] / 2)
        value = min(value, _mix(mp, first, epsilon, ratios[1:]))
    return value


def _mix(mp: MPContext, delta: Number, epsilon: Number, ratios: list[Number]) -> Number:
    """ε̃ = log(1 + (e^ε - 1)/δ),  δ ← δ θ_ε̃(r)  (Balle et al. 2019, Theorem 1)."""
    expm1 = mp.expm1(epsilon)
    for r in ratios:
        if delta == 0 or r == 0:
            return mp.mpf(0)
        if delta < mp.mpf(10) ** -2000:
            return delta  # more steps only make it smaller
        delta *= theta(mp, mp.log1p(expm1 / delta), r)
    return delta
