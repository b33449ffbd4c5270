"""The route of a job, and its recipe: as given, or calibrated, or planned, so that its certificate
meets the target on a real machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from expunge.accounting.calibration import calibrate
from expunge.accounting.guarantee import MAX_EPSILON, guarantee
from expunge.accounting.planning import Plan, plan
from expunge.accounting.precision import NoisyRecipe, choose_precision
from expunge.errors import InputError, UnlearningError
from expunge.jobs.tables import Job, MethodTable, PlanTable, TargetTable
from expunge.recipes import Execution, Guarantee, Retraining, from_dict

SOME_PARAMETERS = 1000  # a plan fails for no size of model or for all
RouteName = Literal[
    "state", "restart", "retraining", "gradient-clipping", "model-clipping", "output-perturbation"
]
NOISE_KEYS = tuple(name for name in PlanTable.model_fields if name != "choose")


@dataclass(frozen=True)
class Settled:
    """The recipe that will run, what it certifies on this many parameters, and how it was found."""

    recipe: NoisyRecipe | Retraining
    guarantee: Guarantee
    calibrated: bool
    plan: Plan | None


def choose_route(job: Job) -> RouteName:
    """The method of a job: the one it names; or, of ``name = "plan"``, exact where a state or a
    training can be, and noisy only if ``choose`` asks for it.

    It follows from the keys of the job alone, never from weights or data.
    """
    if job.method.name != "plan":
        return cast(RouteName, job.method.name)
    if (asked := job.method.parameters.get("choose")) is not None:
        return cast(RouteName, asked)
    if job.model.state is not None:
        return "state"
    return "retraining" if find_public_weights(job) is None else "restart"


def find_public_weights(job: Job) -> str | None:
    """The file of public weights that a restart begins from: ``centre.weights``."""
    return None if job.centre is None else job.centre.weights


def explain_route(job: Job) -> str:
    """Why a job takes its route, in two sentences."""
    target = f"epsilon = {job.target.epsilon:g}"
    noisy = (
        f"A noisy run at {target} ends near its centre too, with noise on top: ask for one by name "
        "if you want it."
    )
    match choose_route(job):
        case "state":
            return (
                f"The job has a state of a model built to forget, {job.model.state}: it answers "
                "the request exactly, and keeps all that the retained data say. Nothing is "
                "trained again but what the request touches."
            )
        case "restart":
            return (
                f"The job has public weights, {find_public_weights(job)}: a restart from them is "
                f"exact, needs no noise, and keeps all that is public. {noisy}"
            )
        case "retraining":
            return (
                "The job has neither a state nor public weights: training a fresh start on the "
                f"retained data is exact, and needs no noise. {noisy}"
            )
        case name:
            return (
                f"{name} was asked for by name: it adds noise, so that little of the old model is "
                f"left. At {target} it ends near its centre: retraining is exact, and no worse."
            )


def settle(
    method: MethodTable, target: TargetTable, parameters: int | None, scale: float | None = None
) -> Settled:
    """The recipe for this many certified parameters; in exact arithmetic without ``parameters``.

    It follows from the target, the size of the model and the ``scale`` of its public centre, never
    from trained weights.
    """
    own, made, calibrated = method.parameters, None, False
    asked = own.get("choose") if method.name == "plan" else method.name
    if asked in ("retraining", "restart", None):
        found = guarantee(Retraining(), delta=target.delta, compared_to=target.compared_to)
        return Settled(Retraining(), found, False, None)
    if method.name == "plan" and target.releases > 1:
        valid = "1 with method.name = 'plan', which plans one release"
        raise InputError.of("target.releases", target.releases, valid)
    if method.name == "plan":
        options = PlanTable.model_validate(own)
        made = plan(
            parameters=parameters or SOME_PARAMETERS,
            batch_size=method.batch_size,
            **target.model_dump(exclude={"releases"}),
            **options.model_dump(exclude={"choose", "scale"}),
            scale=scale if options.scale is None else options.scale,
        )
        recipe = cast(NoisyRecipe, next(c.recipe for c in made.candidates if c.method == asked))
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
