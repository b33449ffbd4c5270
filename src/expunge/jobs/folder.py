"""A directory of jobs: all checked before the first runs, and none run twice.

A job is finished when its run directory holds a certificate that verifies and the hash of this very
job. Everything else follows from what is on disk, so a call after a crash does what is left.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import chdir, closing, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from expunge.certificates.verification import verify
from expunge.errors import ExpungeError, InputError
from expunge.files import read_limited
from expunge.jobs.directory import check_output, is_finished, read_metrics, workspace_of
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.many import Item, Outcome, Pool, perform
from expunge.jobs.tracking import SETS
from expunge.processes.stopping import catch_signals

MAX_BYTES = 10_000_000
State = Literal["finished", "unfinished", "new"]


@dataclass(frozen=True)
class FolderJob:
    """One valid job of the directory, where its run goes, and how far it is."""

    name: str
    made: JobFile
    target: Path
    state: State


def run_folder(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    pool: Pool | None = None,
    progress: bool = False,
) -> dict[str, Outcome]:
    """Run every job of a directory that is not finished, in sequence or on Ray.

    The value of an outcome is the job's facts: ``directory``, ``epsilon``, ``delta``, accuracies.
    A job that fails does not keep the others from running.

    >>> run_folder("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: /nowhere is not a directory of jobs
    """
    jobs = check_folder(folder, out=out)
    found = dict[str, Outcome]()
    for job in jobs:
        if job.state == "finished":
            _remove_leftovers(job.target)
            found[job.name] = Outcome(job.name, read_facts(job.target), kept=True)
    left = [_make_item(job) for job in jobs if job.name not in found]
    shared = find_shared(jobs)
    with (
        redirect_stdout(sys.stderr),
        nullcontext() if pool is None else catch_signals(),
        closing(perform(run_one, left, pool, kept=len(found), progress=progress)) as outcomes,
    ):
        for outcome, bar in outcomes:
            found[outcome.name] = _check_visible(outcome)
            while shared:
                bar.tell(shared.pop())
    return {job.name: found[job.name] for job in jobs}


def check_folder(folder: str | Path, *, out: str | Path | None = None) -> list[FolderJob]:
    """The jobs ``DIR/*.toml`` and ``DIR/*/job.toml``; one error names all that is wrong with any.

    With ``out`` the runs go to ``OUT/NAME``, else to each job's ``output.dir``.
    """
    paths = find_jobs(Path(folder))
    problems, jobs = list[str](), list[FolderJob]()
    for name, path in paths.items():
        try:
            made = read_job(path)
        except ExpungeError as error:
            problems.append(str(error))
            continue
        target = made.find_target(None if out is None else Path(out).absolute() / name)
        state: State = "new"
        try:
            state = find_state(made, target)
        except ExpungeError as error:
            problems.append(f"{path}: {error}")
        jobs.append(FolderJob(name, made, target, state))
    problems += _find_clashes(jobs)
    if problems:
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        listed = "\n  ".join(line for problem in problems for line in problem.split("\n"))
        raise InputError(f"{folder}: {count} in {len(paths)} jobs, nothing was run:\n  {listed}")
    return jobs


def find_shared(jobs: Iterable[FolderJob]) -> list[str]:
    """A sentence for each old model that more jobs start from than their targets count."""
    groups = dict[Path, list[FolderJob]]()
    for job in jobs:
        groups.setdefault(job.made.locate(job.made.job.model.weights).resolve(), []).append(job)
    return [
        f"{len(group)} jobs start from {weights.name} ({', '.join(job.name for job in group)}): "
        f"their certificates count {least}; if you release more of these models, say so in "
        "target.releases"
        for weights, group in groups.items()
        if len(group) > (least := min(job.made.job.target.releases for job in group))
    ]


def find_jobs(folder: Path) -> dict[str, Path]:
    """The job files of a directory by name: ``NAME.toml`` and ``NAME/job.toml``."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory of jobs")
    paths = [*folder.glob("*.toml"), *folder.glob("*/job.toml")]
    found = dict[str, Path]()
    for path in sorted(path for path in paths if path.relative_to(folder).parts[0][0] != "."):
        name = path.stem if path.parent == folder else path.parent.name
        if name in found:
            raise InputError(f"{found[name]} and {path} are two jobs named {name}; rename one")
        found[name] = path
    if not found:
        raise InputError(f"{folder} holds no jobs; they must be named *.toml or */job.toml")
    return found


