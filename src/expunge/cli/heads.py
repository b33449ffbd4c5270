"""``expunge forget``: the next release of a head built to forget, from its state folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from expunge.cli.text import AsJson, print_json

DELTA = 1e-5


def forget(
    state: Annotated[Path, typer.Argument(help="What learn or save wrote; it is private.")],
    names: Annotated[Path, typer.Argument(metavar="FORGET.TXT", help="One identifier per line.")],
    out: Annotated[Path, typer.Option(help="A new directory for the release.")] = Path("release"),
    epsilon: Annotated[
        float | None, typer.Option(help="Convex heads: start from what is kept, with noise.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Of the certificate; default: 1e-5.")] = None,
    as_json: AsJson = False,
) -> None:
    """Forget, certify and release: model, certificate, record and report in OUT."""
    from expunge.certificates.certificate import Certificate, certify
    from expunge.errors import InputError
    from expunge.files import write_atomic
    from expunge.forgettable.convex import ConvexHead
    from expunge.forgettable.loading import load
    from expunge.jobs.data import read_ids
    from expunge.jobs.directory import write_run

    head, ids = load(state), read_ids(names)
    if out.exists():
        raise InputError.of("--out", str(out), "a directory that is not there yet")
    last = state / "certificate.json"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if epsilon is None:
            run = head.forget(ids)
        elif isinstance(head, ConvexHead):
            run = head.forget(ids, epsilon=epsilon, delta=delta or DELTA)
        else:
            raise InputError.of("--epsilon", epsilon, "left out: this head forgets exactly")
    parent = Certificate.load(last) if last.exists() else None
    if parent is not None and parent.weights.after != run.record.weights_before:
        parent = None
    certificate = certify(run.record, delta=delta or DELTA, parent=parent)
    write_run(out, model=run.model, record=run.record, certificate=certificate)
    write_atomic(last, certificate.to_bytes())
    if as_json:
        print_json(certificate.model_dump(mode="json"))
        return
    for warning in said:
        typer.echo(str(warning.message))
    typer.echo(
        f"{out}: epsilon = {certificate.epsilon:.6g}, delta = {certificate.delta:.6g}; "
        f"{len(head)} examples remain"
    )
