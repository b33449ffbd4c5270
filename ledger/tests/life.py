"""What tests of the ledger share: workers that die where a test says, and what must always hold."""

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import update

import expunge
from expunge_ledger import Ledger, models
from expunge_ledger.database import connected
from expunge_ledger.schema import LEASES
from expunge_ledger.work import Done, list_forgotten


class Killed(BaseException):
    """What nothing catches."""


def die(*given: Any, **more: Any) -> None:
    raise Killed


def die_at(owner: object, name: str, work: Callable[..., object], *given: Any) -> None:
    """Work is killed as it comes to this function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Killed):
            work(*given)


def file(ledger: Ledger, *people: str) -> None:
    """A request of each."""
    for person in people:
        ledger.request(person)


def forget(ledger: Ledger, *people: str) -> Done:
    """File their requests, and work on the one model that there is."""
    file(ledger, *people)
    (done,) = ledger.work()
    return done


def work_with(ledger: Ledger, owner: object, name: str, other: Callable[..., object]) -> Done:
    """A round of work with another function in the place of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, other)
        (done,) = ledger.work()
    return done


def check_fails(ledger: Ledger, *said: str) -> None:
    """The next round of work answers nobody, and says why."""
    (done,) = ledger.work()
    assert done.failed
    for one in said:
        assert one in done.failed


def check_refused(said: str, call: Callable[..., object], *given: Any, **more: Any) -> None:
    with pytest.raises(expunge.InputError, match=said):
        call(*given, **more)


def check_differs(said: str, *calls: Callable[[], object]) -> None:
    """Each call finds what was changed, and names it."""
    for call in calls:
        with pytest.raises(expunge.VerificationError, match=said):
            call()


def let_lease_end(ledger: Ledger) -> None:
    """Workers that died are dead for everybody."""
    with connected(ledger.engine, writes=True) as connection:
        connection.execute(update(LEASES).values(until=0.0))


def list_states(ledger: Ledger) -> dict[int, str]:
    return {request.number: request.state for request in ledger.requests()}


def list_returned(ledger: Ledger, name: str = "shop") -> list[int]:
    """The requests of the forgotten who are in a model's state again."""
    with ledger.reading() as tables:
        model = tables.need_model(name)
    forgotten = list_forgotten(ledger, model)
    there = models.Model(model["path"]).find(forgotten)
    return sorted(number for name in there for number in forgotten[name])


def check_answers(ledger: Ledger) -> None:
    """Nobody who was answered "forgotten" is there; every certificate verifies; the books agree."""
    assert ledger.verify().requests == len(ledger.requests())
    for model in ledger.models():
        if model.kind != "job":
            assert not list_returned(ledger, model.name)
        for release in model.releases:
            assert expunge.verify(release.directory).holds
    named = [n for model in ledger.models() for one in model.releases if not one.replay
             for n in one.requests]  # fmt: skip
    if len(ledger.models()) == 1:
        assert len(named) == len(set(named))


def write(ledger: Ledger, statement: str, *given: object) -> None:
    """What somebody with the database, and no key, does."""
    with sqlite3.connect(str(ledger.url.database)) as raw:
        raw.execute(statement, given)
    raw.close()


def put(ledger: Ledger, table: str, *rows: Any) -> None:
    """Put rows into a table, as they were read before."""
    for row in rows:
        write(ledger, f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", *row)


def read(ledger: Ledger, statement: str, *given: object) -> list[Any]:
    with sqlite3.connect(str(ledger.url.database)) as raw:
        found = raw.execute(statement, given).fetchall()
    raw.close()
    return found
