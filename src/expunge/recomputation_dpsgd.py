"""DP-SGD for a group, computed a second time: the composed privacy loss by Laplace inversion.

Nothing here uses ``expunge.group`` or ``expunge.privacy_loss``, which round the losses of one step
to a grid and convolve them. With P = Σ_c Binomial(k, q)(c) N(c/σ, 1), Q = N(0, 1) and
L = log dP/dQ, the losses of T steps have the moment generating function M(s)^T,

    M(s) = E_Q e^{(1+s) L}  with the group,      M(s) = E_Q e^{-s L}  without it,

and along a line Re s = c through the saddle point of the integrand

    (1/2πi) ∫ e^{-sε} M(s)^T / (s (s + 1)) ds  =  δ(ε) for c > 0,  δ(ε) - 1 for -1 < c < 0.

M is a Gauss–Legendre sum, exact to rounding; the line a trapezoidal sum, whose step is halved
until nothing changes. Both converge exponentially, so that the result is good to 1e-8.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from expunge.errors import InputError
from expunge.recipes import GroupDPSGD

Array = npt.NDArray[np.float64]
Complex = npt.NDArray[np.complex128]
_TAIL, _NEGLIGIBLE, _SMALL = 17.0, 1e-60, -30.0
_MOST_TERMS, _TOLERANCE = 2**25, 1e-8


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
        if float((log_integrand(line).real - peak).max()) < _SMALL:
            return reach
        reach *= 1.5
    return reach
