"""The paper's own formulas, as it prints them, for comparison only: no certificate uses them.

"Certified Unlearning for Neural Networks" (Koloskova, Allouah, Jha, Guerraoui, Koyejo; ICML 2025;
arXiv 2506.06985). They are given as printed, also where they are not sound: each docstring says
where, tests/experiments and docs/errata.md show it. Where a function prescribes the noise of a
recipe, the recipe's own ``noise_std`` is not used. Letters: docs/theory.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from expunge import GradientClipping, ModelClipping
from expunge.accounting import gaussian
from expunge.recipes import schedule

Array = npt.NDArray[np.float64]
AsPrinted = Literal["printed", "corrected"]


def theorem_1_noise_std(recipe: GradientClipping, *, epsilon: float, delta: float) -> float:
    """Theorem 1, gradient clipping in closed form.

        λ = 0:  σ² = 9 log(1/δ)/(ε² T) · (C0 + C1 γ T)²
        λ > 0:  σ² = 72 γλ log(1/δ)/ε² · (C0 (1-γλ)^T + C1/λ)²

    Printed domain: 0 < ε < 3 log(1/δ), and γλ ∈ (1/2, 1) when λ > 0. Without regularisation it is
    not sound in all of it: at δ = 1e-5 it fails from ε = 10.985 on (erratum E2).

    >>> recipe = GradientClipping(start_clip=1.0, grad_clip=0.0, learning_rate=0.1,
    ...                           weight_decay=0.0, steps=1, noise_std=0.0)
    >>> round(theorem_1_noise_std(recipe, epsilon=1.0, delta=1e-5), 4)
    10.1792
    """
    gamma, lam = _read_rate(recipe), recipe.weight_decay
    C0, C1, T = recipe.start_clip, recipe.grad_clip, recipe.steps
    log_term = math.log(1 / delta)
    if lam == 0:
        return math.sqrt(9 * log_term / T) / epsilon * (C0 + C1 * gamma * T)
    reach = C0 * (1 - gamma * lam) ** T + C1 / lam
    return math.sqrt(72 * gamma * lam * log_term) / epsilon * reach


def theorem_2_steps(recipe: ModelClipping, *, epsilon: float, delta: float) -> int:
    """Theorem 2, model clipping: the number of steps by the weak recursion δ_{t+1} = θ_ε(r) δ_t.

        T ≥ (log(1/δ) + log θ_ε(2 C0/σ0)) / log(1/θ_ε(2 C2/σ))

    Sound for every ε > 0; the first θ is 1 without initial noise. The strong recursion, which the
    paper's tables use, needs about a third of the steps (``accounting.theorems.mix``). The recipe's
    own ``steps`` is not used.

    >>> recipe = ModelClipping(model_clip=0.5, learning_rate=1e-3, weight_decay=10.0,
    ...                        noise_std=0.5, steps=6)
    >>> theorem_2_steps(recipe, epsilon=1.0, delta=1e-5)
    18
    """
    sigma, sigma_0 = recipe.noise_std, recipe.start_noise_std
    assert isinstance(sigma, float)
    log_start = 0.0
    if recipe.start_clip is not None and sigma_0 > 0:
        log_start = float(gaussian.log_delta(epsilon, 2 * recipe.start_clip / sigma_0))
    log_factor = float(gaussian.log_delta(epsilon, 2 * recipe.model_clip / sigma))
    return max(1, math.ceil((math.log(1 / delta) + log_start) / -log_factor))


def theorem_2_noise_std(
    recipe: ModelClipping, *, epsilon: float, delta: float, algebra: AsPrinted = "printed"
) -> float:
    """Theorem 2, model clipping: the closed form, as printed or with its algebra corrected.

        printed:    σ² = 8 C2² ln(1.25)/ε² · [1 + (ln(1.25/δ) - σ0² ε²/(8 C0²))/T]
        corrected:  σ² = 8 C2²/ε² · [ln(1.25) + (ln(1.25/δ) - σ0² ε²/(8 C0²))/T]

    Printed domain: 0 < ε < 1 (1 is fine too). The printed form is not sound at T = 1 (erratum E3).

    >>> recipe = ModelClipping(model_clip=1.0, learning_rate=1e-3, weight_decay=0.0,
    ...                        noise_std=0.0, steps=1)
    >>> round(theorem_2_noise_std(recipe, epsilon=1.0, delta=1e-5, algebra="corrected"), 3)
    9.781
    >>> round(theorem_2_noise_std(recipe, epsilon=1.0, delta=1e-5), 3)
    4.768
    """
    first, rest = math.log(1.25), math.log(1.25 / delta)
    if recipe.start_clip:
        rest -= (recipe.start_noise_std * epsilon / recipe.start_clip) ** 2 / 8
    share = rest / recipe.steps
    bracket = first * (1 + share) if algebra == "printed" else first + share
    return math.sqrt(8 * bracket) * recipe.model_clip / epsilon


def classical_noise_std(*, distance: float, epsilon: float, delta: float) -> float:
    """The classical Gaussian mechanism, the paper's output-perturbation baseline.

        σ = D sqrt(2 ln(1.25/δ))/ε,   D = 2 C0

    Sound for ε, δ ∈ (0, 1) (and at ε = 1, as in the tables; Dwork & Roth 2014, Theorem A.1).

    >>> round(classical_noise_std(distance=0.02, epsilon=1.0, delta=1e-5), 7)
    0.0968961
    """
    return distance * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def log_group_factor(epsilon: float, group_size: int) -> float:
    """log (e^{kε₁} - 1)/(e^{ε₁} - 1) with kε₁ = ε, in log space; log k at ε = 0.

    >>> round(log_group_factor(50.0, 225), 6)
    51.39091
    """
    if epsilon == 0 or group_size == 1:
        return math.log(group_size)
    whole, one = (x + math.log(-math.expm1(-x)) for x in (epsilon, epsilon / group_size))
    return whole - one


def renyi_divergence(
    recipe: GradientClipping, *, order: float, products: AsPrinted = "corrected"
) -> float:
    """The appendix's general theorem: a bound on D_q(x_T ‖ x'_T) for varying steps.

        D_q ≤ (q/2) [(Π ρ_t) 2 C0 + Σ w_t s_t]² / Σ w_t² σ_t²,   ρ_t = 1 - γ_t λ,  s_t = 2 γ_t C1

    corrected: w_t = Π_{k=t+1}^{T-1} ρ_k;  printed: w_t = Π_{k=1}^{T-1-t} ρ_k, which is right only
    for constant ρ (erratum E4). Domain: q ≥ 1, γ_t λ < 1, no initial noise, no projection. It is
    qμ²/2 with the μ of the whole run; ours takes the best prefix and needs no order q.

    >>> recipe = GradientClipping(start_clip=0.01, grad_clip=100.0, learning_rate=1e-4,
    ...                           weight_decay=10.0, steps=1, noise_std=0.02827)
    >>> round(renyi_divergence(recipe, order=1.0), 4)
    1.0
    """
    gamma = schedule(recipe.learning_rate, recipe.steps)
    sigma = schedule(recipe.noise_std, recipe.steps)
    rho, s = 1 - gamma * recipe.weight_decay, 2 * gamma * recipe.grad_clip
    if products == "corrected":
        w = np.cumprod(np.append(rho[1:], 1.0)[::-1])[::-1]
    else:
        w = np.cumprod(np.insert(rho[1:], 0, 1.0))[::-1]
    distance = float(np.prod(rho)) * 2 * recipe.start_clip + float(w @ s)
    return order / 2 * distance**2 / float(np.square(w) @ np.square(sigma))


def tables_noise_std(recipe: GradientClipping, *, epsilon: float) -> float:
    """The rule behind every σ of the gradient-clipping tables: D_q/q = ε, so μ = sqrt(2ε).

        σ² = [ρ^T 2 C0 + s Σ_k ρ^k]² / (2 ε Σ_k ρ^{2k}),   ρ = 1 - γλ,  s = 2 γ C1,  k < T

    It reads a Rényi divergence *per order* as ε (erratum E1): what it certifies is
    δ = θ_ε(sqrt(2ε)), 0.286 at ε = 1, so it is sound only for δ as large as that.

    >>> recipe = GradientClipping(start_clip=0.01, grad_clip=100.0, learning_rate=1e-4,
    ...                           weight_decay=10.0, steps=1, noise_std=0.0)
    >>> round(tables_noise_std(recipe, epsilon=1.0), 6)
    0.02827
    """
    return math.sqrt(renyi_divergence(replace(recipe, noise_std=1.0), order=1.0) / epsilon)


def tables_steps(recipe: GradientClipping) -> int:
    """The rule behind every T of the gradient-clipping tables, from the minimisers in the text.

        T = min(⌈C0/(γ C1)⌉, ⌈log(2 λ C0/C1)/(γλ)⌉), the second only where it is positive.

    The text prints log(λ C0/C1); the tables need the diameter 2 C0. Not a guarantee: any T is
    sound with its own σ. Domain: γ, C1 > 0. The recipe's own ``steps`` is not used.

    >>> tables_steps(GradientClipping(start_clip=0.01, grad_clip=10.0, learning_rate=1e-4,
    ...                               weight_decay=750.0, steps=1, noise_std=0.0))
    6
    """
    gamma, lam = _read_rate(recipe), recipe.weight_decay
    by_length = math.ceil(recipe.start_clip / (gamma * recipe.grad_clip))
    diameter = 2 * lam * recipe.start_clip / recipe.grad_clip
    if diameter <= 1:
        return by_length
    return min(by_length, math.ceil(math.log(diameter) / (gamma * lam)))


def tables_epsilon(*, renyi_epsilon: float, delta: float) -> float:
    """The conversion behind the tables: ε_R = D_q/q taken for D_q itself, at every order q.

        ε = min_q  ε_R + log((q-1)/q) - (log δ + log q)/(q-1),   q ∈ [1.001, 1000]

    The divergence is q ε_R, not ε_R (erratum E1); :func:`epsilon_from_renyi` has the factor.

    >>> round(tables_epsilon(renyi_epsilon=1.0, delta=1e-5), 4)
    1.0036
    """
    q = np.linspace(1.001, 1000, 10_000)
    return max(float(np.min(renyi_epsilon + _renyi_to_dp(q, delta))), 0.0)


def epsilon_from_renyi(mu: float, delta: float) -> float:
    """A sound Rényi conversion of D_q = qμ²/2, for comparison with the exact ε(μ, δ).

        ε = min_{q>1}  qμ²/2 + log((q-1)/q) - (log δ + log q)/(q-1)

    (Balle et al. 2020, Theorem 21; Canonne, Kamath & Steinke 2020, Proposition 12). Every order is
    sound, so the minimum over a grid of orders is sound too.

    >>> round(epsilon_from_renyi(2**0.5, 1e-5), 3)  # the exact value is 6.573
    7.077
    """
    q = 1 + np.geomspace(1e-4, 1e8, 200_001)
    return max(float(np.min(q * mu**2 / 2 + _renyi_to_dp(q, delta))), 0.0)


def _renyi_to_dp(q: Array, delta: float) -> Array:
    return np.log1p(-1 / q) - (math.log(delta) + np.log(q)) / (q - 1)


def _read_rate(recipe: GradientClipping) -> float:
    """The paper's gradient clipping has one learning rate, no initial noise and no projection."""
    assert isinstance(recipe.learning_rate, float)
    assert recipe.start_noise_std == 0
    assert recipe.model_clip is None
    return recipe.learning_rate
