"""What a job would do, before it does it: recipe, cost, and what its certificate would say."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from expunge.accounting.guarantee import guarantee_to_dict
from expunge.accounting.planning import Plan
from expunge.accounting.precision import NoisyRecipe
from expunge.jobs.data import make_loader
from expunge.jobs.directory import check_output
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.loading import importing_from
from expunge.jobs.prepare import Prepared, prepare
from expunge.noisy.model import copy_subject
from expunge.noisy.noise import SeededNoise
from expunge.noisy.run import unlearn
from expunge.recipes import Guarantee, OutputPerturbation
from expunge.training.batches import move_batch
from expunge.training.losses import compute_loss
from expunge.training.randomness import untouched_random

_NESTED = ("recipe", "guarantee", "plan")


@dataclass(frozen=True)
class Preview:
    """``gradient_evaluations`` counts examples in the noisy steps; ``seconds`` is an estimate from
    timing one gradient and one draw of noise on this machine."""

    directory: Path
    recipe: NoisyRecipe
    guarantee: Guarantee
    plan: Plan | None
    calibrated: bool
    parameters: int
    retain: int
    forget: int
    steps: int
    gradient_evaluations: int
    finetune_gradient_evaluations: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """One flat object, as ``--json`` prints it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NESTED}
        plain["directory"] = str(self.directory)
        return plain | guarantee_to_dict(self.recipe, self.guarantee)


def preview_job(path: str | Path, *, out: str | Path | None = None) -> Preview:
    """Read, build and check everything, time a step, and write nothing.

    >>> preview_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    made = read_job(path)
    target = made.locate(made.job.output.dir) if out is None else Path(out)
    check_output(target, resume=False)
    with importing_from(made.folder):
        ready = prepare(made)
        check_output(target, False, ready.needed_bytes)
        gradient, noise = time_step(made, ready)
    recipe, settled = ready.settled.recipe, ready.settled
    kept, batch = len(ready.parts.retain), min(made.job.method.batch_size, len(ready.parts.retain))
    steps = 0 if isinstance(recipe, OutputPerturbation) else recipe.steps
    tuning = 0 if made.job.finetune is None else math.ceil(made.job.finetune.epochs * kept)
    seconds = (steps * batch + tuning) / batch * gradient + max(steps, 1) * noise
    return Preview(
        directory=target,
        recipe=recipe,
        guarantee=settled.guarantee,
        plan=settled.plan,
        calibrated=settled.calibrated,
        parameters=ready.parameters,
        retain=kept,
        forget=len(ready.parts.forget),
        steps=steps,
        gradient_evaluations=steps * batch,
        finetune_gradient_evaluations=tuning,
        seconds=seconds * (2 if made.job.evaluation.control else 1),
    )


def time_step(made: JobFile, ready: Prepared) -> tuple[float, float]:
    """Seconds of one minibatch gradient and of one draw of noise over all certified parameters.

    Both on copies that start at the centre: nothing of the old model is used or kept.
    """
    model, method = made.job.model, made.job.method
    loader = make_loader(ready.parts.retain, method.batch_size, seed=0)
    subject = copy_subject(
        ready.model, ready.centre, buffers=model.buffers, public_buffers=model.public_buffers
    )
    with untouched_random():
        batch = move_batch(next(iter(loader)), subject.device)
        gradient = math.inf
        for _ in range(2):
            start = time.perf_counter()
            compute_loss(subject.model, batch, ready.loss_fn).backward()
            gradient = min(gradient, time.perf_counter() - start)
            subject.model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    unlearn(
        ready.model,
        [batch],
        OutputPerturbation(start_clip=0.0, noise_std=1.0),
        loss_fn=ready.loss_fn,
        centre=ready.centre,
        noise=SeededNoise(0),
        start="centre",
        buffers=model.buffers,
        public_buffers=model.public_buffers,
    )
    return gradient, time.perf_counter() - start
