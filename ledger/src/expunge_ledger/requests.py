"""Requests: filed once, looked up, withdrawn or refused. What is answered is answered by work."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import date, datetime, timedelta
from typing import Any, Literal, get_args

from pydantic import BaseModel
from sqlalchemy import delete, insert, select, true

from expunge import InputError
from expunge_ledger.clocks import Pace, add_month, read_date, read_now, read_pace
from expunge_ledger.deeds import FORGOTTEN, Row, broken, find_bucket
from expunge_ledger.keys import read_person
from expunge_ledger.schema import FILINGS, RELEASES, REQUESTS, SECRETS, WORK
from expunge_ledger.tables import Tables, split

State = Literal["open", "running", "answered", "refused", "withdrawn"]
STATES: tuple[State, ...] = get_args(State)
MOST_NUMBER, MOST_REASON = 2**31 - 1, 10_000


class Answer(BaseModel, frozen=True):
    """What a request asks of one model; outcome is null until that is done, then "forgotten",
    "already forgotten" (by the release named), "not held" or "model withdrawn"."""

    model: str
    state: str
    outcome: str | None
    release: int | None
    certificate: str | None


class Request(BaseModel, frozen=True):
    """A request as it is now; person is a keyed hash, model null for all, new whether this call
    filed it."""

    number: int
    person: str
    state: State
    answer: str | None
    model: str | None
    received: date
    due: date
    filed: datetime
    ended: datetime | None
    pace: Pace
    days: int
    why: str | None
    has_reason: bool
    answers: tuple[Answer, ...]
    new: bool = False


def file_request(
    tables: Tables, person: object, *, model: str | None = None,
    received: date | str | None = None, due: date | str | None = None, reason: str | None = None,
) -> tuple[int, bool]:  # fmt: skip
    """File a request; the same one that is not answered yet is the one that is there, due when
    the earlier of both is."""
    name, today = read_person(person), read_now().date()
    arrived = read_date("received", received, today)
    if arrived > today + timedelta(days=1):  # it is tomorrow already somewhere
        raise InputError.of("received", arrived.isoformat(), "today or earlier")
    late = read_date("due", due, add_month(arrived)).isoformat()
    if late < arrived.isoformat():
        raise InputError.of("due", late, f"{arrived.isoformat()} or later")
    if reason is not None:
        check_reason(reason, "a text")
    models = {row["name"]: row["id"] for row in tables.models() if row["retired"] is None}
    if model is not None and model not in models:
        raise InputError.of("model", model, f"one of {sorted(models)}")
    key, scope = tables.key, (0 if model is None else models[model])
    hashed = key.tag("person", name)
    tables.prove([hashed])
    number, new = tables.book["requests"] + 1, True
    same = {"person": hashed, "scope": scope, "state": "open"}
    rows = [tables.get(REQUESTS, one) or {} for one in tables.people[hashed]]  # all are read now
    if found := [row for row in rows if same.items() <= row.items()]:
        number, new = found[0]["number"], False
        if late < found[0]["due"]:  # whoever filed first does not set the clock
            tables.record("hastened", request=number, due=late)
    else:
        tables.record(
            "requested", request=number, person=hashed, model=model,
            models=list(models) if model is None else [model], received=arrived.isoformat(),
            due=late, reason=None if reason is None else key.tag("reason", reason),
        )  # fmt: skip
        write_secret(tables, number, "person", hashed, name)
        if reason is not None:
            write_secret(tables, number, "reason", hashed, reason)
    if tables.by is not None and tables.get(FILINGS, tables.by, number) is None:
        tables.record("filed", request=number)
    return number, new


def end_request(tables: Tables, number: int, state: str, why: str) -> None:
    """Withdraw or refuse a request on which nobody is working; what was done stays done."""
    row = tables.get(REQUESTS, number) if 0 < number <= MOST_NUMBER else None
    if row is None:
        raise InputError.of("request", number, "the number of a request of this ledger")
    if state == "refused" or why:
        check_reason(why, "why the request is refused")
    tables.prove([row["person"]])
    running = any(part["state"] == "running" for part in tables.parts(number))
    if row["state"] != "open" or running:
        now = "being worked on" if row["state"] == "open" else row["state"]
        raise InputError(f"request {number} is {now}; only an open one can be {state}")
    tables.record(state, request=number, reason=tables.key.tag("why", why))
    write_secret(tables, number, "why", row["person"], why)
    drop_names(tables, [number])


def check_reason(reason: str, valid: str) -> None:
    """A reason says something, and not too much."""
    if not reason.strip() or len(reason) > MOST_REASON:
        valid = f"{valid}, of at most {MOST_REASON:,} characters"
        raise InputError.of("reason", f"{reason[:20]}…", valid)


def write_secret(tables: Tables, number: int, what: str, person: str, given: str) -> None:
    """Seal a text about a request."""
    data = given.encode("utf-8", "surrogatepass")
    sealed = tables.key.seal(data, f"{tables.ledger} {what} {number} {person}")
    row = {"request": number, "what": what, "sealed": sealed}
    tables.connection.execute(insert(SECRETS).values(**row))


def read_secrets(tables: Tables, what: str, requests: Collection[int]) -> dict[int, str]:
    """{request: text} of those that were sealed and kept; each is proved to be of its request."""
    found = dict[int, str]()
    for part in split(sorted(requests)):
        tables.find(REQUESTS, REQUESTS.c.number.in_(part))
        chosen = select(SECRETS).where(SECRETS.c.what == what, SECRETS.c.request.in_(part))
        for row in tables.connection.execute(chosen):
            asked = tables.get(REQUESTS, row.request) or {}
            bound = f"{tables.ledger} {what} {row.request} {asked['person']}"
            found[row.request] = tables.key.open(row.sealed, bound).decode("utf-8", "surrogatepass")
    return found


def read_names(tables: Tables, requests: Collection[int]) -> dict[int, str]:
    """{request: identifier}; one that is missing or of somebody else is refused."""
    found = read_secrets(tables, "person", requests)
    for number in requests:
        asked = tables.get(REQUESTS, number) or {}
        if number not in found or tables.key.tag("person", found[number]) != asked["person"]:
            raise broken(f"secrets: the identifier of request {number} is gone")
    return found


def drop_names(tables: Tables, requests: Iterable[int]) -> None:
    """Where nothing will have to be forgotten again, the identifier is not needed."""
    gone = list[int]()
    for number in requests:
        asked = tables.get(REQUESTS, number) or {}
        released = any(part["release"] is not None for part in tables.parts(number))
        if asked["state"] != "open" and asked["answer"] != FORGOTTEN and not released:
            gone.append(number)
    for part in split(gone):
        fits = SECRETS.c.request.in_(part) & (SECRETS.c.what == "person")
        tables.connection.execute(delete(SECRETS).where(fits))


def choose_numbers(
    tables: Tables, *, state: str | None = None, model: str | None = None,
    person: str | None = None, after: int = 0, most: int | None = None,
) -> list[int]:  # fmt: skip
    """The numbers of requests that fit."""
    if state is not None and state not in STATES:
        raise InputError.of("state", state, "one of " + ", ".join(STATES))
    chosen = select(REQUESTS.c.number).where(REQUESTS.c.number > after)
    if person is not None:
        chosen = chosen.where(fits_person(person))
    if state is not None:
        chosen = chosen.where(fits_state(state))
    if model is not None:
        chosen = chosen.where(asks(tables, model))
    chosen = chosen.order_by(REQUESTS.c.number).limit(most)
    return list(tables.connection.execute(chosen).scalars())


def fits_person(hashed: str) -> Any:
    """A condition: about this person."""
    return (REQUESTS.c.bucket == find_bucket(hashed)) & (REQUESTS.c.person == hashed)


def fits_state(state: str) -> Any:
    """A condition: "running" is an open request of which a part is being worked on."""
    running = REQUESTS.c.number.in_(select(WORK.c.request).where(WORK.c.state == "running"))
    if state in ("running", "open"):
        return (REQUESTS.c.state == "open") & (running if state == "running" else ~running)
    return REQUESTS.c.state == ("open" if state == "waiting" else state)


def asks(tables: Tables, model: str, *states: str) -> Any:
    """A condition: it asks this model, and its part is in one of these states."""
    ids = [row["id"] for row in tables.models() if row["name"] == model]
    fits = WORK.c.model.in_(ids) & (WORK.c.state.in_(states) if states else true())
    return REQUESTS.c.number.in_(select(WORK.c.request).where(fits))


def list_requests(tables: Tables, numbers: Collection[int]) -> tuple[Request, ...]:
    """Requests in the order of their numbers given, with clocks and answers."""
    tables.load(numbers)
    names = {row["id"]: row["name"] for row in tables.models()}
    rows = [row for row in (tables.get(REQUESTS, number) for number in numbers) if row is not None]
    whys = read_secrets(tables, "why", [row["number"] for row in rows if row["why"] is not None])
    return tuple(_make(tables, row, names, whys.get(row["number"])) for row in rows)


def _make(tables: Tables, row: Row, names: dict[int, str], why: str | None) -> Request:
    parts = tables.parts(row["number"])
    due, ended = date.fromisoformat(row["due"]), (row["ended"] or "")[:10]
    pace, days = read_pace(due, date.fromisoformat(ended) if ended else None, read_now().date())
    facts = {"pace": pace, "days": days, "why": why or None, "model": names.get(row["scope"])}
    facts |= {"has_reason": row["reason"] is not None}
    if any(part["state"] == "running" for part in parts):
        facts["state"] = "running"
    answers = list[Row]()
    for part in parts:
        made = part["release"] and tables.get(RELEASES, part["model"], part["release"])
        certificate = made["certificate"] if made else None
        answers.append(part | {"model": names[part["model"]], "certificate": certificate})
    return Request.model_validate(row | facts | {"answers": answers})
