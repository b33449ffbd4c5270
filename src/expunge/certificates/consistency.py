"""Whether a record agrees with itself: what ran must be what its recipe says, step by step."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from itertools import groupby

import numpy as np

from expunge.accounting.guarantee import is_exact
from expunge.accounting.precision import (
    NoisyRecipe,
    bound_descent_rounding,
    bound_solution_rounding,
    find_disagreements,
)
from expunge.certificates.record import CentreOrigin, RunRecord, Sharding, Trace
from expunge.certificates.schema import OriginWire, ShardingWire
from expunge.recipes import (
    STATED,
    ConvexHeadRecipe,
    DescentRecipe,
    ExactStatistics,
    GradientClipping,
    GroupDPSGD,
    HeadRecipe,
    ModelClipping,
    NoisyDescent,
    OutputPerturbation,
    Problem,
    Recipe,
    Retraining,
    RewindToDelete,
    ShardedTraining,
    schedule,
)

# ‖ξ‖/σ is within 12 of √d but for less than 1 draw in 10³⁰, whatever the number of parameters d.
NOISE_DEVIATIONS = 12.0
# Recorded norms are float32 at worst.
NORM_TOLERANCE = 1e-5


def find_contradictions(record: RunRecord) -> list[str]:
    """Every reason why this record cannot be certified, as sentences; none if it can."""
    recipe = record.recipe
    found = [*_check_noise_source(record), *_check_weights(record), *check_time(record.created)]
    found += check_start(recipe, record.start, record.centre)
    if isinstance(recipe, HeadRecipe) and record.statistics is None:
        found.append("statistics is missing: it says what the head was computed from")
    if isinstance(recipe, ConvexHeadRecipe) and not is_exact(recipe) and record.forget is None:
        found.append("forget is missing: a noisy head must name the set that its noise is for")
    if isinstance(recipe, ShardedTraining):
        found += check_shards(recipe, record.shards)
    if record.parameters < 1:
        found.append("parameters is 0: nothing was certified")
    least = least_rounding(recipe, record.problem, record.grid, record.parameters)
    if record.execution.rounding < least * (1 - 1e-9):
        found.append(
            f"execution.rounding is {record.execution.rounding!r}; a grid of {record.grid!r} "
            f"costs at least {least!r}"
        )
    if isinstance(recipe, DescentRecipe):
        found += _check_problem(record, recipe)
    if isinstance(recipe, DescentRecipe | GroupDPSGD):
        found += _check_training(record, recipe.group_size)
    steps = sum(count for count, _, _ in summarise_schedule(recipe))
    if len(record.trace) != steps:
        return [*found, f"the trace has {len(record.trace)} steps; the recipe has {steps}"]
    return [*found, *_check_trace(record.trace, record.parameters, recipe)]


def least_rounding(recipe: Recipe, problem: Problem | None, grid: float, parameters: int) -> float:
    """The least that a grid adds to each step's sensitivity; 0 where rounding is free."""
    match recipe:
        case GradientClipping():
            return 2 * grid * math.sqrt(parameters)
        case NoisyDescent() | RewindToDelete() if grid > 0:
            return bound_descent_rounding(recipe, problem or STATED, grid, parameters)
        case ConvexHeadRecipe():
            return bound_solution_rounding(grid, parameters)
        case _:
            return 0.0


def check_shards(recipe: ShardedTraining, sharding: Sharding | ShardingWire | None) -> list[str]:
    """What is wrong with the description of an ensemble's constituents."""
    if sharding is None:
        return ["shards is missing: it says what the constituents are"]
    columns = (sharding.samples, sharding.hashes, sharding.trained_from)
    found = [
        f"shards.{name} has {len(column)} entries; the recipe has {recipe.shards} shards"
        for name, column in zip(("samples", "hashes", "trained_from"), columns, strict=True)
        if len(column) != recipe.shards and not (name == "trained_from" and not column)
    ]
    if not any(sharding.samples):
        found.append("shards.samples are all 0: nothing was trained")
    if any(not 0 <= first <= recipe.slices for first in sharding.trained_from):
        found.append(f"shards.trained_from must be 0 or a slice from 1 to {recipe.slices}")
    return found


