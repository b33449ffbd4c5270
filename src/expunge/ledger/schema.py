"""The tables. Nothing in them names a person: hashes and seals need the key, which lies apart."""

from __future__ import annotations

from sqlalchemy import (
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

VERSION = "0004"
METADATA = MetaData()

# One row: which ledger this is, and the end of the chain of events. Whoever writes locks it first.
BOOK = Table(
    "book",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("ledger", String(64), nullable=False),
    Column("check", String(64), nullable=False),
    Column("events", Integer, nullable=False),
    Column("head", String(64), nullable=False),
)

EVENTS = Table(
    "events",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("at", String(32), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("body", Text, nullable=False),
    Column("hash", String(64), nullable=False),
    Column("seal", String(64), nullable=False),
)

# ``worker`` holds the model until ``until``; nobody else begins work on it before.
MODELS = Table(
    "models",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("name", String(100), nullable=False, unique=True),
    Column("kind", String(8), nullable=False),
    Column("path", Text, nullable=False),
    Column("releases", Text, nullable=False),
    Column("identity", String(64), nullable=False),
    Column("registered", String(32), nullable=False),
    Column("worker", String(100)),
    Column("until", String(32)),
    Column("retired", String(32)),
)

REQUESTS = Table(
    "requests",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("person", String(64), nullable=False),
    Column("scope", Integer, nullable=False),  # a model, or 0 for all
    Column("sealed", LargeBinary),
    Column("reason", LargeBinary),
    Column("received", String(10), nullable=False),
    Column("due", String(10), nullable=False),
    Column("filed", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("answer", String(32)),
    Column("ended", String(32)),
    Column("why", LargeBinary),
    Index("requests_person", "person"),
    Index("requests_state", "state"),
    Index(
        "requests_once",
        "person",
        "scope",
        unique=True,
        sqlite_where=text("state IN ('open', 'running')"),
        postgresql_where=text("state IN ('open', 'running')"),
    ),
)

RELEASES = Table(
    "releases",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("model", Integer, ForeignKey("models.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("directory", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("replay", Integer, nullable=False),
    Column("begun", String(32), nullable=False),
    Column("finished", String(32)),
    Column("certificate", String(64)),
    Column("parent", String(64)),
    UniqueConstraint("model", "number"),
    Index(
        "releases_one_begun",
        "model",
        unique=True,
        sqlite_where=text("state = 'begun'"),
        postgresql_where=text("state = 'begun'"),
    ),
)

# What a request asks of one model, and how that was answered.
WORK = Table(
    "work",
    METADATA,
    Column("request", Integer, ForeignKey("requests.number"), primary_key=True),
    Column("model", Integer, ForeignKey("models.id"), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("outcome", String(32)),
    Column("release", Integer, ForeignKey("releases.id")),
    Column("readmitted", String(32)),
    Index("work_state", "model", "state"),
)

# Whom a release names: written before anything of them is destroyed.
NAMED = Table(
    "named",
    METADATA,
    Column("release", Integer, ForeignKey("releases.id"), primary_key=True),
    Column("request", Integer, ForeignKey("requests.number"), primary_key=True),
)

# Whom the data of a job ever held, as hashes one after the other, and the hash of its weights.
KNOWN = Table(
    "known",
    METADATA,
    Column("model", Integer, ForeignKey("models.id"), primary_key=True, autoincrement=False),
    Column("weights", String(64), nullable=False),
    Column("marks", LargeBinary, nullable=False),
)

# Who may ask the server what; ``model`` is the name of the only one a token is for, or None.
TOKENS = Table(
    "tokens",
    METADATA,
    Column("name", String(100), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("model", String(100)),
    Column("created", String(32), nullable=False),
)

# Which requests a token filed, or found filed when it asked the same.
FILINGS = Table(
    "filings",
    METADATA,
    Column("token", String(100), primary_key=True),
    Column("request", Integer, ForeignKey("requests.number"), primary_key=True),
)
