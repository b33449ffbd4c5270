"""What the tables are about: requests with their clocks, models with their releases, tokens.

Requests are filed once, looked up, withdrawn or refused; what is answered is answered by work. When
an answer is due, and how late it is, is computed from two dates and today, never stored.
"""

from __future__ import annotations

import calendar
import hmac
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field
from sqlalchemy import case, delete, exists, func, insert, null, select

from expunge import InputError
from expunge_ledger.deeds import FORGOTTEN, LIVE, Row, broken, find_bucket
from expunge_ledger.keys import Key, hash_bytes, read_person
from expunge_ledger.schema import FILINGS, RELEASES, REQUESTS, SECRETS, SEEN, WORK
from expunge_ledger.tables import Tables, read_now, split

State = Literal["open", "running", "answered", "refused", "withdrawn"]
Pace = Literal["on time", "due soon", "overdue"]
Role = Literal["requester", "operator", "auditor"]
STATES: tuple[State, ...] = get_args(State)
PACES: tuple[Pace, ...] = get_args(Pace)
SOON, MOST_NUMBER, MOST_REASON, _MARK = 7, 2**31 - 1, 10_000, 16
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


class Release(BaseModel, frozen=True):
    """A release: its certificate's SHA-256, the one it is chained to, and the requests it names;
    replay: it forgot people who had come back."""

    number: int
    certificate: str
    parent: str | None
    finished: datetime
    requests: tuple[int, ...]
    replay: bool
    directory: Path = Field(exclude=True)


class Model(BaseModel, frozen=True):
    """A registered model, and its chain of releases; retired is when its operator said that
    nobody uses it any more."""

    name: str
    kind: str
    registered: datetime
    open: int
    running: int
    retired: datetime | None
    releases: tuple[Release, ...]
    path: Path = Field(exclude=True)
    folder: Path = Field(exclude=True)


class Token(BaseModel, frozen=True):
    """Who asks the server; model is the only one that a token is for, null for all."""

    name: str
    role: Role
    model: str | None


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

    >>> for day in ("2026-01-31", "2028-01-31", "2026-03-31", "2026-12-05"):
    ...     print(add_month(date.fromisoformat(day)))
    2026-02-28
    2028-02-29
    2026-04-30
    2027-01-05
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


