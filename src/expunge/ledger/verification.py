"""Whether a ledger is what it was: its chain, its tables by its chain, its releases, its anchors.

What is not found: events cut off together with what they changed in the tables, if no release was
written and nothing was exported or verified after them. Anchors of those lie outside.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select

from expunge.errors import ExpungeError, VerificationError
from expunge.files import write_atomic
from expunge.ledger.chain import Anchor, Event, append, find_breaks, list_events, read_anchor
from expunge.ledger.database import reading, writing
from expunge.ledger.evidence import ANCHOR, check_release, is_written
from expunge.ledger.evidence import read_anchor as read_file
from expunge.ledger.fulfilment import read_finished
from expunge.ledger.leases import Worker
from expunge.ledger.schema import MODELS
from expunge.ledger.telling import find_contradictions, read_tables, tell


@dataclass(frozen=True)
class Verified:
    """A ledger that holds: its size, the end of its chain, and what else there is to say."""

    events: int
    head: str
    requests: int
    releases: int
    said: tuple[str, ...] = ()


def verify_ledger(worker: Worker, anchor: Path, *, certificates: bool = True) -> Verified:
    """All of it; what differs is one :class:`VerificationError`. Where it holds, ``anchor`` says
    how far it went, so that the next time anything cut off before is found."""
    beside = list_beside(worker, anchor)
    with reading(worker.engine) as connection:
        events, end = list_events(connection), read_anchor(connection)
        found, problems = read_tables(connection, worker.key)
        models = connection.execute(select(MODELS).order_by(MODELS.c.id)).all()
    broken = find_breaks(events, end, worker.key)
    problems = broken + problems
    if not broken:
        told = tell(events)
        problems += told.problems + find_contradictions(told, found)
    problems += find_cut(events, end, beside)
    for model in models if certificates else ():
        problems += [one for _, found_ in inspect_model(worker, model) for one in found_]
    if problems:
        raise VerificationError("the ledger does not hold: " + "; ".join(problems))
    said = [
        f"event {event.number} is dated before the one before it: a clock was set"
        for before, event in itertools.pairwise(events)
        if event.at < before.at
    ]
    write_atomic(anchor, json.dumps(asdict(end), sort_keys=True).encode(), private=True)
    return Verified(end.events, end.head, len(found.requests), len(found.releases), tuple(said))


def inspect_model(worker: Worker, model: Any) -> list[tuple[int, list[str]]]:
    """(release, what differs) of every finished release of a model's row: certificate, record, the
    people it names, and of the last one the weights, unless the model is retired."""
    with reading(worker.engine) as connection:
        try:
            finished = read_finished(connection, worker.key, model)
        except ExpungeError as error:
            return [(0, [str(error)])]
    found = list[tuple[int, list[str]]]()
    for release in finished:
        last = release is finished[-1] and model.retired is None
        try:
            check_release(release.directory, release.people.values(), release.certificate, last)
            found.append((release.number, []))
        except ExpungeError as error:
            found.append((release.number, [str(error)]))
    return found


def advance_anchor(worker: Worker, anchor: Path) -> None:
    """Leave the end of the chain beside the key, unless this chain does not go through what is
    there: that stays, for ``verify`` to find."""
    own = read_file(anchor)
    with reading(worker.engine) as connection:
        end = read_anchor(connection)
        passed = () if own is None else list_events(connection, after=own.events - 1, most=1)
    if own is None or [event.hash for event in passed] == [own.head]:
        write_atomic(anchor, json.dumps(asdict(end), sort_keys=True).encode(), private=True)


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
    found = [Beside(str(p), read_file(p / ANCHOR), True) for p in places if is_written(p)]
    return [Beside(str(own), read_file(own), False), *found]


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


def accept(worker: Worker, anchor: Path, reason: str) -> tuple[str, ...]:
    """Say that an older copy was put back knowingly: what it does not know is listed, and kept."""
    beside = [one.anchor for one in list_beside(worker, anchor)]
    with reading(worker.engine) as connection:
        hashes = {event.number: event.hash for event in list_events(connection)}
    lost = sorted({a.head for a in beside if a is not None and hashes.get(a.events) != a.head})
    with writing(worker.engine) as connection:
        append(connection, "accepted", anchors=lost, reason=worker.key.tag("accepted", reason))
    return tuple(lost)
