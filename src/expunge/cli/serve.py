"""``expunge serve``: the ledger in a browser, and for programs; and the tokens that open it."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from expunge.cli.ledger import KeyFile, Url, open_ledger
from expunge.cli.text import AsJson, print_json, print_table

TokenName = Annotated[str, typer.Argument(metavar="NAME", help="What the token is called.")]


def serve(
    ledger: Url = None,
    key: KeyFile = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    name: Annotated[
        list[str] | None, typer.Option(help="A host name people type, of a proxy with TLS.")
    ] = None,
    log: Annotated[bool, typer.Option(help="Print a line for each request.")] = True,
) -> None:
    """Serve a ledger: pages for people, a JSON API for programs, work in the background."""
    from expunge.server.app import serve as run

    if log:
        logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    opened = open_ledger(ledger, key)
    run(opened, host=host, port=port, names=tuple(name or ()), tell=_tell)


def _tell(sentence: str) -> None:
    typer.echo(sentence, err=sentence.startswith(" "))


def token(
    name: TokenName,
    role: Annotated[str, typer.Option(help="requester, operator or auditor.")],
    model: Annotated[str | None, typer.Option(help="The only model it is for.")] = None,
    ledger: Url = None,
    key: KeyFile = None,
) -> None:
    """Make a token for the server; it is printed now and never again."""
    from expunge.ledger.tokens import make_token

    typer.echo(make_token(open_ledger(ledger, key).engine, name, role, model))
    typer.echo("  keep it: only its hash is stored", err=True)


def tokens(ledger: Url = None, key: KeyFile = None, as_json: AsJson = False) -> None:
    """The tokens that open the server, without their secrets."""
    from expunge.ledger.tokens import list_tokens

    found = list_tokens(open_ledger(ledger, key).engine)
    if as_json:
        names = ("name", "role", "model")
        facts = [{field: getattr(one, field) for field in names} for one in found]
        made = [one.created.isoformat() for one in found]
        print_json({"tokens": [a | {"created": at} for a, at in zip(facts, made, strict=True)]})
        return
    rows = [(one.name, one.role, one.model or "all", str(one.created.date())) for one in found]
    print_table(("token", "role", "model", "made"), rows, left=4)


def revoke(name: TokenName, ledger: Url = None, key: KeyFile = None) -> None:
    """Revoke a token: it opens nothing from now on."""
    from expunge.ledger.tokens import revoke_token

    revoke_token(open_ledger(ledger, key).engine, name)
    typer.echo(f"the token {name} is revoked")
