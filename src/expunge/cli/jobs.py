"""``expunge unlearn`` and ``expunge init``. Light to import: torch comes when they run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from expunge.cli.text import AsJson, format_up, print_json
from expunge.errors import InputError
from expunge.files import write_atomic
from expunge.jobs.tracking import describe_scores

if TYPE_CHECKING:
    from expunge.jobs.folder import FolderJob
    from expunge.jobs.many import Outcome, Pool
    from expunge.jobs.run import Finished

Kind = Literal["plain", "lora", "head", "shards"]
TEMPLATES = Path(__file__).parent / "templates"
FILES = {"job.toml": "job.toml", "own.py": "own.py.txt", "forget.txt": "forget.txt"}
TO_DO = {"finished": "done before", "unfinished": "to go on with", "new": "to do"}


def unlearn(
    job: Annotated[
        Path,
        typer.Argument(
            metavar="JOB.TOML|DIR",
            help="What to do (see expunge init), or a directory of NAME.toml and NAME/job.toml.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to leave the run (of DIR: OUT/NAME); default: output.dir."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stopped run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show recipe, cost and certificate; write nothing.")
    ] = False,
    accept_unchecked: Annotated[
        bool,
        typer.Option(
            "--accept-unchecked",
            help="Release although identifiers could not be checked; the certificate says so.",
        ),
    ] = False,
    ray: Annotated[bool, typer.Option("--ray", help="DIR: run the jobs on Ray, here.")] = False,
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="DIR: run them on this Ray cluster.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="With Ray: jobs at once; default: one for each CPU.")
    ] = None,
    retries: Annotated[
        int, typer.Option(help="With Ray: tries more for a job whose worker died.")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Run a job: forget, fine-tune, certify, report.

    Exit 0 done, 2 refused, 3 failed and may be tried again, 130 stopped. With a directory: all its
    jobs that are not finished. Exit 1 if some failed.
    """
    on_ray = ray or ray_address is not None
    if job.is_dir():
        from expunge.jobs.many import Pool

        if workers is not None and not on_ray:
            said = f"--workers is {workers}, which needs --ray; without it jobs run in turn"
            raise InputError(said)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise InputError(f"{job} is a directory of jobs; under torchrun, name one job file")
        if accept_unchecked:
            raise InputError(f"--accept-unchecked needs one job file; {job} is a directory of jobs")
        pool = Pool(ray_address, workers, retries, fresh=True) if on_ray else None
        _unlearn_folder(job, out, pool, dry_run, as_json)
        return
    if on_ray or workers is not None:
        raise InputError(f"--ray needs a directory of jobs; {job} is none")
    if dry_run:
        _preview(job, out, as_json)
        return
    done = _run(job, out, resume, accept_unchecked)
    if not _follows():
        _print_finished(done, as_json)


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the files.")],
    lora: Annotated[
        bool, typer.Option("--lora", help="For a Hugging Face model with a LoRA adapter.")
    ] = False,
    head: Annotated[
        bool, typer.Option("--head", help="For a head built to forget on a public network.")
    ] = False,
    shards: Annotated[
        bool, typer.Option("--shards", help="For an ensemble built to forget, of any network.")
    ] = False,
) -> None:
    """Write job.toml, own.py and forget.txt: commented, running as they are, yours to change."""
    kinds: dict[Kind, bool] = {"lora": lora, "head": head, "shards": shards}
    asked: list[Kind] = [kind for kind, given in kinds.items() if given]
    if len(asked) > 1:
        raise InputError(f"--{' and --'.join(asked)} are kinds of job; name one of them")
    for path in write_template(folder, asked[0] if asked else "plain"):
        typer.echo(path)
    built = head or shards
    then = "learn job.toml --release release-1" if built else "unlearn job.toml"
    made = "" if built else "python own.py && "
    typer.echo(f"next: cd {folder} && {made}expunge {then}", err=True)


def _preview(job: Path, out: Path | None, as_json: bool) -> None:
    if _follows():
        return
    from expunge.cli.text import print_preview
    from expunge.jobs.preview import preview_job

    with _logging_to_stderr():
        found = preview_job(job, out=out)
    print_json(found.to_dict()) if as_json else print_preview(found)


def _run(job: Path, out: Path | None, resume: bool, accept_unchecked: bool) -> Finished:
    """The finished run; a signal ends the process with a word on how to go on."""
    from expunge.jobs.run import run_job
    from expunge.processes.stopping import Stopped

    options: dict[str, Any] = {"out": out, "resume": resume, "accept_unchecked": accept_unchecked}
    try:
        with _logging_to_stderr():
            return run_job(job, progress=True, **options)
    except Stopped as stop:
        launch = "torchrun … -m " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        place = "" if out is None else f" --out {out}"
        again = (
            f"what is done is saved\n  go on with: {launch}expunge unlearn {job}{place} --resume"
        )
        if not _follows():
            typer.echo(
                f"expunge: {stop}; {again if stop.saved else 'nothing was written'}", err=True
            )
        sys.exit(stop.exit_code)


