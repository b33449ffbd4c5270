"""The recipe of a job: as given, or calibrated, or planned, so that its certificate meets the
target on a real machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from expunge.accounting.calibration import calibrate
from expunge.accounting.guarantee import MAX_EPSILON, guarantee
from expunge.accounting.planning import Plan, plan
from expunge.accounting.precision import NoisyRecipe, choose_precision
from expunge.errors import InputError, UnlearningError
from expunge.jobs.tables import RUNNABLE, MethodTable, PlanTable, TargetTable
from expunge.recipes import Execution, Guarantee, from_dict

SOME_PARAMETERS = 1000  # a plan fails for no size of model or for all


@dataclass(frozen=True)
class Settled:
    """The recipe that will run, what it certifies on this many parameters, and how it was found."""

    recipe: NoisyRecipe
    guarantee: Guarantee
    calibrated: bool
    plan: Plan | None


def settle(method: MethodTable, target: TargetTable, parameters: int | None) -> Settled:
    """The recipe for this many certified parameters; in exact arithmetic without ``parameters``.

    It follows from the target and the size of the model, never from trained weights.
    """
    own, made, calibrated = method.parameters, None, False
    if method.name == "plan" and target.releases > 1:
        valid = "1 with method.name = 'plan', which plans one release"
        raise InputError.of("target.releases", target.releases, valid)
    if method.name == "plan":
        options = PlanTable.model_validate(own)
        made = plan(
            parameters=parameters or SOME_PARAMETERS,
            batch_size=method.batch_size,
            **target.model_dump(exclude={"releases"}),
            **options.model_dump(exclude={"choose"}),
        )
        recipe = _choose(made, options.choose)
    elif "noise_std" in own:
        recipe = make_recipe(method.name, own)
    else:
        calibrated = True
        recipe = calibrate(
            lambda noise_std: cast(Any, make_recipe(method.name, own | {"noise_std": noise_std})),
            parameters=parameters,
            execution=Execution(releases=target.releases),
            **target.model_dump(exclude={"releases"}),
        )
    return Settled(recipe, _foresee(recipe, target, parameters), calibrated, made)


def make_recipe(name: str, parameters: Mapping[str, Any]) -> NoisyRecipe:
    """The recipe of a method with these parameters."""
    return cast(NoisyRecipe, from_dict({"method": name, **parameters}))


def _foresee(recipe: NoisyRecipe, target: TargetTable, parameters: int | None) -> Guarantee:
    """What the certificate of a real run will say, finite precision included.

    A run that could not be certified, or would miss its target, is refused here.
    """
    rounding = 0.0 if parameters is None else choose_precision(recipe, parameters).rounding
    execution = Execution(rounding=rounding, releases=target.releases)
    found = guarantee(
        recipe, delta=target.delta, compared_to=target.compared_to, execution=execution
    )
    if not found.epsilon <= target.epsilon:
        raise UnlearningError(
            f"this recipe certifies epsilon = {found.epsilon:.6g} at delta = {target.delta:g}, and "
            f"the target is {target.epsilon:g}; leave noise_std out to have it calibrated"
        )
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
