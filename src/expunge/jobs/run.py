"""A job run from start to end: measure, unlearn and fine-tune, or train again, certify, write.

The output directory appears in one rename when all of it is there. Until then the run lives in a
hidden folder beside it, from which it can be resumed. What was measured on the way is in
``metrics.json`` (:mod:`expunge.reports.metrics`).
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from expunge.baselines.retraining import Initialise, retrain
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.identifiers import commit
from expunge.certificates.record import Run, list_versions
from expunge.errors import UnlearningError
from expunge.files import write_atomic
from expunge.jobs.data import Split, make_loader
from expunge.jobs.directory import (
    FULL,
    check_output,
    hash_job,
    is_finished,
    read_metrics,
    workspace_of,
    write_run,
)
from expunge.jobs.jobfile import JobFile
from expunge.jobs.loading import explaining, importing_from
from expunge.jobs.methods import choose_route
from expunge.jobs.prepare import Prepared, prepare
from expunge.jobs.ranks import CHECKPOINTS, join_job, shard_model, share_workspace
from expunge.jobs.states import Finished, forget_in_state
from expunge.jobs.tables import FinetuneTable
from expunge.jobs.tracking import SETS, Tracker, describe_scores
from expunge.jobs.training import TRAINING, count_training_steps, list_options, tell_why
from expunge.noisy.checkpoint import Checkpoint
from expunge.noisy.noise import SeededNoise, SystemNoise
from expunge.noisy.run import Start, describe_data, unlearn
from expunge.processes.agreement import check_start
from expunge.processes.group import Processes, is_restarted
from expunge.processes.stopping import Stopper, catch_signals
from expunge.recipes import Retraining, to_dict
from expunge.reports.metrics import (
    AFTER_NOISE,
    AFTER_TRAINING,
    AFTER_TUNING,
    BEFORE,
    CENTRE,
    RETRAINING,
)
from expunge.training.evaluation import measure
from expunge.training.resuming import Keeper
from expunge.training.train import fine_tune

LOG = logging.getLogger("expunge")
NO_SALT = "00" * 32  # for a file that is private anyway


def run_job(
    path: str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    accept_unchecked: bool = False,
) -> Finished:
    """Run the job of a file; a :class:`expunge.processes.stopping.Stopped` run can be resumed.

    ``accept_unchecked`` is that of :func:`expunge.certify`. A job that torchrun restarts goes on
    where it stood.

    >>> run_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    with join_job(path) as (made, processes):
        target = made.find_target(out)
        if choose_route(made.job) == "state":
            with importing_from(made.folder):
                return forget_in_state(made, target)
        if is_restarted():
            if processes.share(is_finished(made, target)):
                certificate = Certificate.load(target / "certificate.json")
                return Finished(target, certificate, read_metrics(target))
            resume = processes.share(workspace_of(target).is_dir())
        with importing_from(made.folder), catch_signals() as stopper:
            with processes.together():
                if processes.leads:
                    check_output(target, resume)
                ready = prepare(made)
                if processes.leads:
                    check_output(target, resume, ready.needed_bytes)
            identity = identify(made, ready)
            check_start(processes, identity)
            with share_workspace(target, resume, identity, processes) as work:
                running = _Running(made, ready, work, stopper, processes, progress)
                return running.finish(target, accept_unchecked)


