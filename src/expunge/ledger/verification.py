"""Whether a ledger is what it was: its chain, its tables by its chain, its releases, its anchors.

What is not found: events cut off together with what they changed in the tables, if no release was
written and nothing was exported or verified after them. Anchors of those lie outside.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from expunge.errors import CertificateError, ExpungeError, VerificationError
from expunge.files import read_limited, write_atomic
from expunge.ledger.chain import Anchor, Event, append, find_breaks, list_events, read_anchor
from expunge.ledger.database import reading, writing
from expunge.ledger.evidence import check_release, is_written
from expunge.ledger.evidence import read_anchor as read_beside
from expunge.ledger.fulfilment import read_named
from expunge.ledger.known import describe_known
from expunge.ledger.leases import Worker
from expunge.ledger.names import Key
from expunge.ledger.requests import ALREADY, FORGOTTEN, open_person
from expunge.ledger.schema import KNOWN, MODELS, NAMED, RELEASES, REQUESTS, WORK

_OTHERS = ("created", "adopted", "failed", "accepted", "token")


@dataclass(frozen=True)
class Verified:
    """A ledger that holds: its size, the end of its chain, and what else there is to say."""

    events: int
    head: str
    requests: int
    releases: int
    said: tuple[str, ...] = ()


@dataclass
class Told:
    """The tables as the events tell them."""

    models: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    requests: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    work: dict[tuple[int, str], tuple[Any, ...]] = field(
        default_factory=dict[tuple[int, str], tuple[Any, ...]]
    )
    releases: dict[tuple[str, int], dict[str, Any]] = field(
        default_factory=dict[tuple[str, int], dict[str, Any]]
    )
    known: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    readmitted: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])


def tell(events: Iterable[Event]) -> Told:
    """What the tables must hold after these events."""
    told = Told()
    for event in events:
        try:
            _tell_one(told, event)
        except (KeyError, TypeError) as error:
            raise VerificationError(f"event {event.number} cannot be followed: {error}") from None
    running = {number for (number, _), work in told.work.items() if work[0] == "running"}
    for number, request in told.requests.items():
        if request["state"] == "open" and number in running:
            request["state"] = "running"
    return told


def _tell_one(told: Told, event: Event) -> None:
    body: Mapping[str, Any] = event.body
    match event.kind:
        case "registered":
            kept = ("kind", "path", "releases", "identity")
            told.models[body["model"]] = (*(body[name] for name in kept), event.at)
            told.work |= {(n, body["model"]): ("open", None, None) for n in body["requests"]}
        case "requested":
            kept = ("person", "model", "received", "due", "reason")
            new = {name: body[name] for name in kept} | {"filed": event.at, "ended": None}
            told.requests[body["request"]] = new | {"state": "open", "answer": None, "why": None}
            told.work |= {(body["request"], m): ("open", None, None) for m in body["models"]}
        case "taken" | "put back":
            state = "running" if event.kind == "taken" else "open"
            told.work |= {(n, body["model"]): (state, None, None) for n in body["requests"]}
        case "settled":
            for number, (outcome, release) in body["outcomes"].items():
                told.work[int(number), body["model"]] = ("done", outcome, release)
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
        case "answered":
            ended = {"state": "answered", "answer": body["answer"], "ended": event.at}
            told.requests[body["request"]] |= ended
        case "withdrawn" | "refused":
            ended = {"state": event.kind, "ended": event.at, "why": body["reason"]}
            told.requests[body["request"]] |= ended
            places = [(body["request"], model) for model in told.models]
            for place in places:
                if told.work.get(place, ("",))[0] == "open":
                    told.work[place] = ("ended", None, None)
        case "hastened":
            told.requests[body["request"]]["due"] = body["due"]
        case "seen":
            told.known[body["model"]] = body["count"], body["digest"], body["weights"]
        case "readmitted":
            told.readmitted.add((body["request"], body["model"]))
        case kind if kind not in _OTHERS:
            raise KeyError(f"nothing is known of {kind!r}")
        case _:
            pass


def read_tables(connection: Connection, key: Key) -> tuple[Told, list[str]]:
    """The tables as they are, in the words of the events; and seals that do not open."""
    found, problems = Told(), list[str]()
    names = {row.id: row.name for row in connection.execute(select(MODELS))}
    for row in connection.execute(select(MODELS)):
        kept = (row.kind, row.path, row.releases, row.identity, row.registered)
        found.models[row.name] = kept
    for row in connection.execute(select(KNOWN)):
        found.known[names[row.model]] = describe_known(row.marks, row.weights)
    numbers = dict[int, int]()
    for row in connection.execute(select(RELEASES)):
        numbers[row.id] = row.number
        kept = ("directory", "state", "begun", "finished", "certificate", "parent")
        facts = {name: getattr(row, name) for name in kept}
        facts |= {"replay": bool(row.replay), "requests": list[int]()}
        found.releases[names[row.model], row.number] = facts
    places = {
        row.id: (names[row.model], row.number) for row in connection.execute(select(RELEASES))
    }
    for row in connection.execute(select(NAMED).order_by(NAMED.c.request)):
        found.releases[places[row.release]]["requests"].append(row.request)
    for row in connection.execute(select(WORK)):
        place = row.request, names[row.model]
        found.work[place] = (row.state, row.outcome, numbers.get(row.release))
        if row.readmitted is not None:
            found.readmitted.add(place)
    needed = set(connection.execute(select(NAMED.c.request)).scalars())
    for row in connection.execute(select(REQUESTS)):
        kept = ("person", "received", "due", "filed", "state", "answer", "ended")
        facts = {name: getattr(row, name) for name in kept}
        facts["model"] = None if row.scope == 0 else names.get(row.scope)
        try:
            for name in ("reason", "why"):
                sealed = getattr(row, name)
                text = None if sealed is None else key.open(sealed, f"{name} {row.number}")
                facts[name] = None if text is None else key.tag(name, text)
            if row.state in ("open", "running") or row.number in needed:
                open_person(row, key)
        except ExpungeError as error:
            problems.append(f"request {row.number}: {error}")
            facts |= {"reason": None, "why": None}
        found.requests[row.number] = facts
    return found, problems


def find_contradictions(told: Told, found: Told) -> list[str]:
    """Where the tables are not what the events tell."""
    problems = list[str]()
    for name in ("models", "requests", "work", "releases", "known"):
        ours: dict[Any, Any] = getattr(found, name)
        theirs: dict[Any, Any] = getattr(told, name)
        for place in [*theirs, *(key for key in ours if key not in theirs)]:
            what = " of ".join(map(str, place)) if isinstance(place, tuple) else place
            if place not in ours:
                problems.append(f"{name}: {what} is gone from the table")
            elif place not in theirs:
                problems.append(f"{name}: {what} is in the table, and no event tells of it")
            elif ours[place] != theirs[place]:
                problems.append(f"{name}: {what} is not what the events tell")
    if told.readmitted != found.readmitted:
        problems.append("work: who was readmitted is not what the events tell")
    return problems


def verify_ledger(worker: Worker, anchor: Path, *, certificates: bool = True) -> Verified:
    """All of it; what differs is one :class:`VerificationError`. Where it holds, ``anchor`` says
    how far it went, so that the next time anything cut off before is found."""
    beside = list_beside(worker, anchor)
    with reading(worker.engine) as connection:
        events, end = list_events(connection), read_anchor(connection)
        found, problems = read_tables(connection, worker.key)
        rows = connection.execute(select(RELEASES).order_by(RELEASES.c.id)).all()
    said = list[str]()
    broken = find_breaks(events, end, worker.key)
    problems = broken + problems
    if not broken:
        problems += find_contradictions(tell(events), found)
    problems += find_cut(events, end, beside)
    problems += _find_unproven(found)
    if certificates:
        last = {row.model: row.id for row in rows if row.state == "finished"}
        for row in rows:
            if row.state == "finished":
                problems += _check_one(worker, row, last[row.model] == row.id)
    before = ""
    for event in events:
        if event.at < before:
            said.append(f"event {event.number} is dated before the one before it: a clock was set")
        before = event.at
    if problems:
        raise VerificationError("the ledger does not hold: " + "; ".join(problems))
    write_atomic(anchor, json.dumps(asdict(end), sort_keys=True).encode(), private=True)
    return Verified(end.events, end.head, len(found.requests), len(found.releases), tuple(said))


def advance_anchor(worker: Worker, anchor: Path) -> None:
    """Leave the end of the chain beside the key, unless this chain does not go through what is
    there: that stays, for ``verify`` to find."""
    own = _read_own(anchor)
    with reading(worker.engine) as connection:
        end = read_anchor(connection)
        passed = () if own is None else list_events(connection, after=own.events - 1, most=1)
    if own is None or [event.hash for event in passed] == [own.head]:
        write_atomic(anchor, json.dumps(asdict(end), sort_keys=True).encode(), private=True)


def _check_one(worker: Worker, row: Any, last: bool) -> list[str]:
    try:
        people = read_named(worker, row.id).values()
        check_release(Path(row.directory), people, row.certificate, last)
    except ExpungeError as error:
        return [str(error)]
    return []


def _find_unproven(found: Told) -> list[str]:
    """Every answer "forgotten" names a release that is finished."""
    problems = list[str]()
    for (number, model), (_, outcome, release) in found.work.items():
        if outcome in (FORGOTTEN, ALREADY):
            facts = found.releases.get((model, release), {})
            if facts.get("state") != "finished":
                problems.append(f"request {number} is answered by a release that is not finished")
    return problems


@dataclass(frozen=True)
class Beside:
    """What lies outside of the database at a place: an anchor, if any; maybe a release."""

    place: str
    anchor: Anchor | None
    release: bool


def list_beside(worker: Worker, own: Path) -> list[Beside]:
    """All anchors. Read before the tables: what is written meanwhile is in these then."""
    with reading(worker.engine) as connection:
        folders = connection.execute(select(MODELS.c.releases)).scalars().all()
    places = [place for folder in folders for place in sorted(Path(folder).glob("[0-9]*"))]
    found = [Beside(str(p), read_beside(p), True) for p in places if is_written(p)]
    return [Beside(str(own), _read_own(own), False), *found]


def find_cut(events: tuple[Event, ...], end: Anchor, beside: list[Beside]) -> list[str]:
    """Anchors outside of the database that this chain does not go through."""
    accepted = {
        hash for event in events if event.kind == "accepted" for hash in event.body["anchors"]
    }
    known = {event.body["directory"] for event in events if event.kind == "begun"}
    hashes = {event.number: event.hash for event in events}
    problems = list[str]()
    for one in beside:
        anchor = one.anchor
        if anchor is not None and anchor.head in accepted:
            continue
        if one.release and one.place not in known:
            problems.append(f"{one.place} is a release that this ledger does not know")
        if anchor is None:
            continue
        if anchor.ledger != end.ledger:
            problems.append(f"{one.place} is of another ledger")
        elif anchor.events > end.events:
            problems.append(
                f"the chain ends at event {end.events}, and {one.place} was written after event "
                f"{anchor.events}: the end was cut off, or an older copy was put back"
            )
        elif hashes.get(anchor.events) != anchor.head:
            problems.append(
                f"event {anchor.events} is not the one that {one.place} was written after"
            )
    return problems


def _read_own(anchor: Path) -> Anchor | None:
    if not anchor.is_file():
        return None
    try:
        return Anchor(**json.loads(read_limited(anchor, 10_000, "anchor")))
    except (ValueError, TypeError):
        raise CertificateError(f"{anchor} is damaged") from None


def accept(worker: Worker, anchor: Path, reason: str) -> tuple[str, ...]:
    """Say that an older copy was put back knowingly: what it does not know is listed, and kept."""
    beside = [one.anchor for one in list_beside(worker, anchor)]
    with reading(worker.engine) as connection:
        hashes = {event.number: event.hash for event in list_events(connection)}
    lost = sorted({a.head for a in beside if a is not None and hashes.get(a.events) != a.head})
    with writing(worker.engine) as connection:
        append(connection, "accepted", anchors=lost, reason=worker.key.tag("accepted", reason))
    return tuple(lost)
