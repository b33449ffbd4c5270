"""The guarantee computed a second time, another way, by code that shares nothing with the first.

``expunge.accounting`` sums in log space, in floats, rounded up, and is never imported here. This
iterates the theorems as they stand (THEORY sections 2 to 5) with mpmath and decimals of 50 digits:

    gradient clipping  W ← ρ_t W + s_t,  V ← ρ_t² V + σ_t²,  μ² = min over prefixes of W²/V
    model clipping     γ ← 1 + (e^ε - 1)/δ,  δ ← δ θ_{log γ}(2 C2/σ_t)
    noisy descent      blocks (ΔW_t, ΔV_t) = (s_t c^-t, σ² c^-2t), neighbours merged while their
                       slopes fall;  μ² = Σ (ΔW)²/ΔV over the blocks that remain
    rewind-to-delete   z ← c z + s_t,  μ = z/σ

with c the expansion of one full-batch step and s_t its shift (ηΔ on all data, 0 on retained data,
both plus rounding). DP-SGD is good to eight digits: the first accountant rounds the losses of a
step to a grid and convolves them, this one inverts a Laplace transform. With
P = Σ_c Binomial(k, q)(c) N(c/σ, 1), Q = N(0, 1) and L = log dP/dQ, the losses of T steps have the
moment generating function M(s)^T,

    M(s) = E_Q e^{(1+s) L}  with the group,      M(s) = E_Q e^{-s L}  without it,

and along a line Re s = c through the saddle point of the integrand

    (1/2πi) ∫ e^{-sε} M(s)^T / (s (s + 1)) ds  =  δ(ε) for c > 0,  δ(ε) - 1 for -1 < c < 0.

M is a Gauss–Legendre sum, exact to rounding; the line a trapezoidal sum, whose step is halved
until nothing changes.
"""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from mpmath import MPContext

from expunge.errors import InputError
from expunge.recipes import (
    ComparedTo,
    ConvexHeadRecipe,
    DescentRecipe,
    ExactStatistics,
    Execution,
    GradientClipping,
    GroupDPSGD,
    ModelClipping,
    NoisyDescent,
    OutputPerturbation,
    Recipe,
    Retraining,
    RewindToDelete,
    ShardedTraining,
    list_restarts,
    schedule,
)

Array = npt.NDArray[np.float64]
Complex = npt.NDArray[np.complex128]
_DECIMAL = decimal.Context(
    prec=50, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[decimal.InvalidOperation]
)
_TAIL, _NEGLIGIBLE, _SMALL_LOSS = 17.0, 1e-60, -30.0
_MOST_TERMS, _TOLERANCE = 2**25, 1e-8
# An mpmath number; the library has no types.
Number = Any


def make_context(digits: int = 50) -> MPContext:
    """An mpmath context of our own, so that nobody else's precision changes ours."""
    context = MPContext()
    context.dps = digits
    return context


def recompute_mu(recipe: Recipe, compared_to: ComparedTo, execution: Execution) -> Number | None:
    """μ of the whole run in 50 digits; None for the methods that are not accounted in GDP.

    >>> from expunge.recipes import IDEAL
    >>> float(recompute_mu(OutputPerturbation(start_clip=1.0, noise_std=4.0), "retrained", IDEAL))
    0.5
    """
    mp = make_context()
    starts = 2 if compared_to == "retrained" else 1
    match recipe:
        case Retraining() | ExactStatistics() | ShardedTraining() | ConvexHeadRecipe(noise_std=0.0):
            return mp.mpf(0)
        case ConvexHeadRecipe(weight_decay=m, tolerance=tau, noise_std=sigma):
            apart = mp.mpf(tau) / mp.mpf(m) + mp.mpf(execution.rounding)
            square = (apart / mp.mpf(sigma)) ** 2
        case ModelClipping() | GroupDPSGD():
            return None
        case OutputPerturbation(start_clip=C0, noise_std=sigma):
            square = _divide(mp, (starts * mp.mpf(C0)) ** 2, mp.mpf(sigma) ** 2)
        case GradientClipping() | NoisyDescent() | RewindToDelete():
            with decimal.localcontext(_DECIMAL):
                if isinstance(recipe, GradientClipping):
                    exact = _gradient_clipping(recipe, starts, execution.rounding)
                else:
                    exact = recompute_descent(recipe, execution.rounding)
            square = mp.inf if exact.is_infinite() else mp.mpf(str(exact))
    return mp.sqrt(square * execution.releases)


