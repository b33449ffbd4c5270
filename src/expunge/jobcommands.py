"""The commands around a job: unlearn, init, doctor. Light to import: torch comes when they run."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from expunge.errors import InputError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


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
    """Run a job: forget, fine-tune, certify, report. Exit 0 done, 2 refused, 130 stopped.

    With a directory: all its jobs that are not finished. Exit 1 if some failed.
    """
    if job.is_dir():
        from expunge.foldercommand import unlearn_folder

        on_ray = ray or ray_address is not None
        unlearn_folder(
            job, out, on_ray, ray_address, workers, retries, dry_run=dry_run, as_json=as_json
        )
        return
    if ray or ray_address is not None or workers is not None:
        raise InputError(f"--ray needs a directory of jobs; {job} is none")
    if dry_run and _follows():
        return
    if dry_run:
        from expunge.previewing import preview_job, print_preview

        with _logging_to_stderr():
            found = preview_job(job, out=out)
        _print_json(found.to_dict()) if as_json else print_preview(found)
        return
    from expunge.jobs import run_job
    from expunge.stopping import Stopped

    try:
        with _logging_to_stderr():
            done = run_job(job, out=out, resume=resume, progress=True)
    except Stopped as stop:
        if _follows():
            sys.exit(stop.exit_code)
        launch = "torchrun … -m " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        again = (
            f"{launch}expunge unlearn {job}"
            + ("" if out is None else f" --out {out}")
            + " --resume"
        )
        saved = "what is done is saved" if stop.saved else "nothing was written"
        typer.echo(f"expunge: {stop}; {saved}", err=True)
        if stop.saved:
            typer.echo(f"  go on with: {again}", err=True)
        sys.exit(stop.exit_code)
    if _follows():
        return
    certificate = done.certificate
    if as_json:
        facts = {"directory": str(done.directory), "metrics": done.metrics}
        _print_json(facts | {"certificate": certificate.model_dump(mode="json")})
        return
    from expunge.rendering import format_up

    shown = _shorten(done.directory)
    typer.echo(
        f"{shown}: epsilon = {format_up(certificate.epsilon, 6)}, "
        f"delta = {certificate.delta:g}, compared to {certificate.compared_to}"
    )
    last = {row["arm"]: row for row in done.metrics["stages"]}
    for row in last.values():
        typer.echo("  " + _describe_row(row))
    for warning in certificate.warnings:
        typer.echo(f"  {warning}")
    typer.echo(f"  check it with: expunge verify {shown}")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the files.")],
    lora: Annotated[
        bool, typer.Option("--lora", help="For a Hugging Face model with a LoRA adapter.")
    ] = False,
) -> None:
    """Write job.toml, own.py and forget.txt: commented, running as they are, yours to change."""
    from expunge.scaffolding import write_template

    for path in write_template(folder, "lora" if lora else "plain"):
        typer.echo(path)
    typer.echo(f"next: cd {folder} && python own.py && expunge unlearn job.toml", err=True)


def doctor(as_json: AsJson = False) -> None:
    """The environment, the data found, and how fast a noisy step is here. Exit 1 if unusable."""
    from expunge.doctor import examine, list_versions

    findings, speed = examine()
    good = all(finding.good is not False for finding in findings)
    if as_json:
        facts = {finding.name: finding.text for finding in findings}
        _print_json({"good": good, "versions": list_versions(), **speed, "findings": facts})
    else:
        for finding in findings:
            mark = {True: "ok", False: "NO", None: "  "}[finding.good]
            typer.echo(f"{mark}  {finding.name:<10}  {finding.text}")
    if not good:
        sys.exit(1)


def show_version() -> None:
    """expunge's version, then those of what computes with it."""
    from expunge.doctor import list_versions

    versions = list_versions()
    typer.echo(f"expunge {versions.pop('expunge')}")
    shown = [f"{name} {number}" for name, number in versions.items() if number is not None]
    typer.echo(", ".join(shown))


def _shorten(path: Path) -> Path:
    """A path below the working folder without that folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _describe_row(row: dict[str, Any]) -> str:
    names = ("retain", "forget", "test")
    shares = [f"{n} {100 * row[n]:.1f} %" for n in names if row.get(n) is not None]
    losses = [f"{n} loss {row[f'{n}_loss']:.4g}" for n in names if f"{n}_loss" in row]
    return f"{row['arm']}, {row['stage']}: " + ", ".join(shares or losses)


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


def _print_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2))
