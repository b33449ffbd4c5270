"""Full-batch descent and its two ways to forget, for comparison (THEORY, section 5).

    x ← x - η ∇F(x) [+ N(0, σ² I)],      F = (1/n) Σ f_i + (m/2) ‖x‖²

with ``‖∇f_i‖ ≤ G``, ``f_i`` ``L_f``-smooth, ``L = L_f + m``. Removing k of n examples changes the
mean gradient by at most ``Δ = 2kG/n``, and one step expands distances by at most
``c = max(|1 - ηm|, |1 - ηL|)`` where the f_i are convex, ``1 + ηL`` where they are only smooth.

    NoisyDescent    (Chourasia & Shah 2023; Chien et al. 2024)  T noisy steps on all data, then K
                    on retained data: the greatest convex minorant of the shifts, ``minorant_mu``
    RewindToDelete  (Mu & Klabjan 2024)  T noiseless steps, back to step T - K, K steps on retained
                    data, one Gaussian:  μ = z/σ,  z = c^K ηΔ Σ_{j<T-K} c^j

The guarantees are those of exact arithmetic, under constants that the caller states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor, nn

from expunge import InputError
from expunge.accounting import gaussian
from expunge.accounting.theorems import SMALLEST, ratio

Array = npt.NDArray[np.float64]
HUGE = 1e150


@dataclass(frozen=True)
class FullBatch:
    """η, σ, T, K, G, L_f, m, n and k, in this order; and whether the f_i are convex."""

    learning_rate: float
    noise_std: float
    train_steps: int
    steps: int
    gradient_bound: float
    smoothness: float
    strong_convexity: float
    examples: int
    group_size: int
    convex: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.group_size < self.examples:
            raise InputError.of("group_size", self.group_size, f"below examples = {self.examples}")


@dataclass(frozen=True)
class NoisyDescent(FullBatch):
    """Langevin-style: T noisy full-batch steps on all data, then K on the retained data."""


@dataclass(frozen=True)
class RewindToDelete(FullBatch):
    """T noiseless full-batch steps on all data, rewind K, redo on retained data, one Gaussian."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps > self.train_steps:
            raise InputError.of("steps", self.steps, f"at most train_steps = {self.train_steps}")


Descent = NoisyDescent | RewindToDelete
AnyDescent = TypeVar("AnyDescent", NoisyDescent, RewindToDelete)


def softmax_constants(feature_clip: float) -> dict[str, Any]:
    """G = √2 B, L_f = B²/2, convex: softmax regression on features clipped to norm B, rounded up.

    With probabilities p, one-hot label e and features a: ∇f = (p - e) ⊗ a with ‖p - e‖ ≤ √2, and
    ∇²f = (diag p - p pᵀ) ⊗ a aᵀ, whose first factor has eigenvalues up to 1/2.

    >>> found = softmax_constants(1.0)
    >>> round(found["gradient_bound"], 6), round(found["smoothness"], 6), found["convex"]
    (1.414214, 0.5, True)
    """
    return {
        "gradient_bound": math.sqrt(2.0) * feature_clip * (1 + 4e-16),
        "smoothness": feature_clip**2 / 2 * (1 + 4e-16),
        "convex": True,
    }


def bound_expansion(recipe: Descent) -> tuple[float, float]:
    """(c, ηΔ), both rounded up: c by two units of the largest number in it, ηΔ never to 0."""
    eta, m = recipe.learning_rate, recipe.strong_convexity
    L = recipe.smoothness + m
    c = max(abs(1 - eta * m), abs(1 - eta * L)) if recipe.convex else 1 + eta * L
    c += 5e-16 * max(1.0, eta * L)
    share = recipe.group_size / recipe.examples
    shift = max(2 * share * eta, SMALLEST) * recipe.gradient_bound * (1 + 1e-15)
    return c, max(shift, SMALLEST) if recipe.gradient_bound > 0 else 0.0


def mu(recipe: Descent) -> float:
    """The smallest μ we can prove.

    >>> step = {"learning_rate": 1.0, "noise_std": 2.0, "gradient_bound": 1.0, "smoothness": 0.5,
    ...         "strong_convexity": 0.5, "examples": 4, "group_size": 2}
    >>> round(mu(RewindToDelete(train_steps=3, steps=1, **step)), 9)  # z: 1, 3/2, then 3/4
    0.375
    """
    c, shift = bound_expansion(recipe)
    T, K, sigma = recipe.train_steps, recipe.steps, recipe.noise_std
    before = T - K if isinstance(recipe, RewindToDelete) else T
    if shift == 0 or before == 0:
        return 0.0  # the forgotten examples never moved anything
    if sigma == 0 or c > HUGE:
        return math.inf
    if isinstance(recipe, NoisyDescent):
        s = np.concatenate([np.full(T, shift), np.zeros(K)])
        return minorant_mu(np.full(T + K, c), s, np.full(T + K, sigma), 0.0)
    with np.errstate(over="ignore", under="ignore"):
        again = max(float(np.exp(K * np.log(c))), SMALLEST)
        grown = float(before) if c == 1 else float(np.expm1(before * np.log(c))) / (c - 1)
        z = again * grown * shift
    return ratio(max(z, SMALLEST), sigma) * (1 + 1e-12)