def find_state(made: JobFile, target: Path) -> State:
    """How far the run in ``target`` is; refused if that is a run of something else.

    A run that cannot be used is never removed here.
    """
    if not (target / "certificate.json").is_file():
        unfinished = workspace_of(target).exists()
        check_output(target, resume=unfinished)
        return "unfinished" if unfinished else "new"
    if not is_finished(made, target):
        raise InputError(
            f"output directory {target} holds a run of another job; name another one or remove it "
            "first"
        )
    try:
        verify(target / "certificate.json", record=target / "record.json")
    except ExpungeError as error:
        raise InputError(f"{error}; remove that run to do it again") from None
    return "finished"


def run_one(argument: Mapping[str, str]) -> dict[str, Any]:
    """One job in this process, from the start or from where a worker that died has left it."""
    from expunge.jobs.run import run_job

    made, target, home = read_job(argument["job"]), Path(argument["target"]), argument["home"]
    with chdir(home) if Path(home).is_dir() else nullcontext():
        state = find_state(made, target)
        if state == "unfinished" and not (workspace_of(target) / "run.json").exists():
            shutil.rmtree(workspace_of(target))
            state = "new"
        if state != "finished":
            run_job(made.path, out=target, resume=state == "unfinished")
            verify(target / "certificate.json", record=target / "record.json")
        _remove_leftovers(target)
    return read_facts(target)


def read_facts(target: Path) -> dict[str, Any]:
    """What a finished run is worth telling: the guarantee, and the accuracies of its last stage."""
    path = target / "certificate.json"
    certificate = json.loads(read_limited(path, MAX_BYTES, "certificate"))
    metrics = read_metrics(target)
    method = metrics.get("arm") or certificate["recipe"]["method"]
    own = [row for row in metrics.get("stages", []) if row.get("arm") == method]
    last = own[-1] if own else {}
    names = ("epsilon", "delta", "compared_to", "releasable", "resumed", "warnings")
    scores = [name + kind for kind in ("", "_loss") for name in SETS]
    facts = {"directory": str(target)} | {name: certificate[name] for name in names}
    return facts | {name: last.get(name) for name in scores}


def _make_item(job: FolderJob) -> Item:
    paths = {"job": str(job.made.path.absolute()), "target": str(job.target)}
    device = job.made.job.model.device or "cpu"
    gpus = 1.0 if device.startswith("cuda") else 0.0
    return Item(job.name, paths | {"home": str(Path.cwd())}, gpus=gpus)


def _check_visible(outcome: Outcome) -> Outcome:
    """A worker on another machine may have written where nobody here can read."""
    if outcome.error is not None or Path(outcome.value["directory"], "certificate.json").is_file():
        return outcome
    sentence = (
        f"{outcome.value['directory']} was written on another machine and cannot be seen here; "
        "the directory of jobs must be on a disk that all machines share"
    )
    return Outcome(outcome.name, None, sentence, outcome.seconds)


def _find_clashes(jobs: Iterable[FolderJob]) -> list[str]:
    """Two jobs that would write to the same place, or one inside the other's."""
    places = [(job.target.resolve(), job) for job in jobs]
    found = list[str]()
    for i, (place, job) in enumerate(places):
        for other, earlier in places[:i]:
            if place == other:
                found.append(
                    f"{earlier.made.path} and {job.made.path} have the same output directory "
                    f"{job.target}; change output.dir of one, or use --out"
                )
            elif place.is_relative_to(other) or other.is_relative_to(place):
                found.append(
                    f"{earlier.made.path} and {job.made.path} have output directories one inside "
                    f"the other ({earlier.target}, {job.target}); change output.dir of one"
                )
    return found


def _remove_leftovers(target: Path) -> None:
    """Drafts of this run by workers that died while writing it; it is complete without them."""
    shutil.rmtree(workspace_of(target), ignore_errors=True)
    for draft in target.parent.glob(f".{target.name}.*.tmp"):
        if re.fullmatch(r"[0-9a-f]{16}", draft.name.split(".")[-2]):
            shutil.rmtree(draft, ignore_errors=True)
