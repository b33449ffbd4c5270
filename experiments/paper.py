"""The paper's own formulas, as it prints them, for comparison only: no certificate uses them.

"Certified Unlearning for Neural Networks" (Koloskova, Allouah, Jha, Guerraoui, Koyejo; ICML 2025;
arXiv 2506.06985). Each function refuses with ``DomainError`` where its result is not sound: the
printed domain first, then our exact accountants. ``enforce_domain=False`` gives the printed value
anyway, so that docs/errata.md can be reproduced. Where a function prescribes the noise of a recipe,
the recipe's own ``noise_std`` is not used. Letters: docs/notation.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from expunge import calibrate
from expunge.accounting import gaussian
from expunge.accounting.guarantee import check_delta, check_epsilon, guarantee
from expunge.errors import InputError
from expunge.recipes import (
    ComparedTo,
    GradientClipping,
    ModelClipping,
    OutputPerturbation,
    schedule,
)

Array = npt.NDArray[np.float64]
AsPrinted = Literal["printed", "corrected"]
_LN_1_25 = math.log(1.25)


Calibration = Literal["exact", "classical"]


class DomainError(InputError):
    """A formula was asked for outside the domain where it is sound."""


def theorem_1_noise_std(
    recipe: GradientClipping, *, epsilon: float, delta: float, enforce_domain: bool = True
) -> float:
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
    _check_target(epsilon, delta)
    gamma, lam = _constant_learning_rate(recipe), recipe.weight_decay
    C0, C1, T = recipe.start_clip, recipe.grad_clip, recipe.steps
    log_term = math.log(1 / delta)
    if enforce_domain and not epsilon < 3 * log_term:
        raise DomainError.of("epsilon", epsilon, f"below 3 log(1/delta) = {3 * log_term:g}")
    if lam == 0:
        sigma = math.sqrt(9 * log_term / T) / epsilon * (C0 + C1 * gamma * T)
    else:
        if enforce_domain and not gamma * lam > 0.5:
            raise DomainError.of("learning_rate * weight_decay", gamma * lam, "above 1/2")
        reach = C0 * (1 - gamma * lam) ** T + C1 / lam
        sigma = math.sqrt(72 * gamma * lam * log_term) / epsilon * reach
    if enforce_domain:
        _require_sound("Theorem 1", _true_delta(recipe, sigma, epsilon), epsilon, delta)
    return sigma


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
    _check_target(epsilon, delta)
    sigma, sigma_0 = recipe.noise_std, recipe.start_noise_std
    if not isinstance(sigma, float) or not sigma > 0:
        raise DomainError.of("noise_std", sigma, "one number above 0 for Theorem 2")
    log_start = 0.0
    if recipe.start_clip is not None and sigma_0 > 0:
        log_start = float(gaussian.log_delta(epsilon, 2 * recipe.start_clip / sigma_0))
    log_factor = float(gaussian.log_delta(epsilon, 2 * recipe.model_clip / sigma))
    if log_factor == 0:
        raise DomainError.of("noise_std", sigma, "large enough that a step lowers delta at all")
    return max(1, math.ceil((math.log(1 / delta) + log_start) / -log_factor))


def theorem_2_noise_std(
    recipe: ModelClipping,
    *,
    epsilon: float,
    delta: float,
    algebra: AsPrinted = "printed",
    enforce_domain: bool = True,
) -> float:
    """Theorem 2, model clipping: the closed form, as printed or with its algebra corrected.

        printed:    σ² = 8 C2² ln(1.25)/ε² · [1 + (ln(1.25/δ) - σ0² ε²/(8 C0²))/T]
        corrected:  σ² = 8 C2²/ε² · [ln(1.25) + (ln(1.25/δ) - σ0² ε²/(8 C0²))/T]

    Printed domain: 0 < ε < 1 (we allow 1 too). The printed form is not sound at T = 1 (erratum E3).

    >>> recipe = ModelClipping(model_clip=1.0, learning_rate=1e-3, weight_decay=0.0,
    ...                        noise_std=0.0, steps=1)
    >>> round(theorem_2_noise_std(recipe, epsilon=1.0, delta=1e-5, algebra="corrected"), 3)
    9.781
    >>> round(theorem_2_noise_std(recipe, epsilon=1.0, delta=1e-5, enforce_domain=False), 3)
    4.768
    """
    _check_target(epsilon, delta)
    if enforce_domain and not epsilon <= 1:
        raise DomainError.of("epsilon", epsilon, "at most 1 for Theorem 2's closed form")
    rest = math.log(1.25 / delta)
    if recipe.start_clip:
        rest -= (recipe.start_noise_std * epsilon / recipe.start_clip) ** 2 / 8
    match algebra:
        case "printed":
            bracket = _LN_1_25 * (1 + rest / recipe.steps)
        case "corrected":
            bracket = _LN_1_25 + rest / recipe.steps
        case _:
            raise InputError.of("algebra", algebra, "'printed' or 'corrected'")
    if bracket <= 0:
        raise DomainError.of(
            "start_noise_std", recipe.start_noise_std, "smaller: the printed variance is negative"
        )
    sigma = math.sqrt(8 * bracket) * recipe.model_clip / epsilon
    if enforce_domain:
        true = _true_delta(recipe, sigma, epsilon)
        _require_sound("Theorem 2's closed form", true, epsilon, delta)
    return sigma


def classical_noise_std(
    *, distance: float, epsilon: float, delta: float, enforce_domain: bool = True
) -> float:
    """The classical Gaussian mechanism, the paper's output-perturbation baseline.

        σ = D sqrt(2 ln(1.25/δ))/ε,   D = 2 C0

    Domain: ε, δ ∈ (0, 1) (we allow ε = 1, as the tables do; Dwork & Roth 2014, Theorem A.1).

    >>> round(classical_noise_std(distance=0.02, epsilon=1.0, delta=1e-5), 7)
    0.0968961
    """
    _check_target(epsilon, delta)
    sigma = _positive("distance", distance) * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    if enforce_domain:
        if not epsilon <= 1:
            raise DomainError.of("epsilon", epsilon, "at most 1 for the classical formula")
        true = float(gaussian.delta(epsilon, distance / sigma))
        _require_sound("the classical Gaussian mechanism", true, epsilon, delta)
    return sigma


def group_privacy(
    *, epsilon: float, delta: float, group_size: int, enforce_domain: bool = True
) -> tuple[float, float]:
    """The paper's group-privacy lemma: per-example (ε, δ) gives k examples (kε, k e^{kε} δ).

    Sound, but it says nothing once the group's δ reaches 1: that is refused. The sharp factor is
    (e^{kε} - 1)/(e^ε - 1) (:func:`log_group_factor`).

    >>> group_epsilon, group_delta = group_privacy(epsilon=0.5, delta=1e-9, group_size=2)
    >>> group_epsilon, round(group_delta, 14)
    (1.0, 5.43656e-09)
    """
    _check_target(epsilon, delta)
    k = _group_size(group_size)
    log_delta = math.log(k) + k * epsilon + math.log(delta)
    if enforce_domain and log_delta >= 0:
        raise DomainError(
            f"the group's delta is k e^(k epsilon) delta = exp({log_delta:g}); it must be below 1"
        )
    return k * epsilon, math.exp(log_delta) if log_delta < 709 else math.inf


def log_group_factor(epsilon: float, group_size: int) -> float:
    """log (e^{kε₁} - 1)/(e^{ε₁} - 1) with kε₁ = ε, in log space; log k at ε = 0.

    >>> round(log_group_factor(50.0, 225), 6)
    51.39091
    """
    if epsilon == 0 or group_size == 1:
        return math.log(group_size)
    whole, one = (x + math.log(-math.expm1(-x)) for x in (epsilon, epsilon / group_size))
    return whole - one


def group_noise_std(
    *, clip: float, group_size: int, epsilon: float, delta: float, enforce_domain: bool = True
) -> float:
    """The noise the paper prints for DP training and a forget set of k examples.

        σ² = 2 C² k²/ε² · (ln(1.25 k/δ) + kε)

    One Gaussian release of sensitivity C per example: it says nothing about T composed steps of
    DP-SGD. With ε/k per example its own lemma asks for ε, not kε, in the last term, so it errs to
    more noise. Domain: ε/k ≤ 1.

    >>> round(group_noise_std(clip=1.0, group_size=2, epsilon=1.0, delta=1e-5), 3)
    10.744
    """
    _check_target(epsilon, delta)
    k, C = _group_size(group_size), _positive("clip", clip)
    sigma = math.sqrt(2 * (math.log(1.25 * k / delta) + k * epsilon)) * C * k / epsilon
    if enforce_domain:
        if not epsilon <= k:
            raise DomainError.of("epsilon", epsilon, f"at most group_size = {k} (1 per example)")
        true = float(gaussian.delta(epsilon, k * C / sigma))
        _require_sound("the paper's group noise", true, epsilon, delta)
    return sigma


def renyi_divergence(
    recipe: GradientClipping,
    *,
    order: float,
    products: AsPrinted = "corrected",
    enforce_domain: bool = True,
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
    if not 1 <= order < math.inf:
        raise InputError.of("order", order, "a finite number >= 1")
    _require_plain(recipe)
    gamma = schedule(recipe.learning_rate, recipe.steps)
    sigma = schedule(recipe.noise_std, recipe.steps)
    rho, s = 1 - gamma * recipe.weight_decay, 2 * gamma * recipe.grad_clip
    match products:
        case "corrected":
            w = np.cumprod(np.append(rho[1:], 1.0)[::-1])[::-1]
        case "printed":
            if enforce_domain and np.any(rho != rho[0]):
                raise DomainError(
                    "learning_rate varies from step to step; it must be constant for the printed "
                    "products of the general theorem"
                )
            w = np.cumprod(np.insert(rho[1:], 0, 1.0))[::-1]
        case _:
            raise InputError.of("products", products, "'printed' or 'corrected'")
    distance = float(np.prod(rho)) * 2 * recipe.start_clip + float(w @ s)
    variance = float(np.square(w) @ np.square(sigma))
    if variance == 0:
        return math.inf if distance > 0 else 0.0
    return order / 2 * distance**2 / variance


def tables_noise_std(
    recipe: GradientClipping, *, epsilon: float, delta: float, enforce_domain: bool = True
) -> float:
    """The rule behind every σ of the gradient-clipping tables: D_q/q = ε, so μ = sqrt(2ε).

        σ² = [ρ^T 2 C0 + s Σ_k ρ^k]² / (2 ε Σ_k ρ^{2k}),   ρ = 1 - γλ,  s = 2 γ C1,  k < T

    It reads a Rényi divergence *per order* as ε (erratum E1): what it certifies is
    δ = θ_ε(sqrt(2ε)), 0.286 at ε = 1, so it is sound only for δ as large as that.

    >>> recipe = GradientClipping(start_clip=0.01, grad_clip=100.0, learning_rate=1e-4,
    ...                           weight_decay=10.0, steps=1, noise_std=0.0)
    >>> round(tables_noise_std(recipe, epsilon=1.0, delta=1e-5, enforce_domain=False), 6)
    0.02827
    """
    _check_target(epsilon, delta)
    _constant_learning_rate(recipe)
    sigma = math.sqrt(renyi_divergence(replace(recipe, noise_std=1.0), order=1.0) / epsilon)
    if enforce_domain:
        true = _true_delta(recipe, sigma, epsilon)
        _require_sound("the rule of the paper's tables", true, epsilon, delta)
    return sigma


def tables_steps(recipe: GradientClipping) -> int:
    """The rule behind every T of the gradient-clipping tables, from the minimisers in the text.

        T = min(⌈C0/(γ C1)⌉, ⌈log(2 λ C0/C1)/(γλ)⌉), the second only where it is positive.

    The text prints log(λ C0/C1); the tables need the diameter 2 C0. Not a guarantee: any T is
    sound with its own σ. Domain: γ, C1 > 0. The recipe's own ``steps`` is not used.

    >>> tables_steps(GradientClipping(start_clip=0.01, grad_clip=10.0, learning_rate=1e-4,
    ...                               weight_decay=750.0, steps=1, noise_std=0.0))
    6
    """
    gamma, lam = _constant_learning_rate(recipe), recipe.weight_decay
    step = _positive("learning_rate * grad_clip", gamma * recipe.grad_clip)
    by_length = math.ceil(recipe.start_clip / step)
    diameter = 2 * lam * recipe.start_clip / recipe.grad_clip
    if diameter <= 1:
        return by_length
    return min(by_length, math.ceil(math.log(diameter) / (gamma * lam)))


def tables_epsilon(*, renyi_epsilon: float, delta: float, enforce_domain: bool = True) -> float:
    """The conversion behind the tables: ε_R = D_q/q taken for D_q itself, at every order q.

        ε = min_q  ε_R + log((q-1)/q) - (log δ + log q)/(q-1),   q ∈ [1.001, 1000]

    The divergence is q ε_R, not ε_R (erratum E1); :func:`epsilon_from_renyi` has the factor.

    >>> round(tables_epsilon(renyi_epsilon=1.0, delta=1e-5, enforce_domain=False), 4)
    1.0036
    """
    _check_target(renyi_epsilon, delta)
    q = np.linspace(1.001, 1000, 10_000)
    epsilon = max(float(np.min(renyi_epsilon + _renyi_to_dp(q, delta))), 0.0)
    if enforce_domain:
        true = float(gaussian.delta(epsilon, math.sqrt(2 * renyi_epsilon)))
        _require_sound("the conversion of the paper's tables", true, epsilon, delta)
    return epsilon


def epsilon_from_renyi(mu: float, delta: float) -> float:
    """A sound Rényi conversion of D_q = qμ²/2, for comparison with the exact ε(μ, δ).

        ε = min_{q>1}  qμ²/2 + log((q-1)/q) - (log δ + log q)/(q-1)

    (Balle et al. 2020, Theorem 21; Canonne, Kamath & Steinke 2020, Proposition 12). Every order is
    sound, so the minimum over a grid of orders is sound too.

    >>> round(epsilon_from_renyi(2**0.5, 1e-5), 3)  # the exact value is 6.573
    7.077
    """
    check_delta(delta)
    if not 0 <= mu < math.inf:
        raise InputError.of("mu", mu, "a finite number >= 0")
    q = 1 + np.geomspace(1e-4, 1e8, 200_001)
    return max(float(np.min(q * mu**2 / 2 + _renyi_to_dp(q, delta))), 0.0)


def _renyi_to_dp(q: Array, delta: float) -> Array:
    return np.log1p(-1 / q) - (math.log(delta) + np.log(q)) / (q - 1)


def _check_target(epsilon: float, delta: float) -> None:
    check_epsilon(epsilon)
    check_delta(delta)
    _positive("epsilon", epsilon)


def _positive(field: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise InputError.of(field, value, "a finite number > 0")
    return value


def _group_size(value: int) -> int:
    if not (math.isfinite(value) and value == int(value) and value >= 1):
        raise InputError.of("group_size", value, "a whole number >= 1")
    return int(value)


def _require_plain(recipe: GradientClipping) -> None:
    """The paper's gradient clipping has neither initial noise nor a projection at every step."""
    if recipe.start_noise_std > 0 or recipe.model_clip is not None:
        raise DomainError("the paper's formula knows neither start_noise_std nor model_clip")


