"""Candidate recipes for a target, before anybody looks at a trained weight.

A noisy run ends in weights that are mostly noise: whatever is left of the old model is bounded by
the guarantee itself (THEORY, section 6). So radii are chosen backwards: the noise that remains in
the released weights gets the scale of a healthy initialisation, and the largest start that the
target allows follows from it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from expunge.accounting.calibration import calibrate
from expunge.accounting.guarantee import check_delta, check_epsilon, guarantee
from expunge.accounting.precision import NoisyRecipe, choose_precision
from expunge.display import Sheet, round_up
from expunge.errors import InputError
from expunge.files import to_plain
from expunge.recipes import (
    IDEAL,
    ComparedTo,
    Execution,
    GradientClipping,
    Guarantee,
    ModelClipping,
    OutputPerturbation,
    Recipe,
    Retraining,
    check_value,
    method_name,
    to_dict,
)

SAMPLES, EPOCHS = 50_000, 20.0  # of retraining, where nobody says
FAR = 100.0  # a start of so many times the noise that is left clips no healthy model
SHORT = 0.1  # of the noise's length: what is left of the old model no longer works as a network


@dataclass(frozen=True)
class Candidate:
    """One recipe that meets the target, and what it costs and leaves.

    ``guarantee`` is that of a real run, the cost of finite precision included.
    ``noise_per_step``: σ; ``noise_left``: the standard deviation of the noise that remains in each
    released weight; ``expected_norm``: the norm of that noise; ``kept_norm``: the largest norm that
    the old model's part can have at the end; ``gradient_evaluations``: examples seen in the noisy
    steps, of retraining in all of it; ``survival_bound``: no event differs more than this from a
    run without the old model.
    """

    method: str
    recipe: Recipe
    guarantee: Guarantee
    steps: int
    noise_per_step: float
    noise_left: float
    expected_norm: float
    kept_norm: float
    gradient_evaluations: int
    survival_bound: float


@dataclass(frozen=True)
class Plan:
    """The candidates for one target, and what a restart from the centre would do instead.

    ``samples`` and ``epochs`` are those of retraining; ``notes`` say what was assumed or capped.
    """

    epsilon: float
    delta: float
    parameters: int
    scale: float
    compared_to: ComparedTo
    candidates: tuple[Candidate, ...]
    restart_is_as_good: bool
    advice: str
    samples: int
    epochs: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _summarise(self).to_text()

    def _repr_html_(self) -> str:
        return _summarise(self).to_html()


def plan(
    *,
    epsilon: float,
    delta: float,
    parameters: int,
    scale: float | None = None,
    steps: int = 10,
    learning_rate: float = 0.01,
    weight_decay: float = 10.0,
    batch_size: int = 128,
    samples: int | None = None,
    epochs: float | None = None,
    compared_to: ComparedTo = "retrained",
) -> Plan:
    """Recipes of each method that meet (ε, δ) and leave noise of standard deviation ``scale``.

    ``scale`` defaults to a LeCun initialisation of a square layer with as many parameters,
    ``parameters ** -1/4``; give the scale your own layers are initialised with if you know it.
    Retraining is counted as ``epochs`` passes over ``samples``. Nothing here depends on trained
    weights or on the forget data, so the radii do not void the certificate (THEORY, section 7).

    >>> p = plan(epsilon=1.0, delta=1e-5, parameters=20_042)
    >>> [c.method for c in p.candidates]
    ['output-perturbation', 'gradient-clipping', 'model-clipping', 'retraining']
    >>> all(c.guarantee.epsilon <= 1.0 for c in p.candidates), p.restart_is_as_good
    (True, True)
    """
    check_epsilon(epsilon)
    check_delta(delta)
    for field, value in (("parameters", parameters), ("steps", steps), ("batch_size", batch_size)):
        check_value("whole", field, value)
    left = float(parameters) ** -0.25 if scale is None else scale
    check_value("positive", "scale", left)
    if left < sys.float_info.min:
        raise InputError.of("scale", scale, f"at least {sys.float_info.min}")
    check_value("positive", "learning_rate", learning_rate)
    notes = list[str]()
    if samples is None or epochs is None:
        said = f"{EPOCHS if epochs is None else epochs:g} epochs of "
        said += f"{SAMPLES if samples is None else samples:,} samples"
        notes.append(f"Retraining is assumed to take {said}; give epochs and samples if you know.")
    samples, epochs = SAMPLES if samples is None else samples, EPOCHS if epochs is None else epochs
    check_value("whole", "samples", samples)
    check_value("positive", "epochs", epochs)
    farthest = FAR * left * math.sqrt(parameters)
    makers = _list_makers(left, steps, learning_rate, weight_decay, compared_to, farthest)
    recipes: list[Recipe] = [
        calibrate(
            make,
            epsilon=epsilon,
            delta=delta,
            compared_to=compared_to,
            find="largest",
            start=left,
            parameters=parameters,
        )
        for make in makers
    ]
    candidates = tuple(
        _describe(recipe, delta, parameters, batch_size, compared_to, round(samples * epochs))
        for recipe in [*recipes, Retraining()]
    )
    largest, kept = max(c.survival_bound for c in candidates), _find_most_kept(candidates)
    as_good = largest <= 0.5 or kept.kept_norm <= SHORT * kept.expected_norm
    if any(getattr(recipe, "start_clip", None) == farthest for recipe in recipes):
        shrunk = (1 - learning_rate * weight_decay) ** steps
        notes.append(
            f"In {steps:,} steps weight_decay shrinks the start by a factor of {shrunk:.1e}, so "
            f"that any start is forgotten: start_clip = {farthest:.4g} is {FAR:g} times the noise "
            "that is left, and clips no healthy model."
        )
    return Plan(
        epsilon=epsilon,
        delta=delta,
        parameters=int(parameters),
        scale=left,
        compared_to=compared_to,
        candidates=candidates,
        restart_is_as_good=as_good,
        advice=_advise(largest, kept, as_good),
        samples=samples,
        epochs=float(epochs),
        notes=tuple(notes),
    )


def _list_makers(
    scale: float,
    steps: int,
    learning_rate: float,
    weight_decay: float,
    compared_to: ComparedTo,
    farthest: float,
) -> list[Callable[[float], NoisyRecipe]]:
    """The recipe of each noisy method as a function of its radius, or of the distance at the end.

    Output perturbation draws all its noise at once, and of model clipping each step's own noise is
    what remains: σ = scale. With gradient clipping σ √(Σ ρ^{2k}) = scale, and with ρ = 1 - γλ the
    distance at the end is z = ρ^T D + 2γC1 Σ ρ^k: half of it is for the start, half for what
    gradients add. Where ρ^T is so small that half would allow any start, the start is ``farthest``
    and gradients have the rest.
    """
    rho = 1 - learning_rate * weight_decay
    if not 0 < rho <= 1:
        raise InputError(
            f"learning_rate * weight_decay is {learning_rate * weight_decay:g}; it must be below 1"
        )
    sigma = scale / math.sqrt(_sum_powers(rho * rho, steps))
    starts = 2.0 if compared_to == "retrained" else 1.0
    shrunk, grown = starts * rho**steps, 2 * learning_rate * _sum_powers(rho, steps)

    def clip_gradients(z: float) -> GradientClipping:
        C0 = farthest if z >= 2 * shrunk * farthest else z / (2 * shrunk)
        C1 = max(z - shrunk * C0, 0.0) / grown
        return GradientClipping(C0, C1, learning_rate, weight_decay, steps, noise_std=sigma)

    return [
        lambda C0: OutputPerturbation(start_clip=C0, noise_std=scale),
        clip_gradients,
        lambda C2: ModelClipping(C2, learning_rate, weight_decay, noise_std=scale, steps=steps),
    ]


def _describe(
    recipe: Recipe,
    delta: float,
    parameters: int,
    batch_size: int,
    compared_to: ComparedTo,
    retraining: int,
) -> Candidate:
    execution = IDEAL
    if isinstance(recipe, NoisyRecipe):
        execution = Execution(rounding=choose_precision(recipe, parameters).rounding)
    found = guarantee(recipe, delta=delta, compared_to=compared_to, execution=execution)
    match recipe:
        case OutputPerturbation(start_clip=C0, noise_std=sigma):
            steps, per_step, left, kept = 0, sigma, sigma, C0
        case GradientClipping(
            start_clip=C0, steps=steps, noise_std=float(per_step), learning_rate=float(gamma)
        ):
            rho = 1 - gamma * recipe.weight_decay
            left = per_step * math.sqrt(_sum_powers(rho * rho, steps))
            kept = C0 * rho**steps
        case ModelClipping(model_clip=C2, steps=steps, noise_std=float(per_step)):
            left, kept = per_step, C2
        case _:
            steps, per_step, left, kept = 0, 0.0, 0.0, 0.0
    assert found.survival_bound is not None
    return Candidate(
        method=method_name(recipe),
        recipe=recipe,
        guarantee=found,
        steps=steps,
        noise_per_step=per_step,
        noise_left=left,
        expected_norm=left * math.sqrt(parameters),
        kept_norm=kept,
        gradient_evaluations=(retraining if isinstance(recipe, Retraining) else steps * batch_size),
        survival_bound=found.survival_bound,
    )


def _sum_powers(x: float, count: int) -> float:
    """Σ_{k<count} x^k."""
    return float(count) if x == 1 else (1 - x**count) / (1 - x)


def _find_most_kept(candidates: Iterable[Candidate]) -> Candidate:
    """The noisy candidate in which the old model's part is longest against the noise."""
    noisy = [c for c in candidates if c.expected_norm > 0]
    return max(noisy, key=lambda c: c.kept_norm / c.expected_norm)


