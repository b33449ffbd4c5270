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
_TINY = float(np.finfo(np.float64).tiny)
_DENORMAL = 5e-324
# Rounding errors of the formulas below, measured in tests/accounting/test_gaussian.py.
_RELATIVE_MARGIN = 4e-13
_LOG_SQRT_2PI = 0.5 * float(np.log(2 * np.pi))


def log_delta(epsilon: ArrayLike, mu: ArrayLike) -> Any:
    """log θ_ε(μ): the logarithm of the smallest δ at which μ-GDP gives (ε, δ).

    Vectorised; ``-inf`` only where δ is exactly 0 (μ = 0 or ε = ∞). Never below the truth.

    >>> round(float(log_delta(3.0, 0.01)), 3)
    -45015.432
    """
    e, m = _pair(epsilon, mu)
    return _evaluate(e, m)[0][()]


def delta(epsilon: ArrayLike, mu: ArrayLike) -> Any:
    """θ_ε(μ): the smallest δ at which μ-GDP gives (ε, δ). Never below the truth, 0 only if exact.

    >>> round(float(delta(1.0, 2**0.5)), 12)  # what the paper's "epsilon = 1" rows really give
    0.286208211922
    """
    e, m = _pair(epsilon, mu)
    return _evaluate(e, m)[1][()]


def epsilon(mu: ArrayLike, delta: ArrayLike) -> Any:
    """The smallest ε ≥ 0 at which μ-GDP gives (ε, δ). Never below the truth; inf when δ = 0 < μ.

    >>> round(float(epsilon(2**0.5, 1e-5)), 9)
    6.572970067
    """
    m, target = _pair(mu, delta)
    known = (m == 0) | (target >= 1) | (target <= 0) | np.isinf(m) | ~((m >= 0) & (target >= 0))
    m_, target_ = np.where(known, 1.0, m), np.where(known, 0.5, target)

    def safe(e: Array) -> npt.NDArray[np.bool_]:
        return _meets(e, m_, target_)

    with np.errstate(over="ignore"):
        # θ_ε(μ) ≤ Φ(μ/2 - ε/μ) gives a value that is large enough but for rounding.
        upper = m_ * (m_ / 2 + np.maximum(-special.ndtri_exp(np.log(target_)), 0.0))
        for _ in range(64):
            grow = np.isfinite(upper) & ~safe(upper)
            if not np.any(grow):
                break
            upper = np.where(grow, upper * (1 + 1e-9), upper)
    upper = np.where(safe(upper), upper, np.inf)
    out = _bisect(safe, upper, np.zeros_like(m_))
    out = np.where(safe(np.zeros_like(m_)), 0.0, out)
    out = np.where(known, np.where((m == 0) | (target >= 1), 0.0, np.inf), out)
    return np.where((m >= 0) & (target >= 0), out, np.nan)[()]


def mu(epsilon: ArrayLike, delta: ArrayLike) -> Any:
    """The largest μ that still gives (ε, δ). Never above the truth; 0 when δ = 0.

    >>> round(float(mu(1.0, 1e-5)), 9)
    0.268051123
    """
    e, target = _pair(epsilon, delta)
    known = (target >= 1) | (target <= 0) | np.isinf(e) | ~((e >= 0) & (target >= 0))
    e_, target_ = np.where(known, 1.0, e), np.where(known, 0.5, target)

    def safe(m: Array) -> npt.NDArray[np.bool_]:
        return _meets(e_, m, target_)

    upper = np.ones_like(e_)
    for _ in range(1100):
        grow = safe(upper)
        if not np.any(grow):
            break
        upper = np.where(grow, upper * 2, upper)
    out = _bisect(safe, np.zeros_like(e_), upper)
    out = np.where(known, np.where((target >= 1) | np.isinf(e) & (target > 0), np.inf, 0.0), out)
    return np.where((e >= 0) & (target >= 0), out, np.nan)[()]


def _pair(first: ArrayLike, second: ArrayLike) -> tuple[Array, Array]:
    a, b = np.broadcast_arrays(np.asarray(first, np.float64), np.asarray(second, np.float64))
    return a, b


def _meets(epsilon: Array, mu: Array, target: Array) -> npt.NDArray[np.bool_]:
    log_value, value = _evaluate(epsilon, mu)
    return (value <= target) & (log_value <= np.log(target))


def _bisect(safe: Callable[[Array], npt.NDArray[np.bool_]], good: Array, bad: Array) -> Array:
    """The end of [good, bad] that is safe, halved until the two are neighbouring floats.

    Halves on the logarithmic scale while the ends are far apart, so that it finds tiny answers too.
    Every element goes its own way: a vector gives what its elements give one by one.
    """
    good, bad = good.astype(float), bad.astype(float)
    for _ in range(2200):
        low, high = np.minimum(good, bad), np.maximum(good, bad)
        open_ = (high > 1e-300) & np.isfinite(high)
        high_ = np.where(open_, high, 1.0)
        far = np.sqrt(np.maximum(low, 1e-300)) * np.sqrt(high_)
        middle = np.where((high_ > 4 * low) & (far > low), far, low + (high_ - low) / 2)
        open_ &= (middle > low) & (middle < high_)
        if not np.any(open_):
            break
        holds = safe(middle)
        good = np.where(open_ & holds, middle, good)
        bad = np.where(open_ & ~holds, middle, bad)
    return good