def minorant_mu(rho: Array, s: Array, sigma: Array, D: float) -> float:
    """μ when *every* step counts (no prefix is post-processing): the greatest convex minorant.

    With w_t = Π_{k>t} ρ_k, ΔV_t = (w_t σ_t)² and ΔW_t = w_t s_t (and w_{-1} D in front),
    μ² = Σ (ΔW)²/ΔV over the segments of the greatest convex minorant of the points
    (0, 0), (V_0, W_0), …, (V_{T-1}, W_{T-1}): its slopes are the isotonic regression of ΔW/ΔV with
    weights ΔV. Domain: ρ > 0, σ_t > 0 at the last step (else there is no bound).

    >>> round(minorant_mu(np.ones(4), np.zeros(4), np.ones(4), 3.0), 12)
    1.5
    """
    if D == 0 and not np.any(s):
        return 0.0
    unit = float(np.max(sigma, initial=0.0))
    if unit == 0:
        return math.inf
    with np.errstate(over="ignore", under="ignore"):
        log_w = np.concatenate([np.cumsum(np.log(rho[::-1]))[::-1], [0.0]])
        w = np.exp(log_w - log_w.max())
        # Rounded up to a positive number: a shift that underflows is not a shift of 0.
        dW = np.where(s > 0, np.maximum(w[1:] * (s / unit), SMALLEST), 0.0)
        dW[0] += max(float(w[0]) * (D / unit), SMALLEST) if D > 0 else 0.0
        dV = np.square(w[1:] * (sigma / unit))
        # A step (almost) without noise cannot absorb its shift: the next one that can carries it.
        noisy = np.flatnonzero(dV > 1e-200)
        if not np.all(dW < 1e100) or np.any(dW[noisy[-1] + 1 :] > 0):
            return math.inf
        dW = np.add.reduceat(dW, np.concatenate([[0], noisy[:-1] + 1]))
        dV = dV[noisy]
        slopes = isotonic_regression(dW / dV, weights=dV).x
        found = float(np.sqrt(np.sum(np.square(slopes) * dV)))
    error = (1e-13 + 5e-16 * len(rho)) * max(1.0, min(float(np.ptp(log_w)), 750.0))
    return max(found * (1 + error), SMALLEST)


def calibrate_descent(
    make: Callable[[float], AnyDescent], *, epsilon: float, delta: float
) -> AnyDescent:
    """``make(σ)`` with the smallest σ that meets (ε, δ): μ is proportional to 1/σ."""
    sigma = mu(make(1.0)) / float(gaussian.mu(epsilon, delta)) * (1 + 1e-12)
    return make(sigma)


class SoftmaxRegression(nn.Module):
    """Logits W a: a is the flattened input with a 1 appended, clipped to norm ``feature_clip``.

    In float64, and started at zero: a public start.

    >>> model = SoftmaxRegression(features=2, classes=3, feature_clip=1.0)
    >>> model(torch.tensor([[2.0, 2.0]])).tolist()
    [[0.0, 0.0, 0.0]]
    """

    def __init__(self, features: int, classes: int, *, feature_clip: float) -> None:
        super().__init__()
        self.feature_clip = feature_clip
        self.weight = nn.Parameter(torch.zeros(classes, features + 1, dtype=torch.float64))

    def clip_features(self, inputs: Tensor) -> Tensor:
        """min(1, B/‖a‖) a with a = (input, 1)."""
        flat = inputs.reshape(len(inputs), -1).double()
        a = torch.cat([flat, torch.ones_like(flat[:, :1])], dim=1)
        return a * (self.feature_clip / a.norm(dim=1, keepdim=True)).clamp(max=1.0)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.clip_features(inputs) @ self.weight.T


@torch.no_grad()
def forget(
    model: SoftmaxRegression, inputs: Tensor, targets: Tensor, gone: int, recipe: Descent, seed: int
) -> SoftmaxRegression:
    """Train from ``model``, a public start, on all rows, then forget the first ``gone`` of them."""
    generator = torch.Generator().manual_seed(seed)
    features, x = model.clip_features(inputs), model.weight.clone()
    kept, labels = features[gone:], targets[gone:]
    T, K, sigma = recipe.train_steps, recipe.steps, recipe.noise_std
    noisy = isinstance(recipe, NoisyDescent)

    def descend(x: Tensor, features: Tensor, targets: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            p = torch.softmax(features @ x.T, dim=1)
            p[torch.arange(len(targets)), targets] -= 1
            gradient = p.T @ features / len(targets) + recipe.strong_convexity * x
            x = x - recipe.learning_rate * gradient
            if noisy:
                x = x + sigma * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return x

    x = descend(x, features, targets, T if noisy else T - K)
    x = descend(x, kept, labels, K)
    if not noisy:
        x = x + sigma * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    released = SoftmaxRegression(
        model.weight.shape[1] - 1, len(model.weight), feature_clip=model.feature_clip
    )
    released.weight.copy_(x)
    return released
