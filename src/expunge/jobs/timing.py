"""How long a job's own steps take here: the real loops, run for a second and stopped.

What torch loads for the first steps of all, and what comes before the first step of a loop, is
counted once. The other steps count as the quietest quarter of what was timed, in groups of a few: a
loader that brings its batches in bursts is averaged, and whatever else the machine did meanwhile is
left out. So it is an estimate for idle cores; :func:`tell_load` says where they are not.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

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
from expunge.processes.weights import hash_weights, list_tensors
from expunge.recipes import OutputPerturbation
from expunge.training.evaluation import measure
from expunge.training.randomness import seeded_random
from expunge.training.train import train

SECONDS, FEWEST, GROUP = 1.0, 4, 8
HASHES = 4  # of the old weights, the start, the result and the release


class Enough(KeyboardInterrupt):
    """Enough steps were timed."""


class Clock:
    """When each step of a loop ended; it stops the loop when it knows enough.

    >>> clock = Clock()
    >>> clock()
    >>> clock.estimate(1) == clock.ends[0] - clock.began
    True
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds, self.ends = seconds, list[float]()
        self.began = time.perf_counter()

    def __call__(self, *_: object) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) > FEWEST and self.ends[-1] - self.ends[0] >= self.seconds:
            raise Enough

    def estimate(self, steps: int, starts: int = 1) -> float:
        """Seconds of so many steps, and of what comes before the first one at every start."""
        if not self.ends:
            return time.perf_counter() - self.began
        between = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        first = self.ends[0] - self.began
        return starts * first + max(steps - starts, 0) * find_quiet(between)


def find_quiet(seconds: Sequence[float]) -> float:
    """The mean of a quiet group of steps: one at the lower quartile of all groups.

    >>> find_quiet([1.0, 3.0] * 16), find_quiet([2.0] * 24 + [200.0] * 40), find_quiet([])
    (2.0, 2.0, 0.0)
    """
    if not seconds:
        return 0.0
    size = max(min(GROUP, len(seconds) // 4), 1)
    groups = [seconds[at : at + size] for at in range(0, len(seconds) - size + 1, size)]
    return sorted(sum(group) / size for group in groups)[len(groups) // 4]


def tell_load() -> str | None:
    """One sentence where other work keeps the cores busy, so that an estimate for idle cores is too
    low; None where it does not, or nobody knows."""
    if not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return None
    return (
        f"The load is {load:.1f} on {cores} core{'' if cores == 1 else 's'}: beside other work it "
        "takes longer, and much longer where threads wait for each other; OMP_WAIT_POLICY=passive "
        "in the environment lets them sleep meanwhile."
    )


def time_noise(made: JobFile, ready: Prepared, recipe: NoisyRecipe) -> float:
    """Seconds of a noisy run with this recipe, from copying the model to its last step."""
    job, clock = made.job, Clock()
    steps = 0 if isinstance(recipe, OutputPerturbation) else recipe.steps
    with contextlib.suppress(Enough):
        unlearn(
            ready.model,
            make_loader(
                ready.splits.retain, job.method.batch_size, seed=0, workers=job.data.workers
            ),
            recipe,
            loss_fn=ready.loss_fn,
            centre="zero" if ready.centre is None else ready.centre,
            public=_list_public(ready.model),
            buffers="reset",
            noise=SeededNoise(0),
            on_step=clock,
        )
    found = clock.estimate(steps)
    if job.model.buffers == "reset":  # statistics are estimated anew
        found += _time_pass(made, ready, ready.splits.retain)
    return found


def warm_up(made: JobFile, ready: Prepared, table: FinetuneTable | None) -> float:
    """Seconds of the first few steps of training in this process: torch loads what it needs."""
    began = time.perf_counter()
    if table is not None:
        time_training(made, ready, table, seconds=0.0)
    return time.perf_counter() - began


def time_training(
    made: JobFile, ready: Prepared, table: FinetuneTable, seconds: float = SECONDS
) -> float:
    """Seconds of the training of ``[finetune]``, on a copy."""
    retain, workers = ready.splits.retain, made.job.data.workers
    clock, model = Clock(seconds), copy.deepcopy(ready.model)
    loader = make_loader(retain, table.batch_size, seed=0, workers=workers)
    options: dict[str, Any] = list_options(table, 0) | {"compile": False}
    with contextlib.suppress(Enough), seeded_random(0, loader):
        train(model, loader, on_step=clock, loss_fn=ready.loss_fn, **options)
    passes = 1 if workers == 0 else math.ceil(table.epochs)  # workers start anew in every pass
    return clock.estimate(count_training_steps(retain, table), passes)


def time_evaluation(made: JobFile, ready: Prepared) -> float:
    """Seconds of measuring the model once on all sets of ``[evaluation]``."""
    table = made.job.evaluation
    splits = {name: getattr(ready.splits, name) for name in SETS if name in table.sets}
    asked = [split.first(table.most) for split in splits.values() if split is not None]
    return sum(_time_pass(made, ready, split) for split in asked if len(split) > 0)


def _time_pass(made: JobFile, ready: Prepared, split: Split) -> float:
    """Seconds of one forward pass over a set; each batch ends with its loss."""
    size, found = made.job.evaluation.batch_size, math.inf
    for _ in range(2):  # the first one is slow
        clock = Clock(SECONDS / 4)

        def lose(output: Any, target: Any, clock: Clock = clock) -> Tensor:
            loss = ready.loss_fn(output, target)
            clock()
            return loss

        with contextlib.suppress(Enough):
            measure(ready.model, make_loader(split, size, workers=made.job.data.workers), lose)
        found = min(found, clock.estimate(math.ceil(len(split) / size)))
    return found


def time_ending(ready: Prepared) -> float:
    """Seconds of hashing the weights as often as a run does; its page takes less than one."""
    began = time.perf_counter()
    hash_weights(list_tensors(ready.model))
    return HASHES * (time.perf_counter() - began)


@dataclass(frozen=True)
class Times:
    """Seconds of each part of a job, measured here; None where it has no such part. ``once`` is
    what every run has, whatever its route: made ready and warm before, hashed after."""

    noise: float | None
    training: float | None
    evaluation: float
    once: float = 0.0

    def add_up(self, control: bool) -> float:
        """All of a run: a noisy one is measured before, after the noise and after fine-tuning."""
        parts = [part for part in (self.noise, self.training) if part is not None]
        again = 2 if control and self.noise is not None else 1
        return self.once + again * (sum(parts) + len(parts) * self.evaluation) + self.evaluation


def _list_public(model: nn.Module) -> dict[str, Any] | None:
    """Whatever is not trained, compared with itself: only the time counts here."""
    return {name: t.detach().clone() for name, t in list_uncertified(model).items()} or None