def _evaluate(epsilon: Array, mu: Array) -> tuple[Array, Array]:
    """(log θ, θ), both rounded up; nan for an ε or μ that is negative or not a number."""
    if epsilon.ndim == 0:
        return _evaluate_scalar(float(epsilon), float(mu))
    finite = (epsilon >= 0) & (mu > 0) & (epsilon < np.inf) & (mu < np.inf)
    zero = (epsilon >= 0) & ((mu == 0) | ((epsilon == np.inf) & (mu > 0) & (mu < np.inf)))
    one = (epsilon >= 0) & (epsilon < np.inf) & (mu == np.inf)
    value = np.where(zero, 0.0, np.where(one, 1.0, np.nan))
    log_value = np.where(zero, -np.inf, np.where(one, 0.0, np.nan))
    e, m = epsilon[finite], mu[finite]
    u, h = _coordinates(e, m)
    rest = np.zeros_like(u)
    left = u < h
    rest[left] = _complement(u[left], h[left])
    near_one = left & (rest < 0.5)
    smooth = ~near_one & _is_smooth(u, h)
    steep = ~near_one & ~smooth
    logs = np.log1p(-rest)
    logs[smooth] = _log_theta_integral(u[smooth], h[smooth], m[smooth])
    logs[steep] = _log_theta_difference(u[steep], h[steep])
    log_value[finite] = logs = np.minimum(logs, 0.0)
    value[finite] = np.where(near_one, _one_minus(rest), _exp_up(logs))
    return log_value, value


def _evaluate_scalar(epsilon: float, mu: float) -> tuple[Any, Any]:
    """``_evaluate`` for one pair: the same formulas without the masks, several times faster."""
    if not (epsilon >= 0 and mu > 0 and epsilon < np.inf and mu < np.inf):
        log_value, value = _evaluate(np.array([epsilon]), np.array([mu]))
        return log_value[0], value[0]
    u, h = _coordinates(epsilon, mu)
    if u < h and (rest := _complement(u, h)) < 0.5:
        return np.minimum(np.log1p(-rest), 0.0), _one_minus(rest)
    if _is_smooth(u, h):
        log_value = np.minimum(_log_theta_integral(u, h, mu), 0.0)
    else:
        log_value = np.minimum(_log_theta_difference(u, h), 0.0)
    return log_value, _exp_up(log_value)


def _coordinates(epsilon: Any, mu: Any) -> tuple[Any, Any]:
    """u and h, with u lowered past the error of its division: θ falls as u grows.

    Beyond 1e150 the lowered u only says that log θ is below -5e299, which is still true.
    """
    with np.errstate(over="ignore"):
        return np.minimum(np.divide(epsilon, mu) * (1 - 2 * _EPS), 1e150), mu / 2


def _is_smooth(u: Any, h: Any) -> Any:
    """Where the integrand of θ is smooth over the whole of [u - h, u + h]."""
    return (h <= 1) | (u / 4 > h)


def _one_minus(rest: Any) -> Any:
    """1 - rest rounded up; the subtraction rounds to nearest and 1 minus its result is exact."""
    whole = 1 - rest
    return np.where(1 - whole > rest, np.nextafter(whole, 2), whole)[()]


def _exp_up(log_value: Any) -> Any:
    """exp rounded up, also among the denormal numbers."""
    value = np.exp(log_value)
    return np.where(value < 2 * _TINY, value + 2 * _DENORMAL, value)[()]


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


def _log_theta_integral(u: Any, h: Any, mu: Any) -> Any:
    """μ ≤ 2 or u > 4h: Gauss–Legendre for the integral, which is smooth there; nothing cancels."""
    slope = _mills_slope(np.asarray(u)[..., None] + np.asarray(h)[..., None] * _NODES)
    mean = (slope * _WEIGHTS).sum(axis=-1) / 2
    return _round_up(_log_phi(u - h) + np.log(mu) + np.log(mean))


def _log_theta_difference(u: Any, h: Any) -> Any:
    """μ > 2 and u ≤ 4h: the two Mills' ratios are far apart."""
    return _round_up(_log_phi(u - h) + np.log(_mills(u - h) - _mills(u + h)))


def _complement(u: Any, h: Any) -> Any:
    """u < h: 1 - θ = Φ(u - h) + φ(u - h) M(u + h), a sum of positive terms, rounded down."""
    x = np.maximum(u - h, -1e150)
    rest = special.ndtr(x) + np.exp(_log_phi(x)) * _mills(u + h)
    rest = rest * (1 - _RELATIVE_MARGIN - 8 * _EPS * np.minimum(np.square(x), 2000.0))
    return np.where(rest < 1e-300, 0.0, rest)[()]
