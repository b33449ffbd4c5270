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
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Table, and_, bindparam, delete, insert, select, update

from expunge import RunError
from expunge_ledger import deeds, schema
from expunge_ledger.chain import START, Anchor, Event, digest_body, hash_event
from expunge_ledger.deeds import BUCKETS, KEYS, LIVE, Row, Rows, broken, find_bucket, find_key
from expunge_ledger.keys import Key
from expunge_ledger.schema import BOOK, EVENTS, FILINGS, MODELS, RELEASES, REQUESTS, TOKENS, WORK

_MODELS, _TOKENS, _WIDTH = BUCKETS, BUCKETS + 1, 16
_FITS = {
    table: and_(*(table.c[name] == bindparam(f"key_{name}") for name in names))
    for table, names in KEYS.items()
}
_EARLIER, _LATER = timedelta(days=1), timedelta(days=366)


def read_now() -> datetime:
    """Now, in whole seconds of UTC."""
    return datetime.now(UTC).replace(microsecond=0)


class Tables(Rows):
    """The tables as one transaction sees them; ``by`` is the token on whose behalf it writes."""

    def __init__(
        self, connection: Connection, key: Key, by: str | None = None, *, writes: bool = False
    ) -> None:
        super().__init__()
        self.connection, self.key, self.by = connection, key, by
        self._written = dict[tuple[Table, Any], tuple[Row, str]]()  # rows as read, their MACs
        self._events, self._proved = list[Event](), set[int]()
        chosen = select(BOOK).with_for_update() if writes else select(BOOK)
        (row,) = connection.execute(chosen).all()
        self.ledger: str = row.ledger
        self.book = self._load(BOOK, row)

    def get(self, table: Table, *key: Any) -> Row | None:
        """A row by its key, proved to be written with the ledger's key."""
        if key not in self.rows[table]:
            given = {f"key_{name}": one for name, one in zip(KEYS[table], key, strict=True)}
            row = self.connection.execute(select(table).where(_FITS[table]), given).one_or_none()
            self.rows[table][key] = None if row is None else self._load(table, row)
        return self.rows[table][key]

    def find(self, table: Table, *where: Any) -> list[Row]:
        """Rows that fit, each proved; that none is missing is for others to prove."""
        chosen = select(table).where(*where).order_by(*table.primary_key)
        return [self._load(table, row) for row in self.connection.execute(chosen)]

    def models(self) -> list[Row]:
        """All models, proved to be all."""
        return self._read_whole(MODELS, _MODELS)

    def tokens(self) -> list[Row]:
        """All tokens, revoked ones too, proved to be all."""
        return self._read_whole(TOKENS, _TOKENS)

    def _read_whole(self, table: Table, group: int) -> list[Row]:
        if group not in self._proved:
            said = f"{table.name}: a row is gone, or an old one is back"
            self._prove([group], [(table, row) for row in self.find(table)], said)
        return self.all(table)

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
        for part in split(set(chosen) - self._proved):
            found = [
                (table, row)
                for table in (REQUESTS, WORK, FILINGS)
                for row in self.find(table, table.c.bucket.in_(part))
            ]
            self._prove(part, found, "rows about a person are gone, or old ones are back")

    def _prove(self, groups: Iterable[int], found: list[tuple[Table, Row]], said: str) -> None:
        totals = Counter[int]()
        for table, row in found:
            written, mac = self._written[table, find_key(table, row)]
            for group in find_groups(table, written):
                totals[group] += self._hash_term(mac)
        for group in groups:
            if totals[group] % 2 ** (8 * _WIDTH) != self._read_sum(group):
                raise broken(said)
            self._proved.add(group)

    def record(self, kind: str, /, **body: Any) -> None:
        """Add an event to the chain, and change the rows as it says. It is never dated before the
        last one; a clock that is days behind it or a year ahead is refused."""
        if self.by is not None:
            body["by"] = self.by
        book, now = self.book, read_now()
        last = datetime.fromisoformat(book["at"])
        if kind == "accepted":
            last = now
        elif not last - _EARLIER <= now <= last + _LATER:
            raise RunError(
                f"the clock says {now.date()}, and the last event is of {last.date()}; nothing "
                "changed. If the clock is right, say so: expunge-ledger verify --accept REASON"
            )
        number, at = book["events"] + 1, max(now, last).isoformat()
        digest = digest_body(self.key.tag("body", str(number)), body)
        hashed = hash_event(book["head"], number, at, kind, digest)
        event = Event(number, at, kind, body, hashed)
        book |= {"events": number, "head": event.hash, "at": at}
        self._events.append(event)
        deeds.apply(self, event)

    def anchor(self) -> Anchor:
        """Where the chain ends."""
        return Anchor(self.ledger, self.book["events"], self.book["head"])

    def events(self, *where: Any) -> list[Event]:
        """All events in order, or those that fit; each written with the key."""
        found = list[Event]()
        chosen = select(EVENTS).where(*where).order_by(EVENTS.c.number)
        for row in self.connection.execute(chosen).mappings():
            if not hmac.compare_digest(self._sign(EVENTS, dict(row))["mac"], row["mac"]):
                raise broken(f"event {row['number']} was not written with the key of this ledger")
            body = json.loads(row["body"])
            found.append(Event(row["number"], row["at"], row["kind"], body, row["hash"]))
        return found

    def find_events(self, request: int) -> list[Event]:
        """The events about one request."""
        own = select(schema.SUBJECTS.c.event).where(schema.SUBJECTS.c.request == request)
        return self.events(EVENTS.c.number.in_(own))

    def flush(self) -> None:
        """Write what changed, with its proofs."""
        for table in deeds.CHANGING:
            self._write(table)
        if not self._events:
            return
        rows, pairs = list[Row](), list[Row]()
        for event in self._events:
            body = json.dumps(event.body, ensure_ascii=False, separators=(",", ":"))
            rows.append(vars(event) | {"body": body})
            pairs += [{"request": n, "event": event.number} for n in sorted({*event.subjects})]
        self.connection.execute(insert(EVENTS), [self._sign(EVENTS, row) for row in rows])
        if pairs:
            self.connection.execute(insert(schema.SUBJECTS), pairs)
        self.book["sums"] = self.key.seal(bytes(self._sums), f"sums {self.ledger}")
        self._update(BOOK, [self._sign(BOOK, self.book)])

    def _write(self, table: Table) -> None:
        new, old = list[Row](), list[Row]()
        for key, row in self.rows[table].items():
            before, mac = self._written.get((table, key), (None, ""))
            if row is before:
                continue
            if before is not None:
                self._add_up(table, before, -self._hash_term(mac))
            if row is None:
                given = {f"key_{name}": one for name, one in zip(KEYS[table], key, strict=True)}
                self.connection.execute(delete(table).where(_FITS[table]), given)
                continue
            signed = self._sign(table, row)
            self._add_up(table, row, self._hash_term(signed["mac"]))
            (new if before is None else old).append(signed)
        if new:
            self.connection.execute(insert(table), new)
        if old:
            self._update(table, old)

    def _update(self, table: Table, rows: list[Row]) -> None:
        given = [row | {f"key_{name}": row[name] for name in KEYS[table]} for row in rows]
        names = {column.name: bindparam(column.name) for column in table.columns}
        self.connection.execute(update(table).where(_FITS[table]).values(names), given)

    def _load(self, table: Table, row: Any) -> Row:
        found = dict(row._mapping)
        mac, key = found.pop("mac"), find_key(table, found)
        if (cached := self.rows[table].get(key)) is not None:  # read before, maybe changed since
            return cached
        if not hmac.compare_digest(self._sign(table, found)["mac"], mac):
            shown = " of ".join(map(str, key))
            raise broken(f"{table.name}: {shown} was not written with the key of this ledger")
        self.put(table, found)
        self._written[table, key] = found, mac
        return found

    def _sign(self, table: Table, row: Row) -> Row:
        return row | {"mac": mac_row(self.key, self.ledger, table, row)}

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
    values = [row[name] for name in deeds.NAMES[table]]
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
    """In order, at most 500 at once: databases have a limit."""
    given = sorted(numbers)
    return [given[start : start + 500] for start in range(0, len(given), 500)]
