"""What a recipe guarantees: one pure function per theorem, one ``match`` over the closed union.

``guarantee(recipe, delta=…)`` or ``guarantee(recipe, epsilon=…)``. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from expunge.accounting import gaussian
from expunge.accounting.dpsgd import group_log_delta
from expunge.accounting.solving import bracket, tighten
from expunge.accounting.theorems import (
    clip_gradients,
    clip_models,
    descend_with_noise,
    perturb_solution,
    ratio,
    rewind_and_perturb,
    round_group,
)
from expunge.errors import InputError
from expunge.files import to_plain
from expunge.recipes import (
    IDEAL,
    Bound,
    ComparedTo,
    ConvexHeadRecipe,
    ExactStatistics,
    Execution,
    GradientClipping,
    GroupDPSGD,
    Guarantee,
    ModelClipping,
    NoisyDescent,
    OutputPerturbation,
    Recipe,
    Retraining,
    RewindToDelete,
    ShardedTraining,
    is_number,
    to_dict,
)

MAX_EPSILON = 709.0


def guarantee(
    recipe: Recipe,
    *,
    delta: float | None = None,
    epsilon: float | None = None,
    compared_to: ComparedTo = "retrained",
    execution: Execution = IDEAL,
) -> Guarantee:
    """The (ε, δ) that ``recipe`` certifies: give one of the two, get the other.

    >>> from expunge import GradientClipping
    >>> from expunge import guarantee
    >>> recipe = GradientClipping(start_clip=0.01, grad_clip=100.0, learning_rate=1e-4,
    ...                           weight_decay=10.0, steps=1, noise_std=0.02827)
    >>> g = guarantee(recipe, delta=1e-5)
    >>> round(g.epsilon, 3), round(g.mu, 4), g.compared_to
    (6.573, 1.4142, 'retrained')
    >>> round(guarantee(recipe, epsilon=1.0).delta, 4)
    0.2862
    """
    if (delta is None) == (epsilon is None):
        raise InputError("give either delta or epsilon: the other one is computed")
    if delta is not None:
        check_delta(delta)
    if epsilon is not None:
        check_epsilon(epsilon)
    if compared_to not in ("retrained", "centre"):
        raise InputError.of("compared_to", compared_to, "'retrained' or 'centre'")
    retrained = _Side(recipe, "retrained", execution).bound(epsilon, delta)
    centre, survival = None, None
    if has_centre(recipe):
        side = _Side(recipe, "centre", execution)
        centre, survival = side.bound(epsilon, delta), _exp_up(side.log_delta(0.0))
    elif is_exact(recipe):
        centre, survival = retrained, 0.0
    chosen = retrained if compared_to == "retrained" else centre
    if chosen is None:
        raise InputError.of(
            "compared_to", compared_to, "'retrained' for a method that does not start from a model"
        )
    return Guarantee(
        epsilon=chosen.epsilon,
        delta=chosen.delta,
        mu=chosen.mu,
        compared_to=compared_to,
        theorem=theorem(recipe),
        retrained=retrained,
        centre=centre,
        survival_bound=survival,
    )


def check_delta(delta: float) -> None:
    """δ ∈ (0, 1)."""
    if not (is_number(delta) and 0 < delta < 1):
        raise InputError.of("delta", delta, "a number in (0, 1)")


def check_epsilon(epsilon: float) -> None:
    """ε ∈ [0, 709]: beyond it e^ε is not a finite float and the statement says nothing."""
    if not (is_number(epsilon) and 0 <= epsilon <= MAX_EPSILON):
        raise InputError.of("epsilon", epsilon, "a number in [0, 709] (e^epsilon must be finite)")


def has_centre(recipe: Recipe) -> bool:
    """Whether the method starts from the old model, so that a centre can stand in for it."""
    return isinstance(recipe, OutputPerturbation | GradientClipping | ModelClipping)


def is_exact(recipe: Recipe) -> bool:
    """Whether the release is a function of retained data alone: (0, 0).

    >>> is_exact(ConvexHeadRecipe(weight_decay=1e-5, tolerance=1e-9))
    True
    """
    solved_from_zero = isinstance(recipe, ConvexHeadRecipe) and recipe.noise_std == 0
    return solved_from_zero or isinstance(recipe, Retraining | ExactStatistics | ShardedTraining)


def theorem(recipe: Recipe) -> str:
    """The theorem a recipe's guarantee rests on."""
    match recipe:
        case OutputPerturbation():
            return "exact Gaussian mechanism (Balle & Wang 2018, Theorem 8)"
        case GradientClipping():
            return "shifted interpolation, exact GDP (Bok, Su & Altschuler 2024; THEORY section 3)"
        case ModelClipping():
            return "amplification by mixing (Balle et al. 2019, Theorem 1; THEORY section 4)"
        case Retraining():
            return "retraining never uses the old model"
        case GroupDPSGD():
            return "mixture of Gaussians, composed (Choquette-Choo et al. 2023; Ganesh 2024)"
        case NoisyDescent():
            return "shifted interpolation under smoothness (THEORY section 5)"
        case RewindToDelete():
            return "exact Gaussian mechanism under smoothness (THEORY section 5)"
        case ExactStatistics():
            return "sums of integers are subtracted exactly (THEORY section 10)"
        case ShardedTraining():
            return "every constituent is trained on retained data alone (THEORY section 12)"
        case ConvexHeadRecipe(noise_std=0.0):
            return "solved from zero on retained data (THEORY section 11)"
        case ConvexHeadRecipe():
            return "exact Gaussian mechanism, the residual measured (THEORY section 11)"


