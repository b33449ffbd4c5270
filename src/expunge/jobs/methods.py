"""The method of a job: its parameters checked, and the recipe that meets the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from pydantic import ValidationError

from expunge.accounting.calibration import calibrate
from expunge.accounting.guarantee import MAX_EPSILON, guarantee
from expunge.accounting.planning import Plan, plan
from expunge.accounting.precision import NoisyRecipe, choose_precision
from expunge.certificates.consistency import MAX_MIXING_STEPS
from expunge.errors import CalibrationError, InputError, UnlearningError
from expunge.jobs.tables import (
    NAMES,
    RUNNABLE,
    Job,
    MethodTable,
    Mistake,
    PlanTable,
    TargetTable,
    describe_error,
    suggest,
)
from expunge.recipes import METHODS, Execution, Guarantee, ModelClipping, from_dict

# A value of each parameter that is right whatever the others are: one key is judged at a time.
_HARMLESS: Mapping[str, Any] = {
    "start_clip": 1.0,
    "grad_clip": 1.0,
    "model_clip": 1.0,
    "learning_rate": 0.0,
    "weight_decay": 0.0,
    "steps": 1,
    "noise_std": 1.0,
    "start_noise_std": 0.0,
}


@dataclass(frozen=True)
class Settled:
    """The recipe that will run, what it certifies on this many parameters, and how it was found."""

    recipe: NoisyRecipe
    guarantee: Guarantee
    calibrated: bool
    plan: Plan | None


def check_method(given: Mapping[str, Any], target: TargetTable | None) -> list[Mistake]:
    """Every mistake in the parameters of ``[method]``; ``target`` too, if it is valid itself.

    >>> [p.sentence for p in check_method({"name": "plan", "scale": 0}, None)]
    ['method.scale is 0; it must be a finite number > 0']
    """
    name = given.get("name")
    own = {key: value for key, value in given.items() if key not in MethodTable.model_fields}
    if name not in NAMES:
        return []
    if name == "plan":
        return _check_plan(own, target)
    problems = _check_parameters(cast(str, name), own)
    if problems:
        return problems
    try:
        recipe = _make(cast(str, name), {"noise_std": 1.0} | own)
    except InputError as error:
        return [Mistake(("method",), f"method: {error}")]
    if isinstance(recipe, ModelClipping) and recipe.steps > MAX_MIXING_STEPS:
        valid = f"at most {MAX_MIXING_STEPS:,} for model-clipping"
        return [Mistake(("method", "steps"), f"method.steps is {recipe.steps}; it must be {valid}")]
    return [] if target is None else _check_reach(cast(str, name), own, target)


def settle(job: Job, parameters: int) -> Settled:
    """The recipe of a job for this many certified parameters.

    It is as given, or calibrated, or planned: from the target and the size of the model, never from
    trained weights.
    """
    given, target = job.method, job.target
    made = None
    if given.name == "plan":
        options = PlanTable.model_validate(given.parameters)
        made = _plan(options, target, parameters, given.batch_size)
        recipe = _choose(made, options.choose)
    elif "noise_std" in given.parameters:
        recipe = _make(given.name, given.parameters)
    else:
        recipe = _calibrate(given.name, given.parameters, target, parameters)
    calibrated = made is None and "noise_std" not in given.parameters
    return Settled(recipe, preview(recipe, target, parameters), calibrated, made)


def preview(recipe: NoisyRecipe, target: TargetTable, parameters: int) -> Guarantee:
    """What the certificate of a real run will say, finite precision included.

    A run that could not be certified, or would miss its target, is refused here.
    """
    precision = choose_precision(recipe, parameters)
    execution = Execution(rounding=precision.rounding, releases=target.releases)
    found = guarantee(
        recipe, delta=target.delta, compared_to=target.compared_to, execution=execution
    )
    if not found.epsilon <= target.epsilon:
        raise UnlearningError(_miss(found.epsilon, target))
    bounds = [b.epsilon for b in (found.retrained, found.centre) if b is not None]
    if not max(bounds) <= MAX_EPSILON or found.survival_bound is None:
        raise UnlearningError(
            f"this recipe cannot be certified: epsilon is {max(bounds):g} against one of the two "
            f"references, and above {MAX_EPSILON:g} it says nothing"
        )
    return found


def _check_parameters(name: str, own: Mapping[str, Any]) -> list[Mistake]:
    """Unknown, missing and wrong ones, each by itself."""
    kind = METHODS[name]
    known = [field.name for field in fields(kind)]
    required = [f.name for f in fields(kind) if f.default is f.default_factory]
    found = [
        Mistake(("method",), f"method.{key} is missing; {name} needs it")
        for key in required
        if key not in own and key != "noise_std"
    ]
    harmless = {key: _HARMLESS[key] for key in known}
    steps = own.get("steps")
    if "steps" in known and isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
        harmless["steps"] = steps
    for key, value in own.items():
        if key not in known:
            hint = suggest(key, [*known, *MethodTable.model_fields])
            found.append(Mistake(("method", key), f"method.{key} is not known to {name}; {hint}"))
            continue
        try:
            _make(name, harmless | {key: value})
        except InputError as error:
            found.append(Mistake(("method", key), f"method.{error}"))
    return found


def _check_reach(name: str, own: Mapping[str, Any], target: TargetTable) -> list[Mistake]:
    """Whether the target can be met at all, in exact arithmetic."""
    try:
        if "noise_std" not in own:
            _calibrate(name, own, target, None)
            return []
        found = guarantee(
            _make(name, own),
            delta=target.delta,
            compared_to=target.compared_to,
            execution=Execution(releases=target.releases),
        )
    except (CalibrationError, InputError) as error:
        return [Mistake(("method",), f"method: {error}")]
    if found.epsilon <= target.epsilon:
        return []
    return [Mistake(("method", "noise_std"), f"method.noise_std: {_miss(found.epsilon, target)}")]


def _check_plan(own: Mapping[str, Any], target: TargetTable | None) -> list[Mistake]:
    """The planner's options, and a plan for some size of model: it fails for none or for all."""
    try:
        options = PlanTable.model_validate(own)
        if target is not None:
            _plan(options, target, 1000, 1)
    except ValidationError as error:
        return [describe_error("method", PlanTable, item) for item in error.errors()]
    except (CalibrationError, InputError) as error:
        return [Mistake(("method",), f"method: {error}")]
    return []