def count_keys(recipe: Recipe) -> int:
    """How many noise keys a run that was never resumed takes: noisy descent trains with one too."""
    return 2 if isinstance(recipe, NoisyDescent) else 1


def expand_schedule(recipe: Recipe) -> list[tuple[float, float]]:
    """(learning rate, noise) of every step that led to the released model.

    >>> expand_schedule(OutputPerturbation(start_clip=1.0, noise_std=0.5))
    [(0.0, 0.5)]
    """
    runs = summarise_schedule(recipe)
    return [(rate, sigma) for count, rate, sigma in runs for _ in range(count)]


def summarise_schedule(recipe: Recipe) -> list[tuple[int, float, float]]:
    """The schedule as runs of equal steps: (how many, learning rate, noise).

    >>> summarise_schedule(ModelClipping(model_clip=1.0, learning_rate=[0.1, 0.1, 0.2],
    ...                                  weight_decay=0.0, noise_std=2.0, steps=3))
    [(2, 0.1, 2.0), (1, 0.2, 2.0)]
    """
    match recipe:
        case Retraining() | ExactStatistics() | ShardedTraining() | ConvexHeadRecipe(noise_std=0.0):
            return []
        case OutputPerturbation(noise_std=sigma) | ConvexHeadRecipe(noise_std=sigma):
            return [(1, 0.0, sigma)]
        case GradientClipping(steps=T) | ModelClipping(steps=T):
            columns = schedule(recipe.learning_rate, T), schedule(recipe.noise_std, T)
            runs = groupby(zip(*(column.tolist() for column in columns), strict=True))
            return [(sum(1 for _ in run), rate, sigma) for (rate, sigma), run in runs]
        case NoisyDescent(learning_rate=rate, noise_std=sigma):
            return [(recipe.train_steps + recipe.steps, rate, sigma)]
        case RewindToDelete(learning_rate=rate, noise_std=sigma):
            return [(recipe.train_steps, rate, 0.0), (1, 0.0, sigma)]
        case GroupDPSGD(steps=T, noise_multiplier=multiplier, clip=C):
            return [(T, 0.0, multiplier * C)]


def _check_noise_source(record: RunRecord) -> list[str]:
    source, found = record.noise.get("source"), list[str]()
    if is_exact(record.recipe):
        return found
    if source == "none":
        found.append("noise.source is 'none', but the recipe draws noise")
    if record.noise.get("releasable") is not (source == "system"):
        found.append(f"noise.releasable is {record.noise.get('releasable')!r} for {source!r} noise")
    expected = count_keys(record.recipe) + record.resumed
    if source == "system" and record.noise_keys != expected:
        found.append(
            f"noise_keys is {record.noise_keys}; a run resumed {record.resumed} times "
            f"uses {expected}"
        )
    return found


def _check_problem(record: RunRecord, recipe: DescentRecipe) -> list[str]:
    found = find_disagreements(recipe, record.problem or STATED, record.parameters)
    if record.problem is None:
        found.append("problem is missing: it says where the constants of the recipe come from")
    return found


def _check_training(record: RunRecord, group_size: int) -> list[str]:
    """What holds for a run whose guarantee covers its training too."""
    found = list[str]()
    gone = 0 if record.forget is None else max(record.forget.count, record.forget.samples or 0)
    if gone > group_size:
        found.append(f"{gone} examples were forgotten; group_size is {group_size}")
    if record.execution.releases != 1 or record.parent is not None:
        found.append("one training run covers one request: releases must be 1 and parent none")
    return found


def _check_weights(record: RunRecord) -> list[str]:
    found = list[str]()
    given = record.centre is not None and record.start != "fresh"
    if given and record.centre == record.weights_before:
        found.append("the centre is the old model itself; it must be public")
    found += check_origin(record.recipe, record.origin, record.centre)
    if (record.frozen is None) != (len(record.frozen_names) == 0):
        found.append("frozen and frozen_names must be given together")
    if (record.buffers == "none") != (len(record.buffer_names) == 0):
        found.append(f"buffers is {record.buffers!r} with {len(record.buffer_names)} buffers named")
    steps = 0 if record.finetune is None else record.finetune.steps
    if record.weights_noisy != record.weights_after:
        found += check_change(record.recipe, steps, record.buffers)
    return found


