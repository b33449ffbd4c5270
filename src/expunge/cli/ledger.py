"""``expunge ledger``: requests of people, from the first letter to the evidence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expunge.cli.text import AsJson, print_json, print_table
from expunge.errors import InputError

if TYPE_CHECKING:
    from expunge.ledger.fulfilment import Done
    from expunge.ledger.ledger import Ledger
    from expunge.ledger.requests import Request

app = typer.Typer(help="Requests of people, and the releases that answer them.")

Url = Annotated[
    str | None,
    typer.Option("--ledger", envvar="EXPUNGE_LEDGER", metavar="URL", help="sqlite:///FILE, or …"),
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key", envvar="EXPUNGE_LEDGER_KEY", metavar="FILE", help="Default: FILE.key."),
]
Reason = Annotated[str, typer.Option(help="Kept sealed.")]
Number = Annotated[int, typer.Argument(metavar="REQUEST", help="Its number.")]
ModelName = Annotated[str | None, typer.Option(help="Only this model.")]


def open_ledger(url: str | None, key: Path | None) -> Ledger:
    """The ledger of ``--ledger`` or EXPUNGE_LEDGER."""
    from expunge.ledger.ledger import Ledger

    return Ledger(_need(url), key=key)


def _need(url: str | None) -> str:
    if not url:
        raise InputError("no ledger is named; give --ledger URL, or set EXPUNGE_LEDGER")
    return url


@app.command()
def init(ledger: Url = None, key: KeyFile = None) -> None:
    """Make a ledger and its key, or bring one to this version."""
    from expunge.ledger.ledger import Ledger

    with Ledger.create(_need(ledger), key=key) as made:
        typer.echo(f"{made.url.render_as_string()} is ready; its key is {made.key_file}")
    typer.echo("  keep a copy of the key elsewhere: without it nobody in the ledger can be found")


@app.command()
def register(
    name: Annotated[str, typer.Argument(help="What the model is called here.")],
    state: Annotated[Path, typer.Argument(help="A state of learn, or the job of unlearn.")],
    releases: Annotated[
        Path | None, typer.Option(help="Folder for its releases; default: STATE-releases.")
    ] = None,
    ledger: Url = None,
    key: KeyFile = None,
) -> None:
    """Register a model that may hold people."""
    with open_ledger(ledger, key) as opened:
        made = opened.register(name, state, releases=releases)
    typer.echo(f"{name}: the {made.kind} {made.path}; releases go to {made.folder}")


@app.command()
def request(
    person: Annotated[str, typer.Argument(help="The identifier; - reads it from the input.")],
    model: ModelName = None,
    received: Annotated[str | None, typer.Option(help="A date; default: today.")] = None,
    due: Annotated[str | None, typer.Option(help="A date; default: in one month.")] = None,
    reason: Annotated[str | None, typer.Option(help="Kept sealed.")] = None,
    ledger: Url = None,
    key: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """File a request; the same again, before it is answered, is the one that is there."""
    given = {"model": model, "received": received, "due": due, "reason": reason}
    with open_ledger(ledger, key) as opened:
        found = opened.request(_read(person), **given)
    if as_json:
        print_json(describe(found) | {"new": found.new})
        return
    how = "is filed" if found.new else "was filed before"
    typer.echo(f"request {found.number} {how}; it is {found.state} and due {found.due}")


@app.command("list")
def list_(
    state: Annotated[str | None, typer.Option(help="open, running, answered, …")] = None,
    model: ModelName = None,
    ledger: Url = None,
    key: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """All requests, with their clocks."""
    with open_ledger(ledger, key) as opened:
        found = opened.requests(state=state, model=model)
    if as_json:
        print_json({"requests": [describe(one) for one in found]})
        return
    names = ("request", "state", "answer", "received", "due", "clock")
    rows = [
        (
            str(one.number),
            one.state,
            one.answer or "",
            str(one.received),
            str(one.due),
            one.clock.pace,
        )
        for one in found
    ]
    print_table(names, rows, left=6)


@app.command()
def work(
    model: ModelName = None,
    most: Annotated[int | None, typer.Option(help="At most this many in one run.")] = None,
    least: Annotated[int, typer.Option(help="Wait for this many, unless one is due.")] = 1,
    days: Annotated[int, typer.Option(help="Due within so many days does not wait.")] = 7,
    lease: Annotated[float, typer.Option(help="Seconds of silence of a dead worker.")] = 900.0,
    ledger: Url = None,
    key: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Forget all who asked, release, certify, and only then answer."""
    with open_ledger(ledger, key) as opened:
        done = opened.work(model, most=most, least=least, days=days, lease=lease)
        models = opened.models(model)
    if as_json:
        print_json({"done": [describe_done(one) for one in done]})
    elif not done:
        held = [f"{one.worker} is at work on {one.name}" for one in models if one.worker]
        waiting = sum(one.open for one in models)
        typer.echo(
            "; ".join(held) or (f"{waiting} open requests wait" if waiting else "nothing to do")
        )
    else:
        for one in done:
            _print(one)
    if any(one.failed for one in done):
        raise typer.Exit(1)