def _print_finished(done: Finished, as_json: bool) -> None:
    certificate = done.certificate
    if as_json:
        facts = {"directory": str(done.directory), "metrics": done.metrics}
        print_json(facts | {"certificate": certificate.model_dump(mode="json")})
        return
    shown = shorten(done.directory)
    typer.echo(
        f"{shown}: epsilon = {format_up(certificate.epsilon, 6)}, "
        f"delta = {certificate.delta:g}, compared to {certificate.compared_to}"
    )
    last = {row["arm"]: row for row in done.metrics["stages"]}
    for row in last.values():
        typer.echo(f"  {row['arm']}, {row['stage']}: {describe_scores(row)}")
    for warning in certificate.warnings:
        typer.echo(f"  {warning}")
    typer.echo(f"  check it with: expunge verify {shown}")


def shorten(path: Path) -> Path:
    """A path as it is typed here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _follows() -> bool:
    """Whether torchrun started this process as another than the first, which prints for all."""
    return os.environ.get("RANK", "0") != "0" and "WORLD_SIZE" in os.environ


@contextmanager
def _logging_to_stderr() -> Generator[None]:
    """What the run says on its way goes to stderr, one plain line each."""
    log = logging.getLogger("expunge")
    handler = logging.NullHandler() if _follows() else logging.StreamHandler(sys.stderr)
    before = log.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _unlearn_folder(
    folder: Path, out: Path | None, pool: Pool | None, dry_run: bool, as_json: bool
) -> None:
    """Run what is left of the directory, then the table. Exit 0 all done, 1 some failed."""
    from expunge.jobs.folder import check_folder, run_folder

    if dry_run:
        jobs = check_folder(folder, out=out)
        print_json({"jobs": _list_states(jobs)}) if as_json else _print_states(jobs)
        return
    try:
        outcomes = run_folder(folder, out=out, pool=pool, progress=True)
    except KeyboardInterrupt as stop:
        again = "finished runs are complete, and the same command goes on with the others"
        typer.echo(f"expunge: {str(stop) or 'stopped'}; {again}", err=True)
        sys.exit(getattr(stop, "exit_code", 130))
    failed = [o.name for o in outcomes.values() if o.error is not None]
    if as_json:
        print_json(
            {
                "directory": str(folder),
                "done": len(outcomes) - len(failed),
                "failed": len(failed),
                "jobs": [_list_facts(o) for o in outcomes.values()],
            }
        )
    else:
        typer.echo("\n".join(make_table(outcomes)))
    if failed:
        names = ", ".join(failed)
        typer.echo(f"expunge: {len(failed)} of {len(outcomes)} jobs failed: {names}", err=True)
        sys.exit(1)


def _list_facts(outcome: Outcome) -> dict[str, Any]:
    head = {"job": outcome.name, "status": _tell_status(outcome), "error": outcome.error}
    return head | (outcome.value or {}) | {"seconds": round(outcome.seconds, 3)}


def make_table(outcomes: Mapping[str, Outcome]) -> list[str]:
    """One line for each job: name, guarantee, accuracy after the last stage, status.

    >>> from expunge.jobs.many import Outcome
    >>> facts = {"epsilon": 1.0, "delta": 1e-5, "test": 0.913}
    >>> lost = Outcome("b", error="row 40 is torn")
    >>> print("\\n".join(make_table({"a": Outcome("a", facts), "b": lost})))
    job  epsilon  delta  accuracy     status
    a          1  1e-05  test 91.3 %  done
    b          -      -  -            failed: row 40 is torn
    """
    rows = [("job", "epsilon", "delta", "accuracy", "status")]
    for name, o in outcomes.items():
        if o.value is None:
            rows.append((name, "-", "-", "-", f"{_tell_status(o)}: {o.error}"))
            continue
        scores = describe_scores(o.value, ["test"]) or describe_scores(o.value, ["retain"]) or "-"
        guarantee = format_up(o.value["epsilon"], 6), f"{o.value['delta']:g}"
        rows.append((name, *guarantee, scores, _tell_status(o)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    a, b, c, d, _ = widths
    return [
        f"{name:<{a}}  {epsilon:>{b}}  {delta:>{c}}  {scores:<{d}}  {status}"
        for name, epsilon, delta, scores, status in rows
    ]


def _tell_status(outcome: Outcome) -> str:
    if outcome.error is not None:
        return "failed"
    return "done before" if outcome.kept else "done"


def _list_states(jobs: Iterable[FolderJob]) -> list[dict[str, str]]:
    return [{"job": j.name, "status": TO_DO[j.state], "directory": str(j.target)} for j in jobs]


def _print_states(jobs: list[FolderJob]) -> None:
    width = max(len(job.name) for job in jobs)
    for job in jobs:
        typer.echo(f"{job.name:<{width}}  {TO_DO[job.state]:<13}  {job.target}")
    typer.echo("All jobs are valid; this was a dry run and wrote nothing.")


def write_template(folder: str | Path, kind: Kind = "plain") -> list[Path]:
    """Write job.toml, own.py and forget.txt; refuse if any of them is there already.

    Python is kept as text in the package, so that no tool takes it for a part of it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in write_template(folder)]
    ['job.toml', 'own.py', 'forget.txt']
    """
    target = Path(folder)
    taken = [target / name for name in FILES if (target / name).exists()]
    if taken:
        raise InputError(f"{taken[0]} exists already; nothing was written, name another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, file in FILES.items():
            write_atomic(target / name, (TEMPLATES / kind / file).read_bytes())
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}") from None
    return [target / name for name in FILES]