def check_change(recipe: Recipe, steps: int, buffers: str) -> list[str]:
    """A sentence if weights cannot have changed after the noise, or after the start of retraining,
    by training of so many ``steps`` or by statistics that were estimated anew."""
    if steps > 0:
        return []
    if isinstance(recipe, Retraining):
        return ["the weights are not those of the start, but no step of training is recorded"]
    if is_exact(recipe) or buffers == "reset":
        return []
    return ["the weights changed after the last noise, but no fine-tuning is recorded"]


def check_origin(
    recipe: Recipe, origin: CentreOrigin | OriginWire | None, centre: str | None
) -> list[str]:
    """What is wrong with the description of the centre; runs of before it have none."""
    if origin is None:
        return []
    found = list[str]()
    if not isinstance(recipe, NoisyRecipe):
        found.append("origin must be given for noisy fine-tuning alone, which has a centre")
    if (origin.kind == "zero") != (centre is None):
        found.append(f"origin.kind is {origin.kind!r}; the hash of the centre is {centre}")
    fresh = origin.kind == "initialisation"
    if any((told is not None) != fresh for told in (origin.seed, origin.drawn)):
        found.append("origin.seed and origin.drawn must be given exactly for an initialisation")
    return found


def check_start(recipe: Recipe, start: str, centre: str | None) -> list[str]:
    """A sentence if the method cannot have started there."""
    if isinstance(recipe, Retraining) and start == "model":
        return ["start is 'model'; retraining begins at a 'fresh' one or at a public 'centre'"]
    if isinstance(recipe, Retraining) and (start == "centre") != (centre is not None):
        return [f"start is {start!r}; retraining has a centre if, and only if, it starts there"]
    trains = isinstance(recipe, GroupDPSGD | DescentRecipe)
    if isinstance(recipe, HeadRecipe) and (start == "fresh") != is_exact(recipe):
        return [f"start is {start!r}; a head is solved from zero ('fresh') or has noise ('model')"]
    if trains and start != "fresh":
        return [f"start is {start!r}; training begins at a 'fresh' one"]
    if start == "fresh" and not trains and not is_exact(recipe):
        return ["start is 'fresh'; this method starts from a model or from the centre"]
    return []


def check_time(created: str) -> list[str]:
    """A sentence unless this is an ISO 8601 time in UTC, and not far in the future."""
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        time = datetime.min
    if time.utcoffset() != timedelta(0):
        return [f"created is {created!r}; it must be an ISO 8601 time in UTC"]
    if time.year > datetime.now(UTC).year + 10:
        return [f"created is {created!r}; it must not be more than ten years ahead"]
    return []


def _check_trace(trace: Trace, parameters: int, recipe: Recipe) -> list[str]:
    found = list[str]()
    if len(trace) == 0:
        return found
    rates, sigmas = (np.array(column) for column in zip(*expand_schedule(recipe), strict=True))
    norms = np.array(trace.noise_norm)
    applied = np.array(trace.gradient_norm) * np.array(trace.clip_factor)
    if not isinstance(recipe, GroupDPSGD):  # there learning rates are post-processing
        found += _name_steps("learning_rate differs from the recipe", rates != trace.learning_rate)
    found += _name_steps("noise_std differs from the recipe", sigmas != trace.noise_std)
    if isinstance(recipe, GradientClipping):
        above = applied > recipe.grad_clip * (1 + NORM_TOLERANCE)
        found += _name_steps("the clipped gradient is longer than grad_clip", above)
    if isinstance(recipe, DescentRecipe):
        above = applied > recipe.gradient_bound * (1 + NORM_TOLERANCE)
        found += _name_steps("the gradient is longer than gradient_bound", above)
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
