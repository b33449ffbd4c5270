"""DP-SGD and a forget set of k examples: the exact law of what they can change, composed.

In one Poisson-sampled step the number of the k examples in the batch is Binomial(k, q), and each
moves the sum by at most ``clip``. Whatever else the step does, the pair of laws with and without
the k examples is no easier to tell apart than (Choquette-Choo et al. 2023, Corollary 4.7; Ganesh
2024)

    Σ_c Binomial(k, q)(c) · N(c/σ, 1)    and    N(0, 1),        σ the noise multiplier,

in both directions, and T steps no easier than T independent copies. ``group_log_delta`` composes
their privacy losses (``expunge.privacy_loss``). Minibatches must really be Poisson sampled.

``textbook_log_delta`` is the usual detour instead: (ε₁, δ₁) for one example, then group privacy,

    log δ = log δ₁(ε/k) + log (e^ε - 1)/(e^{ε/k} - 1).

It is kept for comparison: for the paper's 225 of 45,000 examples at (50, 1e-5) it asks for a noise
multiplier of 25.4, the direct way for 18.0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from scipy import special

from expunge import gaussian
from expunge.privacy_loss import MAX_WINDOW, Losses, compose_log_delta, round_losses
from expunge.recipes import GroupDPSGD
from expunge.solving import bracket, tighten

Array = npt.NDArray[np.float64]
MAX_EPSILON = 1e5
_DEPTHS = (8.5, 17.0)  # standard deviations to which a step is followed; 1e-17, 4e-65 lie beyond
_MAX_SHIFT = 30.0  # standard deviations: what a step moves by more is recognised anyway
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)
_MAX_PARTS, _MAX_CELLS, _MAX_BINS = 256, 2**16, 2**16
_ORDERS = sorted({round(2 * 1.1**i) for i in range(82)})  # 2, 3, 4, … 4,500


def log_group_factor(epsilon: float, group_size: int) -> float:
    """log (e^{kε₁} - 1)/(e^{ε₁} - 1) with kε₁ = ε, in log space; log k at ε = 0.

    >>> round(log_group_factor(50.0, 225), 6)
    51.39091
    """
    if epsilon == 0 or group_size == 1:
        return math.log(group_size)
    return _log_expm1(epsilon) - _log_expm1(epsilon / group_size)


def group_log_delta(recipe: GroupDPSGD, epsilon: float) -> float:
    """log δ for the whole group at group ε: the smallest of four bounds.

    The composed losses; all k examples in every batch, which is exactly k√T/σ-GDP; the probability
    that any of the k is ever sampled; and Rényi for one example with group privacy.

    >>> recipe = GroupDPSGD(clip=1.0, noise_multiplier=4.0, sampling_rate=0.01, steps=1000,
    ...                     group_size=5)
    >>> round(group_log_delta(recipe, 2.0), 2)
    -16.06
    """
    sigma, q, k, T = (
        recipe.noise_multiplier, recipe.sampling_rate, recipe.group_size, recipe.steps
    )  # fmt: skip
    mu = k * math.sqrt(T) / sigma * (1 + 1e-15) if sigma > 0 else math.inf
    always = float(gaussian.log_delta(epsilon, max(mu, 1e-300)))
    if q == 1:
        return always
    ever = _log_up(-math.expm1(k * T * math.log1p(-q)))
    if sigma == 0 or max(1.0, k * q) / sigma > _MAX_SHIFT:
        return min(always, ever)
    value = min(always, ever, _log_delta_renyi(recipe, epsilon))
    for depth in _DEPTHS:
        pair = _mixture_losses(sigma, q, k, T, depth)
        value = min(value, max(compose_log_delta(losses, T, epsilon) for losses in pair))
        if value > math.log(T) + math.log(pair[0].infinite) + 7:
            break  # what lies beyond this depth is less than a thousandth of δ
    return value


def group_epsilon(recipe: GroupDPSGD, delta: float) -> float:
    """The smallest group ε we can show at group δ; inf when there is none up to 1e5."""
    target = math.log(delta) - 4e-16 * (1 + abs(math.log(delta)))

    def excess(epsilon: float) -> float:
        return max(group_log_delta(recipe, epsilon), -1e6) - target

    if excess(0.0) <= 0:
        return 0.0
    ends = bracket(excess, 1.0, lowest=1e-9, highest=MAX_EPSILON)
    return math.inf if ends is None else tighten(excess, *ends, relative=1e-9)


def textbook_log_delta(recipe: GroupDPSGD, epsilon: float) -> float:
    """log δ for the group by way of one example: Rényi or ``dp_accounting``, whichever is smaller.

    >>> recipe = GroupDPSGD(clip=1.0, noise_multiplier=4.0, sampling_rate=0.01, steps=1000,
    ...                     group_size=5)
    >>> round(textbook_log_delta(recipe, 2.0), 2)
    -15.87
    """
    sigma, q, T = recipe.noise_multiplier, recipe.sampling_rate, recipe.steps
    if not (0.2 <= sigma <= 1e5 and T <= 10**8):  # there the library runs out of memory or digits
        return _log_delta_renyi(recipe, epsilon)
    one = float(_accountant(sigma, q, T).get_delta(epsilon / recipe.group_size))
    # Its Fourier transform loses up to about 1e-16 per step, and may answer 0.
    value = math.log(one + 1e-14 * T) + log_group_factor(epsilon, recipe.group_size)
    return min(value, _log_delta_renyi(recipe, epsilon))


def _log_expm1(x: float) -> float:
    return x + math.log(-math.expm1(-x))


def _log_up(x: float) -> float:
    return math.log(x) + 1e-12 if x > 0 else -math.inf


@functools.lru_cache(maxsize=64)
def _accountant(sigma: float, sampling_rate: float, steps: int) -> Any:
    """The privacy loss distribution of ``dp_accounting``."""
    import dp_accounting
    from dp_accounting import pld

    event = dp_accounting.GaussianDpEvent(sigma)
    return pld.PLDAccountant().compose(
        dp_accounting.PoissonSampledDpEvent(sampling_rate, event), steps
    )


@functools.lru_cache(maxsize=4096)
def renyi_divergence(sigma: float, sampling_rate: float, order: int) -> float:
    """D_α of one Poisson-sampled step for one example (Mironov, Talwar & Zhang 2019), whole α ≥ 2.

    (α-1) D_α = log Σ_i C(α,i) (1-q)^{α-i} q^i e^{(i²-i)/2σ²}, rounded up.

    >>> round(renyi_divergence(2.0, 1.0, 3), 12)  # α/2σ²
    0.375
    """
    if sampling_rate == 1:
        return order / 2 / sigma / sigma * (1 + 1e-15)
    i = np.arange(order + 1.0)
    logs = -np.log(order + 1.0) - special.betaln(order - i + 1, i + 1)
    logs += i * math.log(sampling_rate) + (order - i) * math.log1p(-sampling_rate)
    with np.errstate(over="ignore"):
        logs += i * (i - 1) / 2 / sigma / sigma
    total = float(cast(Any, special.logsumexp(logs)))
    return (max(total, 0.0) * (1 + 1e-14) + 1e-14 * order) / (order - 1)


def _log_delta_renyi(recipe: GroupDPSGD, epsilon: float) -> float:
    """log δ₁(ε/k) + group factor, δ₁ by Rényi (Canonne, Kamath & Steinke 2020, Proposition 12):

    log δ₁ = min over α of (α-1)(T D_α - ε/k + log(1 - 1/α)) - log α.
    """
    sigma, q, T, k = (
        recipe.noise_multiplier, recipe.sampling_rate, recipe.steps, recipe.group_size
    )  # fmt: skip
    if sigma == 0:
        return 0.0
    one = min(
        (a - 1) * (T * renyi_divergence(sigma, q, a) - epsilon / k + math.log1p(-1 / a))
        - math.log(a)
        for a in _ORDERS
    )
    return min(one + 1e-12 * abs(one) + log_group_factor(epsilon, k), 0.0)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest whole number in (low, high] for which ``holds``; high if none below does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _parts(group_size: int, sampling_rate: float, negligible: float) -> tuple[Array, Array, float]:
    """(c, log P(c), lost): the number of sampled examples, at most 256 values of it.

    Rounding a count up makes the pair of laws easier to tell apart, because the ratio of the two
    densities grows with x; so counts are merged into the largest of theirs. ``lost`` is the
    probability of counts above the last one.
    """
    from scipy import stats

    law = cast(Any, stats.binom(group_size, sampling_rate))
    low = _first(lambda c: law.cdf(c) > negligible, -1, group_size)
    high = _first(lambda c: law.sf(c) <= negligible, low - 1, group_size)
    edges = np.unique(np.linspace(low - 1, high, min(high - low + 1, _MAX_PARTS) + 1).astype(int))
    counts = edges[1:].astype(float)
    if len(counts) == high - low + 1:
        mass = np.asarray(law.pmf(counts))
    else:
        cdf, sf = law.cdf(edges), law.sf(edges)
        mass = np.where(cdf[1:] < 0.5, np.diff(cdf), -np.diff(sf))
    mass[0] = law.cdf(counts[0])
    logs = np.log(np.maximum(mass, 1e-300))
    return counts, logs, float(law.sf(high))


@functools.lru_cache(maxsize=16)
def _mixture_losses(
    sigma: float, sampling_rate: float, group_size: int, steps: int, depth: float
) -> tuple[Losses, Losses]:
    """The losses of one step with and without the group, and the other way round.

    The line is cut into cells; within one the loss ``L(x) = log Σ_c p_c e^{a_c x - a_c²/2}`` grows
    from its left to its right end, and four Gauss–Legendre nodes carry the cell's mass.
    """
    beyond = float(special.ndtr(-depth)) * (1 + 1e-12)
    counts, log_p, lost = _parts(group_size, sampling_rate, beyond)
    a = counts / sigma

    def loss_at(x: Array) -> Array:
        out = np.empty(x.size)
        size = max(2**21 // len(a), 1)
        for start in range(0, x.size, size):
            terms = np.multiply.outer(x.ravel()[start : start + size], a) + (log_p - a * a / 2)
            top = terms.max(axis=1)
            out[start : start + size] = top + np.log(np.exp(terms - top[:, None]).sum(axis=1))
        return out.reshape(x.shape)

    # sd of dP/dQ, the scale of one step's loss; the grid is a small part of it.
    with np.errstate(over="ignore"):
        log_square = float(cast(Any, special.logsumexp(log_p[:, None] + log_p + np.outer(a, a))))
    scale = math.sqrt(min(max(math.expm1(min(log_square, 1.0)), 1e-300), 1.0))
    part = min(max(30 * math.sqrt(steps) / MAX_WINDOW, 1 / 40), 1 / 4)
    last = depth + float(a[-1])
    ends = loss_at(np.array([-depth, 5.0, 6.0, last]))
    width = max(part * scale, float(ends[3] - ends[0]) / _MAX_BINS)
    slope = max(float(ends[2] - ends[1]), 1e-300)
    cells = min(math.ceil((last + depth) * max(4 * slope / width, 20.0)), _MAX_CELLS)
    edges = np.linspace(-depth, last, cells + 1)
    half = (last + depth) / cells / 2
    x = (edges[:-1] + half)[:, None] + half * _NODES
    at_edges, at_nodes = loss_at(edges), loss_at(x)
    q_mass = np.exp(-0.5 * x * x) * (half / math.sqrt(2 * math.pi)) * _WEIGHTS
    with np.errstate(over="ignore"):
        p_mass = np.exp(at_nodes - 0.5 * x * x) * (half / math.sqrt(2 * math.pi)) * _WEIGHTS
    low, high = at_edges[:-1], at_edges[1:]
    removed = round_losses(
        low, high, at_nodes, p_mass, width=width, below=beyond, above=beyond + lost
    )
    added = round_losses(-high, -low, -at_nodes, q_mass, width=width, below=beyond, above=beyond)
    return removed, added
