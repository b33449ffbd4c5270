"""Whether what is said of a run agrees with itself; a trace also with its recipe, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from expunge.certificates.hashes import combine_leaves
from expunge.certificates.record import Noise, Record, Run, Trace
from expunge.recipes import (
    IDEAL,
    GradientClipping,
    LinearModel,
    NoisyRecipe,
    Recipe,
    Retraining,
    Sharding,
    schedule,
)

Array = npt.NDArray[np.float64]
# ‖ξ‖/σ is within 12 of √d but for less than 1 draw in 10³⁰, whatever the number of parameters d.
NOISE_DEVIATIONS = 12.0


def find_contradictions(record: Record) -> list[str]:
    """Every reason why this record cannot be certified, as sentences; none if it can."""
    found = list(check_run(record))
    (rates, sigmas), trace = list_steps(record.recipe), record.trace or Trace()
    if len(trace) != len(rates):
        return [*found, f"the trace has {len(trace)} steps; the recipe has {len(rates)}"]
    norms = np.array(trace.noise_norm)
    with np.errstate(over="ignore"):
        off = np.abs(norms - sigmas * math.sqrt(record.parameters)) > NOISE_DEVIATIONS * sigmas
    for what, wrong in (
        ("learning_rate differs from the recipe", rates != trace.learning_rate),
        ("noise_std differs from the recipe", sigmas != trace.noise_std),
        ("the noise is too short or too long for its noise_std", off),
    ):
        if np.any(wrong):
            found.append(f"{what} at step {int(np.argmax(wrong))}")
    # The noise of all steps, each over its σ, is one longer draw, and there is one of it to judge.
    drawn = sigmas > 0
    with np.errstate(over="ignore"):
        length = float(np.linalg.norm(norms[drawn] / sigmas[drawn]))
    if abs(length - math.sqrt(record.parameters * int(drawn.sum()))) > NOISE_DEVIATIONS / 2:
        found.append("the noise of all steps together is too short or too long for its noise_std")
    if len(norms) > 2 and record.parameters > 16 and norms[0] > 0 and np.ptp(norms) == 0:
        found.append("every step added noise of the same norm: one draw was used again")
    return found


def list_steps(recipe: Recipe) -> tuple[Array, Array]:
    """Learning rate and noise of every entry of a trace.

    >>> from expunge.recipes import OutputPerturbation
    >>> list_steps(OutputPerturbation(start_clip=1.0, noise_std=2.0))
    (array([0.]), array([2.]))
    """
    if not isinstance(recipe, NoisyRecipe):
        return np.zeros(0), np.zeros(0)
    steps, rate = getattr(recipe, "steps", 1), getattr(recipe, "learning_rate", 0.0)
    return schedule(rate, steps), schedule(recipe.noise_std, steps)


def check_run(run: Run) -> Iterator[str]:
    """What contradicts itself in what record and certificate both say."""
    recipe, w, noise, samples = run.recipe, run.weights, run.noise, run.retained.samples
    grid, ran = run.grid, run.execution
    noisy, linear = isinstance(recipe, NoisyRecipe), isinstance(recipe, LinearModel)
    starts = ("model", "centre") if noisy else ("build",)
    if run.start not in starts:
        yield f"start is {run.start!r}; it must be {' or '.join(starts)} for this method"
    if (run.origin is None) == noisy:
        yield f"origin is {run.origin!r}; a noisy run, and no other, has a centre"
    if (run.missing or run.buffers) and not noisy:
        yield "missing or buffers is given, but no old model was used"
    needed = not isinstance(recipe, LinearModel | Sharding) or run.forget.samples > 0
    if run.forget.count < 1 and needed:
        yield "forget names nobody; a certificate is about a request"
    if run.forget.root == run.retained.root:
        yield "forget and retained are one set of people"
    if samples < 1:
        yield "retained has no samples: nothing was learned"
    if run.training is None and isinstance(recipe, Retraining | Sharding):
        yield "training is missing: it says what the release was trained by"
    if run.training is not None and run.training.examples != samples:
        yield f"training was handed {run.training.examples} examples; {samples} are retained"
    if (run.statistics is None) == linear:
        yield "statistics must be given exactly for linear models"
    if run.statistics is not None and run.statistics.samples != samples:
        yield f"statistics are of {run.statistics.samples} rows; {samples} are retained"
    if not 2020 <= int(run.created[:4]) <= datetime.now(UTC).year + 10:
        yield f"created is {run.created!r}, which is before 2020 or more than ten years ahead"

    for name, names in (
        *((name, getattr(run, name)) for name in ("buffers", "missing", "unchanged")),
        ("weights.published.names", () if w.published is None else w.published.names),
    ):
        if len(set(names)) < len(names):
            yield f"{name} has a name twice"
    if (w.noisy is None) == noisy:
        yield "weights.noisy must be given exactly for noisy runs"
    if (w.start is None) != linear:
        yield "weights.start, the hash of what build() gave, must be given but for linear models"
    for name in w.files:
        config = name.endswith(".json") and not name.endswith(".index.json")
        part = run.sharding is not None and name.startswith(("constituents/", "adapters/"))
        if not config and not part:
            yield f"weights.files names {name!r}, which is no configuration"
    if w.old is not None and w.old == w.start:
        yield "build() gave the old model itself; it must be public"
    if w.noisy is not None and w.noisy in (w.old, w.start):
        yield "weights.noisy is what the run began with: nothing was added to it"
    before = run.applied[0].before if run.applied else w.after
    if w.noisy not in (None, before) and run.training is None and not run.buffers:
        yield "the weights changed after the last noise, but no training is recorded"
    links = [*(one.before for one in run.applied[1:]), w.after]
    if any(one.after != link for one, link in zip(run.applied, links, strict=False)):
        yield "applied does not lead from each change to the next and to weights.after"

    if not noisy and (noise != Noise() or grid != 0 or ran != IDEAL):
        yield "noise or its precision is given, but an exact run has none"
    if noisy and noise.source == "none":
        yield "noise.source is 'none', but the recipe draws noise"
    if noise.source == "system" and noise.keys != 1 + run.resumed:
        yield f"noise.keys is {noise.keys}; a run resumed {run.resumed} times uses one more"
    if grid > 0 and math.frexp(grid)[0] != 0.5:
        yield f"grid is {grid!r}; it must be 0 or a power of two"
    # Where a step ends in a projection, rounding goes towards the centre and is free.
    least = 2 * grid * math.sqrt(run.parameters) if isinstance(recipe, GradientClipping) else 0.0
    if ran.rounding < least * (1 - 1e-9):
        yield f"rounding is {ran.rounding!r}; a grid of {grid!r} costs at least {least!r}"
    yield from _check_shards(run)


def _check_shards(run: Run) -> Iterator[str]:
    recipe, shards = run.recipe, run.sharding
    if not isinstance(recipe, Sharding) or shards is None:
        if isinstance(recipe, Sharding) or shards is not None:
            yield "sharding must be given exactly for shards: it says what the constituents are"
        return
    sizes = {len(shards.samples), len(shards.hashes), len(shards.trained_from) or recipe.shards}
    if sizes != {recipe.shards}:
        yield f"sharding must have {recipe.shards} samples, hashes and trained_from"
    if sum(shards.samples) != run.retained.samples:
        yield f"shards have {sum(shards.samples)} samples; {run.retained.samples} are retained"
    if any(first > recipe.slices for first in shards.trained_from):
        yield f"sharding.trained_from must be 0 or a slice from 1 to {recipe.slices}"
    empty, pairs = combine_leaves([]), zip(shards.samples, shards.hashes, strict=False)
    if any((samples == 0) != (digest == empty) for samples, digest in pairs):
        yield "sharding.hashes has a constituent for a shard without samples, or lacks one"
