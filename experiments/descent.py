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

from expunge.accounting import gaussian

Array = npt.NDArray[np.float64]


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


@dataclass(frozen=True)
class NoisyDescent(FullBatch):
    """Langevin-style: T noisy full-batch steps on all data, then K on the retained data."""


@dataclass(frozen=True)
class RewindToDelete(FullBatch):
    """T noiseless full-batch steps on all data, rewind K, redo on retained data, one Gaussian."""


Descent = NoisyDescent | RewindToDelete
AnyDescent = TypeVar("AnyDescent", NoisyDescent, RewindToDelete)


def softmax_constants(feature_clip: float) -> dict[str, Any]:
    """G = √2 B, L_f = B²/2, convex: softmax regression on features clipped to norm B.

    With probabilities p, one-hot label e and features a: ∇f = (p - e) ⊗ a with ‖p - e‖ ≤ √2, and
    ∇²f = (diag p - p pᵀ) ⊗ a aᵀ, whose first factor has eigenvalues up to 1/2.

    >>> found = softmax_constants(1.0)
    >>> round(found["gradient_bound"], 6), round(found["smoothness"], 6), found["convex"]
    (1.414214, 0.5, True)
    """
    return {
        "gradient_bound": math.sqrt(2.0) * feature_clip,
        "smoothness": feature_clip**2 / 2,
        "convex": True,
    }


def bound_expansion(recipe: Descent) -> tuple[float, float]:
    """(c, ηΔ)."""
    eta, m = recipe.learning_rate, recipe.strong_convexity
    L = recipe.smoothness + m
    c = max(abs(1 - eta * m), abs(1 - eta * L)) if recipe.convex else 1 + eta * L
    return c, 2 * recipe.group_size / recipe.examples * eta * recipe.gradient_bound


def mu(recipe: Descent) -> float:
    """The smallest μ we can prove; σ must not be 0.

    >>> step = {"learning_rate": 1.0, "noise_std": 2.0, "gradient_bound": 1.0, "smoothness": 0.5,
    ...         "strong_convexity": 0.5, "examples": 4, "group_size": 2}
    >>> round(mu(RewindToDelete(train_steps=3, steps=1, **step)), 9)  # z: 1, 3/2, then 3/4
    0.375
    """
    c, shift = bound_expansion(recipe)
    T, K, sigma = recipe.train_steps, recipe.steps, recipe.noise_std
    if isinstance(recipe, NoisyDescent):
        return minorant_mu(c, np.repeat([shift, 0.0], [T, K]) / sigma)
    return shift / sigma * c**K * math.fsum(c**j for j in range(T - K))


def minorant_mu(c: float, s: Array) -> float:
    """μ when *every* step counts (no prefix is post-processing): the greatest convex minorant.

    Step t has unit noise and the shift s_t. With w_t = c^{T-1-t}, ΔV_t = w_t² and ΔW_t = w_t s_t,
    μ² = Σ (ΔW)²/ΔV over the segments of the greatest convex minorant of the points
    (0, 0), (V_0, W_0), …, (V_{T-1}, W_{T-1}): its slopes are the isotonic regression of ΔW/ΔV with
    weights ΔV.

    >>> round(minorant_mu(1.0, np.array([3.0, 0.0, 0.0, 0.0])), 12)
    1.5
    """
    w = c ** np.arange(len(s) - 1.0, -1.0, -1.0)
    slopes = isotonic_regression(s / w, weights=w**2).x
    return float(np.sqrt(np.sum(np.square(slopes * w))))


def calibrate_descent(
    make: Callable[[float], AnyDescent], *, epsilon: float, delta: float
) -> AnyDescent:
    """``make(σ)`` with the smallest σ that meets (ε, δ): μ is proportional to 1/σ."""
    return make(mu(make(1.0)) / float(gaussian.mu(epsilon, delta)) * (1 + 1e-12))


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