def mu(
    recipe: Recipe, *, compared_to: ComparedTo = "retrained", execution: Execution = IDEAL
) -> float | None:
    """The smallest μ we can prove, or None for methods that are not accounted in GDP.

    >>> round(mu(OutputPerturbation(start_clip=1.0, noise_std=4.0)), 12)
    0.5
    """
    starts = 2.0 if compared_to == "retrained" else 1.0
    match recipe:
        case OutputPerturbation(start_clip=C0, noise_std=sigma):
            value = ratio(starts * C0, sigma)
        case GradientClipping():
            value = clip_gradients(recipe, starts * recipe.start_clip, execution.rounding)
        case Retraining() | ExactStatistics() | ShardedTraining() | ConvexHeadRecipe(noise_std=0.0):
            value = 0.0
        case ConvexHeadRecipe():
            value = perturb_solution(recipe, execution.rounding)
        case NoisyDescent():
            value = descend_with_noise(recipe, execution.rounding)
        case RewindToDelete():
            value = rewind_and_perturb(recipe, execution.rounding)
        case ModelClipping() | GroupDPSGD():
            return None
    if value == 0 or execution.releases == 1:
        return value
    return math.sqrt(execution.releases) * value * (1 + 4e-16)


def log_delta(
    recipe: Recipe,
    epsilon: float,
    *,
    compared_to: ComparedTo = "retrained",
    execution: Execution = IDEAL,
) -> float:
    """log δ at ε, also where δ itself is below the smallest float.

    >>> round(log_delta(OutputPerturbation(start_clip=0.5, noise_std=100.0), 3.0), 3)
    -45015.432
    """
    return _Side(recipe, compared_to, execution).log_delta(epsilon)


@dataclass(frozen=True)
class _Side:
    """One recipe, as it ran, against one reference."""

    recipe: Recipe
    compared_to: ComparedTo
    execution: Execution

    @functools.cached_property
    def mu(self) -> float | None:
        return mu(self.recipe, compared_to=self.compared_to, execution=self.execution)

    def log_delta(self, epsilon: float) -> float:
        n = self.execution.releases
        match self.recipe:
            case ModelClipping() as recipe:
                # n releases by basic composition: ε and δ add up.
                starts = 2.0 if self.compared_to == "retrained" else 1.0
                value = math.log(n) + clip_models(recipe, epsilon / n, starts)
            case GroupDPSGD() as recipe:
                if n > 1:
                    raise InputError.of("releases", n, "1 for DP-SGD, which is released as trained")
                value = group_log_delta(round_group(recipe, self.execution.rounding), epsilon)
            case _:
                assert self.mu is not None
                value = float(gaussian.log_delta(epsilon, self.mu))
        return min(_add_tail(value, epsilon, self.execution), 0.0)

    def bound(self, epsilon: float | None, delta: float | None) -> Bound:
        if epsilon is not None:
            return Bound(epsilon, _exp_up(self.log_delta(epsilon)), self.mu)
        assert delta is not None
        if self.mu is not None and self.execution.tail_delta == 0:
            return Bound(float(gaussian.epsilon(self.mu, delta)), delta, self.mu)
        return Bound(self.solve(delta), delta, self.mu)

    def solve(self, delta: float) -> float:
        """The smallest ε with log δ(ε) ≤ log δ, on the safe side: δ falls as ε grows."""
        target = math.log(delta) - 4e-16 * (1 + abs(math.log(delta)))

        def excess(value: float) -> float:
            return max(self.log_delta(value), -1e6) - target

        if excess(0.0) <= 0:
            return 0.0
        if self.execution.tail_delta > 0:
            # The tail's own share grows with e^ε, so δ need not fall: the first ε that holds.
            ladder = [0.0, 1e-9, *(1e-3 * 1.1**n for n in range(142))]
            steps = itertools.pairwise(ladder)
            ends = next((pair for pair in steps if excess(pair[1]) <= 0), None)
        else:
            ends = bracket(excess, 1.0, lowest=1e-12, highest=1e5)
        relative = 1e-9 if isinstance(self.recipe, GroupDPSGD) else 1e-12  # losses are on a grid
        return math.inf if ends is None else tighten(excess, *ends, relative=relative)


def _exp_up(log_value: float) -> float:
    """exp, rounded up: 0 only for an exact 0."""
    if log_value == -math.inf:
        return 0.0
    return min(max(math.exp(log_value), 2.2250738585072014e-308), 1.0)


def _add_tail(log_value: float, epsilon: float, execution: Execution) -> float:
    """δ + (1 + e^ε) · tail: both laws are within ``tail`` of the ideal ones; rounded up."""
    if execution.tail_delta == 0:
        return log_value
    tail = math.log(execution.tail_delta * execution.releases) + float(np.logaddexp(0.0, epsilon))
    total = float(np.logaddexp(log_value, tail))
    return total + 2e-15 * (1 + abs(total))


def guarantee_to_dict(recipe: Recipe, found: Guarantee) -> dict[str, Any]:
    """One flat object: the method, the recipe's fields and the guarantee's fields."""
    return to_plain(to_dict(recipe)) | to_plain(found)
