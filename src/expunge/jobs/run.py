"""A job run from start to end: leave out, train or perturb, certify, write.

The folder of the release appears in one rename. Until then the run has a hidden folder beside it,
``.NAME.unfinished``, for the checkpoints from which it can be resumed; they are private.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import expunge
from expunge.errors import InputError, RunError
from expunge.files import check_free, write_atomic
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.loading import explaining, importing_from
from expunge.jobs.request import Request, check_second, load_request
from expunge.jobs.tables import Job, NoisyTable, UnlearnJob

if TYPE_CHECKING:
    from expunge.certificates.release import Release

LOG = logging.getLogger("expunge")
MOST_MEASURED = 5_000  # examples of each set, evenly spaced: a measurement is not a training


def run_job(
    path: str | Path,
    *,
    forget: Iterable[Any] | None = None,
    out: str | Path | None = None,
    parent: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Release:
    """Run the job of a file and write its release; ``forget`` takes the place of the job's list,
    ``out`` of its folder, ``parent`` of the release before it.

    Under ``torchrun`` every process calls it, and the first writes. A run that is stopped can be
    resumed.

    >>> run_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    from expunge.noisy.processes import joined

    made = read_job(path).of(UnlearnJob)
    if parent is not None:
        method = made.job.method.model_copy(update={"parent": str(Path(parent).absolute())})
        made = JobFile(made.path, made.job.model_copy(update={"method": method}))
    target = find_target(made, out)
    work = target.absolute().with_name(f".{target.name}.unfinished")
    resume = resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    with importing_from(made.folder), joined() as processes:
        with processes.together():
            if processes.leads:
                check_free(target)
            request = load_request(made, forget)
            if processes.leads:
                check_second(made, request, target)
        with processes.together():
            if processes.leads:
                _open_workspace(work, resume)
        began = time.monotonic()
        with _keeping(work):
            release = _make_release(made, request, work, progress and processes.leads)
        release = sign_release(release, made, made.job.output.sign)
        with processes.together():
            if processes.leads:
                metrics = _measure(made, request, release, time.monotonic() - began)
                write_release(release, target, metrics)
                shutil.rmtree(work, ignore_errors=True)
    return release


def find_target(made: JobFile[UnlearnJob], out: str | Path | None) -> Path:
    return made.locate(made.job.output.dir) if out is None else Path(out)


def _make_release(
    made: JobFile[UnlearnJob], request: Request, work: Path, progress: bool
) -> Release:
    """The release of the job's method; its own code may fail in the model, the data or train."""
    model, method, data = made.job.model, made.job.method, request.data
    leaving = 0 if data.stream else data.count(request.people)
    facts = (
        f"{len(data) - leaving:,} examples stay, {leaving:,} examples of {len(request.people):,}"
    )
    LOG.info("%s: %s", method.name, "a stream" if data.stream else f"{facts} people leave")
    options: dict[str, Any] = request.options | {"resume": work, "device": model.device}
    with explaining("the run failed in the model, its data or its training"):
        if not isinstance(method, NoisyTable):
            return expunge.retrain(request.build, data, old=request.old, **options)
        asked = {"epsilon", "delta", "compared_to", "centre", "releases"}
        return expunge.unlearn(
            request.old,
            request.build,
            data,
            method=method.name,
            recipe=method.recipe,
            noise=None if method.noise_seed is None else expunge.SeededNoise(method.noise_seed),
            strict=model.strict,
            progress=progress,
            **method.model_dump(include=asked),
            **request.batches,
            **options,
        )


def _measure(
    made: JobFile[UnlearnJob], request: Request, release: Release, seconds: float
) -> dict[str, Any]:
    """How well the old model and the released one do; it says more than a release may: private."""
    stages, models = list[dict[str, Any]](), {"after training": lambda: release.model}
    if request.old is not None:
        models = {"before": lambda: _load_old(request)} | models
    for stage, load in models.items():
        try:
            stages.append({"stage": stage} | _score(request, load()))
        except Exception as error:  # a loss that measures nothing here loses no release
            LOG.info("the model %s was not measured: %s", stage, str(error).split("\n")[0])
    return {"task": made.job.data.load, "stages": stages, "cost": {"seconds": round(seconds, 3)}}


def _load_old(request: Request) -> Any:
    """The old model, running statistics included, for a measurement and nothing else."""
    from expunge.networks.building import call_build
    from expunge.networks.checkpoints import read_state

    module, file, key = call_build(request.build), cast(Path, request.old), request.options["key"]
    module.load_state_dict(read_state(file, module, key), strict=False)
    return module


def _score(request: Request, model: Any) -> dict[str, Any]:
    row, data = dict[str, Any](), request.data
    if data.stream:
        return row
    kept = data.drop(request.people)
    parts = {"retain": kept, "forget": data.only(request.people), "test": kept.test}
    for name, part in parts.items():
        if part is not None and not part.stream and len(part) > 0:
            every = max(1, -(-len(part) // MOST_MEASURED))
            found = expunge.evaluate(model, part.take(range(0, len(part), every)), **request.loss)
            row |= {name: found.accuracy, f"{name}_loss": found.loss, f"{name}_count": found.count}
    return row


def sign_release(release: Release, made: JobFile[Job], key: str | None) -> Release:
    """The release with its certificate signed by the key that the job names, if it names one."""
    if key is None:
        return release
    return dataclasses.replace(release, certificate=release.certificate.sign(made.locate(key)))


def write_release(release: Release, target: Path, metrics: dict[str, Any] | None = None) -> Path:
    """The folder of a release, in one rename; then what was measured, and the report."""
    from expunge.report.page import write_report

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        release.save(target)
        if metrics is not None:
            text = json.dumps(metrics, allow_nan=False, indent=1)
            write_atomic(target / "metrics.json", text.encode(), private=True)
        write_report(target)
    except OSError as error:
        raise RunError(
            f"{target} could not be written: {error.strerror}; make room and run the same command "
            "again"
        ) from None
    return target


def _open_workspace(work: Path, resume: bool) -> None:
    """Make the hidden folder of a run, or go on with the one that is there."""
    if work.exists() and not resume and any(work.iterdir()):
        raise InputError(
            f"an unfinished run is in {work}; go on with it by --resume, or remove that folder"
        )
    if resume and not work.exists():
        LOG.info("there is nothing to resume; the run begins")
    try:
        work.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"{work} cannot be made: {error.strerror}") from None


@contextmanager
def _keeping(work: Path) -> Generator[None]:
    """A run that failed before its first checkpoint leaves no folder behind."""
    try:
        yield
    except BaseException:
        if work.is_dir() and {path.name for path in work.iterdir()} <= {"run.json"}:
            shutil.rmtree(work, ignore_errors=True)
        raise
