"""Rows that are read with proof, and written with it.

Every row has a MAC by the key. That it is the newest, and that none is missing, follows from
``book``: its one row has a MAC too, and in it, sealed, a sum for every group of rows:

    the rows about people, in 1,024 buckets · all models · all tokens · the live work of each model
    sum = Σ HMAC(K, "term" ‖ mac of the row)  mod 2^128         sealed: nobody sees sums or terms

So a step costs the same however many rows there are: it reads the book, the models, and the bucket
of whom it is about.
"""

from __future__ import annotations

import functools
import hmac
import json
import secrets
from collections import Counter
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Table, and_, bindparam, delete, insert, select, update

from expunge import RunError
from expunge_ledger.chain import START, Anchor, Event, make_event
from expunge_ledger.clocks import read_now
from expunge_ledger.deeds import BUCKETS, KEYS, LIVE, Row, Rows, apply, broken, find_bucket
from expunge_ledger.keys import Key
from expunge_ledger.schema import (
    BOOK,
    EVENTS,
    FILINGS,
    MODELS,
    RELEASES,
    REQUESTS,
    SUBJECTS,
    TOKENS,
    WORK,
)  # fmt: skip

_MODELS, _TOKENS, _WIDTH = BUCKETS, BUCKETS + 1, 16
_NAMES = {table: [c.name for c in table.columns if c.name != "mac"] for table in KEYS}
_GET = {
    table: select(table).where(and_(*(table.c[name] == bindparam(name) for name in names)))
    for table, names in KEYS.items()
}
_EARLIER, _LATER = timedelta(days=1), timedelta(days=366)


