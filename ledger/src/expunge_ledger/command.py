"""``expunge-ledger``: requests of people, from the first letter to the evidence."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from expunge import ExpungeError, InputError
from expunge_ledger.ledger import Ledger
from expunge_ledger.work import Done

HELP = "Requests of people to be forgotten, and the releases that answer them."
app = typer.Typer(help=HELP, no_args_is_help=True, pretty_exceptions_enable=False)
Url = Annotated[str | None, typer.Option("--ledger", envvar="EXPUNGE_LEDGER", metavar="URL")]
KeyFile = Annotated[Path | None, typer.Option("--key", envvar="EXPUNGE_LEDGER_KEY")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Person = Annotated[str, typer.Argument(help="The identifier; - reads it from the input.")]
OneModel = Annotated[str | None, typer.Option("--model", help="Only this model.")]
Day = Annotated[str | None, typer.Option(metavar="DATE", help="As 2026-01-31.")]
Result = tuple[Any, str, int]  # plain data, what to print instead, exit code


def main() -> None:
    """The command; an error of ours is one sentence, and its exit code."""
    try:
        app()
    except ExpungeError as error:
        typer.echo(f"expunge-ledger: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def command(function: Callable[..., Result]) -> None:
    """A command on an opened ledger, with the options that all of them have."""

    def run(ledger: Any, key: Any, as_json: Any, **given: Any) -> None:
        with Ledger(_need(ledger), key=key) as opened:
            data, text, code = function(opened, **given)
        shown = json.dumps(data, ensure_ascii=False, indent=1, default=str) if as_json else text
        if shown:
            typer.echo(shown)
        raise typer.Exit(code)

    kind, keyword = inspect.Parameter, inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]
    more = {"ledger": (Url, None), "key": (KeyFile, None), "as_json": (AsJson, False)}
    own = [one.replace(annotation=hints[one.name], kind=keyword) for one in own]
    own += [kind(name, keyword, default=d, annotation=a) for name, (a, d) in more.items()]
    made = functools.partial(run)
    made.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    made.__annotations__ = {one.name: one.annotation for one in own}
    app.command(function.__name__.strip("_"), help=function.__doc__)(made)


def _need(url: str | None) -> str:
    if not url:
        raise InputError("no ledger is named; give --ledger URL, or set EXPUNGE_LEDGER")
    return url


def _align(*rows: tuple[Any, ...]) -> str:
    shown = [["" if one is None else str(one) for one in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join(f"  {'   '.join(map(str.ljust, row, widths)).rstrip()}" for row in shown)


def _read(person: str) -> str:
    """The identifier, not on the command line where other users may see it."""
    if person != "-":
        return person
    try:
        lines = sys.stdin.read(10_000).splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"the input is not text: {error.reason}; one identifier is") from None
    if len(lines) != 1:
        raise InputError(f"the input has {len(lines)} lines; it must be one identifier")
    return lines[0]


def _describe(done: Done) -> str:
    said = "".join(f"  {sentence}\n" for sentence in done.said)
    if done.failed is not None:
        return f"{said}{done.model}: {done.failed}"
    count = f"{len(done.requests)} request{'' if len(done.requests) == 1 else 's'}"
    text = f"{said}{done.model}: {count}; {done.forgotten} forgotten, {done.already} already, "
    place = "" if done.directory is None else f"\n  release {done.release}: {done.directory}"
    return f"{text}{done.not_held} not held{place}"


@app.command()
def init(ledger: Url = None, key: KeyFile = None) -> None:
    """Make a ledger and its key."""
    with Ledger.create(_need(ledger), key=key) as made:
        typer.echo(f"{made.url.render_as_string()} is ready; its key is {made.key_file}")
    typer.echo("  keep a copy of the key elsewhere: without it nobody in the ledger can be found")


@command
def register(
    opened: Ledger, name: str,
    state: Annotated[Path | None, typer.Argument(help="Its folder, or a job's file.")] = None,
    releases: Annotated[Path | None, typer.Option(help="Default: STATE-releases.")] = None,
    retire: Annotated[str | None, typer.Option(help="Ask it no more: why nobody uses it.")] = None,
    readmit: Annotated[int | None, typer.Option(help="A request: its person may be back.")] = None,
) -> Result:  # fmt: skip
    """Register a model that may hold people; retire it; let somebody be in it again."""
    if sum(one is not None for one in (state, retire, readmit)) != 1:
        raise InputError("give one of: STATE, --retire REASON, --readmit REQUEST")
    if retire is not None:
        numbers = opened.retire(name, retire)
        return numbers, f"{name} is retired; {len(numbers)} requests waited for it", 0
    if readmit is not None:
        opened.readmit(readmit, name)
        return {}, f"the person of request {readmit} may stay in {name}", 0
    made = opened.register(name, state or "", releases=releases)
    text = f"{name}: the {made.kind} {made.path}; releases go to {made.folder}"
    return made.model_dump(mode="json"), text, 0


@command
def request(
    opened: Ledger,
    person: Annotated[str | None, typer.Argument(help="Whom; - reads it from the input.")] = None,
    model: OneModel = None, received: Day = None, due: Day = None,
    reason: Annotated[str | None, typer.Option(help="Kept sealed.")] = None,
    refuse: Annotated[int | None, typer.Option(help="Refuse this request; say a reason.")] = None,
    withdraw: Annotated[int | None, typer.Option(help="The person takes this one back.")] = None,
) -> Result:  # fmt: skip
    """File a request; the same again is the one that is there. Or end one."""
    if sum(one is not None for one in (person, refuse, withdraw)) != 1:
        raise InputError("give one of: PERSON, --refuse NUMBER, --withdraw NUMBER")
    if person is not None:
        given = {"model": model, "received": received, "due": due, "reason": reason}
        found = opened.request(_read(person), **given)
        how = "is filed" if found.new else "was filed before"
        text = f"request {found.number} {how}; it is {found.state} and due {found.due}"
        return found.model_dump(mode="json"), text, 0
    end = opened.withdraw if refuse is None else opened.refuse
    found = end(refuse or withdraw or 0, reason or "")
    return found.model_dump(mode="json"), f"request {found.number} is {found.state}", 0


@command
def list_(
    opened: Ledger, state: Annotated[str | None, typer.Option(help="open, running, …")] = None,
    model: OneModel = None,
) -> Result:  # fmt: skip
    """All requests, with their clocks."""
    found = [one.model_dump(mode="json") for one in opened.requests(state=state, model=model)]
    names = ("number", "state", "answer", "received", "due", "pace")
    rows = [tuple(one[name] for name in names) for one in found]
    return {"requests": found}, _align(names, *rows), 0


@command
def work(
    opened: Ledger, model: OneModel = None,
    replay: Annotated[bool, typer.Option("--replay", help="Forget again who came back.")] = False,
) -> Result:  # fmt: skip
    """Forget all who asked, release, certify, and only then answer."""
    if replay:
        if model is None:
            raise InputError("--replay needs --model NAME")
        done = opened.replay(model)
        nobody = done.release is None and done.failed is None
        text = f"{model} holds nobody who was forgotten" if nobody else _describe(done)
        return asdict(done), text, int(done.failed is not None)

    rounds = opened.work(model)
    waiting = sum(one.open + one.running for one in opened.models(model))
    text = "\n".join(map(_describe, rounds))
    text = text or (f"{waiting} requests wait" if waiting else "nothing to do")
    return {"done": [asdict(one) for one in rounds]}, text, int(any(one.failed for one in rounds))


@command
def verify(
    opened: Ledger,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the certificates.")] = False,
    accept: Annotated[str | None, typer.Option(help="Why to go on from an old copy.")] = None,
) -> Result:  # fmt: skip
    """The chain, the tables by the chain, anchors, certificates: 0 it holds, 1 what differs."""
    if accept is not None:
        opened.accept(accept)
    found = opened.verify(certificates=not quick)
    text = f"the ledger holds: {found.events:,} events, {found.requests:,} requests, "
    text += f"{found.releases:,} releases; its last event is {found.head}"
    return found.model_dump(), text, 0


@command
def export(opened: Ledger, person: Person, out: Path = Path("evidence.zip")) -> Result:
    """The evidence about a person, for a regulator: a zip that explains itself."""
    if out.exists():
        raise InputError.of("--out", str(out), "a new file")
    data = opened.export(_read(person))
    with open(out, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(data)
    return {"out": out}, f"{out}: README.txt in it says how to verify it", 0


@command
def token(
    opened: Ledger,
    name: Annotated[str | None, typer.Argument(help="Without one all are listed.")] = None,
    role: Annotated[str | None, typer.Option(help="requester, operator or auditor.")] = None,
    model: Annotated[str | None, typer.Option(help="The only model it is for.")] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="It opens nothing any more.")] = False,
) -> Result:  # fmt: skip
    """Make a token for the server, which is printed now and never again; list or revoke them."""
    if name is None:
        found = [one.model_dump() for one in opened.tokens()]
        rows = [(one["name"], one["role"], one["model"] or "all") for one in found]
        return {"tokens": found}, _align(("token", "role", "models"), *rows), 0
    if revoke:
        opened.revoke_token(name)
        return {}, f"the token {name} is revoked", 0
    made = opened.make_token(name, role or "", model)
    typer.echo("  keep it: only its hash is stored", err=True)
    return {"token": made}, made, 0


@command
def serve(
    opened: Ledger, host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    name: Annotated[list[str] | None, typer.Option(help="Of a proxy with TLS.")] = None,
) -> Result:  # fmt: skip
    """Serve a ledger: pages for people, a JSON API for programs, work in the background."""
    from expunge_ledger.server.app import run

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    run(opened, host=host, port=port, names=tuple(name or ()), say=typer.echo)
    return {}, "", 0
