"""What a job would do and cost, before it runs: everything is checked, nothing is written."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.accounting.guarantee import guarantee_to_dict
from expunge.jobs.costs import time_state
from expunge.jobs.directory import check_output
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.loading import explaining, importing_from
from expunge.jobs.methods import RouteName, Settled, choose_route, explain_route, settle
from expunge.jobs.prepare import Prepared, prepare
from expunge.jobs.states import read_request
from expunge.jobs.timing import (
    Times,
    time_ending,
    time_evaluation,
    time_noise,
    time_training,
    warm_up,
)
from expunge.jobs.training import tell_why
from expunge.recipes import OutputPerturbation, Retraining


@dataclass(frozen=True)
class Preview:
    """``retain`` and ``forget`` count samples; ``gradient_evaluations`` examples in the noisy
    steps, ``finetune_…`` in the training after them, which of retraining is all of it; ``seconds``
    is an estimate of the whole run on idle cores, from running its own steps here. ``why`` says why
    a plan takes its ``route``."""

    directory: Path
    route: RouteName
    why: str | None
    settled: Settled
    parameters: int
    retain: int
    forget: int
    retain_people: int
    forget_people: int
    steps: int
    gradient_evaluations: int
    finetune_gradient_evaluations: int
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """One flat object, as ``--json`` prints it."""
        plain = {name: value for name, value in vars(self).items() if name != "settled"}
        plain |= {"directory": str(self.directory), "calibrated": self.settled.calibrated}
        return plain | guarantee_to_dict(self.settled.recipe, self.settled.guarantee)


def preview_job(path: str | Path, *, out: str | Path | None = None) -> Preview:
    """Read, build and check everything, time a few steps, and write nothing.

    >>> preview_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    made = read_job(path)
    target, job = made.find_target(out), made.job
    check_output(target, resume=False)
    if choose_route(job) == "state":
        return _preview_state(made, target)
    with importing_from(made.folder):
        began = time.perf_counter()
        ready = prepare(made)
        preparing = time.perf_counter() - began
        check_output(target, False, ready.needed_bytes)
        with explaining("a step cannot be timed"):
            times = time_job(made, ready, preparing)
    kept, recipe = len(ready.splits.retain), ready.settled.recipe
    batch = min(job.method.batch_size, kept)
    steps = 0 if isinstance(recipe, OutputPerturbation | Retraining) else recipe.steps
    tuning = 0 if job.finetune is None else math.ceil(job.finetune.epochs * kept)
    return Preview(
        directory=target,
        route=choose_route(job),
        why=tell_why(made, ready.frozen) if job.method.name == "plan" else None,
        settled=ready.settled,
        parameters=ready.parameters,
        retain=kept,
        forget=len(ready.splits.forget),
        retain_people=ready.splits.retain.count_people(),
        forget_people=ready.splits.forget.count_people(),
        steps=steps,
        gradient_evaluations=steps * batch,
        finetune_gradient_evaluations=tuning,
        seconds=times.add_up(job.evaluation.control),
    )


def time_job(made: JobFile, ready: Prepared, preparing: float) -> Times:
    """Seconds of the parts of a job as it stands, of which ``preparing`` is known."""
    recipe, table = ready.settled.recipe, made.job.finetune
    once = preparing + warm_up(made, ready, table) + time_ending(ready)
    return Times(
        noise=None if isinstance(recipe, Retraining) else time_noise(made, ready, recipe),
        training=None if table is None else time_training(made, ready, table),
        evaluation=time_evaluation(made, ready),
        once=once,
    )


def _preview_state(made: JobFile, target: Path) -> Preview:
    """A request to a state: who is held, and how long it takes."""
    with importing_from(made.folder):
        request = read_request(made)
        with explaining("a request cannot be timed"):
            seconds = time_state(request)
    return Preview(
        directory=target,
        route="state",
        why=explain_route(made.job),
        settled=settle(made.job.method, made.job.target, None),
        parameters=0,
        retain=0,
        forget=request.examples,
        retain_people=0,
        forget_people=len(request.ids),
        steps=0,
        gradient_evaluations=0,
        finetune_gradient_evaluations=0,
        seconds=seconds,
    )