def recompute(
    recipe: Recipe, compared_to: ComparedTo, execution: Execution
) -> tuple[Number | None, Callable[[Number], Number]]:
    """μ, and δ as a function of ε in 50 digits, with the sampler's tail: δ + n (1 + e^ε) tail.

    δ is remembered for every ε it was asked at.

    >>> from expunge.recipes import IDEAL
    >>> recipe = OutputPerturbation(start_clip=0.5, noise_std=2**-0.5)
    >>> mu, delta_at = recompute(recipe, "retrained", IDEAL)
    >>> round(float(mu), 9), round(float(delta_at(1.0)), 9)
    (1.414213562, 0.286208212)
    """
    mp, n = make_context(), execution.releases
    mu = recompute_mu(recipe, compared_to, execution)
    tail = n * mp.mpf(execution.tail_delta)

    @functools.cache
    def delta_at(epsilon: Number) -> Number:
        epsilon = mp.mpf(epsilon)
        match recipe:
            case ModelClipping():
                value = n * _model_clipping(mp, recipe, epsilon / n, compared_to)
            case GroupDPSGD(sampling_rate=1.0, group_size=k, steps=T, noise_multiplier=z):
                value = theta(mp, epsilon, _divide(mp, k * mp.sqrt(T), mp.mpf(z)))
            case GroupDPSGD():
                value = mp.mpf(recompute_group_delta(recipe, float(epsilon)))
            case _:
                value = theta(mp, epsilon, mp.mpf(mu))
        return min(value + (1 + mp.exp(epsilon)) * tail, mp.mpf(1))

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
            first = _ndtr(mp, r / 2 - epsilon / r)
            value = first - mp.exp(epsilon) * _ndtr(mp, -r / 2 - epsilon / r)
            if value > first * mp.mpf(10) ** (20 - digits):
                return +value
        digits *= 2


def _ndtr(mp: MPContext, x: Number) -> Number:
    return mp.erfc(-x / mp.sqrt(2)) / 2


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
    rates, sigmas = schedule(recipe.learning_rate, T), schedule(recipe.noise_std, T)
    decay, clip = Decimal(recipe.weight_decay), Decimal(recipe.grad_clip)
    extra = Decimal(rounding)
    rho = [1 - Decimal(rate) * decay for rate in rates.tolist()]
    s = [clip if clip.is_infinite() else 2 * Decimal(r) * clip + extra for r in rates.tolist()]
    variances = [Decimal(sigma) ** 2 for sigma in sigmas.tolist()]
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


def _model_clipping(
    mp: MPContext, recipe: ModelClipping, epsilon: Number, compared_to: ComparedTo
) -> Number:
    """δ_T of one run at ε: the recursion, and against the centre also from its first step."""
    C2, sigmas = mp.mpf(recipe.model_clip), schedule(recipe.noise_std, recipe.steps).tolist()
    ratios = [_divide(mp, 2 * C2, mp.mpf(sigma)) for sigma in sigmas]
    start = mp.mpf(1)
    if recipe.start_clip is not None:
        D = (2 if compared_to == "retrained" else 1) * mp.mpf(recipe.start_clip)
        start = theta(mp, epsilon, _divide(mp, D, mp.mpf(recipe.start_noise_std)))
    value = _mix(mp, start, epsilon, ratios)
    if compared_to == "centre":
        first = theta(mp, epsilon, ratios[0] / 2)
        value = min(value, _mix(mp, first, epsilon, ratios[1:]))
    return value