def _constant_learning_rate(recipe: GradientClipping) -> float:
    _require_plain(recipe)
    if not isinstance(recipe.learning_rate, float):
        raise DomainError("learning_rate is a schedule; it must be one number for this formula")
    return recipe.learning_rate


def _true_delta(recipe: GradientClipping | ModelClipping, sigma: float, epsilon: float) -> float:
    return guarantee(replace(recipe, noise_std=sigma), epsilon=epsilon).delta


def _require_sound(formula: str, true: float, epsilon: float, delta: float) -> None:
    if true > delta:
        raise DomainError(
            f"{formula} is not sound at epsilon = {epsilon:g}, delta = {delta:g}: what it asks for "
            f"certifies delta = {true:.4g} (enforce_domain=False gives the printed value)"
        )


def calibrate_output(
    start_clip: float,
    *,
    epsilon: float,
    delta: float,
    calibration: Calibration = "exact",
    compared_to: ComparedTo = "retrained",
) -> OutputPerturbation:
    """Output perturbation that meets (ε, δ), by the exact trade-off or by the classical formula.

    The classical ``σ = D sqrt(2 ln(1.25/δ))/ε`` is the paper's baseline, valid up to ε = 1 only
    (else a :class:`DomainError`); ``unlearn`` runs either.

    >>> exact, classical = (
    ...     calibrate_output(0.01, epsilon=1.0, delta=1e-5, calibration=kind).noise_std
    ...     for kind in ("exact", "classical"))
    >>> round(exact, 6), round(classical / exact, 4)
    (0.074613, 1.2987)
    """
    if calibration == "exact":
        return calibrate(
            lambda s: OutputPerturbation(start_clip=start_clip, noise_std=s),
            epsilon=epsilon,
            delta=delta,
            compared_to=compared_to,
        )
    if calibration != "classical":
        raise InputError.of("calibration", calibration, "'exact' or 'classical'")
    if compared_to not in ("retrained", "centre"):
        raise InputError.of("compared_to", compared_to, "'retrained' or 'centre'")
    distance = (2.0 if compared_to == "retrained" else 1.0) * start_clip
    sigma = classical_noise_std(distance=distance, epsilon=epsilon, delta=delta)
    return OutputPerturbation(start_clip=start_clip, noise_std=sigma)
