"""What a recipe guarantees: one pure function per theorem, one ``match`` over the closed union.

``guarantee(recipe, delta=…)`` or ``guarantee(recipe, epsilon=…)``. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from expunge.accounting import gaussian
from expunge.accounting.solving import bracket, tighten
from expunge.accounting.theorems import clip_gradients, clip_models, ratio
from expunge.errors import InputError
from expunge.recipes import (
    IDEAL,
    Bound,
    ComparedTo,
    Execution,
    GradientClipping,
    Guarantee,
    LinearModel,
    ModelClipping,
    OutputPerturbation,
    Recipe,
    Retraining,
    Sharding,
    check_value,
    is_exact,
)

_SMALLEST = 2.2250738585072014e-308


def guarantee(
    recipe: Recipe,
    *,
    delta: float | None = None,
    epsilon: float | None = None,
    compared_to: ComparedTo = "retrained",
    execution: Execution = IDEAL,
) -> Guarantee:
    """The (ε, δ) that ``recipe`` certifies: give one of the two, get the other.

    An exact method needs neither, and has (0, 0) whatever is given.

    >>> from expunge import GradientClipping, Retraining, guarantee
    >>> recipe = GradientClipping(start_clip=0.01, grad_clip=100.0, learning_rate=1e-4,
    ...                           weight_decay=10.0, steps=1, noise_std=0.02827)
    >>> g = guarantee(recipe, delta=1e-5)
    >>> round(g.epsilon, 3), round(g.mu, 4), g.compared_to
    (6.573, 1.4142, 'retrained')
    >>> round(guarantee(recipe, epsilon=1.0).delta, 4)
    0.2862
    >>> exact = guarantee(Retraining())
    >>> exact.epsilon, exact.delta
    (0.0, 0.0)
    """
    if delta is not None:
        check_value("delta", "delta", delta)
    if epsilon is not None:
        check_value("epsilon", "epsilon", epsilon)
    if compared_to not in ("retrained", "centre"):
        raise InputError.of("compared_to", compared_to, "'retrained' or 'centre'")
    if is_exact(recipe):
        retrained = centre = Bound(0.0, 0.0, 0.0)
        survival = 0.0
    elif (delta is None) == (epsilon is None):
        raise InputError("give either delta or epsilon: the other one is computed")
    else:
        retrained = _bound(recipe, "retrained", execution, epsilon, delta)
        centre = _bound(recipe, "centre", execution, epsilon, delta)
        survival = _exp_up(log_delta(recipe, 0.0, compared_to="centre", execution=execution))
    chosen = retrained if compared_to == "retrained" else centre
    stated = chosen.epsilon, chosen.delta, chosen.mu
    return Guarantee(*stated, compared_to, recipe.theorem, retrained, centre, survival)


def mu(
    recipe: Recipe, *, compared_to: ComparedTo = "retrained", execution: Execution = IDEAL
) -> float | None:
    """The smallest μ we can prove, or None for model clipping, which is not accounted in GDP.

    >>> round(mu(OutputPerturbation(start_clip=1.0, noise_std=4.0)), 12)
    0.5
    """
    starts = 2.0 if compared_to == "retrained" else 1.0
    match recipe:
        case OutputPerturbation(start_clip=C0, noise_std=sigma):
            value = ratio(starts * C0, sigma)
        case GradientClipping():
            value = clip_gradients(recipe, starts * recipe.start_clip, execution.rounding)
        case ModelClipping():
            return None
        case Retraining() | LinearModel() | Sharding():
            return 0.0
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
    if isinstance(recipe, ModelClipping):
        # n releases by basic composition: ε and δ add up.
        n, starts = execution.releases, 2.0 if compared_to == "retrained" else 1.0
        value = math.log(n) + clip_models(recipe, epsilon / n, starts)
    else:
        found = mu(recipe, compared_to=compared_to, execution=execution)
        assert found is not None
        value = gaussian.log_delta(epsilon, found)
    if is_exact(recipe):
        return value
    return min(_add_tail(value, epsilon, execution), 0.0)


def _bound(
    recipe: Recipe,
    compared_to: ComparedTo,
    execution: Execution,
    epsilon: float | None,
    delta: float | None,
) -> Bound:
    """The other one of ε and δ, against one reference."""

    def find(at: float) -> float:
        return log_delta(recipe, at, compared_to=compared_to, execution=execution)

    found = mu(recipe, compared_to=compared_to, execution=execution)
    if epsilon is not None:
        return Bound(epsilon, _exp_up(find(epsilon)), found)
    assert delta is not None
    tail = execution.tail_delta > 0
    if found is not None and not tail:
        return Bound(gaussian.epsilon(found, delta), delta, found)
    return Bound(_solve(find, delta, tail), delta, found)


def _solve(find: Callable[[float], float], delta: float, tail: bool) -> float:
    """The smallest ε with log δ(ε) ≤ log δ, on the safe side: δ falls as ε grows."""
    target = math.log(delta) - 4e-16 * (1 + abs(math.log(delta)))

    def excess(value: float) -> float:
        return max(find(value), -1e6) - target

    if excess(0.0) <= 0:
        return 0.0
    if tail:
        # The tail's own share grows with e^ε, so δ need not fall: the first ε that is enough.
        ladder = [0.0, 1e-9, *(1e-3 * 1.1**n for n in range(142))]
        ends = next((pair for pair in itertools.pairwise(ladder) if excess(pair[1]) <= 0), None)
    else:
        ends = bracket(excess, 1.0, lowest=1e-12, highest=1e5)
    return math.inf if ends is None else tighten(excess, *ends)


def _exp_up(log_value: float) -> float:
    """exp, rounded up: 0 only for an exact 0."""
    return 0.0 if log_value == -math.inf else min(max(math.exp(log_value), _SMALLEST), 1.0)


def _add_tail(log_value: float, epsilon: float, execution: Execution) -> float:
    """δ + (1 + e^ε) · tail: both laws are within ``tail`` of the ideal ones; rounded up."""
    if execution.tail_delta == 0:
        return log_value
    tail = math.log(execution.tail_delta * execution.releases) + float(np.logaddexp(0.0, epsilon))
    total = float(np.logaddexp(log_value, tail))
    return total + 2e-15 * (1 + abs(total))