@app.command()
def retire(
    model: Annotated[str, typer.Argument(help="A registered model.")],
    withdrawn: Annotated[str, typer.Option(help="Why nobody uses it any more; kept as a hash.")],
    ledger: Url = None,
    key: KeyFile = None,
) -> None:
    """Ask a model no more, for good, because it was withdrawn: say why."""
    with open_ledger(ledger, key) as opened:
        numbers = opened.retire(model, withdrawn)
    typer.echo(f"{model} is retired; {len(numbers)} requests waited for it")


@app.command()
def check(
    state: Annotated[str, typer.Argument(help="A state, a copy of one, or a model's name.")],
    ledger: Url = None,
    key: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Whether anybody who was forgotten is held again: 0 nobody, 1 the requests are named."""
    with open_ledger(ledger, key) as opened:
        found = opened.check(state)
    facts = {"model": found.model, "path": str(found.path), "forgotten": found.forgotten}
    if as_json:
        print_json(facts | {"returned": list(found.returned)})
    elif not found.returned:
        typer.echo(f"{found.path} holds nobody of the {found.forgotten} whom it forgot")
    else:
        numbers = ", ".join(map(str, found.returned))
        typer.echo(f"{found.path} holds again who was forgotten by request {numbers}")
        typer.echo(f"  forget them again with: expunge ledger replay {found.model}")
    if found.returned:
        raise typer.Exit(1)


@app.command()
def replay(
    model: Annotated[str, typer.Argument(help="A registered model.")],
    ledger: Url = None,
    key: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Forget again who came back into a model's state, as from a backup."""
    with open_ledger(ledger, key) as opened:
        done = opened.replay(model)
    if as_json:
        print_json(describe_done(done))
    elif done.release is None:
        typer.echo(f"{model} holds nobody who was forgotten")
    else:
        _print(done)


@app.command()
def readmit(
    number: Number,
    model: Annotated[str, typer.Argument(help="The model the person is back in.")],
    ledger: Url = None,
    key: KeyFile = None,
) -> None:
    """Say that a person is back in a model on purpose, and may stay."""
    with open_ledger(ledger, key) as opened:
        opened.readmit(number, model)
    typer.echo(f"the person of request {number} may stay in {model}")


@app.command()
def verify(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the certificates.")] = False,
    accept: Annotated[
        str | None, typer.Option(help="Why an older copy was put back, to go on from it.")
    ] = None,
    ledger: Url = None,
    key: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """The chain, the tables by the chain, anchors, certificates: 0 it holds, 1 what differs."""
    with open_ledger(ledger, key) as opened:
        if accept is not None:
            opened.accept(accept)
        found = opened.verify(certificates=not quick)
    facts = {"events": found.events, "head": found.head, "requests": found.requests}
    if as_json:
        print_json({"holds": True} | facts | {"releases": found.releases, "said": list(found.said)})
        return
    typer.echo(
        f"the ledger holds: {found.events:,} events, {found.requests:,} requests, "
        f"{found.releases:,} releases; its last event is {found.head}"
    )
    for sentence in found.said:
        typer.echo(f"  {sentence}")


@app.command()
def export(
    person: Annotated[str, typer.Argument(help="The identifier; - reads it from the input.")],
    out: Annotated[Path, typer.Option(help="The zip to write.")] = Path("evidence.zip"),
    ledger: Url = None,
    key: KeyFile = None,
) -> None:
    """The evidence about a person, for a regulator: a zip that explains itself."""
    from expunge.files import write_atomic

    if out.exists():
        raise InputError.of("--out", str(out), "a new file")
    with open_ledger(ledger, key) as opened:
        write_atomic(out, opened.export(_read(person)), private=True)
    typer.echo(f"{out}: README.txt in it says how to verify it")


@app.command()
def withdraw(number: Number, reason: Reason = "", ledger: Url = None, key: KeyFile = None) -> None:
    """The person takes a request back."""
    with open_ledger(ledger, key) as opened:
        opened.withdraw(number, reason)
    typer.echo(f"request {number} is withdrawn")


@app.command()
def refuse(
    number: Number,
    reason: Annotated[str, typer.Option(help="Why; kept sealed.")],
    ledger: Url = None,
    key: KeyFile = None,
) -> None:
    """Refuse a request, with a reason."""
    with open_ledger(ledger, key) as opened:
        opened.refuse(number, reason)
    typer.echo(f"request {number} is refused")


def describe(found: Request) -> dict[str, Any]:
    """A request as plain data."""
    return {
        "number": found.number,
        "person": found.person,
        "state": found.state,
        "answer": found.answer,
        "model": found.model,
        "received": str(found.received),
        "due": str(found.due),
        "filed": found.filed.isoformat(),
        "ended": None if found.ended is None else found.ended.isoformat(),
        "clock": found.clock.pace,
        "days": found.clock.days,
        "answers": [
            {
                "model": one.model,
                "state": one.state,
                "outcome": one.outcome,
                "release": one.release,
                "certificate": one.certificate,
                "directory": None if one.directory is None else str(one.directory),
            }
            for one in found.answers
        ],
    }


def describe_done(done: Done) -> dict[str, Any]:
    """A round of work as plain data."""
    names = ("model", "forgotten", "already", "not_held", "release", "certificate", "failed")
    facts = {name: getattr(done, name) for name in names}
    facts |= {"requests": list(done.requests), "said": list(done.said)}
    return facts | {"directory": None if done.directory is None else str(done.directory)}


def _print(done: Done) -> None:
    if done.failed is not None:
        typer.echo(f"{done.model}: {done.failed}", err=True)
        return
    for sentence in done.said:
        typer.echo(f"  {sentence}", err=True)
    count = f"{len(done.requests)} request{'' if len(done.requests) == 1 else 's'}"
    typer.echo(
        f"{done.model}: {count}; {done.forgotten} forgotten, {done.already} "
        f"already, {done.not_held} not held"
    )
    if done.directory is not None:
        typer.echo(f"  release {done.release}: {done.directory}")


def _read(person: str) -> str:
    """The identifier, not on the command line where other users may see it."""
    if person != "-":
        return person
    try:
        lines = typer.get_text_stream("stdin").read(10_000).splitlines()
    except UnicodeDecodeError as error:
        raise InputError(
            f"the input is not text: {error.reason}; it must be one identifier"
        ) from None
    if len(lines) != 1:
        raise InputError(f"the input has {len(lines)} lines; it must be one identifier")
    return lines[0]
