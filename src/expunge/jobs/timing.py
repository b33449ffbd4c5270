"""How long a job's own steps take here: the real loops, run for a second and stopped.

The first step of a loop is slow (memory, threads, caches) and is counted once; the median of the
others stands for the rest. Data loading, clipping, noise and the copy that is shown after a step
are in them, because they are what the run does.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

from torch import nn

from expunge.accounting.precision import NoisyRecipe
from expunge.jobs.data import Split, make_loader
from expunge.jobs.jobfile import JobFile
from expunge.jobs.prepare import Prepared
from expunge.jobs.tables import FinetuneTable
from expunge.jobs.tracking import SETS
from expunge.jobs.training import count_training_steps, list_options
from expunge.noisy.model import list_uncertified
from expunge.noisy.noise import SeededNoise
from expunge.noisy.run import unlearn
from expunge.recipes import OutputPerturbation
from expunge.training.evaluation import measure
from expunge.training.randomness import seeded_random
from expunge.training.train import train

SECONDS, FEWEST, MOST = 1.0, 4, 200
BATCHES = 4


class _Enough(KeyboardInterrupt):
    """Enough steps were timed."""


class Clock:
    """When each step of a loop ended; it stops the loop when it knows enough.

    >>> clock = Clock()
    >>> clock()
    >>> clock.estimate(1) == clock.ends[0] - clock.began
    True
    """

    def __init__(self) -> None:
        self.began, self.ends = time.perf_counter(), list[float]()

    def __call__(self, *_: object) -> None:
        self.ends.append(time.perf_counter())
        long = self.ends[-1] - self.ends[0] >= SECONDS
        if len(self.ends) >= MOST or (long and len(self.ends) >= FEWEST):
            raise _Enough

    def estimate(self, steps: int) -> float:
        """Seconds of so many steps, with what comes before the first one."""
        if not self.ends:
            return time.perf_counter() - self.began
        between = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        each = statistics.median(between) if between else 0.0
        return self.ends[0] - self.began + max(steps - 1, 0) * each


def time_noise(made: JobFile, ready: Prepared, recipe: NoisyRecipe) -> float:
    """Seconds of a noisy run with this recipe, from copying the model to its last step."""
    job, clock = made.job, Clock()
    steps = 0 if isinstance(recipe, OutputPerturbation) else recipe.steps
    with contextlib.suppress(_Enough):
        unlearn(
            ready.model,
            make_loader(ready.splits.retain, job.method.batch_size, seed=0),
            recipe,
            loss_fn=ready.loss_fn,
            centre="zero" if ready.centre is None else ready.centre,
            public=_list_public(ready.model),
            buffers="reset",
            noise=SeededNoise(0),
            on_step=clock,
        )
    found = clock.estimate(steps)
    if job.model.buffers == "reset" and len(clock.ends) < steps:  # statistics are estimated anew
        found += _time_pass(made, ready, ready.splits.retain)
    return found


def time_training(ready: Prepared, table: FinetuneTable) -> float:
    """Seconds of the training of ``[finetune]``, on a copy."""
    clock, model = Clock(), copy.deepcopy(ready.model)
    loader = make_loader(ready.splits.retain, table.batch_size, seed=0)
    options: dict[str, Any] = list_options(table, 0) | {"compile": False}
    with contextlib.suppress(_Enough), seeded_random(0, loader):
        train(model, loader, on_step=clock, loss_fn=ready.loss_fn, **options)
    return clock.estimate(count_training_steps(ready.splits.retain, table))


def time_evaluation(made: JobFile, ready: Prepared) -> float:
    """Seconds of measuring the model once on all sets of ``[evaluation]``."""
    table = made.job.evaluation
    splits = {name: getattr(ready.splits, name) for name in SETS if name in table.sets}
    asked = [split.first(table.most) for split in splits.values() if split is not None]
    return sum(_time_pass(made, ready, split) for split in asked if len(split) > 0)


def _time_pass(made: JobFile, ready: Prepared, split: Split) -> float:
    """Seconds of one forward pass over a set, from a few of its batches."""
    size = made.job.evaluation.batch_size
    part, taken = split.first(BATCHES * size), math.inf
    for _ in range(2):  # the first one is slow
        start = time.perf_counter()
        measure(ready.model, make_loader(part, size), ready.loss_fn)
        taken = min(taken, time.perf_counter() - start)
    return taken * len(split) / len(part)


@dataclass(frozen=True)
class Times:
    """Seconds of each part of a job, measured here; None where it has no such part."""

    noise: float | None
    training: float | None
    evaluation: float

    def add_up(self, control: bool) -> float:
        """All of a run: a noisy one is measured before, after the noise and after fine-tuning."""
        parts = [part for part in (self.noise, self.training) if part is not None]
        again = 2 if control and self.noise is not None else 1
        return again * (sum(parts) + len(parts) * self.evaluation) + self.evaluation


def _list_public(model: nn.Module) -> dict[str, Any] | None:
    """Whatever is not trained, compared with itself: only the time counts here."""
    return {name: t.detach().clone() for name, t in list_uncertified(model).items()} or None