class Tables(Rows):
    """The tables as one transaction sees them; ``by`` is the token on whose behalf it writes."""

    def __init__(
        self, connection: Connection, key: Key, by: str | None = None, *, writes: bool = False
    ) -> None:
        super().__init__()
        self.connection, self.key, self.by = connection, key, by
        self._written = dict[tuple[Table, Any], tuple[Row, str]]()  # rows as read, their MACs
        self._events, self._loaded, self._proved = list[Event](), set[int](), set[int]()
        (row,) = connection.execute(
            select(BOOK).with_for_update() if writes else select(BOOK)
        ).all()
        self.ledger: str = row.ledger
        self.book = self._load(BOOK, row)

    def get(self, table: Table, *key: Any) -> Row | None:
        """A row by its key, proved to be written with the ledger's key."""
        if key not in self.rows[table]:
            given = dict(zip(KEYS[table], key, strict=True))
            row = self.connection.execute(_GET[table], given).one_or_none()
            self.rows[table][key] = None if row is None else self._load(table, row)
        return self.rows[table][key]

    def find(self, table: Table, *where: Any) -> list[Row]:
        """Rows that fit, each proved; that none is missing is for others to prove."""
        chosen = select(table).where(*where).order_by(*table.primary_key)
        return [self._load(table, row) for row in self.connection.execute(chosen)]

    def models(self) -> list[Row]:
        """All models, proved to be all."""
        self._read_whole(MODELS, _MODELS)
        return super().models()

    def tokens(self) -> list[Row]:
        """All tokens, revoked ones too, proved to be all."""
        self._read_whole(TOKENS, _TOKENS)
        return sorted(filter(None, self.rows[TOKENS].values()), key=lambda row: row["name"])

    def _read_whole(self, table: Table, group: int) -> None:
        if group not in self._proved:
            said = f"{table.name}: a row is gone, or an old one is back"
            self._prove([group], [(table, row) for row in self.find(table)], said)

    def load(self, requests: Iterable[int]) -> None:
        """Read some requests and their parts at once, for who asks for them one by one."""
        for part in split(sorted(set(requests) - self._loaded)):
            rows, written = self.rows[REQUESTS], self._written
            new = {n for n in part if rows.get((n,)) and (REQUESTS, (n,)) not in written}
            if old := sorted({*part} - new):
                self.find(REQUESTS, REQUESTS.c.number.in_(old))
                self.find(WORK, WORK.c.request.in_(old))
            for model in self.models():
                for number in part:
                    self.rows[WORK].setdefault((number, model["id"]), None)
            self._loaded.update(part)

    def waiting(self) -> list[int]:
        """The open requests that ask all models."""
        rows = self.find(REQUESTS, REQUESTS.c.state == "open", REQUESTS.c.scope == 0)
        return [row["number"] for row in rows]

    def live(self, model: Row) -> list[Row]:
        """The open and running parts of a model, proved to be all, as they were before."""
        found = self.find(WORK, WORK.c.model == model["id"], WORK.c.state.in_(LIVE))
        said = f"work: the open parts of {model['name']} are not those that were written: a row "
        said += "is gone, or an old one is back"
        self._prove([_TOKENS + model["id"]], [(WORK, row) for row in found], said)
        return found

    def prove(self, people: Collection[str] | None = None) -> None:
        """All rows about some people, or about all, are there, and none that is old or foreign."""
        chosen = range(BUCKETS) if people is None else {find_bucket(one) for one in people}
        for part in split(sorted(set(chosen) - self._proved)):
            found = [
                (table, row)
                for table in (REQUESTS, WORK, FILINGS)
                for row in self.find(table, table.c.bucket.in_(part))
            ]
            self._prove(part, found, "rows about a person are gone, or old ones are back")

    def _prove(self, groups: Iterable[int], found: list[tuple[Table, Row]], said: str) -> None:
        totals = Counter[int]()
        for table, row in found:
            written, mac = self._written[table, tuple(row[name] for name in KEYS[table])]
            for group in find_groups(table, written):
                totals[group] += self._hash_term(mac)
        for group in groups:
            if totals[group] % 2 ** (8 * _WIDTH) != self._read_sum(group):
                raise broken(said)
            self._proved.add(group)

    def record(self, kind: str, /, **body: Any) -> Event:
        """Add an event to the chain, and change the rows as it says."""
        if self.by is not None:
            body["by"] = self.by
        book, number = self.book, self.book["events"] + 1
        at = self._read_time(datetime.fromisoformat(book["at"]), kind)
        event = make_event(self.key, book["head"], number, at, kind, body)
        book |= {"events": number, "head": event.hash, "at": at}
        self._events.append(event)
        apply(self, event)
        return event

    def _read_time(self, last: datetime, kind: str) -> str:
        """Never before the last event; a clock that is days behind or a year ahead is refused."""
        now = read_now()
        if kind != "accepted" and not last - _EARLIER <= now <= last + _LATER:
            raise RunError(
                f"the clock says {now.date()}, and the last event is of {last.date()}; nothing "
                "changed. If the clock is right, say so: expunge-ledger verify --accept REASON"
            )
        return (now if kind == "accepted" else max(now, last)).isoformat()

    def anchor(self) -> Anchor:
        """Where the chain ends."""
        return Anchor(self.ledger, self.book["events"], self.book["head"])

    def goes_through(self, anchor: Anchor) -> bool:
        """Whether this chain was what an anchor says."""
        hashes = select(EVENTS.c.hash).where(EVENTS.c.number == anchor.events)
        return self.connection.execute(hashes).scalar_one_or_none() == anchor.head

    def events(self, request: int | None = None) -> list[Event]:
        """All events in order, or those about one request; each written with the key."""
        chosen = select(EVENTS).order_by(EVENTS.c.number)
        if request is not None:
            own = select(SUBJECTS.c.event).where(SUBJECTS.c.request == request)
            chosen = chosen.where(EVENTS.c.number.in_(own))
        found = list[Event]()
        for row in self.connection.execute(chosen).mappings():
            if not hmac.compare_digest(self._mac(EVENTS, dict(row)), row["mac"]):
                raise broken(f"event {row['number']} was not written with the key of this ledger")
            body = json.loads(row["body"])
            found.append(Event(row["number"], row["at"], row["kind"], body, row["hash"]))
        return found

    def flush(self) -> None:
        """Write what changed, with its proofs."""
        for table in (REQUESTS, WORK, FILINGS, RELEASES, TOKENS, MODELS):
            self._write(table)
        if not self._events:
            return
        self.connection.execute(insert(EVENTS), [self._dump(event) for event in self._events])
        pairs = {(n, event.number) for event in self._events for n in event.subjects}
        if pairs:
            rows = [{"request": n, "event": e} for n, e in sorted(pairs)]
            self.connection.execute(insert(SUBJECTS), rows)
        self.book["sums"] = self.key.seal(bytes(self._sums), f"sums {self.ledger}")
        self._update(BOOK, [self.book | {"mac": self._mac(BOOK, self.book)}])

    def _write(self, table: Table) -> None:
        new, old = list[Row](), list[Row]()
        for key, row in self.rows[table].items():
            before, mac = self._written.get((table, key), (None, ""))
            if row is before:
                continue
            if before is not None:
                self._add_up(table, before, -self._hash_term(mac))
            if row is None:
                fits = (
                    table.c[name] == value for name, value in zip(KEYS[table], key, strict=True)
                )
                self.connection.execute(delete(table).where(*fits))
                continue
            mac = self._mac(table, row)
            self._add_up(table, row, self._hash_term(mac))
            (new if before is None else old).append(row | {"mac": mac})
        if new:
            self.connection.execute(insert(table), new)
        if old:
            self._update(table, old)

    def _update(self, table: Table, rows: list[Row]) -> None:
        where = and_(*(table.c[name] == bindparam(f"key_{name}") for name in KEYS[table]))
        given = [row | {f"key_{name}": row[name] for name in KEYS[table]} for row in rows]
        names = {column.name: bindparam(column.name) for column in table.columns}
        self.connection.execute(update(table).where(where).values(names), given)

    def _load(self, table: Table, row: Any) -> Row:
        found = dict(row._mapping)
        mac = found.pop("mac")
        key = tuple(found[name] for name in KEYS[table])
        if (cached := self.rows[table].get(key)) is not None:  # read before, maybe changed since
            return cached
        if not hmac.compare_digest(self._mac(table, found), mac):
            shown = " of ".join(map(str, key))
            raise broken(f"{table.name}: {shown} was not written with the key of this ledger")
        self.put(table, found)
        self._written[table, key] = found, mac
        return found

    def _dump(self, event: Event) -> Row:
        row = {"number": event.number, "at": event.at, "kind": event.kind, "hash": event.hash}
        row["body"] = json.dumps(event.body, ensure_ascii=False, separators=(",", ":"))
        return row | {"mac": self._mac(EVENTS, row)}

    def _mac(self, table: Table, row: Row) -> str:
        return mac_row(self.key, self.ledger, table, row)

    def _hash_term(self, mac: str) -> int:
        return int(self.key.tag("term", mac)[: 2 * _WIDTH], 16)

    @functools.cached_property
    def _sums(self) -> bytearray:
        return bytearray(self.key.open(self.book["sums"], f"sums {self.ledger}"))

    def _read_sum(self, group: int) -> int:
        return int.from_bytes(self._sums[_WIDTH * group : _WIDTH * (group + 1)])

    def _add_up(self, table: Table, row: Row, term: int) -> None:
        for group in find_groups(table, row):
            self._sums.extend(bytes(max(0, _WIDTH * (group + 1) - len(self._sums))))
            total = (self._read_sum(group) + term) % 2 ** (8 * _WIDTH)
            self._sums[_WIDTH * group : _WIDTH * (group + 1)] = total.to_bytes(_WIDTH)


