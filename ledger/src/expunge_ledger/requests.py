"""Requests: filed once, looked up, withdrawn or refused. What is answered is answered by work.

When an answer is due, and how late it is, is computed from two dates and today, never stored.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import date, datetime, timedelta
from typing import Any, Literal, get_args

from pydantic import BaseModel
from sqlalchemy import case, delete, exists, func, insert, null, select

from expunge import InputError
from expunge_ledger.deeds import FORGOTTEN, LIVE, Row, broken, find_bucket
from expunge_ledger.keys import read_person
from expunge_ledger.schema import FILINGS, RELEASES, REQUESTS, SECRETS, WORK
from expunge_ledger.tables import Tables, read_now, split

State = Literal["open", "running", "answered", "refused", "withdrawn"]
Pace = Literal["on time", "due soon", "overdue"]
STATES: tuple[State, ...] = get_args(State)
PACES: tuple[Pace, ...] = get_args(Pace)
SOON, MOST_NUMBER, MOST_REASON = 7, 2**31 - 1, 10_000
ENDS = ("settled", "released", "retired")  # events by which a model does its part


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


def read_pace(due: date, ended: date | None, today: date) -> tuple[Pace, int]:
    """The pace, and the days that are left (or were, when it ended), negative when overdue.

    >>> read_pace(date(2026, 2, 28), None, date(2026, 2, 25))
    ('due soon', 3)
    """
    days = (due - (ended or today)).days
    if days < 0:
        return "overdue", days
    return ("due soon" if ended is None and days <= SOON else "on time"), days


def add_month(day: date) -> date:
    """The same day of the next month, or its last: one month as the law counts it.

    >>> add_month(date(2026, 1, 31)), add_month(date(2026, 12, 5))
    (datetime.date(2026, 2, 28), datetime.date(2027, 1, 5))
    """
    year, month = day.year + day.month // 12, day.month % 12 + 1
    return date(year, month, min(day.day, calendar.monthrange(year, month)[1]))


def read_date(field: str, given: date | str) -> date:
    """A date from a date or its ISO text."""
    if isinstance(given, date):
        return date(given.year, given.month, given.day)
    with suppress(ValueError):
        if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", given):
            return date.fromisoformat(given)
    raise InputError.of(field, given, "a date such as 2026-01-31")


def check_reason(reason: str, valid: str) -> None:
    """A reason says something, and not too much."""
    if not reason.strip() or len(reason) > MOST_REASON:
        valid = f"{valid}, of at most {MOST_REASON:,} characters"
        raise InputError.of("reason", f"{reason[:20]}…", valid)


def file_request(
    tables: Tables, person: object, *, model: str | None = None,
    received: date | str | None = None, due: date | str | None = None, reason: str | None = None,
) -> tuple[int, bool]:  # fmt: skip
    """File a request; the same one that is not answered yet is the one that is there, due when
    the earlier of both is."""
    name, today = read_person(person), read_now().date()
    arrived = read_date("received", received or today)
    if arrived > today + timedelta(days=1):  # it is tomorrow already somewhere
        raise InputError.of("received", arrived.isoformat(), "today or earlier")
    late = read_date("due", due or add_month(arrived)).isoformat()
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


def write_secret(tables: Tables, number: int, what: str, person: str, given: str) -> None:
    """Seal a text about a request."""
    data = given.encode("utf-8", "surrogatepass")
    sealed = tables.key.seal(data, f"{tables.ledger} {what} {number} {person}")
    row = {"request": number, "what": what, "sealed": sealed}
    tables.connection.execute(insert(SECRETS).values(**row))


def read_secrets(tables: Tables, what: str, requests: Collection[int]) -> dict[int, str]:
    """{request: text} of those that were sealed and kept; each is proved to be of its request."""
    found = dict[int, str]()
    for part in split(requests):
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


def look_up(tables: Tables, *where: Any, own: str | None = None, model: str | None = None) -> Any:
    """A table to choose requests from: number, due, state, waits and pace, as :func:`show_requests`
    shows them. ``model`` is one that they ask; of ``own`` alone who looks may know."""
    ids = {row["name"]: row["id"] for row in tables.models()}
    asked, part, ended, today = REQUESTS.c, WORK.c, REQUESTS.c.ended, read_now().date()
    running = exists().where(part.request == asked.number, part.state == "running")
    state = case((asked.state != "open", asked.state), (running, "running"), else_="open")
    chosen = select(REQUESTS)
    if own is not None:
        over = case((part.state == "done", "answered"), else_=part.state)
        state = case((asked.state.in_(("refused", "withdrawn")), asked.state), else_=over)
        fits = (part.request == asked.number) & (part.model == ids.get(own, 0))
        chosen = chosen.join(WORK, fits)
    if model is not None:
        visible = ids.get(model, 0) if own in (None, model) else 0
        where += (asked.number.in_(select(part.request).where(part.model == visible)),)
    waits = state.in_(LIVE)
    soon, until = (today + timedelta(days=SOON)).isoformat(), func.substr(ended, 1, 10)
    late = asked.due < func.coalesce(until, today.isoformat())
    pace = case((late, "overdue"), (waits & (asked.due <= soon), "due soon"), else_="on time")
    if own is not None:  # when one model ended is not in the row
        pace = case((waits, pace), else_=null())
    named = (state.label("state"), waits.label("waits"), pace.label("pace"))
    return chosen.with_only_columns(asked.number, asked.due, *named).where(*where).subquery()


def is_about(hashed: str) -> Any:
    """A condition: about this person."""
    return (REQUESTS.c.bucket == find_bucket(hashed)) & (REQUESTS.c.person == hashed)


def show_requests(
    tables: Tables, numbers: Collection[int], own: str | None = None
) -> list[Request]:
    """Requests in the order of the numbers, with clocks and answers. Who may see the model ``own``
    alone sees its part, as if no other were asked: what the others came to, and when, is not in
    state, answer or clock."""
    tables.load(numbers)
    names = {row["id"]: row["name"] for row in tables.models()}
    rows = [row for row in (tables.get(REQUESTS, number) for number in numbers) if row is not None]
    whys = read_secrets(tables, "why", [row["number"] for row in rows if row["why"] is not None])
    found = list[Request]()
    for row in rows:
        answers = list[Row]()
        for part in tables.parts(row["number"]):
            made = part["release"] and tables.get(RELEASES, part["model"], part["release"])
            facts = {"model": names[part["model"]], "certificate": made and made["certificate"]}
            answers.append(part | facts)
        shown = row | {"model": names.get(row["scope"]), "why": whys.get(row["number"]) or None}
        if any(one["state"] == "running" for one in answers):
            shown["state"] = "running"
        if own is not None:
            answers = [one for one in answers if one["model"] == own]
            shown["model"] = own
            if row["state"] in LIVE or row["state"] == "answered":
                shown |= _show_part(tables, answers[0])
        due, ended = date.fromisoformat(row["due"]), (shown["ended"] or "")[:10]
        over = date.fromisoformat(ended) if ended else None
        shown["pace"], shown["days"] = read_pace(due, over, read_now().date())
        shown |= {"answers": answers, "has_reason": row["reason"] is not None}
        found.append(Request.model_validate(shown))
    return found


def _show_part(tables: Tables, part: Row) -> Row:
    """The state of one model's part, as if it were the request's."""
    if part["state"] != "done":
        return {"state": part["state"], "answer": None, "ended": None}
    ended = None
    for event in tables.find_events(part["request"]):
        if event.body.get("model") == part["model"] and event.kind in ENDS:
            ended = event.at
    return {"state": "answered", "answer": part["outcome"], "ended": ended}
