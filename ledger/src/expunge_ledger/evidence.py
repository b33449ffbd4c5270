"""Whether a ledger is what it was, and what leaves it for a regulator.

Verified are its chain, its tables by its chain, its releases, and the anchor beside the key. What
is not found: events cut off together with what they changed in the tables, if nothing was worked
on, exported or verified after them. An export is verified first: a zip about one person that needs
no ledger and no key to be read.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

import expunge
from expunge import ExpungeError, InputError, VerificationError
from expunge_ledger import models, records
from expunge_ledger.chain import START, Anchor, Event, digest_body, hash_event
from expunge_ledger.database import Database
from expunge_ledger.deeds import CHANGING, FORGOTTEN, Row, Rows, apply, broken, find_key
from expunge_ledger.records import Records, Request
from expunge_ledger.schema import RELEASES, REQUESTS
from expunge_ledger.work import check_finished

_WHEN = (1980, 1, 1, 0, 0, 0)
Outside = tuple[Anchor | None, list[str]]


class Verified(BaseModel, frozen=True):
    """Whether it holds, and what differs if not; releases is how many were verified, events and
    head are the size of the chain and its end."""

    holds: bool = True
    differences: list[str] = []
    releases: int = 0
    events: int | None = None
    head: str | None = None
    requests: int = Field(default=0, exclude=True)


def check_tables(tables: Records) -> list[Event]:
    """All events, if the chain holds and the tables are what it says; else what differs."""
    events, memory, previous = tables.events(), Rows(), START
    for number, event in enumerate(events, 1):
        if event.number != number:
            raise broken(f"event {number} is missing")
        digest = digest_body(tables.key.tag("body", str(number)), event.body)
        if hash_event(previous, number, event.at, event.kind, digest) != event.hash:
            raise broken(f"event {number} was changed: its hash is not that of what it says")
        previous = event.hash
        try:
            apply(memory, event)
        except (VerificationError, KeyError, TypeError, ValueError) as error:
            said = str(error).removeprefix(str(broken("")))
            raise broken(f"event {number} does not follow: {said}") from None
    book = tables.book
    if (len(events), previous) != (book["events"], book["head"]):
        raise broken(f"the chain ends at event {len(events)}, and the book says {book['events']}")
    if problems := find_differences(tables, memory):
        raise broken("; ".join(problems))
    return events


def find_differences(tables: Records, memory: Rows) -> list[str]:
    """Where the tables are not what the events say: every row, every sum, every seal."""
    problems = list[str]()
    for table in CHANGING:
        ours = {find_key(table, row): row for row in tables.find(table)}
        theirs = {find_key(table, row): row for row in memory.all(table)}
        for key in sorted({*ours, *theirs}):
            shown = f"{table.name}: {' of '.join(map(str, key))}"
            if key not in ours:
                problems.append(f"{shown} is gone from the table")
            elif ours[key] != theirs.get(key):
                problems.append(f"{shown} is not what the events say")
    if tables.book["requests"] != memory.book["requests"]:
        problems.append(f"requests: the book says {tables.book['requests']}, the events do not")
    if problems:
        return problems
    tables.prove()
    tables.tokens()
    for model in tables.models():
        tables.live(model)
        tables.read_seen(model)
    rows = tables.find(REQUESTS)
    for what in ("reason", "why"):
        sealed = {row["number"]: row[what] for row in rows if row[what] is not None}
        texts = tables.read_secrets(what, sealed)
        problems += [
            f"secrets: the {what} of request {number} is not the one that was sealed"
            for number, tag in sealed.items()
            if number not in texts or tables.key.tag(what, texts[number]) != tag
        ]
    kept = [r["number"] for r in rows if r["state"] == "open" or r["answer"] == FORGOTTEN]
    tables.read_names(kept)
    return problems


def verify_ledger(db: Database, *, certificates: bool = True) -> Verified:
    """All of it; what differs is one :class:`VerificationError`. Where it holds, the anchor beside
    the key says how far it went, so that the next time anything cut off before is found."""
    outside = read_outside(db)  # before the tables: what comes later is in these
    with db.reading() as tables:
        problems = list(find_unknown(tables, check_tables(tables), outside).values())
        for model in tables.models() if certificates else ():
            problems += [one for _, one in inspect_model(tables, model)]
        if problems:
            raise broken("; ".join(problems))
        tables.anchor().write(db.anchor_file)
        count, book = len(tables.find(RELEASES, RELEASES.c.state == "finished")), tables.book
        facts = {name: book[name] for name in ("events", "head", "requests")}
        return Verified(releases=count, **facts)


def inspect_model(tables: Records, model: Row, only: int | None = None) -> list[tuple[int, str]]:
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


def read_outside(db: Database) -> Outside:
    """What lies outside of the database: the anchor beside the key, and the releases."""
    with db.reading() as tables:
        folders = [Path(row["folder"]) for row in tables.models()]
    places = [place for folder in folders for place in sorted(folder.glob("[0-9]*"))]
    return Anchor.load(db.anchor_file), [str(one) for one in places if models.is_written(one)]


def find_unknown(tables: Records, events: Sequence[Event], outside: Outside) -> dict[str, str]:
    """What lies outside and this chain does not go through, and what is to be said of it."""
    (anchor, places), end = outside, tables.anchor()
    begun = {event.body["directory"] for event in events if event.kind == "begun"}
    unknown = {
        place: f"{place} is a release that this ledger does not know"
        for place in places
        if place not in begun
    }
    if anchor is not None:
        hashes = {event.number: event.hash for event in events}
        if anchor.ledger != end.ledger:
            unknown[anchor.head] = "the anchor beside the key is of another ledger"
        elif anchor.events > end.events:
            unknown[anchor.head] = (
                f"the chain ends at event {end.events}, and the anchor beside the key was written "
                f"after event {anchor.events}: the end was cut off, or an older copy was restored"
            )
        elif hashes[anchor.events] != anchor.head:
            unknown[anchor.head] = (
                f"event {anchor.events} is not the one after which the anchor beside the key was "
                "written"
            )
    accepted = {one for event in events if event.kind == "accepted" for one in event.body["lost"]}
    return {one: said for one, said in unknown.items() if one not in accepted}


def export_person(db: Database, person: object) -> bytes:
    """All requests of a person: facts, events, certificates, how to verify."""
    with db.reading() as tables:
        about = records.is_about(db.key.hash_person(person))
        numbers = [row["number"] for row in tables.find(REQUESTS, about)]
        if not numbers:
            raise InputError("person has no request in this ledger; check how it is written")
        events = check_tables(tables)
        found = tables.show_requests(numbers)
        files = {
            "requests.json": _dump([request.model_dump(mode="json") for request in found]),
            "events.json": _dump(_choose(tables, events, set(numbers))),
            "anchor.json": tables.anchor().dump() + b"\n",
        }
        finished = tables.find(RELEASES, RELEASES.c.state == "finished")
        places = {row["certificate"]: Path(row["directory"]) for row in finished}
        for answer in (one for request in found for one in request.answers):
            if answer.release is None:
                continue
            model = tables.need_model(answer.model)
            row = tables.read_release(model, answer.release)
            check_finished(tables, model, row)
            name, parent = (
                f"{answer.model}/{answer.release:04d}/certificate.json",
                row["certificate"],
            )
            while parent in places and name not in files:  # and those it is chained to
                files[name] = models.read_certificate(places[parent], parent)
                parent = expunge.Certificate.from_bytes(files[name]).parent
                name = f"{answer.model}/{answer.release:04d}/chain/{str(parent)[:16]}.json"
    files["README.txt"] = _explain(found, sorted(files)).encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _WHEN), data, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def _choose(tables: Records, events: list[Event], numbers: set[int]) -> list[dict[str, Any]]:
    """The events about these requests, with what is needed to check each: the hash before it, and
    the body with its salt, unless that names the requests of others."""
    found, previous = list[dict[str, Any]](), START
    for event in events:
        if numbers.intersection(event.subjects):
            salt = tables.key.tag("body", str(event.number))
            row = vars(event) | {"previous": previous, "digest": digest_body(salt, event.body)}
            row |= {"salt": salt, "shown": event.shown}
            if not numbers.issuperset(event.subjects) or "directory" in event.body:
                del row["body"], row["salt"]
            found.append(row)
        previous = event.hash
    return found


def _explain(requests: list[Request], names: list[str]) -> str:
    lines = ["Evidence about requests to be forgotten", ""]
    for one in requests:
        ended = "" if one.ended is None else f" on {one.ended.date()}"
        answer = "" if one.answer is None else f" ({one.answer})"
        lines.append(
            f"Request {one.number}: received {one.received}, due {one.due}, {one.state}{answer}"
            f"{ended}, {one.pace}"
        )
        for part in one.answers:
            place = "" if part.release is None else f", release {part.release:04d}"
            lines.append(f"  {part.model}: {part.outcome or part.state}{place}")
    how = Path(__file__).with_name("evidence.txt").read_text().format(version=version("expunge"))
    return "\n".join([*lines, "", "Files", "", *(f"  {name}" for name in names), "", how])


def _dump(data: Any) -> bytes:
    return (json.dumps(data, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()
