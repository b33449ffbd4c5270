"""The free parameter that just meets a target (ε, δ), never on the unsafe side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

from expunge.accounting.guarantee import guarantee, log_delta
from expunge.accounting.precision import choose_precision
from expunge.accounting.solving import bracket, tighten
from expunge.errors import CalibrationError, InputError
from expunge.recipes import (
    IDEAL,
    MAX_MIXING_STEPS,
    MAX_STEPS,
    ComparedTo,
    Execution,
    GradientClipping,
    ModelClipping,
    NoisyRecipe,
    Recipe,
    check_value,
)

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)
Find = Literal["smallest", "largest", "fewest"]
SMALLEST, LARGEST = 1e-150, 1e150


@runtime_checkable
class Model(Protocol):
    """What has ``parameters()``, as a torch module does; torch itself is not needed here."""

    def parameters(self) -> Iterable[Any]: ...


def calibrate(
    make: Callable[[float], AnyRecipe],
    *,
    epsilon: float,
    delta: float,
    compared_to: ComparedTo = "retrained",
    find: Find = "smallest",
    start: float = 1.0,
    parameters: int | Model | None = None,
    execution: Execution = IDEAL,
) -> AnyRecipe:
    """The recipe ``make(x)`` with the best ``x`` that still meets (ε, δ).

    ``find="smallest"``: the smallest real x, for a noise (more of it is safer);
    ``find="largest"``: the largest real x, for a clip (less of it is safer);
    ``find="fewest"``: the smallest whole x, for a number of steps.
    The recipe that comes back meets the target by ``guarantee`` itself; x is within 1e-11 of the
    best one. With ``parameters``, a model or the number of its certified parameters, the
    target is met by a real run, whose finite precision costs a little
    (``expunge.accounting.precision``). ``start`` is where the search begins, if evaluating far
    from it is costly.

    >>> from expunge import OutputPerturbation, calibrate
    >>> recipe = calibrate(lambda s: OutputPerturbation(start_clip=0.01, noise_std=s),
    ...                    epsilon=1.0, delta=1e-5)
    >>> round(recipe.noise_std, 6)
    0.074613
    """
    check_value("epsilon", "epsilon", epsilon)
    check_value("delta", "delta", delta)
    check_value("positive", "start", start)
    if find not in ("smallest", "largest", "fewest"):
        raise InputError.of("find", find, "'smallest', 'largest' or 'fewest'")
    target = _Target(epsilon, delta, compared_to, execution)
    best = _search(make, target, find, start)
    if parameters is None:
        return best
    size = count_parameters(parameters)
    while isinstance(best, NoisyRecipe):
        rounding = execution.rounding + choose_precision(best, size).rounding
        if target.with_rounding(rounding).excess(best) <= 0:
            return best
        best = _search(make, target.with_rounding(rounding * (1 + 1e-6)), find, start)
    return best


def count_parameters(given: int | Model) -> int:
    """The number itself, or how many numbers a model trains; shared parameters count once.

    >>> count_parameters(20_042)
    20042
    """
    if isinstance(given, Model):
        return sum(p.numel() for p in given.parameters() if p.requires_grad)
    whole = isinstance(cast(object, given), int) and not isinstance(given, bool)
    if not whole or not 1 <= given < 2**53:
        raise InputError.of("parameters", given, "a model, or a whole number from 1 to 2**53 - 1")
    return given


@dataclass(frozen=True)
class _Target:
    epsilon: float
    delta: float
    compared_to: ComparedTo
    execution: Execution

    def with_rounding(self, rounding: float) -> _Target:
        return replace(self, execution=replace(self.execution, rounding=rounding))

    def excess(self, recipe: Recipe) -> float:
        """log δ(recipe) - log δ at a hair below ε, so that solving for ε again stays below it."""
        aim = self.epsilon * (1 - 3e-12)
        found = log_delta(recipe, aim, compared_to=self.compared_to, execution=self.execution)
        log_delta_target = math.log(self.delta)
        return max(found, -1e300) - log_delta_target + 4e-16 * (1 + abs(log_delta_target))

    def refuse(self, recipe: Recipe) -> CalibrationError:
        reached = guarantee(
            recipe, epsilon=self.epsilon, compared_to=self.compared_to, execution=self.execution
        )
        return CalibrationError(
            f"no value meets epsilon = {self.epsilon:g}, delta = {self.delta:g}: even the extreme "
            f"one leaves delta = {reached.delta:.3g}, because {_limit(recipe, self.execution)}"
        )


def _search(
    make: Callable[[float], AnyRecipe], target: _Target, find: Find, start: float
) -> AnyRecipe:
    def excess(x: float) -> float:
        return target.excess(make(x))

    if find == "fewest":
        return make(_find_fewest(excess, make, target))
    # The largest x is the smallest y = 1/x, which is safer the larger it is.
    turn = (lambda y: 1 / y) if find == "largest" else (lambda x: x)
    ends = bracket(lambda x: excess(turn(x)), turn(start), lowest=SMALLEST, highest=LARGEST)
    if ends is None:
        safest = 0.0 if find == "largest" else LARGEST
        if excess(safest) > 0:
            raise target.refuse(make(safest))
        return make(safest)
    if ends[0] <= SMALLEST and find == "largest":
        raise CalibrationError(
            f"every value up to {1 / ends[1]:g} meets epsilon = {target.epsilon:g}, "
            f"delta = {target.delta:g}: this parameter is not what limits the guarantee"
        )
    if ends[0] <= SMALLEST:
        return make(0.0 if excess(0.0) <= 0 else ends[1])
    best = turn(tighten(lambda x: excess(turn(x)), *ends, relative=1e-11))
    while excess(best) > 0:  # 1/(1/x) may be another float
        best *= 1 - 2e-16
    return make(best)


def _find_fewest(
    excess: Callable[[float], float], make: Callable[[float], Recipe], target: _Target
) -> int:
    """Doubling, then halving on whole numbers; more steps never hurt, so the first good is best."""
    bad, good = 0, 1
    most = MAX_MIXING_STEPS if isinstance(make(good), ModelClipping) else MAX_STEPS
    while excess(good) > 0:
        if good >= most:
            raise target.refuse(make(good))
        bad, good = good, min(good * 2, most)
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if excess(middle) <= 0 else (middle, good)
    return good


def _limit(recipe: Recipe, execution: Execution) -> str:
    """Which bound keeps the guarantee from getting better."""
    if execution.tail_delta > 0:
        return f"the noise sampler's own error is tail_delta = {execution.tail_delta:g}"
    match recipe:
        case GradientClipping(weight_decay=0.0):
            return (
                "without weight_decay each step adds 2 * learning_rate * grad_clip to the distance "
                "while noise grows only with the square root of the steps"
            )
        case GradientClipping():
            return (
                "steps add 2 * learning_rate * grad_clip as fast as weight_decay forgets: the "
                "distance settles at 2 * grad_clip / weight_decay against noise_std"
            )
        case ModelClipping():
            return "model_clip is so large against noise_std that a step forgets almost nothing"
        case _:
            return "noise_std is zero against a start_clip above zero"
