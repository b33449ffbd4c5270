"""The recipe of a job: as given, or calibrated, or planned, so that its certificate meets the
target on a real machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from expunge.accounting.guarantee import MAX_EPSILON, guarantee
from expunge.accounting.planning import Plan
from expunge.accounting.precision import NoisyRecipe, choose_precision
from expunge.errors import UnlearningError
from expunge.jobs.jobfile import (
    RUNNABLE,
    Job,
    PlanTable,
    TargetTable,
    calibrate_recipe,
    describe_miss,
    make_recipe,
    plan_recipes,
)
from expunge.recipes import Execution, Guarantee


@dataclass(frozen=True)
class Settled:
    """The recipe that will run, what it certifies on this many parameters, and how it was found."""

    recipe: NoisyRecipe
    guarantee: Guarantee
    calibrated: bool
    plan: Plan | None


def settle(job: Job, parameters: int) -> Settled:
    """The recipe of a job for this many certified parameters.

    It follows from the target and the size of the model, never from trained weights.
    """
    given, target = job.method, job.target
    made = None
    if given.name == "plan":
        options = PlanTable.model_validate(given.parameters)
        made = plan_recipes(options, target, parameters, given.batch_size)
        recipe = _choose(made, options.choose)
    elif "noise_std" in given.parameters:
        recipe = make_recipe(given.name, given.parameters)
    else:
        recipe = calibrate_recipe(given.name, given.parameters, target, parameters)
    calibrated = made is None and "noise_std" not in given.parameters
    return Settled(recipe, foresee(recipe, target, parameters), calibrated, made)


def foresee(recipe: NoisyRecipe, target: TargetTable, parameters: int) -> Guarantee:
    """What the certificate of a real run will say, finite precision included.

    A run that could not be certified, or would miss its target, is refused here.
    """
    precision = choose_precision(recipe, parameters)
    execution = Execution(rounding=precision.rounding, releases=target.releases)
    found = guarantee(
        recipe, delta=target.delta, compared_to=target.compared_to, execution=execution
    )
    if not found.epsilon <= target.epsilon:
        raise UnlearningError(describe_miss(found.epsilon, target))
    bounds = [b.epsilon for b in (found.retrained, found.centre) if b is not None]
    if not max(bounds) <= MAX_EPSILON or found.survival_bound is None:
        raise UnlearningError(
            f"this recipe cannot be certified: epsilon is {max(bounds):g} against one of the two "
            f"references, and above {MAX_EPSILON:g} it says nothing"
        )
    return found


def _choose(made: Plan, method: str | None) -> NoisyRecipe:
    """The method asked for, else the candidate of which most can survive."""
    noisy = [c for c in made.candidates if c.method in RUNNABLE]
    if method is not None:
        return cast(NoisyRecipe, next(c.recipe for c in noisy if c.method == method))
    return cast(NoisyRecipe, max(noisy, key=lambda c: c.survival_bound).recipe)
