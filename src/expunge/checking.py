"""Whether a record agrees with itself: what ran must be what its recipe says, step by step."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from itertools import groupby

import numpy as np

from expunge.recipes import (
    GradientClipping,
    ModelClipping,
    OutputPerturbation,
    Recipe,
    Retraining,
    method_name,
    schedule,
)
from expunge.record import RunRecord, Trace

# ‖ξ‖/σ is within 12 of √d but for less than 1 draw in 10³⁰, whatever the number of parameters d.
NOISE_DEVIATIONS = 12.0
# Model clipping is recomputed step by step in 50 digits when it is verified.
MAX_MIXING_STEPS = 100_000
# Recorded norms are float32 at worst.
NORM_TOLERANCE = 1e-5


def find_contradictions(record: RunRecord) -> list[str]:
    """Every reason why this record cannot be certified, as sentences; none if it can."""
    recipe = record.recipe
    if not isinstance(recipe, OutputPerturbation | GradientClipping | ModelClipping | Retraining):
        return [
            f"the guarantee of {method_name(recipe)} rests on a training run that a record of "
            "unlearning does not hold; guarantee() gives its numbers"
        ]
    found = [*_check_noise_source(record), *_check_weights(record), *check_time(record.created)]
    if record.parameters < 1:
        found.append("parameters is 0: nothing was certified")
    if isinstance(recipe, ModelClipping) and recipe.steps > MAX_MIXING_STEPS:
        found.append(f"steps is {recipe.steps}; at most {MAX_MIXING_STEPS} can be verified")
    if isinstance(recipe, GradientClipping):
        least = 2 * record.grid * math.sqrt(record.parameters)
        if record.execution.rounding < least * (1 - 1e-9):
            found.append(
                f"execution.rounding is {record.execution.rounding!r}; a grid of {record.grid!r} "
                f"costs at least {least!r}"
            )
    steps = sum(count for count, _, _ in summarise_schedule(recipe))
    if len(record.trace) != steps:
        return [*found, f"the trace has {len(record.trace)} steps; the recipe has {steps}"]
    return [*found, *_check_trace(record.trace, record.parameters, recipe)]


def expand_schedule(recipe: Recipe) -> list[tuple[float, float]]:
    """(learning rate, noise) of every noisy step.

    >>> expand_schedule(OutputPerturbation(start_clip=1.0, noise_std=0.5))
    [(0.0, 0.5)]
    """
    match recipe:
        case OutputPerturbation(noise_std=sigma):
            return [(0.0, sigma)]
        case GradientClipping(steps=T) | ModelClipping(steps=T):
            rates, sigmas = schedule(recipe.learning_rate, T), schedule(recipe.noise_std, T)
            return list(zip(rates.tolist(), sigmas.tolist(), strict=True))
        case _:
            return []


def summarise_schedule(recipe: Recipe) -> list[tuple[int, float, float]]:
    """The schedule as runs of equal steps: (how many, learning rate, noise).

    >>> summarise_schedule(ModelClipping(model_clip=1.0, learning_rate=[0.1, 0.1, 0.2],
    ...                                  weight_decay=0.0, noise_std=2.0, steps=3))
    [(2, 0.1, 2.0), (1, 0.2, 2.0)]
    """
    if isinstance(recipe, GradientClipping | ModelClipping):
        rate, sigma = recipe.learning_rate, recipe.noise_std
        if isinstance(rate, float) and isinstance(sigma, float):
            return [(recipe.steps, rate, sigma)]
    runs = groupby(expand_schedule(recipe))
    return [(sum(1 for _ in run), rate, sigma) for (rate, sigma), run in runs]


def _check_noise_source(record: RunRecord) -> list[str]:
    source, found = record.noise.get("source"), list[str]()
    if isinstance(record.recipe, Retraining):
        return found
    if source == "none":
        found.append("noise.source is 'none', but the recipe draws noise")
    if record.noise.get("releasable") is not (source == "system"):
        found.append(f"noise.releasable is {record.noise.get('releasable')!r} for {source!r} noise")
    if source == "system" and record.noise_keys != 1 + record.resumed:
        found.append(
            f"noise_keys is {record.noise_keys}; a run resumed {record.resumed} times "
            f"uses {1 + record.resumed}"
        )
    return found


def _check_weights(record: RunRecord) -> list[str]:
    found = list[str]()
    if record.centre is not None and record.centre == record.weights_before:
        found.append("the centre is the old model itself; it must be public")
    if (record.frozen is None) != (len(record.frozen_names) == 0):
        found.append("frozen and frozen_names must be given together")
    if (record.buffers == "none") != (len(record.buffer_names) == 0):
        found.append(f"buffers is {record.buffers!r} with {len(record.buffer_names)} buffers named")
    unexplained = record.finetune is None and record.buffers != "reset"
    noisy = not isinstance(record.recipe, Retraining)
    if unexplained and noisy and record.weights_noisy != record.weights_after:
        found.append("the weights changed after the last noise, but no fine-tuning is recorded")
    return found


def check_time(created: str) -> list[str]:
    """A sentence unless this is an ISO 8601 time in UTC."""
    try:
        offset = datetime.fromisoformat(created).utcoffset()
    except ValueError:
        offset = None
    valid = "an ISO 8601 time in UTC"
    return [] if offset == timedelta(0) else [f"created is {created!r}; it must be {valid}"]


def _check_trace(trace: Trace, parameters: int, recipe: Recipe) -> list[str]:
    found = list[str]()
    if len(trace) == 0:
        return found
    rates, sigmas = (np.array(column) for column in zip(*expand_schedule(recipe), strict=True))
    norms = np.array(trace.noise_norm)
    applied = np.array(trace.gradient_norm) * np.array(trace.clip_factor)
    found += _name_steps("learning_rate differs from the recipe", rates != trace.learning_rate)
    found += _name_steps("noise_std differs from the recipe", sigmas != trace.noise_std)
    if isinstance(recipe, GradientClipping):
        above = applied > recipe.grad_clip * (1 + NORM_TOLERANCE)
        found += _name_steps("the clipped gradient is longer than grad_clip", above)
    radius = _projection_radius(recipe) * (1 + NORM_TOLERANCE)
    found += _name_steps("the model is outside its clip", np.array(trace.model_norm) > radius)
    off = np.abs(norms - sigmas * math.sqrt(parameters)) > NOISE_DEVIATIONS * sigmas
    found += _name_steps("the noise is too short or too long for its noise_std", off)
    if len(norms) > 2 and parameters > 16 and norms[0] > 0 and np.ptp(norms) == 0:
        found.append("every step added noise of the same norm: one draw was used again")
    return found


def _projection_radius(recipe: Recipe) -> float:
    """The ball the model is in right before each noise, where the recipe projects onto one."""
    match recipe:
        case OutputPerturbation(start_clip=radius) | ModelClipping(model_clip=radius):
            return radius
        case GradientClipping(model_clip=float(radius)):
            return radius
        case _:
            return math.inf


def _name_steps(what: str, wrong: np.typing.NDArray[np.bool_]) -> list[str]:
    places = np.flatnonzero(wrong)
    if len(places) == 0:
        return []
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return [f"{what} at step {int(places[0])}{more}"]
