"""``expunge unlearn DIR``: what the command prints about a directory of jobs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from expunge.errors import InputError
from expunge.jobfolders import FolderJob, check_folder, run_folder
from expunge.manyruns import Outcome, Pool
from expunge.rendering import format_up
from expunge.stopping import Stopped

TO_DO = {"finished": "done before", "unfinished": "to go on with", "new": "to do"}


def unlearn_folder(
    folder: Path,
    out: Path | None,
    on_ray: bool,
    address: str | None,
    workers: int | None,
    retries: int,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run what is left of the directory, then the table. Exit 0 all done, 1 some failed."""
    if workers is not None and not on_ray:
        raise InputError(f"--workers is {workers}, which needs --ray; without it jobs run in turn")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError(f"{folder} is a directory of jobs; under torchrun, name one job file")
    pool = Pool(address, workers, retries, fresh=True) if on_ray else None
    if dry_run:
        jobs = check_folder(folder, out=out)
        _print_json({"jobs": _list_states(jobs)}) if as_json else _print_states(jobs)
        return
    try:
        outcomes = run_folder(folder, out=out, pool=pool, progress=True)
    except KeyboardInterrupt as stop:
        typer.echo(
            f"expunge: {stop if isinstance(stop, Stopped) else 'stopped'}; finished runs are "
            "complete, and the same command goes on with the others",
            err=True,
        )
        sys.exit(stop.exit_code if isinstance(stop, Stopped) else 130)
    failed = [o for o in outcomes.values() if o.error is not None]
    if as_json:
        _print_json(summarise(folder, outcomes))
    else:
        typer.echo("\n".join(make_table(outcomes)))
    if failed:
        names = ", ".join(outcome.name for outcome in failed)
        typer.echo(f"expunge: {len(failed)} of {len(outcomes)} jobs failed: {names}", err=True)
        sys.exit(1)


def summarise(folder: Path, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """What ``--json`` prints: the counts, and the facts of every job."""
    jobs = list[dict[str, Any]]()
    for name, o in outcomes.items():
        head = {"job": name, "status": _tell_status(o), "error": o.error}
        facts = {k: v for k, v in (o.value or {}).items() if k != "told"}
        jobs.append(head | facts | {"attempts": o.attempts, "seconds": round(o.seconds, 3)})
    failed = sum(o.error is not None for o in outcomes.values())
    return {
        "directory": str(folder),
        "done": len(outcomes) - failed,
        "failed": failed,
        "jobs": jobs,
    }


def make_table(outcomes: Mapping[str, Outcome]) -> list[str]:
    """One line for each job: name, guarantee, accuracy after the last stage, status.

    >>> facts = {"epsilon": 1.0, "delta": 1e-5, "test": 0.913}
    >>> lost = Outcome("b", error="row 40 is torn")
    >>> print("\\n".join(make_table({"a": Outcome("a", facts), "b": lost})))
    job  epsilon  delta  accuracy     status
    a          1  1e-05  test 91.3 %  done
    b          -      -  -            failed: row 40 is torn
    """
    rows = [("job", "epsilon", "delta", "accuracy", "status")]
    for name, o in outcomes.items():
        status = _tell_status(o) + (f": {o.error}" if o.error is not None else "")
        if o.value is None:
            rows.append((name, "-", "-", "-", status))
        else:
            epsilon, delta = format_up(o.value["epsilon"], 6), f"{o.value['delta']:g}"
            rows.append((name, epsilon, delta, _tell_accuracy(o.value), status))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:<{widths[3]}}  {row[4]}"
        for row in rows
    ]


def _tell_accuracy(facts: Mapping[str, Any]) -> str:
    """On the test set if there is one, else on what was kept; a loss where there are no classes."""
    for name in ("test", "retain"):
        if facts.get(name) is not None:
            return f"{name} {100 * facts[name]:.1f} %"
        if facts.get(f"{name}_loss") is not None:
            return f"{name} loss {facts[f'{name}_loss']:.4g}"
    return "-"


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


def _print_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2))
