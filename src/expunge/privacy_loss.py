"""Privacy loss distributions: many equal steps composed exactly, with relative precision at any δ.

A step is a pair of laws (P, Q) with loss ``ℓ = log dP/dQ``. Its losses are rounded to a grid so
that every atom splits into its two neighbours with both its P-mass and its Q-mass kept: the
original pair is a function of the rounded one, so δ can only grow (the "connect the dots" of
Doroshenko et al. 2022, here cell by cell). T steps are a T-fold convolution, and

    δ(ε) = T p_∞ + Σ_ℓ (1 - e^{ε-ℓ})_+ p_T(ℓ).

The convolution is done with the fast Fourier transform after tilting p by e^{θℓ}, with θ such that
the sum's mean is ε: then p_T is computed relative to its size near ε, and rounding noise, which
would drown a plain transform near 1e-16 T, is scaled down with it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

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
