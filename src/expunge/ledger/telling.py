"""The tables by the chain: what the events tell, what the tables hold, and where both differ.

Whoever can write the database, and has no key, can bend a row, let a worker seal an answer that
follows from it, and bend the row back. So a worker reads the chain before the tables, and every
event must follow from those before it: who was asked, what was owed, whom a release names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Column, Connection, Select, Table, select

from expunge.errors import ExpungeError, VerificationError
from expunge.ledger.chain import NOWHERE, Anchor, Event, find_breaks, list_events, read_anchor
from expunge.ledger.known import describe_known
from expunge.ledger.names import Key
from expunge.ledger.requests import ALREADY, FORGOTTEN, WITHDRAWN, conclude, open_person
from expunge.ledger.schema import (
    FILINGS,
    KNOWN,
    MODELS,
    NAMED,
    RELEASES,
    REQUESTS,
    TOKENS,
    WORK,
)

_OTHERS = ("created", "adopted", "failed", "accepted")
_TABLES = (
    "models", "requests", "work", "releases", "known", "readmitted", "tokens", "filings"
)  # fmt: skip
_OPEN = ("open", None, None)
Rows = dict[Any, Any]


@dataclass
class Told:
    """The tables as the events tell them, and events that do not follow from those before."""

    models: Rows = field(default_factory=Rows)
    requests: Rows = field(default_factory=Rows)
    work: Rows = field(default_factory=Rows)
    releases: Rows = field(default_factory=Rows)
    known: Rows = field(default_factory=Rows)
    readmitted: Rows = field(default_factory=Rows)
    tokens: Rows = field(default_factory=Rows)
    filings: Rows = field(default_factory=Rows)
    problems: list[str] = field(default_factory=list[str])


@dataclass
class Book:
    """How far somebody followed the chain, and what it told until then."""

    told: Told = field(default_factory=Told)
    end: Anchor = NOWHERE

    def follow(self, connection: Connection, key: Key) -> Told:
        """Go on to the end of the chain; a break of it is a :class:`VerificationError`."""
        events, end = list_events(connection, after=self.end.events), read_anchor(connection)
        if broken := find_breaks(events, end, key, self.end):
            raise VerificationError("the ledger does not hold: " + "; ".join(broken))
        tell(events, self.told)
        self.end = end
        return self.told


def check_tables(
    connection: Connection, key: Key, book: Book, requests: Collection[int] | None = None
) -> Told:
    """What the events tell, if the tables hold just that: all of them, or what work on some
    ``requests`` relies on."""
    told = book.follow(connection, key)
    found, problems = read_tables(connection, key, requests)
    problems = [*told.problems, *problems] or find_contradictions(told, found, requests)
    if problems:
        raise VerificationError("the ledger does not hold: " + "; ".join(problems))
    return told


def tell(events: Iterable[Event], told: Told | None = None) -> Told:
    """What the tables must hold after these events, that come after what was ``told``."""
    told = Told() if told is None else told
    for event in events:
        try:
            wrong = _tell_one(told, event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise VerificationError(f"event {event.number} cannot be followed: {error}") from None
        if wrong is not None:
            told.problems.append(f"event {event.number} does not follow: {wrong}")
    return told


def _tell_one(told: Told, event: Event) -> str | None:
    """Take one event in; what it says that does not follow from those before, if anything."""
    body: Mapping[str, Any] = event.body
    match event.kind:
        case "registered":
            kept = ("kind", "path", "releases", "identity")
            facts = {name: body[name] for name in kept}
            told.models[body["model"]] = facts | {"registered": event.at, "retired": None}
            waiting = [n for n, facts in told.requests.items() if _waits(facts)]
            told.work |= {(n, body["model"]): _OPEN for n in body["requests"]}
            return None if sorted(waiting) == body["requests"] else "it leaves requests out"
        case "requested":
            kept = ("person", "model", "received", "due", "reason")
            new = {name: body[name] for name in kept} | {"filed": event.at, "ended": None}
            again = body["request"] in told.requests
            told.requests[body["request"]] = new | {"state": "open", "answer": None, "why": None}
            told.work |= {(body["request"], m): _OPEN for m in body["models"]}
            live = [name for name, facts in told.models.items() if facts["retired"] is None]
            asked = live if body["model"] is None else [body["model"]]
            same = asked == body["models"] and not again
            return None if same else "it does not ask the models that there were"
        case "taken" | "put back":
            before, after = ("open", "running") if event.kind == "taken" else ("running", "open")
            return _move(told, body["model"], body["requests"], before, (after, None, None))
        case "settled":
            return _settle(told, body["model"], body["outcomes"])
        case "begun":
            kept = ("directory", "replay", "requests")
            new = {name: body[name] for name in kept} | {"state": "begun", "begun": event.at}
            new |= {"finished": None, "certificate": None, "parent": None}
            told.releases[body["model"], body["release"]] = new
        case "joined":
            named = told.releases[body["model"], body["release"]]
            named["requests"] = sorted({*named["requests"], *body["requests"]})
        case "dropped":
            del told.releases[body["model"], body["release"]]
        case "released":
            place = body["model"], body["release"]
            told.releases[place] |= {"state": "finished", "finished": event.at}
            told.releases[place] |= {name: body[name] for name in ("certificate", "parent")}
            for number in body["requests"]:
                if told.work[number, body["model"]][0] == "running":
                    told.work[number, body["model"]] = ("done", FORGOTTEN, body["release"])
            named = told.releases[place]["requests"]
            return None if named == body["requests"] else "it answers others than it names"
        case "answered":
            return _answer(told, body["request"], body["answer"], event.at)
        case "withdrawn" | "refused":
            facts = told.requests[body["request"]]
            waited = facts["state"] == "open"
            facts |= {"state": event.kind, "ended": event.at, "why": body["reason"]}
            for model in told.models:
                if told.work.get((body["request"], model), ("",))[0] == "open":
                    told.work[body["request"], model] = ("ended", None, None)
            return None if waited else f"request {body['request']} had ended"
        case "hastened":
            told.requests[body["request"]]["due"] = body["due"]
        case "retired":
            told.models[body["model"]]["retired"] = event.at
            owed = [n for (n, m), row in told.work.items() if m == body["model"] and row == _OPEN]
            done = ("done", WITHDRAWN, None)
            wrong = _move(told, body["model"], body["requests"], "open", done)
            return wrong or (None if sorted(owed) == body["requests"] else "requests are left out")
        case "seen":
            told.known[body["model"]] = body["count"], body["digest"], body["weights"]
        case "readmitted":
            told.readmitted[body["request"], body["model"]] = True
        case "token":
            _tell_token(told, event)
        case kind if kind not in _OTHERS:
            raise KeyError(f"nothing is known of {kind!r}")
        case _:
            pass
    return None


def _waits(facts: Mapping[str, Any]) -> bool:
    return facts["state"] == "open" and facts["model"] is None


def _move(told: Told, model: str, numbers: list[int], before: str, after: Any) -> str | None:
    wrong = [n for n in numbers if told.work[n, model][0] != before]
    told.work |= {(number, model): after for number in numbers}
    return f"{model} does not owe this to request {wrong[0]}" if wrong else None


def _settle(told: Told, model: str, outcomes: Mapping[str, Any]) -> str | None:
    """Who was forgotten already is named by the release that is said to have done it."""
    wrong = _move(told, model, [int(number) for number in outcomes], "running", _OPEN)
    for number, (outcome, release) in outcomes.items():
        told.work[int(number), model] = ("done", outcome, release)
        if outcome == ALREADY:
            facts = told.releases[model, release]
            named = {told.requests[n]["person"] for n in facts["requests"]}
            if facts["state"] != "finished" or told.requests[int(number)]["person"] not in named:
                wrong = f"release {release} of {model} does not name request {number}"
    return wrong


def _answer(told: Told, number: int, answer: str, at: str) -> str | None:
    """A request is answered when no model owes it anything, by what they came to."""
    facts, places = told.requests[number], [(number, model) for model in told.models]
    rows = [told.work[place] for place in places if place in told.work]
    owed = not rows or any(row[0] != "done" for row in rows) or facts["state"] != "open"
    due = None if owed else conclude([row[1] for row in rows], facts["model"] is None)
    facts |= {"state": "answered", "answer": answer, "ended": at}
    return None if due == answer else f"request {number} had another answer to come"


def _tell_token(told: Told, event: Event) -> None:
    body: Mapping[str, Any] = event.body
    match body["did"]:
        case "made" if "hash" in body:  # those of before version 0004 went with its migration
            kept = ("role", "model", "hash")
            told.tokens[body["name"]] = {name: body[name] for name in kept} | {"created": event.at}
        case "made" | "revoked":
            told.tokens.pop(body["name"], None)
        case _:
            told.filings[body["name"], body["request"]] = True


def read_tables(
    connection: Connection, key: Key, requests: Collection[int] | None = None
) -> tuple[Told, list[str]]:
    """The tables as they are, in the words of the events; and seals that do not open."""
    found, problems = Told(), list[str]()
    names = dict[int, str]()
    for row in connection.execute(select(MODELS)):
        names[row.id] = row.name
        found.models[row.name] = _pick(row, "kind path releases identity registered retired")

    def name(model: int) -> str:
        return names.get(model, f"model {model}")

    places = dict[int, tuple[str, int]]()
    chosen = select(RELEASES)
    for row in connection.execute(
        chosen if requests is None else chosen.where(RELEASES.c.state == "begun")
    ):
        places[row.id] = name(row.model), row.number
        facts = _pick(row, "directory state begun finished certificate parent")
        found.releases[places[row.id]] = facts | {"replay": bool(row.replay), "requests": []}
    needed = set[int]()
    for row in _choose(connection, NAMED, NAMED.c.release, None if requests is None else places):
        needed.add(row.request)
        place = places.get(row.release, (f"release {row.release}", 0))
        found.releases.setdefault(place, {"requests": []})["requests"].append(row.request)
    for facts in found.releases.values():
        facts["requests"].sort()
    releases = {row.id: row.number for row in connection.execute(select(RELEASES))}
    for row in _choose(connection, WORK, WORK.c.request, requests):
        place = row.request, name(row.model)
        found.work[place] = (row.state, row.outcome, releases.get(row.release, row.release))
        if row.readmitted is not None:
            found.readmitted[place] = True
    for row in _choose(connection, REQUESTS, REQUESTS.c.number, requests):
        facts = _pick(row, "person received due filed state answer ended")
        facts["model"] = None if row.scope == 0 else name(row.scope)
        try:
            for field_ in ("reason", "why"):
                sealed = getattr(row, field_)
                text = None if sealed is None else key.open(sealed, f"{field_} {row.number}")
                facts[field_] = None if text is None else key.tag(field_, text)
            if row.state in ("open", "running") or row.number in needed:
                open_person(row, key)
        except ExpungeError as error:
            problems.append(f"request {row.number}: {error}")
            facts |= {"reason": None, "why": None}
        found.requests[row.number] = facts
    if requests is None:
        for row in connection.execute(select(KNOWN)):
            found.known[name(row.model)] = describe_known(row.marks, row.weights)
        for row in connection.execute(select(TOKENS)):
            found.tokens[row.name] = _pick(row, "role model hash created")
        for row in connection.execute(select(FILINGS)):
            found.filings[row.token, row.request] = True
    return found, problems


def _pick(row: Any, names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names.split()}


def _choose(
    connection: Connection, table: Table, column: Column[Any], among: Collection[int] | None
) -> Iterable[Any]:
    """The rows of a table, or those whose column is one of some numbers."""
    chosen: Select[Any] = select(table)
    if among is None:
        return connection.execute(chosen).all()
    numbers = sorted(among)
    parts = [numbers[start : start + 500] for start in range(0, len(numbers), 500)]
    return [row for part in parts for row in connection.execute(chosen.where(column.in_(part)))]


def find_contradictions(
    told: Told, found: Told, requests: Collection[int] | None = None
) -> list[str]:
    """Where the tables are not what the events tell; of some ``requests``, in what is theirs."""
    problems = list[str]()
    for name in _TABLES if requests is None else _TABLES[:4]:
        ours: Rows = getattr(found, name)
        theirs: Rows = _state(told) if name == "requests" else getattr(told, name)
        if requests is not None and name != "models":
            theirs = {place: row for place, row in theirs.items() if _is_of(place, row, requests)}
        for place in [*theirs, *(key for key in ours if key not in theirs)]:
            what = " of ".join(map(str, place)) if isinstance(place, tuple) else place
            if place not in ours:
                problems.append(f"{name}: {what} is gone from the table")
            elif place not in theirs:
                problems.append(f"{name}: {what} is in the table, and no event tells of it")
            elif ours[place] != theirs[place]:
                problems.append(f"{name}: {what} is not what the events tell")
    return problems


def _state(told: Told) -> Rows:
    """Requests as their table has them: one is running while a model is at work on it."""
    running = {number for (number, _), work in told.work.items() if work[0] == "running"}
    waits = {n: told.requests[n] for n in running if told.requests[n]["state"] == "open"}
    return told.requests | {n: facts | {"state": "running"} for n, facts in waits.items()}


def _is_of(place: Any, row: Any, requests: Collection[int]) -> bool:
    """Whether a row is about one of the requests, or a release that has begun."""
    if isinstance(row, dict) and "directory" in row:
        return row["state"] == "begun"
    return (place[0] if isinstance(place, tuple) else place) in requests
