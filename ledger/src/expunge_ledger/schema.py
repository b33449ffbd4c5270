"""The tables. Nothing in them names a person: hashes and seals need the key, which lies elsewhere.

``mac`` is the row's own MAC by the key: who writes the database without it is found at that row.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text
from sqlalchemy import text as sql

VERSION, METADATA = "0001", MetaData()
HASH, TIME, DAY, WORD, NAME = String(64), String(32), String(10), String(32), String(100)


def _key(name: str, kind: Any = Integer) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


def _full(name: str, kind: Any) -> Column[Any]:
    return Column(name, kind, nullable=False)


# One row: the end of the chain, how many requests there are, and what sums up all other rows.
BOOK = Table(
    "book", METADATA, _key("id"), _full("ledger", HASH), _full("check", HASH), _full("at", TIME),
    _full("events", Integer), _full("head", HASH), _full("requests", Integer),
    _full("sums", LargeBinary), _full("mac", HASH),
)  # fmt: skip
EVENTS = Table(
    "events", METADATA, _key("number"), _full("at", TIME), _full("kind", WORD),
    _full("body", Text), _full("hash", HASH), _full("mac", HASH),
)  # fmt: skip
# Which events are about a request, so that nobody reads all to find them.
SUBJECTS = Table("subjects", METADATA, _key("request"), _key("event"))
# ``begun`` is the release being written, ``finished`` the number of the last one; ``seen`` the MAC
# of its row in that table, ``generation`` what a state was when its last release was written.
MODELS = Table(
    "models", METADATA, _key("id"), Column("name", NAME, nullable=False, unique=True),
    _full("kind", WORD), _full("path", Text), _full("folder", Text), _full("identity", HASH),
    _full("registered", TIME), Column("retired", TIME), Column("begun", Integer),
    _full("finished", Integer), Column("seen", HASH), Column("generation", HASH),
    _full("mac", HASH),
)  # fmt: skip
REQUESTS = Table(
    "requests", METADATA, _key("number"), _full("bucket", Integer), _full("person", HASH),
    _full("scope", Integer),  # a model, or 0 for all
    _full("received", DAY), _full("due", DAY), _full("filed", TIME),
    Column("reason", HASH), _full("state", WORD), Column("answer", WORD), Column("ended", TIME),
    Column("why", HASH), _full("mac", HASH),
    Index("requests_bucket", "bucket"), Index("requests_state", "state"),
    Index("requests_once", "person", "scope", unique=True,
          sqlite_where=sql("state = 'open'"), postgresql_where=sql("state = 'open'")),
)  # fmt: skip
# What a request asks of one model, and how that was answered.
WORK = Table(
    "work", METADATA, _key("request"), _key("model"), _full("bucket", Integer),
    _full("due", DAY), _full("state", WORD), Column("outcome", WORD),
    Column("release", Integer), Column("readmitted", TIME), _full("mac", HASH),
    Index("work_bucket", "bucket"), Index("work_state", "model", "state"),
)  # fmt: skip
# Identifiers and reasons, sealed: an identifier goes when nothing will have to be forgotten again.
SECRETS = Table(
    "secrets", METADATA, _key("request"), _key("what", WORD), _full("sealed", LargeBinary)
)
# ``requests`` are whom a release names: written before anything of them is destroyed.
RELEASES = Table(
    "releases", METADATA, _key("model"), _key("number"), _full("directory", Text),
    _full("state", WORD), _full("replay", Integer), _full("begun", TIME), Column("finished", TIME),
    Column("certificate", HASH), Column("parent", HASH), _full("requests", Text),
    _full("mac", HASH),
)  # fmt: skip
# Everybody whom the data of a job ever had, as short hashes, and the hash of its old weights.
SEEN = Table("seen", METADATA, _key("model"), _full("weights", HASH), _full("marks", LargeBinary))
TOKENS = Table(
    "tokens", METADATA, _key("name", NAME), _full("role", WORD), Column("model", NAME),
    _full("hash", HASH), _full("created", TIME), Column("revoked", TIME), _full("mac", HASH),
)  # fmt: skip
# Which requests a token filed, or found filed when it asked the same.
FILINGS = Table(
    "filings", METADATA, _key("token", NAME), _key("request"), _full("bucket", Integer),
    _full("mac", HASH), Index("filings_bucket", "bucket"),
)  # fmt: skip
# Who works on a model, and until when nobody else does; worth nothing to who changes it.
LEASES = Table("leases", METADATA, _key("model"), Column("worker", NAME), _full("until", Float))
