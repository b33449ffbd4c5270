"""``expunge learn`` and ``expunge forget``: a model built to forget, its state, its releases."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expunge.cli.jobs import shorten
from expunge.cli.text import AsJson, format_up, print_json

if TYPE_CHECKING:
    from expunge.jobs.releases import Released

DELTA = 1e-5


def learn(
    job: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="See expunge init --head.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="STATE", help="The state, which is private; default: output.dir."),
    ] = None,
    release: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the head, with its certificate.")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Compute features, or shards, on Ray, here.")
    ] = False,
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Compute them on this Ray cluster.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Shards: processes; with Ray: tasks at once.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Learn a job's examples into a state; again, those that are new.

    All of them or none, through crashes: the same command again counts nothing twice.
    """
    from expunge.jobs.heads import learn_job

    pool = None
    if ray or ray_address is not None:
        from expunge.jobs.many import Pool

        pool = Pool(ray_address, workers)
    there = None if pool is not None else workers
    done = learn_job(job, out=out, release=release, pool=pool, workers=there, progress=True)
    _warn(done.said)
    if as_json:
        facts = {name: getattr(done, name) for name in ("new", "examples", "people", "digest")}
        facts |= {"state": str(done.state), "method": done.method}
        print_json(facts | ({} if done.release is None else {"release": _list(done.release)}))
        return
    state, place = shorten(done.state), "" if out is None else f" --out {_quote(out)}"
    typer.echo(
        f"{state}: {done.new:,} examples are new; it holds {done.examples:,} of "
        f"{done.people:,} people and is private"
    )
    what = "the examples and settings" if done.method == "shards" else "the sums"
    typer.echo(f"  {what} have the SHA-256 {done.digest}")
    if done.release is None:
        typer.echo(
            f"  write the model with: expunge learn {_quote(job)}{place} --release release-1"
        )
    else:
        _print(done.release, state)
    typer.echo(f"  forget with: expunge forget {_quote(state)} forget.txt --out release-2")


def forget(
    state: Annotated[Path, typer.Argument(help="What learn or save wrote; it is private.")],
    names: Annotated[Path, typer.Argument(metavar="FORGET.TXT", help="One identifier per line.")],
    out: Annotated[Path, typer.Option(help="A new directory for the release.")] = Path("release"),
    column: Annotated[
        str | None, typer.Option(help="The column of a CSV or Parquet file of identifiers.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Convex heads: start from what is kept, with noise.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Of the certificate.")] = DELTA,
    as_json: AsJson = False,
) -> None:
    """Forget, certify and release: model, certificate, record and report in OUT.

    After a crash the same command again goes on where it stood.
    """
    from expunge.jobs.lists import read_ids
    from expunge.jobs.releases import release_state

    done = release_state(state, out, read_ids(names, column), epsilon=epsilon, delta=delta)
    if as_json:
        print_json(_list(done))
    else:
        _print(done, state)


def _list(done: Released) -> dict[str, Any]:
    facts = {"directory": str(done.directory), "examples": done.examples, "said": list(done.said)}
    facts |= {} if done.test is None else {"test": done.test}
    return facts | {"certificate": done.certificate.model_dump(mode="json")}


def _print(done: Released, state: Path) -> None:
    found = done.certificate
    _warn(done.said)
    scored = "" if done.test is None else f"; test {100 * done.test:.1f} %"
    typer.echo(
        f"{done.directory}: epsilon = {format_up(found.epsilon, 6)}, delta = {found.delta:g}; "
        f"{done.examples:,} examples remain{scored}"
    )
    how = "--store" if found.shards is None else "--retrain"
    where = f"{_quote(done.directory)} [{how} {_quote(state)}]"
    typer.echo(f"  check it with: expunge verify {where}")


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _warn(said: tuple[str, ...]) -> None:
    for sentence in said:
        typer.echo(f"  {sentence}", err=True)