def _advise(largest: float, kept: Candidate, as_good: bool) -> str:
    """What the old model can still do, from ‖kept‖ against ‖noise‖ and the survival bound."""
    share = f"{100 * largest:.1f} %"
    length = f"{100 * kept.kept_norm / kept.expected_norm:.3g} %"
    norms = f"‖kept‖ {kept.kept_norm:.4g} against ‖noise‖ {kept.expected_norm:.4g}"
    way = (
        'Say name = "retraining" in [method] of job.toml (or "restart", with public weights in '
        "[centre]) and run expunge unlearn job.toml: that is exact, needs no noise, and is at "
        "least as good."
    )
    if as_good and largest <= 0.5:
        return (
            f"At this target at most {share} of runs can differ in any way, accuracy included, "
            f"from runs that start at the centre and never see the old model. {way} To keep more, "
            "choose a better public centre (pretrained weights, a checkpoint from before the data "
            "arrived)."
        )
    if as_good:
        return (
            f"At this target what is left of the old model is at most {length} as long as the "
            f"noise ({norms}): a test may tell up to {share} of runs from runs that never saw it, "
            f"but as a network they are restarts from the centre. {way}"
        )
    return (
        f"At this target up to {share} of runs can differ from runs that start at the centre, and "
        f"what is left of the old model can be {length} as long as the noise ({norms}): it can "
        'matter. Compare with a restart all the same: name = "retraining" or "restart" in '
        "[method] of job.toml."
    )


def _summarise(found: Plan) -> Sheet:
    rows = [
        (
            candidate.method,
            str(candidate.steps),
            f"{candidate.expected_norm:.4g}",
            f"{candidate.kept_norm:.4g}",
            f"≤ {round_up(100 * candidate.survival_bound, 3)} %",
        )
        for candidate in found.candidates
    ]
    title = (
        f"Plan for epsilon = {found.epsilon:g}, delta = {found.delta:g}, compared to "
        f"{found.compared_to}: {found.parameters:,} parameters"
    )
    names = ("method", "steps", "‖noise‖", "‖kept‖", "survives")
    return Sheet(title, rows, names=names, note=found.advice)


def plan_to_dict(found: Plan) -> dict[str, Any]:
    """The plan with each candidate's recipe by its API names."""
    candidates = [
        to_plain(candidate) | {"recipe": to_plain(to_dict(candidate.recipe))}
        for candidate in found.candidates
    ]
    return to_plain(found) | {"candidates": candidates}
