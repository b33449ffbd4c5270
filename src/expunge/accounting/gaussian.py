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

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_EPS = float(np.finfo(np.float64).eps)
_TINY = float(np.finfo(np.float64).tiny)
_DENORMAL = 5e-324
# Rounding errors of the formulas below, measured in tests/accounting/test_gaussian.py.
_RELATIVE_MARGIN = 4e-13
_LOG_SQRT_2PI = 0.5 * float(np.log(2 * np.pi))


def log_delta(epsilon: float, mu: float) -> float:
    """log θ_ε(μ): the logarithm of the smallest δ at which μ-GDP gives (ε, δ).

    ``-inf`` only where δ is exactly 0 (μ = 0 or ε = ∞). Never below the truth.

    >>> round(log_delta(3.0, 0.01), 3)
    -45015.432
    """
    return _evaluate(epsilon, mu)[0]


def delta(epsilon: float, mu: float) -> float:
    """θ_ε(μ): the smallest δ at which μ-GDP gives (ε, δ). Never below the truth, 0 only if exact.

    >>> round(delta(1.0, 2**0.5), 12)  # what the paper's "epsilon = 1" rows really give
    0.286208211922
    """
    return _evaluate(epsilon, mu)[1]


def epsilon(mu: float, delta: float) -> float:
    """The smallest ε ≥ 0 at which μ-GDP gives (ε, δ). Never below the truth; inf when δ = 0 < μ.

    >>> round(epsilon(2**0.5, 1e-5), 9)
    6.572970067
    """
    if not (mu >= 0 and delta >= 0):
        return math.nan
    if mu == 0 or delta >= 1:
        return 0.0
    if delta == 0 or mu == math.inf:
        return math.inf

    def safe(value: float) -> bool:
        return _meets(value, mu, delta)

    if safe(0.0):
        return 0.0
    # θ_ε(μ) ≤ Φ(μ/2 - ε/μ) gives a value that is large enough but for rounding.
    upper = mu * (mu / 2 + max(-float(special.ndtri_exp(math.log(delta))), 0.0))
    for _ in range(64):
        if safe(upper):
            return _bisect(safe, upper, 0.0)
        upper *= 1 + 1e-9
    return math.inf


def mu(epsilon: float, delta: float) -> float:
    """The largest μ that still gives (ε, δ). Never above the truth; 0 when δ = 0.

    >>> round(mu(1.0, 1e-5), 9)
    0.268051123
    """
    if not (epsilon >= 0 and delta >= 0):
        return math.nan
    if delta == 0:
        return 0.0
    if delta >= 1 or epsilon == math.inf:
        return math.inf

    def safe(value: float) -> bool:
        return _meets(epsilon, value, delta)

    upper = 1.0
    while safe(upper):
        upper *= 2
    return _bisect(safe, 0.0, upper)


def _meets(epsilon: float, mu: float, target: float) -> bool:
    log_value, value = _evaluate(epsilon, mu)
    return value <= target and log_value <= math.log(target)


def _bisect(safe: Callable[[float], bool], good: float, bad: float) -> float:
    """The end of [good, bad] that is safe, halved until the two are neighbouring floats.

    Halves on the logarithmic scale while the ends are far apart, so that it finds tiny answers too.
    """
    while 1e-300 < max(good, bad) < math.inf:
        low, high = min(good, bad), max(good, bad)
        far = math.sqrt(max(low, 1e-300)) * math.sqrt(high)
        middle = far if high > 4 * low and far > low else low + (high - low) / 2
        if not low < middle < high:
            break
        good, bad = (middle, bad) if safe(middle) else (good, middle)
    return good


def _evaluate(epsilon: float, mu: float) -> tuple[float, float]:
    """(log θ, θ), both rounded up; nan for an ε or μ that is negative or not a number."""
    if not (epsilon >= 0 and mu >= 0) or epsilon == mu == math.inf:
        return math.nan, math.nan
    if mu == 0 or epsilon == math.inf:
        return -math.inf, 0.0
    if mu == math.inf:
        return 0.0, 1.0
    u, h = _coordinates(epsilon, mu)
    if u < h and (rest := _complement(u, h)) < 0.5:
        return min(math.log1p(-rest), 0.0), _one_minus(rest)
    smooth = h <= 1 or u / 4 > h  # the integrand of θ, over the whole of [u - h, u + h]
    log_value = _log_theta_integral(u, h, mu) if smooth else _log_theta_difference(u, h)
    log_value = min(float(log_value), 0.0)
    return log_value, _exp_up(log_value)


def _coordinates(epsilon: float, mu: float) -> tuple[float, float]:
    """u and h, with u lowered past the error of its division: θ falls as u grows.

    Beyond 1e150 the lowered u only says that log θ is below -5e299, which is still true.
    """
    with np.errstate(over="ignore"):
        return min(float(np.divide(epsilon, mu)) * (1 - 2 * _EPS), 1e150), mu / 2


def _one_minus(rest: float) -> float:
    """1 - rest rounded up; the subtraction rounds to nearest and 1 minus its result is exact."""
    whole = 1 - rest
    return math.nextafter(whole, 2) if 1 - whole > rest else whole


def _exp_up(log_value: float) -> float:
    """exp rounded up, also among the denormal numbers."""
    value = math.exp(log_value)
    return value + 2 * _DENORMAL if value < 2 * _TINY else value


def _round_up(log_value: Any) -> Any:
    return log_value + (_RELATIVE_MARGIN + 8 * _EPS * np.abs(log_value))


def _log_phi(x: Any) -> Any:
    return -0.5 * x * x - _LOG_SQRT_2PI


def _mills(x: Any) -> Any:
    """M(x) = Φ(-x)/φ(x)."""
    return np.sqrt(np.pi / 2) * special.erfcx(x / np.sqrt(2))


def _mills_slope(x: Any) -> Any:
    """-M'(x) = 1 - x M(x) > 0; its asymptotic series Σ (-1)^k (2k+1)!! / x^(2k+2) beyond 30."""
    y = 1 / np.square(np.maximum(x, 30.0))
    series = y * (1 - 3 * y * (1 - 5 * y * (1 - 7 * y * (1 - 9 * y * (1 - 11 * y * (1 - 13 * y))))))
    return np.where(x > 30, series, 1 - x * _mills(np.minimum(x, 30.0)))


def _log_theta_integral(u: float, h: float, mu: float) -> Any:
    """μ ≤ 2 or u > 4h: Gauss–Legendre for the integral, which is smooth there; nothing cancels."""
    mean = (_mills_slope(u + h * _NODES) * _WEIGHTS).sum() / 2
    return _round_up(_log_phi(u - h) + np.log(mu) + np.log(mean))


def _log_theta_difference(u: float, h: float) -> Any:
    """μ > 2 and u ≤ 4h: the two Mills' ratios are far apart."""
    return _round_up(_log_phi(u - h) + np.log(_mills(u - h) - _mills(u + h)))


def _complement(u: float, h: float) -> float:
    """u < h: 1 - θ = Φ(u - h) + φ(u - h) M(u + h), a sum of positive terms, rounded down."""
    x = max(u - h, -1e150)
    rest = float(special.ndtr(x) + np.exp(_log_phi(x)) * _mills(u + h))
    rest *= 1 - _RELATIVE_MARGIN - 8 * _EPS * min(x * x, 2000.0)
    return 0.0 if rest < 1e-300 else rest
