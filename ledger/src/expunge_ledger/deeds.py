"""What each event does to the rows: the one place where they change.

Whoever works applies an event to the tables; whoever verifies applies all events to empty ones in
memory, and compares. An event that does not follow from those before is refused by both.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Table

from expunge import VerificationError
from expunge_ledger.chain import Event
from expunge_ledger.schema import BOOK, EVENTS, FILINGS, MODELS, RELEASES, REQUESTS, TOKENS, WORK

Row = dict[str, Any]
CHANGING = (REQUESTS, WORK, FILINGS, RELEASES, TOKENS, MODELS)
KEYS = {table: [one.name for one in table.primary_key] for table in (*CHANGING, BOOK, EVENTS)}
NAMES = {table: [one.name for one in table.columns if one.name != "mac"] for table in KEYS}
BUCKETS, LIVE = 1024, ("open", "running")
FORGOTTEN, ALREADY, NOT_HELD = "forgotten", "already forgotten", "not held"
HELD_IN_NONE, WITHDRAWN = "held in none", "model withdrawn"


class Rows:
    """The tables in memory: all there is for whoever follows the chain from its beginning."""

    def __init__(self) -> None:
        self.book: Row = {"requests": 0}
        self.rows: dict[Table, dict[tuple[Any, ...], Row | None]] = {table: {} for table in KEYS}
        self.people = defaultdict[str, set[int]](set)  # the requests of each that were read

    def get(self, table: Table, *key: Any) -> Row | None:
        return self.rows[table].get(key)

    def put(self, table: Table, row: Row) -> None:
        self.rows[table][find_key(table, row)] = row
        if table is REQUESTS:
            self.people[row["person"]].add(row["number"])

    def all(self, table: Table) -> list[Row]:
        return [row for row in self.rows[table].values() if row is not None]

    def models(self) -> list[Row]:
        return self.all(MODELS)

    def parts(self, request: int) -> list[Row]:
        """What a request asks of each model."""
        found = (self.get(WORK, request, model["id"]) for model in self.models())
        return [row for row in found if row is not None]

    def waiting(self) -> list[int]:
        """The open requests that ask all models."""
        rows = self.all(REQUESTS)
        return sorted(r["number"] for r in rows if r["state"] == "open" and r["scope"] == 0)

    def live(self, model: Row) -> list[Row]:
        """The open and running parts of a model."""
        rows = self.all(WORK)
        return [r for r in rows if r["model"] == model["id"] and r["state"] in LIVE]


def find_key(table: Table, row: Row) -> tuple[Any, ...]:
    """What a row is found by."""
    return tuple(row[name] for name in KEYS[table])


def find_bucket(person: str) -> int:
    """One of 1,024, by the keyed hash of a person.

    >>> find_bucket("00f" + "0" * 61)
    240
    """
    return int(person[:4], 16) % BUCKETS


def broken(what: str) -> VerificationError:
    """The one error of a ledger that was bent."""
    return VerificationError(f"the ledger does not hold: {what}")


def conclude(outcomes: Sequence[str], all_models: bool) -> str:
    """The answer to a request of which every model has done its part.

    >>> conclude([NOT_HELD, ALREADY], True), conclude([NOT_HELD, WITHDRAWN], True)
    ('forgotten', 'held in none')
    """
    if FORGOTTEN in outcomes or ALREADY in outcomes:
        return FORGOTTEN
    return HELD_IN_NONE if all_models else outcomes[0]  # others were not asked


def apply(rows: Rows, event: Event) -> None:
    """Change the rows as an event says, if it follows from those before."""
    body, at = event.body, event.at
    match event.kind:
        case "registered":
            models, asked = rows.models(), rows.waiting()
            _check(all(row["name"] != body["model"] for row in models), "the model is there")
            _check(asked == body["requests"], "it leaves requests out")
            new, facts = len(models) + 1, {"name": body["model"], "registered": at}
            rows.put(MODELS, _make(MODELS, body | facts | {"id": new, "finished": 0}))
            for number in asked:
                _ask(rows, _need(rows, REQUESTS, number), new)
        case "requested":
            _request(rows, event)
        case "filed":
            asked = _need(rows, REQUESTS, body["request"])
            rows.put(FILINGS, _make(FILINGS, asked | body | {"token": body["by"]}))
        case "hastened":
            asked = _need_open(rows, body["request"])
            _check(body["due"] < asked["due"], "it is not due earlier")
            rows.put(REQUESTS, asked | {"due": body["due"]})
            for part in rows.parts(body["request"]):
                if part["state"] in LIVE:
                    rows.put(WORK, part | {"due": body["due"]})
        case "settled":
            _settle(rows, event)
        case "begun":
            _begin(rows, event)
        case "dropped":
            model = find_model(rows, body["model"])
            made = _need(rows, RELEASES, model["id"], body["release"])
            _check(model["begun"] == body["release"], "this release had not begun")
            for number in json.loads(made["requests"]):
                _move(rows, model, number, "running", {"state": "open"}, ("done",))
            rows.rows[RELEASES][find_key(RELEASES, made)] = None
            rows.put(MODELS, model | {"begun": None})
        case "released":
            _release(rows, event)
        case "refused" | "withdrawn":
            asked, parts = _need_open(rows, body["request"]), rows.parts(body["request"])
            _check(all(part["state"] != "running" for part in parts), "it is being worked on")
            rows.put(REQUESTS, asked | {"state": event.kind, "ended": at, "why": body["reason"]})
            for part in parts:
                if part["state"] == "open":
                    rows.put(WORK, part | {"state": "ended"})
        case "retired":
            model = find_model(rows, body["model"])
            _check(model["retired"] is None and model["begun"] is None, "the model is not free")
            owed = sorted(part["request"] for part in rows.live(model))
            _check(owed == body["requests"], "it leaves requests out")
            rows.put(MODELS, model | {"retired": at})
            done = {"state": "done", "outcome": WITHDRAWN}
            _answer(rows, model, dict.fromkeys(owed, done), "open", at)
        case "seen":
            rows.put(MODELS, find_model(rows, body["model"]) | {"seen": body["digest"]})
        case "readmitted":
            part = _need(rows, WORK, body["request"], find_model(rows, body["model"])["id"])
            rows.put(WORK, part | {"readmitted": at})
        case "token":
            old = rows.get(TOKENS, body["name"])
            used = old is not None and old["revoked"] is None
            _check(used == (body["did"] == "revoked"), "there is a token of this name, or none")
            new = (old or {}) | {"revoked": at} if used else body | {"created": at}
            rows.put(TOKENS, _make(TOKENS, new))
        case kind:
            _check(kind in ("created", "accepted"), f"nothing is known of events {kind!r}")


def find_model(rows: Rows, name: str) -> Row:
    """A model by its name."""
    for row in rows.models():
        if row["name"] == name:
            return row
    raise broken(f"there is no model {name}")


def _request(rows: Rows, event: Event) -> None:
    body, models = event.body, [row for row in rows.models() if row["retired"] is None]
    rows.book["requests"] += 1
    _check(rows.book["requests"] == body["request"], "its number is not the next")
    chosen = [row for row in models if body["model"] in (None, row["name"])]
    _check([row["name"] for row in chosen] == body["models"], "it leaves models out")
    facts = {"number": body["request"], "bucket": find_bucket(body["person"]), "state": "open"}
    facts |= {"scope": 0 if body["model"] is None else chosen[0]["id"], "filed": event.at}
    asked = _make(REQUESTS, body | facts)
    rows.put(REQUESTS, asked)
    for model in chosen:
        _ask(rows, asked, model["id"])


def _ask(rows: Rows, asked: Row, model: int) -> None:
    rows.put(WORK, _make(WORK, asked | {"request": asked["number"], "model": model}))


def _settle(rows: Rows, event: Event) -> None:
    """Who was forgotten already is named by the release that is said to have done it."""
    model, found = find_model(rows, event.body["model"]), dict[int, Row]()
    for number, (outcome, release) in event.body["outcomes"].items():
        if outcome == ALREADY:
            made = _need(rows, RELEASES, model["id"], release)
            person = _need(rows, REQUESTS, int(number))["person"]
            named = (_need(rows, REQUESTS, n)["person"] for n in json.loads(made["requests"]))
            fits = made["state"] == "finished" and person in named
            _check(fits, f"release {release} does not name request {number}")
        found[int(number)] = {"state": "done", "outcome": outcome, "release": release}
    _answer(rows, model, found, "open", event.at)


def _begin(rows: Rows, event: Event) -> None:
    """A release begins, or the one that has begun names more people."""
    body, model = event.body, find_model(rows, event.body["model"])
    made = rows.get(RELEASES, model["id"], body["release"])
    fits = (model["begun"] is None) == (made is None) and model["begun"] in (None, body["release"])
    _check(fits, "another release had begun, or has this number")
    if made is None:
        facts = {"model": model["id"], "number": body["release"], "state": "begun"}
        made = _make(RELEASES, body | facts | {"begun": event.at, "requests": "[]"})
        rows.put(MODELS, model | {"begun": body["release"]})
    for number in body["requests"]:
        _move(rows, model, number, "open", {"state": "running"}, ("running", "done"))
    named = json.dumps(sorted({*json.loads(made["requests"]), *body["requests"]}))
    rows.put(RELEASES, made | {"requests": named, "replay": max(made["replay"], body["replay"])})


def _release(rows: Rows, event: Event) -> None:
    body, model = event.body, find_model(rows, event.body["model"])
    made = _need(rows, RELEASES, model["id"], body["release"])
    begun, named = model["begun"] == body["release"], json.loads(made["requests"])
    fits = begun and made["state"] == "begun" and named == body["requests"]
    _check(fits, "it answers others than it names")
    facts = {name: body[name] for name in ("certificate", "parent")}
    rows.put(RELEASES, made | facts | {"state": "finished", "finished": event.at})
    ended = {"begun": None, "finished": body["release"], "generation": body["generation"]}
    rows.put(MODELS, model | ended)
    done = {"state": "done", "outcome": FORGOTTEN, "release": body["release"]}
    _answer(rows, model, dict.fromkeys(named, done), "running", event.at, ("done",))


def _answer(
    rows: Rows, model: Row, found: dict[int, Row], before: str, at: str, other: Sequence[str] = ()
) -> None:
    """A model has done its part in some requests; where it was the last, they are answered."""
    for number, after in found.items():
        _move(rows, model, number, before, after, other)
        asked, parts = _need(rows, REQUESTS, number), rows.parts(number)
        if asked["state"] == "open" and all(part["state"] == "done" for part in parts):
            answer = conclude([part["outcome"] for part in parts], asked["scope"] == 0)
            rows.put(REQUESTS, asked | {"state": "answered", "answer": answer, "ended": at})


def _move(
    rows: Rows, model: Row, number: int, before: str, after: Row, other: Sequence[str] = ()
) -> None:
    """A part of work goes on; one that is in an ``other`` state stays in it."""
    part = _need(rows, WORK, number, model["id"])
    _check(part["state"] in (before, *other), f"request {number} does not wait for this")
    if part["state"] == before:
        rows.put(WORK, part | after)


def _make(table: Table, facts: Row) -> Row:
    """A row of a table from what is known; the rest is empty."""
    return {name: facts.get(name) for name in NAMES[table]}


def _need(rows: Rows, table: Table, *key: Any) -> Row:
    row = rows.get(table, *key)
    _check(row is not None, f"{table.name}: {' of '.join(map(str, key))} is not there")
    return row or {}


def _need_open(rows: Rows, number: int) -> Row:
    asked = _need(rows, REQUESTS, number)
    _check(asked["state"] == "open", f"request {number} had ended")
    return asked


def _check(fits: bool, otherwise: str) -> None:
    if not fits:
        raise broken(otherwise)
