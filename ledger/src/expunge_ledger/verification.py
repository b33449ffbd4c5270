"""Whether a ledger is what it was: its chain, its tables by its chain, its releases, its anchors.

What is not found: events cut off together with what they changed in the tables, if no release was
written and nothing was exported or verified after them. Anchors of those lie outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expunge import ExpungeError, VerificationError
from expunge_ledger import models
from expunge_ledger.chain import START, Anchor, Event, digest_body, hash_event, salt_of
from expunge_ledger.database import Database
from expunge_ledger.deeds import FORGOTTEN, KEYS, Row, Rows, apply, broken
from expunge_ledger.registry import read_seen
from expunge_ledger.requests import read_names, read_secrets
from expunge_ledger.schema import FILINGS, MODELS, RELEASES, REQUESTS, TOKENS, WORK
from expunge_ledger.tables import Tables
from expunge_ledger.work import ANCHOR, check_finished, write_anchor

_PREFIX = str(broken(""))
Beside = list[tuple[Path, Anchor | None, bool]]  # place, anchor, whether it is a release


@dataclass(frozen=True)
class Verified:
    """A ledger that holds: its size, the end of its chain, and what else there is to say."""

    events: int
    head: str
    requests: int
    releases: int
    said: tuple[str, ...] = ()


def check_tables(tables: Tables) -> list[Event]:
    """All events, if the chain holds and the tables are what it says; else what differs."""
    events, memory = list[Event](), Rows()
    try:
        events = tables.events()
        problems = find_breaks(tables, events)
        for event in events if not problems else ():
            try:
                apply(memory, event)
            except (VerificationError, KeyError, TypeError, ValueError) as error:
                said = str(error).removeprefix(_PREFIX)
                problems.append(f"event {event.number} does not follow: {said}")
        problems = problems or find_differences(tables, memory)
    except VerificationError as error:
        problems = [str(error).removeprefix(_PREFIX)]
    if problems:
        raise broken("; ".join(problems))
    return events


def find_breaks(tables: Tables, events: Sequence[Event]) -> list[str]:
    """Where the chain is broken, if anywhere."""
    previous = START
    for number, event in enumerate(events, 1):
        if event.number != number:
            return [f"event {number} is missing"]
        digest = digest_body(salt_of(tables.key, number), event.body)
        if hash_event(previous, number, event.at, event.kind, digest) != event.hash:
            return [f"event {number} was changed: its hash is not that of what it says"]
        previous = event.hash
    if (len(events), previous) != (tables.book["events"], tables.book["head"]):
        return [f"the chain ends at event {len(events)}, and the book says {tables.book['events']}"]
    return []


def find_differences(tables: Tables, memory: Rows) -> list[str]:
    """Where the tables are not what the events say: every row, every sum, every seal."""
    problems = list[str]()
    for table in (MODELS, REQUESTS, WORK, RELEASES, TOKENS, FILINGS):
        ours = {tuple(row[name] for name in KEYS[table]): row for row in tables.find(table)}
        theirs = {key: row for key, row in memory.rows[table].items() if row is not None}
        for key in sorted({*ours, *theirs}):
            shown = f"{table.name}: {' of '.join(map(str, key))}"
            if key not in ours:
                problems.append(f"{shown} is gone from the table")
            elif key not in theirs:
                problems.append(f"{shown} is in the table, and no event says so")
            elif ours[key] != theirs[key]:
                problems.append(f"{shown} is not what the events say")
    if tables.book["requests"] != memory.book["requests"]:
        problems.append(f"requests: the book says {tables.book['requests']}, the events do not")
    if problems:
        return problems
    tables.prove()
    tables.tokens()
    for model in tables.models():
        tables.live(model)
        read_seen(tables, model)
    requests = tables.find(REQUESTS)
    for what in ("reason", "why"):
        sealed = {row["number"]: row[what] for row in requests if row[what] is not None}
        texts = read_secrets(tables, what, sealed)
        problems += [
            f"secrets: the {what} of request {number} is not the one that was sealed"
            for number, tag in sealed.items()
            if number not in texts or tables.key.tag(what, texts[number]) != tag
        ]
    kept = [r["number"] for r in requests if r["state"] == "open" or r["answer"] == FORGOTTEN]
    read_names(tables, kept)
    return problems


def verify_ledger(db: Database, anchor: Path, *, certificates: bool = True) -> Verified:
    """All of it; what differs is one :class:`VerificationError`. Where it holds, ``anchor`` says
    how far it went, so that the next time anything cut off before is found."""
    with db.reading() as tables:
        beside = list_beside(tables, anchor)  # before the tables: what comes later is in these
    with db.reading() as tables:
        events = check_tables(tables)
        problems = find_cut(tables.anchor(), events, beside)
        for model in tables.models() if certificates else ():
            problems += [one for _, one in inspect_model(tables, model)]
        if problems:
            raise broken("; ".join(problems))
        said = [
            f"event {event.number} is dated before the one before it: a clock was set"
            for before, event in itertools.pairwise(events)
            if event.at < before.at
        ]
        # A worker killed after its last line leaves none either: no proof of anything by itself.
        said += [
            f"{place} has no {ANCHOR}: it does not say how far the ledger was when it was written"
            for place, found, release in beside
            if release and found is None
        ]
        write_anchor(anchor, tables.anchor())
        count = len(tables.find(RELEASES, RELEASES.c.state == "finished"))
        book = tables.book
        return Verified(book["events"], book["head"], book["requests"], count, tuple(said))


def inspect_model(tables: Tables, model: Row, only: int | None = None) -> list[tuple[int, str]]:
    """(release, what differs) of the finished releases of a model, or of one: certificate, record,
    the people it names, its parent, and of the last one the weights."""
    found, before = list[tuple[int, str]](), None
    fits = (RELEASES.c.model == model["id"], RELEASES.c.state == "finished")
    for release in tables.find(RELEASES, *fits):
        number, parent = release["number"], release["parent"]
        if only in (None, number):
            try:
                check_finished(tables, model, release)
            except (ExpungeError, OSError) as error:
                found.append((number, str(error)))
            if before is not None and parent != before["certificate"] and not release["replay"]:
                found.append((number, f"it is not chained to release {before['number']}"))
        before = release
    return found


def list_beside(tables: Tables, own: Path) -> Beside:
    """The anchors that lie outside of the database."""
    folders = [Path(row["folder"]) for row in tables.models()]
    places = [place for folder in folders for place in sorted(folder.glob("[0-9]*"))]
    found = [(one, Anchor.load(one / ANCHOR), True) for one in places if models.is_written(one)]
    return [(own, Anchor.load(own), False), *found]


def find_cut(end: Anchor, events: Sequence[Event], beside: Beside) -> list[str]:
    """Anchors outside of the database that this chain does not go through."""
    said = [event.body["anchors"] for event in events if event.kind == "accepted"]
    accepted, problems = set(itertools.chain(*said)), list[str]()
    begun = {event.body["directory"] for event in events if event.kind == "begun"}
    for place, anchor, release in beside:
        if anchor is not None and anchor.head in accepted:
            continue
        if release and str(place) not in begun:
            problems.append(f"{place} is a release that this ledger does not know")
        if anchor is None:
            continue
        if anchor.ledger != end.ledger:
            problems.append(f"{place} is of another ledger")
        elif anchor.events > end.events:
            problems.append(
                f"the chain ends at event {end.events}, and {place} was written after event "
                f"{anchor.events}: the end was cut off, or an older copy was restored"
            )
        elif events[anchor.events - 1].hash != anchor.head:
            problems.append(f"event {anchor.events} is not the one that {place} was written after")
    return problems


def accept(db: Database, anchor: Path, reason: str) -> tuple[str, ...]:
    """An older copy was restored knowingly, or the clock is right: go on from here."""
    with db.writing() as tables:
        hashes = {event.number: event.hash for event in tables.events()}
        anchors = [one for _, one, _ in list_beside(tables, anchor) if one is not None]
        lost = sorted({one.head for one in anchors if hashes.get(one.events) != one.head})
        tables.record("accepted", anchors=lost, reason=db.key.tag("accepted", reason))
    return tuple(lost)