def find_groups(table: Table, row: Row) -> list[int]:
    """The groups in whose sums a row is; releases are proved by the rows of their models."""
    if table in (MODELS, TOKENS):
        return [_MODELS if table is MODELS else _TOKENS]
    if table is WORK and row["state"] in LIVE:
        return [row["bucket"], _TOKENS + row["model"]]
    return [] if table is RELEASES else [row["bucket"]]


def mac_row(key: Key, ledger: str, table: Table, row: Row) -> str:
    """The MAC of a row, in its table, of one ledger."""
    values = [row[name] for name in _NAMES[table]]
    text = json.dumps([v.hex() if isinstance(v, bytes) else v for v in values])
    return key.tag(f"row/{ledger}/{table.name}", text)


def begin_book(connection: Connection, key: Key) -> None:
    """The one row of a new ledger, and its first event."""
    name = secrets.token_hex(32)
    row = {"id": 1, "ledger": name, "check": key.tag("check", name), "at": read_now().isoformat()}
    sums = key.seal(bytes(_WIDTH * (BUCKETS + 2)), f"sums {name}")
    row |= {"events": 0, "head": START, "requests": 0, "sums": sums}
    connection.execute(insert(BOOK).values(**row, mac=mac_row(key, name, BOOK, row)))
    tables = Tables(connection, key)
    tables.record("created", ledger=name)
    tables.flush()


def split(numbers: Collection[int]) -> list[list[int]]:
    """At most 500 at once: databases have a limit."""
    given = list(numbers)
    return [given[start : start + 500] for start in range(0, len(given), 500)]