def _mix(mp: MPContext, delta: Number, epsilon: Number, ratios: list[Number]) -> Number:
    expm1 = mp.expm1(epsilon)
    for r in ratios:
        if delta == 0 or r == 0:
            return mp.mpf(0)
        if delta < mp.mpf(10) ** -2000:
            return delta  # more steps only make it smaller
        delta *= theta(mp, mp.log1p(expm1 / delta), r)
    return delta


def recompute_descent(recipe: DescentRecipe, rounding: float) -> Decimal:
    """μ² of one training run and its request.

    >>> recipe = RewindToDelete(learning_rate=1.0, noise_std=2.0, train_steps=3, steps=1,
    ...                         gradient_bound=1.0, smoothness=0.5, strong_convexity=0.5,
    ...                         examples=4, group_size=2)
    >>> recompute_descent(recipe, 0.0)  # z: 1, 3/2, then 3/4;  μ = 3/8
    Decimal('0.140625')
    """
    c, shift = _read_step(recipe)
    variance, extra = Decimal(recipe.noise_std) ** 2, Decimal(rounding)
    early = recipe.train_steps - (recipe.steps if isinstance(recipe, RewindToDelete) else 0)
    if shift == 0 or early == 0:
        return Decimal(0)
    if variance == 0:
        return Decimal("inf")
    shifts = [shift + extra] * early + [extra] * recipe.steps
    if isinstance(recipe, NoisyDescent):
        return _merge_blocks(c, shifts, variance)
    z = Decimal(0)
    for s in shifts:
        z = c * z + s
    return z * z / variance


def _read_step(recipe: DescentRecipe) -> tuple[Decimal, Decimal]:
    """(c, ηΔ) with Δ = 2 k G/n."""
    eta, m = Decimal(recipe.learning_rate), Decimal(recipe.strong_convexity)
    slope = eta * (Decimal(recipe.smoothness) + m)
    c = max(abs(1 - eta * m), abs(1 - slope)) if recipe.convex else 1 + slope
    share = Decimal(2 * recipe.group_size) / Decimal(recipe.examples)
    return c, eta * share * Decimal(recipe.gradient_bound)


def _merge_blocks(c: Decimal, shifts: list[Decimal], variance: Decimal) -> Decimal:
    """The energy of the greatest convex minorant of the points (Σ ΔV, Σ ΔW)."""
    if c == 0:
        return shifts[-1] ** 2 / variance  # the last step forgets all before it
    blocks: list[tuple[Decimal, Decimal]] = []
    unit, inverse = Decimal(1), 1 / c
    for s in shifts:
        W, V = s * unit, variance * unit * unit
        while blocks and W * blocks[-1][1] < blocks[-1][0] * V:
            before = blocks.pop()
            W, V = W + before[0], V + before[1]
        blocks.append((W, V))
        unit *= inverse
    return sum((W * W / V for W, V in blocks), Decimal(0))


def recompute_group_delta(recipe: GroupDPSGD, epsilon: float) -> float:
    """δ at ε for the whole group, Poisson sampled with q < 1.

    >>> recipe = GroupDPSGD(clip=1.0, noise_multiplier=4.0, sampling_rate=0.01, steps=1000,
    ...                     group_size=5)
    >>> round(math.log(recompute_group_delta(recipe, 2.0)), 6)
    -16.066387
    """
    q, T, k = recipe.sampling_rate, recipe.steps, recipe.group_size
    if recipe.noise_multiplier == 0:
        return 1.0
    loss, log_mass = _tabulate(recipe.noise_multiplier, q, k)
    found = [_invert(loss, log_mass + loss, T, epsilon)]
    # Without the group a step loses at most -k log(1 - q).
    if epsilon < -T * k * math.log1p(-q):
        found.append(_invert(-loss, log_mass, T, epsilon))
    return min(max(found), 1.0)


