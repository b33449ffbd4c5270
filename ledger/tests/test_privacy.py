"""No identifier is written in clear: not in the database, nor in what is said by default."""

import logging
import subprocess
from pathlib import Path

import pytest

from expunge_ledger import Ledger
from ledger.tests.postgres import find_programs
from ledger.tests.stand_in import FILE, learn_again, make_state

NAME = "zebulon.quartermaine@example.org"
REASON = "the zinnia incident"


def live(ledger: Ledger, state: Path) -> list[str]:
    """Every kind of end that a request of this person may have, and what was said."""
    said = list[str]()
    for model in (None, "shop"):
        ledger.request(NAME, model=model, reason=REASON)
    ledger.withdraw(2, REASON)
    said.append(str(ledger.work()))
    ledger.request(NAME)
    said.append(str(ledger.work()))
    (state / FILE).rename(state.with_name(FILE))
    ledger.request(NAME, model="shop")
    said.append(str(ledger.work()))
    (state.with_name(FILE)).rename(state / FILE)
    ledger.refuse(4, REASON)
    ledger.request(f"not-{NAME}")
    said += [str(ledger.work()), str(ledger.verify())]
    return said + [str(event) for event in ledger.events()]


def search(data: bytes) -> list[str]:
    parts = (NAME, NAME.split("@")[0], REASON, "zinnia")
    return [part for part in parts for form in ("utf-8", "utf-16-le") if part.encode(form) in data]


def test_no_name_in_any_byte(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: object
) -> None:
    caplog.set_level(logging.DEBUG)
    home = make_state(tmp_path / "home" / "state")
    learn_again(home, NAME)
    ledger = Ledger.create(url, key=tmp_path / "ledger.key")
    ledger.register("shop", home)
    said = live(ledger, home)
    assert not search("\n".join([*said, caplog.text]).encode())
    if ledger.url.get_backend_name() == "postgresql":
        programs, socket = find_programs(), ledger.url.query["host"]
        words = [programs / "pg_dump", "-h", socket, "-U", "postgres", ledger.url.database]
        dumped = subprocess.run(words, capture_output=True, check=True).stdout
        assert b"CREATE TABLE public.requests" in dumped
        assert not search(dumped)
        assert not search((Path(str(socket)) / "log").read_bytes())
    ledger.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != FILE]
    assert len(files) > 5
    for path in files:
        assert not search(path.read_bytes()), path


def test_the_search_finds_what_is_there() -> None:
    assert search(f"to {NAME}".encode())
    assert search(NAME.encode("utf-16-le"))


def test_names_are_not_shown_by_objects(small: Ledger) -> None:
    found = small.request(NAME, reason=None)
    assert not search(f"{found!r} {small.key!r} {small.engine!r}".encode())
    assert small.key.secret.hex() not in repr(small.key)
