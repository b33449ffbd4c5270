"""Events in a chain: each carries the hash of the one before, so none can be changed or left out.

    hash_n = SHA-256("expunge/event\\0" ‖ hash_{n-1} ‖ canonical JSON of (number, at, kind, body))
    seal_n = HMAC(key, hash_n)

Anybody can check the hashes; only who has the key can write an event that is sealed. The hash of
the last event and their number stand in ``book``, in every release that was written
(``ledger.json`` beside its certificate) and in every export: whoever cuts off the end of the chain,
or puts back an old copy of the database, is found by the anchors that lie outside of it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import rfc8785
from sqlalchemy import Connection, insert, select, update

from expunge.ledger.clocks import read_now
from expunge.ledger.names import Key
from expunge.ledger.schema import BOOK, EVENTS

START = "0" * 64


@dataclass(frozen=True)
class Event:
    """One change of the ledger; ``body`` is plain data without identifiers."""

    number: int
    at: str
    kind: str
    body: Mapping[str, Any]
    hash: str
    seal: str

    def concerns(self, request: int) -> bool:
        """Whether it is about this request, alone or with others."""
        body = self.body
        listed = request in body.get("requests", ()) or str(request) in body.get("outcomes", ())
        return body.get("request") == request or listed


@dataclass(frozen=True)
class Anchor:
    """The end of a chain at some moment: how many events there were, and the hash of the last."""

    ledger: str
    events: int
    head: str


NOWHERE = Anchor("", 0, START)


def hash_event(previous: str, number: int, at: str, kind: str, body: Mapping[str, Any]) -> str:
    """The hash of an event, by the one before.

    >>> hash_event(START, 1, "2026-01-31T12:00:00+00:00", "created", {})[:12]
    '24227eb7aacd'
    """
    told = rfc8785.dumps({"number": number, "at": at, "kind": kind, "body": dict(body)})
    return hashlib.sha256(b"expunge/event\0" + bytes.fromhex(previous) + told).hexdigest()


def append(connection: Connection, kind: str, /, **body: Any) -> Event:
    """Add an event; the transaction must be one that writes, of an engine that has the key."""
    key: Key = connection.get_execution_options()["key"]
    book = connection.execute(select(BOOK)).one()
    number, at = book.events + 1, read_now().isoformat()
    made = hash_event(book.head, number, at, kind, body)
    text = rfc8785.dumps(body).decode()
    seal = key.tag("event", made)
    row = {"number": number, "at": at, "kind": kind, "body": text, "hash": made, "seal": seal}
    connection.execute(insert(EVENTS).values(**row))
    connection.execute(update(BOOK).values(events=number, head=made))
    return Event(number, at, kind, body, made, seal)


def read_anchor(connection: Connection) -> Anchor:
    """Where the chain ends now."""
    book = connection.execute(select(BOOK)).one()
    return Anchor(book.ledger, book.events, book.head)


def list_events(
    connection: Connection, *, after: int = 0, most: int | None = None
) -> tuple[Event, ...]:
    """Events in order, from the one ``after`` a number on."""
    chosen = select(EVENTS).where(EVENTS.c.number > after).order_by(EVENTS.c.number).limit(most)
    return tuple(map(_read, connection.execute(chosen)))


def list_own(connection: Connection, request: int, *, after: int = 0) -> tuple[Event, ...]:
    """Events about one request: the database leaves out what cannot be, in the JSON of bodies."""
    text = EVENTS.c.body
    fits = text.like(f'%"request":{request}%') | text.like(f'%"{request}":[%')
    fits |= text.like(f'%"requests":[%{request}%')
    chosen = select(EVENTS).where(EVENTS.c.number > after, fits).order_by(EVENTS.c.number)
    found = map(_read, connection.execute(chosen))
    return tuple(event for event in found if event.concerns(request))


def _read(row: Any) -> Event:
    return Event(row.number, row.at, row.kind, json.loads(row.body), row.hash, row.seal)


def is_genuine(connection: Connection, event: Event) -> bool:
    """Whether an event is as it was sealed, wherever the others are."""
    key: Key = connection.get_execution_options()["key"]
    before = select(EVENTS.c.hash).where(EVENTS.c.number == event.number - 1)
    previous = connection.execute(before).scalar_one_or_none() or START
    return not find_breaks(
        [event], Anchor("", event.number, event.hash), key, Anchor("", event.number - 1, previous)
    )


def find_breaks(
    events: Iterable[Event], end: Anchor, key: Key, start: Anchor = NOWHERE
) -> list[str]:
    """Where the chain from ``start`` on is broken, if anywhere; the first break is named."""
    previous, count = start.head, start.events
    for event in events:
        count += 1
        if event.number != count:
            return [f"event {count} is missing"]
        if hash_event(previous, event.number, event.at, event.kind, event.body) != event.hash:
            return [f"event {count} was changed: its hash is not that of what it says"]
        if not hmac.compare_digest(key.tag("event", event.hash), event.seal):
            return [f"event {count} was not sealed with the key of this ledger"]
        previous = event.hash
    if (count, previous) != (end.events, end.head):
        return [f"the chain ends at event {count}, and the book says {end.events}"]
    return []
