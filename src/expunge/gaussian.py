"""The exact Gaussian trade-off θ_ε(μ) and its inverses, in log space and on the safe side.

Two Gaussians ``N(a, σ²I)`` and ``N(b, σ²I)`` with ``‖a - b‖ = μσ`` satisfy (Balle & Wang 2018,
Theorem 8; domain: ε ≥ 0, μ ≥ 0)

    sup_A P(A) - e^ε Q(A)  =  θ_ε(μ)  =  Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ).

With ``u = ε/μ``, ``h = μ/2`` and Mills' ratio ``M(x) = Φ(-x)/φ(x)`` the factor e^ε cancels,

    θ_ε(μ)  =  φ(u - h) · [M(u - h) - M(u + h)]  =  φ(u - h) · ∫_{u-h}^{u+h} (1 - x M(x)) dx,

which never overflows, never subtracts equal numbers and works where θ itself is below the
smallest float. Every function rounds to the safe side: ``delta`` and ``epsilon`` are never below
the truth and ``mu`` is never above it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]
ArrayLike = npt.ArrayLike

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_EPS = float(np.finfo(np.float64).eps)
# Rounding errors of the formulas below, measured against 60 digits: tests/test_gaussian.py.
_RELATIVE_MARGIN = 4e-13
_LOG_SQRT_2PI = 0.5 * float(np.log(2 * np.pi))


def log_delta(epsilon: ArrayLike, mu: ArrayLike) -> Any:
    """log θ_ε(μ): the logarithm of the smallest δ at which μ-GDP gives (ε, δ).

    Vectorised; ``-inf`` where δ is 0 (μ = 0). Never below the truth.

    >>> round(float(log_delta(3.0, 0.01)), 3)
    -45014.853
    """
    epsilon, mu = np.broadcast_arrays(np.asarray(epsilon, float), np.asarray(mu, float))
    out = np.full(epsilon.shape, np.nan)
    ok = (epsilon >= 0) & (mu >= 0)
    out[ok & (mu == 0)] = -np.inf
    out[ok & np.isinf(epsilon) & np.isfinite(mu)] = -np.inf
    out[ok & np.isinf(mu) & np.isfinite(epsilon)] = 0.0
    ok &= (mu > 0) & np.isfinite(mu) & np.isfinite(epsilon)
    with np.errstate(over="ignore", under="ignore"):
        _fill(out, ok & (mu <= 2.0), _log_delta_integral, epsilon, mu)
        _fill(out, ok & (mu > 2.0) & (mu * mu <= 2 * epsilon), _log_delta_difference, epsilon, mu)
        _fill(out, ok & (mu > 2.0) & (mu * mu > 2 * epsilon), _log_delta_complement, epsilon, mu)
    return out[()]


def delta(epsilon: ArrayLike, mu: ArrayLike) -> Any:
    """θ_ε(μ): the smallest δ at which μ-GDP gives (ε, δ). Never below the truth.

    >>> round(float(delta(1.0, 2**0.5)), 12)  # what the paper's "epsilon = 1" rows really give
    0.286208211923
    """
    with np.errstate(under="ignore"):
        exact = np.exp(log_delta(epsilon, mu))
    # Below the smallest normal float a rounded δ could be too small: report the smallest normal one.
    tiny = np.finfo(np.float64).tiny
    return np.where((np.asarray(mu) > 0) & (exact < tiny) & np.isfinite(epsilon), tiny, exact)[()]


def epsilon(mu: ArrayLike, delta: ArrayLike) -> Any:
    """The smallest ε ≥ 0 at which μ-GDP gives (ε, δ). Never below the truth; inf when δ = 0 < μ.

    >>> round(float(epsilon(2**0.5, 1e-5)), 9)
    6.572970067
    """
    mu, target = np.broadcast_arrays(np.asarray(mu, float), np.asarray(delta, float))
    log_target = _log_target(target)
    with np.errstate(all="ignore"):
        # θ_ε(μ) ≤ Φ(μ/2 - ε/μ) gives a value that is large enough to start from.
        upper = np.maximum(mu * mu / 2 - mu * special.ndtri_exp(log_target), mu * mu / 2)
    upper = np.where(np.isfinite(upper), upper * (1 + 1e-9) + 1e-300, 1.0)
    out = _bisect(lambda e: log_delta(e, mu) <= log_target, upper, np.zeros_like(mu))
    out = np.where((log_delta(0.0, mu) <= log_target) | (target >= 1), 0.0, out)
    out = np.where(((target <= 0) & (mu > 0)) | (np.isinf(mu) & (target < 1)), np.inf, out)
    return np.where(np.isnan(mu) | np.isnan(target) | (mu < 0), np.nan, out)[()]


def mu(epsilon: ArrayLike, delta: ArrayLike) -> Any:
    """The largest μ that still gives (ε, δ). Never above the truth; 0 when δ = 0.

    >>> round(float(mu(1.0, 1e-5)), 9)
    0.268051123
    """
    eps, target = np.broadcast_arrays(np.asarray(epsilon, float), np.asarray(delta, float))
    log_target = _log_target(target)
    upper = np.ones_like(eps)
    for _ in range(1100):
        grow = (log_delta(eps, upper) <= log_target) & (upper < 1e300) & (target < 1)
        if not np.any(grow):
            break
        upper = np.where(grow, upper * 2, upper)
    out = _bisect(lambda m: log_delta(eps, m) <= log_target, np.zeros_like(eps), upper)
    out = np.where(target >= 1, np.inf, out)
    out = np.where(target <= 0, 0.0, out)
    return np.where(np.isnan(eps) | np.isnan(target) | (eps < 0), np.nan, out)[()]


def _log_target(target: Array) -> Array:
    """log δ, lowered by a few units in the last place so that ``delta(inverse) <= δ`` survives exp."""
    with np.errstate(divide="ignore", invalid="ignore"):
        log_target = np.log(target)
    return log_target - 4 * _EPS * (1 + np.abs(np.where(np.isfinite(log_target), log_target, 0.0)))


def _bisect(safe: Callable[[Array], npt.NDArray[np.bool_]], good: Array, bad: Array) -> Array:
    """The end of [good, bad] that is safe, halved until the two are neighbouring floats.

    Halves on the logarithmic scale while the ends are far apart, so that tiny answers are found too.
    """
    good, bad = good.astype(float), bad.astype(float)
    for _ in range(2200):
        low, high = np.minimum(good, bad), np.maximum(good, bad)
        middle = np.where(high > 4 * low, np.sqrt(np.maximum(low, 1e-300)) * np.sqrt(high), 0)
        middle = np.where(middle > low, middle, low + (high - low) / 2)
        open_ = (middle > low) & (middle < high) & (high > 1e-300)
        if not np.any(open_):
            break
        holds = safe(middle)
        good = np.where(open_ & holds, middle, good)
        bad = np.where(open_ & ~holds, middle, bad)
    return good


def _fill(
    out: Array,
    where: npt.NDArray[np.bool_],
    function: Callable[[Array, Array], Array],
    epsilon: Array,
    mu: Array,
) -> None:
    if np.any(where):
        out[where] = np.minimum(function(epsilon[where], mu[where]), 0.0)


def _round_up(log_value: Array) -> Array:
    return log_value + (_RELATIVE_MARGIN + 8 * _EPS * np.abs(log_value))


def _log_phi(x: Array) -> Array:
    return -0.5 * x * x - _LOG_SQRT_2PI


def _mills(x: Array) -> Array:
    """M(x) = Φ(-x)/φ(x)."""
    return np.sqrt(np.pi / 2) * special.erfcx(x / np.sqrt(2))


def _mills_slope(x: Array) -> Array:
    """-M'(x) = 1 - x M(x) > 0; its asymptotic series Σ (-1)^k (2k+1)!! / x^(2k+2) beyond 30."""
    y = 1 / np.square(np.maximum(x, 30.0))
    series = y * (1 - 3 * y * (1 - 5 * y * (1 - 7 * y * (1 - 9 * y * (1 - 11 * y * (1 - 13 * y))))))
    return np.where(x > 30, series, 1 - x * _mills(np.minimum(x, 30.0)))


def _log_delta_integral(epsilon: Array, mu: Array) -> Array:
    """μ ≤ 2: Gauss–Legendre for the integral, which is smooth; nothing cancels however small μ is."""
    u, h = epsilon / mu, mu / 2
    x = u[..., None] + h[..., None] * _NODES
    return _round_up(_log_phi(u - h) + np.log(h) + np.log(_mills_slope(x) @ _WEIGHTS))


def _log_delta_difference(epsilon: Array, mu: Array) -> Array:
    """μ > 2, μ² ≤ 2ε: the two Mills' ratios are far apart."""
    u, h = epsilon / mu, mu / 2
    return _round_up(_log_phi(u - h) + np.log(_mills(u - h) - _mills(u + h)))


def _log_delta_complement(epsilon: Array, mu: Array) -> Array:
    """μ > 2, μ² > 2ε: θ = 1 - [Φ(u - h) + φ(u - h) M(u + h)] with a small bracket."""
    u, h = epsilon / mu, mu / 2
    bracket = special.ndtr(u - h) + np.exp(_log_phi(u - h)) * _mills(u + h)
    return np.log1p(-bracket * (1 - _RELATIVE_MARGIN - 8 * _EPS * np.square(u - h)))
