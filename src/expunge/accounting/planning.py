"""A plan before anybody trains: which recipes meet a target, and what their noise buys.

The noise that is left in each weight is chosen first (``scale``), the radii that the target allows
follow from it. Retraining stands beside them: it is (0, 0), and by THEORY, section 6, at a small ε
a noisy run *is* a restart from the public centre, up to the survival bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from expunge.accounting.calibration import Model, calibrate, count_parameters
from expunge.accounting.guarantee import guarantee
from expunge.accounting.precision import choose_precision
from expunge.display import Shown, round_up, tabulate
from expunge.errors import InputError
from expunge.files import to_plain
from expunge.recipes import (
    ComparedTo,
    Execution,
    GradientClipping,
    Guarantee,
    ModelClipping,
    NoisyRecipe,
    OutputPerturbation,
    Recipe,
    Retraining,
    check_value,
    to_dict,
)

FAR = 100.0  # a start of so many times the noise that is left clips no healthy model
SHORT = 0.1  # of the noise's length: what is left of the old model no longer works as a network
RETRAINING = (
    'Retraining (expunge.retrain, or name = "retraining" in [method] of job.toml) is exact, '
    "(0, 0), needs no noise, and is at least as good; where build() loads published weights it "
    "starts from them."
)


@dataclass(frozen=True)
class Candidate:
    """One recipe that meets the target, and what it leaves.

    ``guarantee`` is that of a real run, the cost of finite precision included.
    ``noise_per_step``: σ; ``noise_left``: the standard deviation of the noise that remains in each
    released weight; ``expected_norm``: the norm of that noise; ``kept_norm``: the largest norm that
    the old model's part can have at the end; ``survival_bound``: no event differs more than this
    from a run without the old model.
    """

    method: str
    recipe: Recipe
    guarantee: Guarantee
    steps: int
    noise_per_step: float
    noise_left: float
    expected_norm: float
    kept_norm: float

    @property
    def survival_bound(self) -> float:
        return self.guarantee.survival_bound


@dataclass(frozen=True)
class Plan(Shown):
    """The candidates for one target, and what a restart from the centre would do instead.

    ``notes`` say what was capped.
    """

    epsilon: float
    delta: float
    parameters: int
    scale: float
    compared_to: ComparedTo
    candidates: tuple[Candidate, ...]
    restart_is_as_good: bool
    advice: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [
            (
                *(c.method, round_up(c.guarantee.epsilon, 4), round_up(c.guarantee.delta, 4)),
                *(str(c.steps), f"{c.expected_norm:.4g}", f"{c.kept_norm:.4g}"),
                f"≤ {round_up(100 * c.survival_bound, 3)} %",
            )
            for c in self.candidates
        ]
        title = (
            f"Plan for epsilon = {self.epsilon:g}, delta = {self.delta:g}, compared to "
            f"{self.compared_to}: {self.parameters:,} parameters"
        )
        names = ("method", "epsilon", "delta", "steps", "‖noise‖", "‖kept‖", "survives")
        return tabulate(title, rows, names, self.advice)


def plan(
    *,
    epsilon: float,
    delta: float,
    parameters: int | Model,
    scale: float | None = None,
    steps: int = 10,
    learning_rate: float = 0.01,
    weight_decay: float = 10.0,
    compared_to: ComparedTo = "retrained",
) -> Plan:
    """Recipes of each method that meet (ε, δ) and leave noise of standard deviation ``scale``.

    ``scale`` defaults to a LeCun initialisation of a square layer with as many parameters,
    ``parameters ** -1/4``; give the scale your own layers are initialised with if you know it.
    Nothing here depends on trained weights or on the forget data, so the radii do not void the
    certificate (THEORY, section 7).

    >>> p = plan(epsilon=1.0, delta=1e-5, parameters=20_042)
    >>> [c.method for c in p.candidates]
    ['output-perturbation', 'gradient-clipping', 'model-clipping', 'retraining']
    >>> all(c.guarantee.epsilon <= 1.0 for c in p.candidates), p.restart_is_as_good
    (True, True)
    >>> p.candidates[-1].guarantee.epsilon, p.candidates[-1].guarantee.delta
    (0.0, 0.0)
    """
    check_value("epsilon", "epsilon", epsilon)
    check_value("delta", "delta", delta)
    size = count_parameters(parameters)
    steps = check_value("whole", "steps", steps)
    left = float(size) ** -0.25 if scale is None else scale
    check_value("positive", "scale", left)
    check_value("positive", "learning_rate", learning_rate)
    farthest = FAR * left * math.sqrt(size)
    target: Any = {"epsilon": epsilon, "delta": delta, "compared_to": compared_to}
    noisy = [
        calibrate(make, **target, find="largest", start=left, parameters=size)
        for make in _list_makers(left, steps, learning_rate, weight_decay, compared_to, farthest)
    ]
    candidates = [_describe(recipe, delta, size, compared_to) for recipe in noisy]
    largest = max(c.survival_bound for c in candidates)
    kept = max(candidates, key=lambda c: c.kept_norm / c.expected_norm)
    as_good = largest <= 0.5 or kept.kept_norm <= SHORT * kept.expected_norm
    notes: list[str] = []
    if any(getattr(recipe, "start_clip", None) == farthest for recipe in noisy):
        shrunk = (1 - learning_rate * weight_decay) ** steps
        notes.append(
            f"In {steps:,} steps weight_decay shrinks the start by a factor of {shrunk:.1e}, so "
            f"that any start is forgotten: start_clip = {farthest:.4g} is {FAR:g} times the noise "
            "that is left, and clips no healthy model."
        )
    exact = Retraining()
    found = guarantee(exact, compared_to=compared_to)
    candidates.append(Candidate("retraining", exact, found, 0, 0.0, 0.0, 0.0, 0.0))
    advice = _advise(largest, kept, as_good)
    return Plan(
        epsilon, delta, size, left, compared_to, tuple(candidates), as_good, advice, tuple(notes)
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


def _describe(recipe: NoisyRecipe, delta: float, size: int, compared_to: ComparedTo) -> Candidate:
    """The recipe as a real run, with σ_left = σ √(Σ ρ^{2k}) and what is kept of C0 or C2."""
    execution = Execution(rounding=choose_precision(recipe, size).rounding)
    found = guarantee(recipe, delta=delta, compared_to=compared_to, execution=execution)
    match recipe:
        case OutputPerturbation(start_clip=C0, noise_std=sigma):
            steps, left, kept = 0, sigma, C0
        case GradientClipping(start_clip=C0, steps=steps, noise_std=float(sigma)):
            assert isinstance(recipe.learning_rate, float)
            rho = 1 - recipe.learning_rate * recipe.weight_decay
            left, kept = sigma * math.sqrt(_sum_powers(rho * rho, steps)), C0 * rho**steps
        case ModelClipping(model_clip=C2, steps=steps, noise_std=float(sigma)):
            left, kept = sigma, C2
        case _:
            raise AssertionError("a plan has equal steps")
    norm = left * math.sqrt(size)
    return Candidate(recipe.method, recipe, found, steps, sigma, left, norm, kept)


def _sum_powers(x: float, count: int) -> float:
    """Σ_{k<count} x^k."""
    return float(count) if x == 1 else (1 - x**count) / (1 - x)


def _advise(largest: float, kept: Candidate, as_good: bool) -> str:
    """What the old model can still do, from ‖kept‖ against ‖noise‖ and the survival bound."""
    share = f"{100 * largest:.1f} %"
    length = f"{100 * kept.kept_norm / kept.expected_norm:.3g} %"
    norms = f"‖kept‖ {kept.kept_norm:.4g} against ‖noise‖ {kept.expected_norm:.4g}"
    if as_good and largest <= 0.5:
        return (
            f"Noise buys nothing here: at this target at most {share} of runs can differ in any "
            "way, accuracy included, from runs that start at the centre and never see the old "
            f"model. {RETRAINING} To keep more, choose a better public centre (pretrained weights, "
            "a checkpoint from before the data arrived)."
        )
    if as_good:
        return (
            f"Noise buys nothing here: what is left of the old model is at most {length} as long "
            f"as the noise ({norms}). A test may find up to {share} of runs different from runs "
            f"that never saw it, but as a network they are restarts from the centre. {RETRAINING}"
        )
    return (
        f"At this target up to {share} of runs can differ from runs that start at the centre, and "
        f"what is left of the old model can be {length} as long as the noise ({norms}): it can "
        "matter. Compare with retraining all the same, which is exact, (0, 0): expunge.retrain, or "
        'name = "retraining" in [method] of job.toml.'
    )


def plan_to_dict(found: Plan) -> dict[str, Any]:
    """The plan as plain data, with each candidate's recipe by its API names."""
    candidates = [
        to_plain(c) | {"recipe": to_plain(to_dict(c.recipe)), "survival_bound": c.survival_bound}
        for c in found.candidates
    ]
    return to_plain(found) | {"candidates": candidates}