def _plan(options: PlanTable, target: TargetTable, parameters: int, batch_size: int) -> Plan:
    return plan(
        epsilon=target.epsilon,
        delta=target.delta,
        parameters=parameters,
        compared_to=target.compared_to,
        batch_size=batch_size,
        **options.model_dump(exclude={"choose"}),
    )


def _calibrate(
    name: str, own: Mapping[str, Any], target: TargetTable, parameters: int | None
) -> NoisyRecipe:
    def make(noise_std: float) -> Any:
        return _make(name, {**own, "noise_std": noise_std})

    return calibrate(
        make,
        epsilon=target.epsilon,
        delta=target.delta,
        compared_to=target.compared_to,
        parameters=parameters,
        execution=Execution(releases=target.releases),
    )


def _choose(made: Plan, method: str | None) -> NoisyRecipe:
    """The method asked for, else the candidate of which most can survive."""
    noisy = [c for c in made.candidates if c.method in RUNNABLE]
    if method is not None:
        return cast(NoisyRecipe, next(c.recipe for c in noisy if c.method == method))
    return cast(NoisyRecipe, max(noisy, key=lambda c: c.survival_bound).recipe)


def _make(name: str, parameters: Mapping[str, Any]) -> NoisyRecipe:
    return cast(NoisyRecipe, from_dict({"method": name, **parameters}))


def _miss(epsilon: float, target: TargetTable) -> str:
    return (
        f"this recipe certifies epsilon = {epsilon:.6g} at delta = {target.delta:g}, and the "
        f"target is {target.epsilon:g}; leave noise_std out to have it calibrated"
    )