@dataclass(eq=False)
class _Running:
    """One run on its way: what the steps below share."""

    made: JobFile
    ready: Prepared
    work: Path
    stopper: Stopper
    processes: Processes
    progress: bool
    stages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    losses: dict[float, float] = field(default_factory=dict[float, float])  # by epoch

    def __post_init__(self) -> None:
        leads, self.job = self.processes.leads, self.made.job
        self.seed, self.started = self.job.method.seed or 0, time.monotonic()
        self.identity = hash_job(self.made)
        path = self.work / "metrics.jsonl" if leads else Path(os.devnull)
        self.tracker = Tracker(path, self.ready.callback if leads else None)
        if self.job.processes.shard:
            shard_model(self.ready.model, self.processes)

    def finish(self, target: Path, accept_unchecked: bool) -> Finished:
        """All of it; the directory appears at the end or not at all."""
        with closing(self.tracker):
            with explaining("the run failed in the model or its data", FULL):
                run = self._run_all()
            certificate = self._certify(run, accept_unchecked)
            facts = {"epsilon": certificate.epsilon, "delta": certificate.delta}
            self.tracker.tell("end", **facts, releasable=certificate.releasable)
        metrics = self._summarise(run, certificate)
        write_run(
            target,
            model=run.model,
            record=run.record,
            certificate=certificate,
            metrics=metrics,
            processes=self.processes,
        )
        if self.processes.leads:
            try:
                told = (self.work / "metrics.jsonl").read_bytes()
                write_atomic(target / "metrics.jsonl", told, private=True)
            except OSError as error:
                LOG.warning("the run is complete, but metrics.jsonl could not be kept: %s", error)
        return Finished(target, certificate, metrics)

    def _run_all(self) -> Run:
        retain, forget = self.ready.splits.retain, self.ready.splits.forget
        recipe, route = self.ready.settled.recipe, choose_route(self.job)
        LOG.info(
            "%s on %d parameters: %s kept, %s forgotten",
            route, self.ready.parameters, _say_size(retain), _say_size(forget, ""),
        )  # fmt: skip
        if self.job.method.name == "plan":
            LOG.info("%s", tell_why(self.made, self.ready.frozen))
        self.tracker.tell("start", recipe=to_dict(recipe), retain=len(retain))
        self._measure(BEFORE, self.ready.model)
        if self.ready.start is not None:
            if self.job.evaluation.control:
                LOG.info("there is no control: nothing of this run depends on the old model")
            run = self._retrain(self.ready.start)
            self._measure(AFTER_TRAINING, run.model)
            return run
        run = self._unlearn_and_tune("model", None)
        if self.job.evaluation.control:
            LOG.info("the control: the same from the centre, which never saw the old model")
            self._unlearn_and_tune("centre", CENTRE)
        return run

    def _unlearn_and_tune(self, start: Start, arm: str | None) -> Run:
        run = self._unlearn(start)
        self._measure(AFTER_NOISE, run.model, arm)
        if self.job.finetune is not None:
            run = self._tune(run, self.job.finetune)
            self._measure(AFTER_TUNING, run.model, arm)
        return run

    def _retrain(self, start: Initialise) -> Run:
        """The whole training, saved now and then: with a seed that is public, a stop changes
        nothing."""
        job, splits, table = self.job, self.ready.splits, self.job.finetune
        assert table is not None
        steps = count_training_steps(splits.retain, table)
        keeper = Keeper(
            self.work / TRAINING,
            {"versions": list_versions(), **identify(self.made, self.ready)},
            job.output.checkpoint_seconds,
        )

        def on_step(done: int) -> None:
            if done == steps or self.tracker.is_due("step"):
                self.tracker.tell("step", step=done, steps=steps)
            self.stopper.check()

        def on_pass(passes: int, loss: float) -> None:
            self.losses[min(float(passes), table.epochs)] = loss
            self.tracker.tell("training", epoch=passes, loss=loss)

        self.stopper.patient = True
        try:
            run = retrain(
                self.ready.model,
                make_loader(
                    splits.retain, table.batch_size, seed=self.seed, workers=job.data.workers
                ),
                initialise=start,
                public=self.ready.public,
                forget_ids=splits.forget.ids,
                retain_ids=splits.retain.ids,
                on_pass=on_pass,
                on_step=on_step,
                keeper=keeper,
                progress=self.progress,
                loss_fn=self.ready.loss_fn,
                **list_options(table, self.seed),
            )
        finally:
            self.stopper.patient = False
        self.stopper.check()
        if run.record.weights_noisy != self.ready.start_hash:
            raise UnlearningError(
                "the start of the training is not the one that was checked; model.build or the "
                "file of public weights gave another one when it was read again"
            )
        return run

    def _unlearn(self, start: Start) -> Run:
        """The noisy steps. Only those from the old model are worth a checkpoint and patience."""
        job, ready, real = self.job, self.ready, start == "model"
        recipe, splits = ready.settled.recipe, ready.splits
        assert not isinstance(recipe, Retraining)
        steps, seed = getattr(recipe, "steps", 1), job.method.seed
        place = self.work / CHECKPOINTS[not self.processes.alone]

        def on_step(done: int, model: nn.Module) -> None:
            if real and (done == steps or self.tracker.is_due("step")):
                self.tracker.tell("step", step=done, steps=steps)
            self.stopper.check()

        self.stopper.patient = real
        try:
            run = unlearn(
                ready.model,
                make_loader(
                    splits.retain, job.method.batch_size, seed=self.seed, workers=job.data.workers
                ),
                recipe,
                loss_fn=ready.loss_fn,
                centre="zero" if ready.centre is None else ready.centre,
                public=ready.public,
                noise=SystemNoise() if seed is None else SeededNoise(seed),
                start=start,
                buffers=job.model.buffers,
                forget_ids=splits.forget.ids,
                retain_ids=splits.retain.ids,
                progress=self.progress,
                on_step=on_step,
                checkpoint=(
                    Checkpoint(place, job.output.checkpoint_seconds, resume=True) if real else None
                ),
                distributed=self.processes,
            )
        finally:
            self.stopper.patient = False
        self.stopper.check()
        return run

    def _tune(self, run: Run, table: FinetuneTable) -> Run:
        real = run.record.start == "model"
        retain, workers = self.ready.splits.retain, self.job.data.workers

        def on_pass(passes: int, loss: float) -> None:
            if real:
                self.losses[min(float(passes), table.epochs)] = loss
                self.tracker.tell("fine-tuning", epoch=passes, loss=loss)

        return fine_tune(
            run,
            make_loader(retain, table.batch_size, seed=self.seed + 1, workers=workers),
            ids=retain.ids,
            on_pass=on_pass,
            progress=self.progress,
            processes=self.processes,
            loss_fn=self.ready.loss_fn,
            **list_options(table, self.seed),
        )

    def _measure(self, stage: str, model: nn.Module, arm: str | None = None) -> None:
        """One row of the table of accuracies, and of losses beside it."""
        splits, table, workers = self.ready.splits, self.job.evaluation, self.job.data.workers
        row: dict[str, Any] = {"stage": stage} | ({} if arm is None else {"arm": arm})
        for name in SETS:
            split = getattr(splits, name)
            if split is not None and len(split) > 0 and name in table.sets:
                loader = make_loader(split.first(table.most), table.batch_size, workers=workers)
                found = measure(model, loader, self.ready.loss_fn, processes=self.processes)
                row |= {name: found.accuracy, f"{name}_loss": found.loss}
                row |= {f"{name}_count": found.count}
        LOG.info("%s: %s", ", ".join(filter(None, (arm, stage))), describe_scores(row))
        self.stages.append(row)
        self.tracker.tell("evaluation", **row)

    def _certify(self, run: Run, accept_unchecked: bool) -> Certificate:
        """The certificate; of several processes, rank 0 makes it and all are told."""
        target, made = self.job.target, b""
        with self.processes.together():
            if self.processes.leads:
                certificate = certify(
                    run.record,
                    parent=self.ready.parent,
                    accept_unchecked=accept_unchecked,
                    **target.model_dump(exclude={"epsilon"}),
                )
                if not certificate.epsilon <= target.epsilon:
                    raise UnlearningError(
                        f"the run certifies epsilon = {certificate.epsilon}, above its target "
                        f"{target.epsilon}; nothing is written"
                    )
                if self.job.output.sign is not None:
                    certificate = certificate.sign(self.made.locate(self.job.output.sign))
                made = certificate.to_bytes()
        return Certificate.from_bytes(self.processes.share(made))

    def _summarise(self, run: Run, certificate: Certificate) -> dict[str, Any]:
        """``metrics.json``: what was measured, and what the run cost."""
        job, record, method = self.job, run.record, choose_route(self.job)
        kept, forgotten = len(self.ready.splits.retain), len(self.ready.splits.forget)
        noisy = record.gradient_evaluations
        tuned = 0 if record.finetune is None else record.finetune.gradient_evaluations
        exact, again = {"epsilon": 0.0, "delta": 0.0}, self.ready.start is not None
        own = exact if again else {"epsilon": certificate.epsilon, "delta": certificate.delta}
        cost = {"gradient_evaluations": noisy + tuned}
        arms = [{"arm": method} | own | cost | self._find_last(None)]
        if job.evaluation.control and not again:
            arms.append({"arm": CENTRE} | exact | cost | self._find_last(CENTRE))
        if job.evaluation.retraining_epochs is not None and not again:
            other = {"gradient_evaluations": round(job.evaluation.retraining_epochs * kept)}
            arms.append({"arm": RETRAINING} | exact | other)
        x, y = list(self.losses), list(self.losses.values())
        doing = "training" if again else "fine-tuning"
        labels = {"name": doing, "x_label": "epoch", "y_label": "training loss"}
        return {
            "title": job.output.title,
            "task": f"{job.model.build} on {job.data.load}",
            "arm": method,
            "route": method,
            "why": tell_why(self.made, self.ready.frozen) if job.method.name == "plan" else None,
            "stages": [{"arm": method, **row} for row in self.stages],
            "curves": [{**labels, "x": x, "y": y}] if x else [],
            "arms": arms if len(arms) > 1 else [],
            "cost": {
                "seconds": round(time.monotonic() - self.started, 3),
                "samples kept": kept,
                "samples forgotten": forgotten,
                "people kept": self.ready.splits.retain.count_people(),
                "people forgotten": self.ready.splits.forget.count_people(),
                **({} if again else {"gradient evaluations, noisy steps": noisy}),
                f"gradient evaluations, {doing}": tuned,
            },
            "job": self.identity,
        }

    def _find_last(self, arm: str | None) -> dict[str, Any]:
        """The accuracies of an arm's last stage; the run itself has no arm."""
        last = [row for row in self.stages if row.get("arm") == arm][-1]
        return {key: last.get(key) for name in SETS for key in (name, f"{name}_count")}


def _say_size(split: Split, noun: str = " samples") -> str:
    """Samples, and the people they are of where some have several."""
    people = split.count_people()
    return f"{len(split)}{noun}" + ("" if people == len(split) else f" of {people} people")


def identify(made: JobFile, ready: Prepared) -> dict[str, Any]:
    """What must not change between a run and its resumption."""
    job, splits = made.job, ready.splits
    common = {
        "recipe": to_dict(ready.settled.recipe),
        "seed": job.method.seed,
        "forget set": commit(splits.forget.ids, NO_SALT).root,
        "retained set": commit(splits.retain.ids, NO_SALT).root,
    }
    if ready.start is None or job.finetune is None:
        return common | {"batch_size": job.method.batch_size}
    return common | {
        "route": choose_route(job),
        "training": job.finetune.model_dump(),
        "loss": job.model.loss,
        "start": ready.start_hash,
        "retained data": describe_data(make_loader(splits.retain, job.finetune.batch_size, seed=0)),
    }
