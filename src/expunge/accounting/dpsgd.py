"""DP-SGD and a forget set of k examples: the exact law of what they can change, composed.

In one Poisson-sampled step the number of the k examples in the batch is Binomial(k, q), and each
moves the sum by at most ``clip``. Whatever else the step does, the pair of laws with and without
the k examples is no easier to tell apart than (Choquette-Choo et al. 2023, Corollary 4.7; Ganesh
2024)

    P = Σ_c Binomial(k, q)(c) · N(c/σ, 1)    and    Q = N(0, 1),      σ the noise multiplier,

in both directions, and T steps no easier than T independent copies. Minibatches must really be
Poisson sampled. The loss ``ℓ = log dP/dQ`` of a step is rounded to a grid so that every atom splits
into its two neighbours with both its P-mass and its Q-mass kept: the original pair is a function
of the rounded one, so δ can only grow (the "connect the dots" of Doroshenko et al. 2022, here cell
by cell). T steps are a T-fold convolution, and

    δ(ε) = T p_∞ + Σ_ℓ (1 - e^{ε-ℓ})_+ p_T(ℓ).

The convolution is a fast Fourier transform after tilting p by e^{θℓ}, with θ such that the sum's
mean is ε: then p_T is computed relative to its size near ε, and rounding noise, which would drown a
plain transform near 1e-16 T, is scaled down with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from scipy import special

from expunge.accounting import gaussian
from expunge.recipes import GroupDPSGD

Array = npt.NDArray[np.float64]
MAX_WINDOW = 2**20
_LOG_TAIL = 42.0  # what the window of the transform may miss, e^-42, relative to the tilted sum


@dataclass(frozen=True, eq=False)
class Losses:
    """P-mass ``probs[i]`` at loss ``(lowest + i) * width``, and ``infinite`` at infinity."""

    width: float
    lowest: int
    probs: Array
    infinite: float

    @functools.cached_property
    def losses(self) -> Array:
        return (self.lowest + np.arange(len(self.probs), dtype=np.float64)) * self.width

    @functools.cached_property
    def logs(self) -> Array:
        with np.errstate(divide="ignore"):
            return np.log(self.probs)


def round_losses(
    low: Array, high: Array, loss: Array, mass: Array, *, width: float, below: float, above: float
) -> Losses:
    """Cells with losses in [low, high], each with P-mass ``mass[:, g]`` at ``loss[:, g]``.

    The mass U at loss ℓ goes to the grid points y ≤ low and z ≥ high: U (1 - e^{y-ℓ})/(1 - e^{y-z})
    to z and the rest to y, which keeps the P-mass U and the Q-mass U e^{-ℓ}. ``below`` is put at
    the least upper point, ``above`` at infinity.
    """
    j = np.floor(low / width - 1e-6)
    k = np.ceil(high / width + 1e-6)
    gap = ((k - j) * width)[:, None]
    up = np.clip(np.expm1((j * width)[:, None] - loss) / np.expm1(-gap), 0.0, 1.0)
    lowest, size = int(j.min()), int(k.max() - j.min()) + 1
    probs = np.zeros(size)
    for place, share in ((j, 1 - up), (k, up)):
        probs += np.bincount((place - lowest).astype(np.int64), (mass * share).sum(axis=1), size)
    probs[int(k.min()) - lowest] += below
    return Losses(width, lowest, probs, above)


def compose_log_delta(losses: Losses, steps: int, epsilon: float) -> float:
    """log δ(ε) of ``steps`` steps, rounded up: the transform where it fits, a Chernoff bound else.

    >>> coin = Losses(width=1.0, lowest=-1, probs=np.array([0.25, 0.0, 0.75]), infinite=0.0)
    >>> round(math.exp(compose_log_delta(coin, 2, 1.0)), 6)  # (1 - 1/e) · 0.75²
    0.355568
    """
    epsilon -= 1e-10 + 4e-13 * steps  # the rounding errors of ``steps`` losses
    beyond = math.log(steps) + math.log(losses.infinite) if losses.infinite > 0 else -math.inf
    highest = steps * float(losses.losses[-1])
    if epsilon >= highest:
        return beyond
    theta = _tilt(losses, epsilon / steps)
    chernoff = steps * _cumulants(losses, theta)[0] - theta * epsilon
    # sup over ℓ of (1 - e^{ε-ℓ})_+ e^{-θ(ℓ-ε)} is θ^θ / (1+θ)^{1+θ} (Canonne et al. 2020).
    simple = chernoff - math.log1p(theta) + (theta * math.log(theta / (1 + theta)) if theta else 0)
    refined = _transform(losses, steps, epsilon, theta)
    best = simple if refined is None else min(simple, chernoff + math.log(refined))
    return float(np.logaddexp(best + 1e-9 + 1e-12 * steps, beyond))


def _cumulants(losses: Losses, theta: float) -> tuple[float, float, float]:
    """log Σ p e^{θℓ}, and mean and variance of ℓ under the tilted masses."""
    logs = losses.logs + theta * losses.losses
    top = float(logs.max())
    tilted = np.exp(logs - top)
    mass = float(tilted.sum())
    mean = float(tilted @ losses.losses) / mass
    variance = float(tilted @ np.square(losses.losses - mean)) / mass
    return top + math.log(mass), mean, variance


def _tilt(losses: Losses, target: float) -> float:
    """The θ ≥ 0 at which the tilted mean is about ``target``; 0 if it is above it already."""

    def excess(theta: float) -> float:
        return _cumulants(losses, theta)[1] - target

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0 and high < 1e12:
        high *= 4
    from scipy import optimize

    return float(cast(Any, optimize.brentq)(excess, 0.0, high, xtol=1e-6, rtol=1e-3))


def _transform(losses: Losses, steps: int, epsilon: float, theta: float) -> float | None:
    """Σ_ℓ (1 - e^{ε-ℓ})_+ e^{-θ(ℓ-ε)} p̃_T(ℓ), p̃_T the tilted composed masses; None if too long."""
    width = losses.width
    total, _, variance = _cumulants(losses, theta)
    spread = math.sqrt(steps * variance) + width
    # Chernoff bounds on where the tilted sum is, but for e^-42 on either side.
    ups, downs = [], []
    for eta in np.geomspace(0.1, 10, 8) / spread:
        more, less = _cumulants(losses, theta + eta)[0], _cumulants(losses, theta - eta)[0]
        ups.append((steps * (more - total) + _LOG_TAIL) / eta)
        downs.append((steps * (less - total) + _LOG_TAIL) / -eta)
    first = max(math.floor(max(downs) / width), steps * losses.lowest)
    last = min(math.ceil(min(ups) / width), steps * (losses.lowest + len(losses.probs) - 1))
    length = last - first + 1
    if length > MAX_WINDOW:
        return None
    from scipy import fft

    size = cast(int, fft.next_fast_len(max(length, 16), real=True))
    tilted = np.exp(losses.logs + theta * losses.losses - total)
    folded = np.bincount(np.arange(len(tilted)) % size, tilted, size)
    spectrum = cast(Any, fft.rfft(folded))
    composed = np.asarray(fft.irfft(spectrum**steps, size))
    composed = np.roll(composed, -((first - steps * losses.lowest) % size))[:length]
    past = (first + np.arange(length)) * width - epsilon
    weights = np.where(past > 0, -np.expm1(-np.maximum(past, 0)) * np.exp(-theta * past.clip(0)), 0)
    noise = 1e-12 + 2e-15 * steps
    return float(weights @ composed) + noise


# Standard deviations to which a step is followed; 1e-17, 4e-65, 6e-300 lie beyond.
_DEPTHS = (8.5, 17.0, 37.0)
_MAX_SHIFT = 30.0  # standard deviations: what a step moves by more is recognised anyway
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)
_MAX_PARTS, _MAX_CELLS, _MAX_BINS = 256, 2**16, 2**16


def group_log_delta(recipe: GroupDPSGD, epsilon: float) -> float:
    """log δ for the whole group at group ε: the smallest of three bounds.

    The composed losses; all k examples in every batch, which is exactly k√T/σ-GDP; and the
    probability that any of the k is ever sampled.

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
    value = min(always, ever)
    for depth in _DEPTHS:
        pair = _mixture_losses(sigma, q, k, T, depth)
        value = min(value, max(compose_log_delta(losses, T, epsilon) for losses in pair))
        if value > math.log(T) + math.log(pair[0].infinite) + 7:
            break  # what lies beyond this depth is less than a thousandth of δ
    return value


def _log_up(x: float) -> float:
    return math.log(x) + 1e-12 if x > 0 else -math.inf


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
