"""Tokens: printed once, kept as a hash, revoked at once; and the command that serves."""

import json
import re

import pytest
from typer.testing import CliRunner

from expunge.cli.main import app
from expunge.errors import InputError
from expunge.ledger.tokens import find_token, hash_token, list_tokens, make_token, revoke_token
from server_run import Life


def test_a_token_is_kept_as_a_hash(life: Life) -> None:
    secret = make_token(life.ledger.engine, "desk", "requester", "shop")
    assert re.fullmatch(r"expunge_[\w-]{43}", secret)
    data = life.read_all()
    assert secret.encode() not in data
    assert hash_token(secret).encode() not in data  # only what the key makes of it
    found = find_token(life.ledger.engine, hash_token(secret))
    assert found is not None
    assert (found.name, found.role, found.model) == ("desk", "requester", "shop")
    assert find_token(life.ledger.engine, hash_token(secret + "x")) is None
    life.ledger.verify()


@pytest.mark.parametrize(
    ("name", "role", "model"),
    [
        ("", "operator", None),
        ("a b", "operator", None),
        ("x" * 101, "operator", None),
        ("a", "admin", None),
        ("a", "operator", "nothing"),
        ("operator", "operator", None),
    ],
)
def test_a_bad_token_is_not_made(life: Life, name: str, role: str, model: str | None) -> None:
    before = life.ledger.anchor(), list_tokens(life.ledger.engine)
    with pytest.raises(InputError):
        make_token(life.ledger.engine, name, role, model)
    with pytest.raises(InputError):
        revoke_token(life.ledger.engine, "nobody")
    assert (life.ledger.anchor(), list_tokens(life.ledger.engine)) == before


def test_making_listing_and_revoking_by_command(life: Life) -> None:
    place = ["--ledger", f"sqlite:///{life.folder}/ledger.db", "--key", f"{life.folder}/ledger.key"]
    run = CliRunner()
    made = run.invoke(app, ["ledger", "token", "desk", "--role", "requester", *place])
    secret = made.stdout.strip()
    assert life.ask(secret, "GET", "/me").json()["name"] == "desk"
    listed = run.invoke(app, ["ledger", "tokens", "--json", *place])
    facts = {one["name"]: one for one in json.loads(listed.stdout)["tokens"]}
    assert facts["desk"]["role"] == "requester"
    assert secret not in listed.stdout
    assert "desk" in run.invoke(app, ["ledger", "tokens", *place]).stdout
    assert run.invoke(app, ["ledger", "revoke", "desk", *place]).exit_code == 0
    assert life.ask(secret, "GET", "/me").status_code == 401
    kinds = [(e.body["did"], e.body["name"]) for e in life.ledger.events() if e.kind == "token"]
    assert kinds[-2:] == [("made", "desk"), ("revoked", "desk")]
    life.ledger.verify()


def test_a_port_that_is_taken_and_a_host_that_is_not_here(life: Life) -> None:
    import socket

    from expunge.server.app import serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot be listened on"):
            serve(life.ledger, port=taken.getsockname()[1])


def test_a_ledger_that_is_not_there_is_not_served(life: Life) -> None:
    run = CliRunner()
    for url in (f"sqlite:///{life.folder}/other.db", "mysql://x", ""):
        found = run.invoke(app, ["serve", "--ledger", url])
        assert isinstance(found.exception, InputError), url
    assert not (life.folder / "other.db").exists()


def test_a_warning_outside_of_loopback(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    from expunge.server import app as module

    kept = list[object]()
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: kept.extend(sockets))
    for host, warned in (("127.0.0.1", False), ("0.0.0.0", True)):
        told = list[str]()
        module.serve(life.ledger, host=host, port=0, tell=told.append)
        assert told[0].startswith(f"the ledger is served on http://{host}:")
        assert (len(told) == 2 and "warning" in told[1]) == warned
    for one in kept:
        one.close()  # pyright: ignore
