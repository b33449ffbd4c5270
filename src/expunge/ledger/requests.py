"""Requests: filed once, looked up, withdrawn or refused. What is answered is answered by work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, func, insert, select, update

from expunge.errors import InputError, VerificationError
from expunge.ledger.chain import append, is_genuine, list_own
from expunge.ledger.clocks import Clock, add_month, read_clock, read_date, read_now
from expunge.ledger.names import Key, read_person
from expunge.ledger.schema import MODELS, RELEASES, REQUESTS, WORK

State = Literal["open", "running", "answered", "refused", "withdrawn"]
STATES: tuple[State, ...] = ("open", "running", "answered", "refused", "withdrawn")
FORGOTTEN, ALREADY, NOT_HELD = "forgotten", "already forgotten", "not held"
HELD_IN_NONE, WITHDRAWN = "held in none", "model withdrawn"
MOST_NUMBER = 2**31 - 1


@dataclass(frozen=True)
class Answer:
    """What a request asks of one model: ``outcome`` is None until that is done.

    ``outcome`` is "forgotten", "already forgotten" (by the release named), "not held" or "model
    withdrawn": its operator said that nobody uses it any more.
    """

    model: str
    state: str
    outcome: str | None
    release: int | None
    certificate: str | None
    directory: Path | None


@dataclass(frozen=True)
class Request:
    """A request as it stands; ``person`` is the keyed hash, ``answer`` what :func:`conclude`
    says. ``new`` is whether this call filed it."""

    number: int
    person: str
    state: State
    answer: str | None
    model: str | None
    received: date
    due: date
    filed: datetime
    ended: datetime | None
    clock: Clock
    reason: str | None
    why: str | None
    answers: tuple[Answer, ...]
    new: bool = False


def conclude(outcomes: Sequence[str], all_models: bool) -> str:
    """The answer to a request that no model owes anything any more.

    >>> conclude([NOT_HELD, ALREADY], True), conclude([NOT_HELD, WITHDRAWN], True)
    ('forgotten', 'held in none')
    """
    if FORGOTTEN in outcomes or ALREADY in outcomes:
        return FORGOTTEN
    return HELD_IN_NONE if all_models else outcomes[0]  # others were not asked


def file_request(
    connection: Connection,
    key: Key,
    person: object,
    *,
    model: str | None = None,
    received: date | str | None = None,
    due: date | str | None = None,
    reason: str | None = None,
) -> tuple[int, bool]:
    """File a request; the same one that is not answered yet is the one that is there, due when
    the earlier of both is."""
    name, now = read_person(person), read_now()
    arrived = read_date("received", received, now.date())
    if arrived > now.date() + timedelta(days=1):  # it is tomorrow already somewhere
        raise InputError.of("received", arrived.isoformat(), "today or earlier")
    late = read_date("due", due, add_month(arrived))
    if late < arrived:
        raise InputError.of("due", late.isoformat(), f"{arrived.isoformat()} or later")
    if reason is not None and not 0 < len(reason) <= 10_000:
        raise InputError.of("reason", f"{reason[:20]}…", "a text of at most 10,000 characters")
    live = select(MODELS).where(MODELS.c.retired.is_(None)).order_by(MODELS.c.id)
    models = {row.name: row.id for row in connection.execute(live)}
    if model is not None and model not in models:
        raise InputError.of("model", model, f"one of {sorted(models)}")
    scope, hashed = (0 if model is None else models[model]), key.hash_person(name)
    same = select(REQUESTS.c.number, REQUESTS.c.due).where(
        REQUESTS.c.person == hashed,
        REQUESTS.c.scope == scope,
        REQUESTS.c.state.in_(("open", "running")),
    )
    found = connection.execute(same).one_or_none()
    if found is not None:
        _check_waiting(connection, found.number, hashed)
        if (sooner := late.isoformat()) < found.due:  # whoever filed first does not set the clock
            append(connection, "hastened", request=found.number, due=sooner)
            chosen = REQUESTS.c.number == found.number
            connection.execute(update(REQUESTS).where(chosen).values(due=sooner))
        return found.number, False
    number = (connection.execute(select(func.max(REQUESTS.c.number))).scalar_one() or 0) + 1
    asked = list(models) if model is None else [model]
    event = append(
        connection,
        "requested",
        request=number,
        person=hashed,
        model=model,
        models=asked,
        received=arrived.isoformat(),
        due=late.isoformat(),
        reason=None if reason is None else key.tag("reason", reason),
    )
    values = {
        "number": number,
        "person": hashed,
        "scope": scope,
        "sealed": key.seal(name, f"{number} {hashed}"),
        "reason": None if reason is None else key.seal(reason, f"reason {number}"),
        "received": arrived.isoformat(),
        "due": late.isoformat(),
        "filed": event.at,
        "state": "open",
    }
    connection.execute(insert(REQUESTS).values(**values))
    for one in asked:
        connection.execute(insert(WORK).values(request=number, model=models[one], state="open"))
    return number, True


def _check_waiting(connection: Connection, number: int, person: str) -> None:
    """Who files again is sent to a request that the chain knows, and that has not ended: else a
    row that somebody put there would swallow theirs."""
    own = list_own(connection, number)
    ended = {"answered", "refused", "withdrawn"}.intersection(event.kind for event in own)
    first = own[0] if own else None
    if ended or first is None or first.body.get("person") != person:
        raise VerificationError(f"request {number} is not what the events tell; nothing is filed")
    if not is_genuine(connection, first):
        raise VerificationError(f"event {first.number} was changed; nothing is filed")


def end_request(
    connection: Connection, key: Key, number: int, state: Literal["refused", "withdrawn"], why: str
) -> None:
    """Withdraw or refuse a request on which nobody is working; what was done stays done."""
    found = select(REQUESTS).where(REQUESTS.c.number == number)
    row = connection.execute(found).one_or_none() if 0 < number <= MOST_NUMBER else None
    if row is None:
        raise InputError.of("request", number, "the number of a request of this ledger")
    if state == "refused" and not why.strip():
        raise InputError.of("reason", why, "why the request is refused")
    if len(why) > 10_000:
        raise InputError.of("reason", f"{why[:20]}…", "a text of at most 10,000 characters")
    parts = connection.execute(select(WORK.c.state).where(WORK.c.request == number)).scalars().all()
    if row.state not in ("open", "running") or "running" in parts:
        stands = "being worked on" if row.state in ("open", "running") else row.state
        raise InputError(f"request {number} is {stands}; only an open one can be {state}")
    event = append(connection, state, request=number, reason=key.tag("why", why))
    # Where nothing was forgotten, nothing will have to be forgotten again: the name is not needed.
    done = select(WORK.c.request).where(WORK.c.request == number, WORK.c.release.is_not(None))
    kept = row.sealed if connection.execute(done).first() else None
    connection.execute(
        update(REQUESTS)
        .where(REQUESTS.c.number == number)
        .values(state=state, ended=event.at, sealed=kept, why=key.seal(why, f"why {number}"))
    )
    connection.execute(
        update(WORK).where(WORK.c.request == number, WORK.c.state == "open").values(state="ended")
    )


def list_requests(
    connection: Connection,
    key: Key,
    *,
    numbers: Iterable[int] | None = None,
    person: str | None = None,
    state: str | None = None,
    model: str | None = None,
    after: int = 0,
    most: int | None = None,
    new: bool = False,
) -> tuple[Request, ...]:
    """Requests by number, with their clocks and what they ask of each model."""
    if state is not None and state not in STATES:
        raise InputError.of("state", state, "one of " + ", ".join(STATES))
    chosen = select(REQUESTS).where(REQUESTS.c.number > after).order_by(REQUESTS.c.number)
    if numbers is not None:
        given = [number for number in numbers if 0 < number <= MOST_NUMBER]
        chosen = chosen.where(REQUESTS.c.number.in_(given))
    if person is not None:
        chosen = chosen.where(REQUESTS.c.person == person)
    if state is not None:
        chosen = chosen.where(REQUESTS.c.state == state)
    if model is not None:
        asked = select(WORK.c.request).join(MODELS, MODELS.c.id == WORK.c.model)
        chosen = chosen.where(REQUESTS.c.number.in_(asked.where(MODELS.c.name == model)))
    rows = connection.execute(chosen.limit(most)).all()
    names = {row.id: row.name for row in connection.execute(select(MODELS))}
    answers = _list_answers(connection, [row.number for row in rows])
    today = read_now().date()
    made = (_make(row, key, names, answers[row.number], today) for row in rows)
    return tuple(replace(one, new=new) for one in made)


def _list_answers(connection: Connection, numbers: list[int]) -> dict[int, list[Answer]]:
    found = defaultdict[int, list[Answer]](list)
    chosen = (
        select(WORK, MODELS.c.name, RELEASES.c.number, RELEASES.c.certificate, RELEASES.c.directory)
        .join(MODELS, MODELS.c.id == WORK.c.model)
        .join(RELEASES, RELEASES.c.id == WORK.c.release, isouter=True)
        .order_by(WORK.c.request, WORK.c.model)
    )
    for start in range(0, len(numbers), 500):
        part = numbers[start : start + 500]
        for row in connection.execute(chosen.where(WORK.c.request.in_(part))):
            place = None if row.directory is None else Path(row.directory)
            told = (row.outcome, row.number, row.certificate, place)
            found[row.request].append(Answer(row.name, row.state, *told))
    return found


def _make(row: Any, key: Key, names: dict[int, str], answers: list[Answer], today: date) -> Request:
    due = date.fromisoformat(row.due)
    ended = None if row.ended is None else datetime.fromisoformat(row.ended)
    return Request(
        number=row.number,
        person=row.person,
        state=row.state,
        answer=row.answer,
        model=None if row.scope == 0 else names[row.scope],
        received=date.fromisoformat(row.received),
        due=due,
        filed=datetime.fromisoformat(row.filed),
        ended=ended,
        clock=read_clock(due, None if ended is None else ended.date(), today),
        reason=None if row.reason is None else key.open(row.reason, f"reason {row.number}"),
        why=None if row.why is None else key.open(row.why, f"why {row.number}"),
        answers=tuple(answers),
    )


def open_person(row: Any, key: Key) -> str:
    """The identifier of a row of requests; one that is not this person's is refused."""
    if row.sealed is None:
        raise InputError(f"request {row.number} ended without a release; its name is not kept")
    name = key.open(row.sealed, f"{row.number} {row.person}")
    if key.hash_person(name) != row.person:
        raise InputError(f"request {row.number} holds the name of somebody else")
    return name