@functools.lru_cache(maxsize=8)
def _tabulate(sigma: float, rate: float, group_size: int) -> tuple[Array, Array]:
    """L at Gauss–Legendre nodes, and the log of Q's mass there."""
    from scipy import stats

    law = cast(Any, stats.binom(group_size, rate))
    low, high = (int(law.ppf(p)) for p in (_NEGLIGIBLE, 0.5))
    while law.sf(high) > _NEGLIGIBLE:
        high += max((high - low) // 8, 1)
    counts = np.arange(max(low - 1, 0), min(high, group_size) + 1)
    log_p, a = law.logpmf(counts), counts / sigma
    span = 2 * _TAIL + float(a[-1])
    cells = math.ceil(span * max(6.0, 3 * float(a[-1])))
    nodes, weights = np.polynomial.legendre.leggauss(10)
    half = span / cells / 2
    middles = -_TAIL + half * (2 * np.arange(cells) + 1)
    x = (middles[:, None] + half * nodes).ravel()
    log_mass = np.log(np.tile(half * weights, cells)) - x * x / 2 - math.log(2 * math.pi) / 2
    loss = np.empty(x.size)
    for start in range(0, x.size, 2048):
        part = slice(start, start + 2048)
        terms = np.multiply.outer(x[part], a) + (log_p - a * a / 2)
        top = terms.max(axis=1)
        loss[part] = top + np.log(np.exp(terms - top[:, None]).sum(axis=1))
    return loss, log_mass


def _invert(loss: Array, log_mass: Array, steps: int, epsilon: float) -> float:
    """δ(ε) when one step loses ``loss`` with probability e^log_mass, over ``steps`` steps."""

    def log_integrand(s: Complex) -> Complex:
        out = np.empty(s.size, complex)
        size = max(2**21 // loss.size, 1)
        for start in range(0, s.size, size):
            terms = np.multiply.outer(s[start : start + size], loss) + log_mass
            top = np.real(terms).max(axis=1)
            out[start : start + size] = top + np.log(np.exp(terms - top[:, None]).sum(axis=1))
        return steps * out - s * epsilon - np.log(s) - np.log(1 + s)

    def height(s: float) -> float:
        return float(log_integrand(np.array([complex(s)]))[0].real)

    most = _MOST_TERMS // loss.size
    right = _minimise(lambda u: height(math.exp(u)), -14.0, 14.0)
    left = _minimise(height, -1 + 1e-6, -1e-6)
    if left[1] < right[1]:
        return 1.0 + _integrate(log_integrand, left[0], left[1], min(-left[0], 1 + left[0]), most)
    if right[1] < -5000:
        return 0.0
    return _integrate(log_integrand, math.exp(right[0]), right[1], math.exp(right[0]), most)


def _minimise(function: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    from scipy import optimize

    found = cast(Any, optimize.minimize_scalar(function, bounds=(low, high), method="bounded"))
    return float(found.x), float(found.fun)


def _integrate(
    log_integrand: Callable[[Complex], Complex], c: float, peak: float, margin: float, most: int
) -> float:
    """The integral along Re s = c by at most ``most`` nodes; the poles are ``margin`` away."""
    step, reach = 2 * math.pi * margin / 40, _find_reach(log_integrand, c, peak, margin, most)
    before = math.inf
    while reach / step < most:
        y = step * np.arange(math.ceil(reach / step) + 1)
        values = np.real(np.exp(log_integrand(c + 1j * y) - peak))
        total = step / math.pi * (float(values.sum()) - float(values[0]) / 2)
        if abs(total - before) < _TOLERANCE * abs(total):
            return math.copysign(math.exp(peak + math.log(abs(total))), total)
        before, step = total, step / 2
    raise InputError(
        "so few or so large steps of DP-SGD cannot be recomputed; more noise or more steps can"
    )


def _find_reach(
    log_integrand: Callable[[Complex], Complex], c: float, peak: float, margin: float, most: int
) -> float:
    """How far up the line the integrand counts: beyond it is below 1e-13 of its peak."""
    reach = margin
    while reach < margin * most:
        y = np.linspace(reach, 2 * reach, 48)
        line = np.asarray(c + 1j * y, np.complex128)
        if float((log_integrand(line).real - peak).max()) < _SMALL_LOSS:
            return reach
        reach *= 1.5
    return reach