def check_name(name: str) -> None:
    """A name that is safe in paths, addresses and logs."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InputError.of("name", name, "letters, digits, '.', '_' and '-', at most 100")


def hash_token(secret: str) -> str:
    """What a session keeps of a token."""
    return hash_bytes(secret.encode("utf-8", "surrogatepass"))


def mark(key: Key, people: Iterable[str]) -> frozenset[bytes]:
    """The short keyed hashes that find people among those who were seen."""
    return frozenset(bytes.fromhex(key.tag("seen", name))[:_MARK] for name in people)


def check_reason(reason: str, valid: str) -> None:
    """A reason says something, and not too much."""
    if not reason.strip() or len(reason) > MOST_REASON:
        valid = f"{valid}, of at most {MOST_REASON:,} characters"
        raise InputError.of("reason", f"{reason[:20]}…", valid)


def is_about(hashed: str) -> Any:
    """A condition: about this person."""
    return (REQUESTS.c.bucket == find_bucket(hashed)) & (REQUESTS.c.person == hashed)


class Records(Tables):
    """The tables, by what is in them: models and tokens, requests and what is sealed about them."""

    def need_model(self, name: str, used: bool = False) -> Row:
        """The row of a model, by its name; one that is still used."""
        names = {row["name"]: row for row in self.models()}
        if name not in names:
            valid = f"one of {sorted(names)}" if names else "registered first"
            raise InputError.of("model", name, valid)
        if used and (day := names[name]["retired"]) is not None:
            raise InputError.of("model", name, f"another: it was retired on {day[:10]}")
        return names[name]

    def list_models(self, name: str | None = None) -> tuple[Model, ...]:
        """Models in the order of their registration, each with its releases, oldest first."""
        rows = self.models() if name is None else [self.need_model(name)]
        pair = (WORK.c.model, WORK.c.state)
        counted = self.connection.execute(select(*pair, func.count()).group_by(*pair))
        counts = Counter({(model, state): number for model, state, number in counted})
        found = list[Model]()
        for row in rows:
            made = [one | {"requests": json.loads(one["requests"])}
                    for one in self.find(RELEASES, RELEASES.c.model == row["id"])
                    if one["state"] == "finished"]  # fmt: skip
            facts = {state: counts[row["id"], state] for state in ("open", "running")}
            found.append(Model.model_validate(row | facts | {"releases": made}))
        return tuple(found)

    def read_release(self, model: Row, number: int) -> Row:
        """A release of a model, in the state that the model's row says."""
        found = self.get(RELEASES, model["id"], number)
        state = "begun" if number == model["begun"] else "finished"
        if found is None or found["state"] != state:
            raise broken(f"releases: {model['name']} {number} is gone, or an old one")
        return found

    def read_seen(self, model: Row) -> tuple[frozenset[bytes], str]:
        """The marks of everybody whom the data of a job ever had, and the hash of its old weights.

        A state keeps its rows itself. A job reads its data anew every time, and the weights it
        starts from may have been trained on more: nobody among these is "not held", and nobody is
        while the weights are others.
        """
        row = self.connection.execute(select(SEEN).where(SEEN.c.model == model["id"])).one_or_none()
        if row is None and model["seen"] is None:
            return frozenset(), ""
        if row is None or self._digest(model, row.weights, row.marks) != model["seen"]:
            raise broken(f"seen: {model['name']} is not what was written")
        marks = (row.marks[at : at + _MARK] for at in range(0, len(row.marks), _MARK))
        return frozenset(marks), row.weights

    def list_tokens(self, hashed: str | None = None) -> tuple[Token, ...]:
        """All tokens that open something, or the one of this hash; all are compared, each in the
        same time."""
        made, rows = hashed and self.key.tag("token", hashed), self.tokens()
        same = [row for row in rows if made is None or hmac.compare_digest(row["hash"], made)]
        used = [row for row in same if row["revoked"] is None]
        return tuple(Token.model_validate(row) for row in used)

    def file_request(
        self, person: object, *, model: str | None = None, received: date | str | None = None,
        due: date | str | None = None, reason: str | None = None,
    ) -> tuple[int, bool]:  # fmt: skip
        """File a request; the same one that is not answered yet is the one that is there, due when
        the earlier of both is."""
        name, today = read_person(person), read_now().date()
        arrived = read_date("received", today if received is None else received)
        if arrived > today + timedelta(days=1):  # it is tomorrow already somewhere
            raise InputError.of("received", arrived.isoformat(), "today or earlier")
        late = read_date("due", add_month(arrived) if due is None else due).isoformat()
        if late < arrived.isoformat():
            raise InputError.of("due", late, f"{arrived.isoformat()} or later")
        if reason is not None:
            check_reason(reason, "a text")
        models = {row["name"]: row["id"] for row in self.models() if row["retired"] is None}
        if model is not None and model not in models:
            raise InputError.of("model", model, f"one of {sorted(models)}")
        key, scope = self.key, (0 if model is None else models[model])
        hashed = key.tag("person", name)
        self.prove([hashed])
        number, new = self.book["requests"] + 1, True
        same = {"person": hashed, "scope": scope, "state": "open"}
        rows = [self.get(REQUESTS, one) or {} for one in self.people[hashed]]  # all are read now
        if found := [row for row in rows if same.items() <= row.items()]:
            number, new = found[0]["number"], False
            if late < found[0]["due"]:  # whoever filed first does not set the clock
                self.record("hastened", request=number, due=late)
        else:
            self.record(
                "requested", request=number, person=hashed, model=model,
                models=list(models) if model is None else [model], received=arrived.isoformat(),
                due=late, reason=None if reason is None else key.tag("reason", reason),
            )  # fmt: skip
            self.write_secret(number, "person", hashed, name)
            if reason is not None:
                self.write_secret(number, "reason", hashed, reason)
        if self.by is not None and self.get(FILINGS, self.by, number) is None:
            self.record("filed", request=number)
        return number, new

    def end_request(self, number: int, state: str, why: str) -> None:
        """Withdraw or refuse a request on which nobody is working; what was done stays done."""
        row = self.get(REQUESTS, number) if 0 < number <= MOST_NUMBER else None
        if row is None:
            raise InputError.of("request", number, "the number of a request of this ledger")
        if state == "refused" or why:
            check_reason(why, "why the request is refused")
        self.prove([row["person"]])
        running = any(part["state"] == "running" for part in self.parts(number))
        if row["state"] != "open" or running:
            now = "being worked on" if row["state"] == "open" else row["state"]
            raise InputError(f"request {number} is {now}; only an open one can be {state}")
        self.record(state, request=number, reason=self.key.tag("why", why))
        self.write_secret(number, "why", row["person"], why)
        self.drop_names([number])

    def write_secret(self, number: int, what: str, person: str, given: str) -> None:
        """Seal a text about a request."""
        data = given.encode("utf-8", "surrogatepass")
        sealed = self.key.seal(data, f"{self.ledger} {what} {number} {person}")
        row = {"request": number, "what": what, "sealed": sealed}
        self.connection.execute(insert(SECRETS).values(**row))

    def read_secrets(self, what: str, requests: Collection[int]) -> dict[int, str]:
        """{request: text} of those that were sealed and kept, each proved to be of its request."""
        found = dict[int, str]()
        for part in split(requests):
            self.find(REQUESTS, REQUESTS.c.number.in_(part))
            chosen = select(SECRETS).where(SECRETS.c.what == what, SECRETS.c.request.in_(part))
            for row in self.connection.execute(chosen):
                asked = self.get(REQUESTS, row.request) or {}
                bound = f"{self.ledger} {what} {row.request} {asked['person']}"
                found[row.request] = self.key.open(row.sealed, bound).decode(
                    "utf-8", "surrogatepass"
                )
        return found

    def read_names(self, requests: Collection[int]) -> dict[int, str]:
        """{request: identifier}; one that is missing or of somebody else is refused."""
        found = self.read_secrets("person", requests)
        for number in requests:
            asked = self.get(REQUESTS, number) or {}
            if number not in found or self.key.tag("person", found[number]) != asked["person"]:
                raise broken(f"secrets: the identifier of request {number} is gone")
        return found

    def drop_names(self, requests: Iterable[int]) -> None:
        """Where nothing will have to be forgotten again, the identifier is not needed."""
        gone = list[int]()
        for number in requests:
            asked = self.get(REQUESTS, number) or {}
            released = any(part["release"] is not None for part in self.parts(number))
            if asked["state"] != "open" and asked["answer"] != FORGOTTEN and not released:
                gone.append(number)
        for part in split(gone):
            fits = SECRETS.c.request.in_(part) & (SECRETS.c.what == "person")
            self.connection.execute(delete(SECRETS).where(fits))

    def look_up(self, *where: Any, own: str | None = None, model: str | None = None) -> Any:
        """A table to choose requests from: number, due, state, waits and pace, as
        :meth:`show_requests` shows them. ``model`` is one that they ask; of ``own`` alone who looks
        may know."""
        ids = {row["name"]: row["id"] for row in self.models()}
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

    def show_requests(self, numbers: Collection[int], own: str | None = None) -> list[Request]:
        """Requests in the order of the numbers, with clocks and answers. Who may see the model
        ``own`` alone sees its part, as if no other were asked: what the others came to, and when,
        is not in state, answer or clock."""
        names = {row["id"]: row["name"] for row in self.models()}
        rows = list(filter(None, (self.get(REQUESTS, number) for number in numbers)))
        whys = self.read_secrets("why", [row["number"] for row in rows if row["why"] is not None])
        found = list[Request]()
        for row in rows:
            answers = list[Row]()
            for part in self.parts(row["number"]):
                made = part["release"] and self.get(RELEASES, part["model"], part["release"])
                facts = {"model": names[part["model"]], "certificate": made and made["certificate"]}
                answers.append(part | facts)
            shown = row | {"model": names.get(row["scope"]), "why": whys.get(row["number"]) or None}
            if any(one["state"] == "running" for one in answers):
                shown["state"] = "running"
            if own is not None:
                answers = [one for one in answers if one["model"] == own]
                shown["model"] = own
                if row["state"] in LIVE or row["state"] == "answered":
                    shown |= self._show_part(answers[0])
            due, ended = date.fromisoformat(row["due"]), (shown["ended"] or "")[:10]
            over = date.fromisoformat(ended) if ended else None
            shown["pace"], shown["days"] = read_pace(due, over, read_now().date())
            shown |= {"answers": answers, "has_reason": row["reason"] is not None}
            found.append(Request.model_validate(shown))
        return found

    def _show_part(self, part: Row) -> Row:
        """The state of one model's part, as if it were the request's."""
        if part["state"] != "done":
            return {"state": part["state"], "answer": None, "ended": None}
        ended = (  # the first: later releases of a job name its people again
            event.at
            for event in self.find_events(part["request"])
            if event.body.get("model") == part["model"] and event.kind in ENDS
        )
        return {"state": "answered", "answer": part["outcome"], "ended": next(ended, None)}

    def add_seen(self, name: str, new: frozenset[bytes], weights: str | None = None) -> None:
        """Add marks of people to those who were seen; ``weights`` says which were trained on the
        data that they are of."""
        model = self.need_model(name)
        before, old = self.read_seen(model)
        if new <= before and weights in (None, old):
            return
        marks, kept = b"".join(sorted(before | new)), old if weights is None else weights
        digest = self._digest(model, kept, marks)
        self.record("seen", model=name, count=len(marks) // _MARK, digest=digest)
        self.connection.execute(delete(SEEN).where(SEEN.c.model == model["id"]))
        values = {"model": model["id"], "marks": marks, "weights": kept}
        self.connection.execute(insert(SEEN).values(**values))

    def _digest(self, model: Row, weights: str, marks: bytes) -> str:
        return self.key.tag("seen/row", f"{model['id']} {weights} {marks.hex()}")
