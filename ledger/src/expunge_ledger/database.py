"""Where the tables lie: SQLite in a file, or PostgreSQL; who writes, writes alone.

Every transaction that writes begins by locking: ``BEGIN IMMEDIATE`` on SQLite, the one row of
``book`` on PostgreSQL. They are short; nothing is trained or forgotten inside one.
"""

from __future__ import annotations

import copy
import functools
import hmac
import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError

from expunge import CertificateError, ExpungeError, InputError, RunError
from expunge_ledger.chain import Anchor
from expunge_ledger.keys import make_key, read_key
from expunge_ledger.records import Records
from expunge_ledger.schema import BOOK, EVENTS, VERSION
from expunge_ledger.tables import begin_book

_VALID = "sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
_NOT_A_LEDGER = ("unable to open database file", "file is not a database")  # what SQLite says


class Database:
    """An opened ledger and its key; ``by`` is the token on whose behalf it writes."""

    by: str | None = None

    def __init__(self, url: str, *, key: str | Path | None = None) -> None:
        self.url = read_url(url)
        file = find_file(self.url)
        if file is not None and not file.is_file():
            raise InputError(f"there is no ledger at {file}; make one with expunge-ledger init")
        self.key_file, self.engine = _find_key(file, key), connect(self.url)
        try:
            check, ledger = _read_check(self.engine)
            self.key = read_key(self.key_file)
            if not hmac.compare_digest(check, self.key.tag("check", ledger)):
                raise InputError(f"the key {self.key_file} is not the key of this ledger")  # noqa: TRY301
        except BaseException:
            self.engine.dispose()
            raise

    @classmethod
    def create(cls, url: str, *, key: str | Path | None = None) -> Self:
        """Make a ledger and its key; one that is there is opened."""
        place = read_url(url)
        file, engine = find_file(place), connect(place)
        path, fresh = _find_key(file, key), False
        try:
            if file is not None and not file.exists():
                with suppress(OSError):
                    file.touch(0o600, exist_ok=False)
                if not (fresh := file.exists()):
                    raise InputError.of("ledger", url, "in a folder that exists")  # noqa: TRY301
            upgrade(engine)
            with connected(engine, writes=True) as connection:
                if connection.execute(select(BOOK.c.id)).first() is None:
                    begin_book(connection, make_key(path))
        except BaseException:
            if file is not None and fresh:
                file.unlink()
            raise
        finally:
            engine.dispose()
        return cls(url, key=key)

    def acting(self, by: str | None) -> Self:
        """The same ledger, on behalf of a token, which its events then name."""
        made = copy.copy(self)
        made.by = by
        return made

    def close(self) -> None:
        """Close the connections to the database."""
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def reading(self) -> Generator[Records]:
        """A transaction that reads one state of all tables."""
        again = {} if self.engine.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        with connected(self.engine, **again) as connection:
            yield Records(connection, self.key)

    @contextmanager
    def writing(self) -> Generator[Records]:
        """A transaction in which nobody else writes: all of it, or nothing."""
        with connected(self.engine, writes=True) as connection:
            tables = Records(connection, self.key, self.by, writes=True)
            yield tables
            tables.flush()

    @property
    def anchor_file(self) -> Path:
        """Where the end of the chain lies beside the key."""
        return self.key_file.with_name(f"{self.key_file.name}.anchor")

    def advance_anchor(self) -> None:
        """Leave the end of the chain beside the key, unless this chain does not go through what is
        there: that stays, for ``verify`` to find. Where none can be written, work goes on."""
        with suppress(OSError, ExpungeError), self.reading() as tables:
            own = Anchor.load(self.anchor_file)
            hashes = select(EVENTS.c.hash).where(EVENTS.c.number == (own.events if own else 0))
            if own is None or tables.connection.execute(hashes).scalar() == own.head:
                tables.anchor().write(self.anchor_file)


def read_url(url: str) -> URL:
    """The address of a ledger.

    >>> read_url("ledger.db")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: ledger is 'ledger.db'; it must be sqlite:///FILE or postgresql+...
    """
    try:
        found = make_url(url)
    except ArgumentError:
        raise InputError.of("ledger", url, _VALID) from None
    backend = found.get_backend_name()
    if backend == "postgresql":
        return found.set(drivername="postgresql+psycopg")
    if backend != "sqlite" or not found.database or found.database == ":memory:":
        raise InputError.of("ledger", found.render_as_string(), _VALID)
    return found.set(drivername="sqlite")


def find_file(url: URL) -> Path | None:
    """The file of a ledger on SQLite."""
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def _find_key(file: Path | None, key: str | Path | None) -> Path:
    given = key or os.environ.get("EXPUNGE_LEDGER_KEY")
    if not given and file is None:
        raise InputError("a ledger on PostgreSQL needs --key FILE or EXPUNGE_LEDGER_KEY")
    return Path(given or f"{file}.key")


def connect(url: URL) -> Engine:
    """The engine; what it reports never shows the values of a statement."""
    file = find_file(url)
    if file is None:
        return create_engine(url, hide_parameters=True, pool_pre_ping=True)
    engine = create_engine(url, hide_parameters=True, creator=lambda: _open_file(file))
    event.listen(engine, "checkout", functools.partial(_check_file, file))
    event.listen(engine, "begin", _begin)
    return engine


def _open_file(file: Path) -> sqlite3.Connection:
    """A file that is there: one that is missing for a moment must not become an empty ledger.
    What is deleted is overwritten; what is committed is on the disk."""
    if not file.exists():
        raise RunError(f"the ledger {file} is gone; nothing changed")
    place = f"file:{quote(str(file.absolute()))}?mode=rw"
    made = sqlite3.connect(place, uri=True, timeout=60, isolation_level=None,
                           check_same_thread=False)  # fmt: skip
    for setting in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
        made.execute(f"PRAGMA {setting}")
    return made


def _check_file(file: Path, connection: Any, record: Any, proxy: object) -> None:
    """A file that was put in place of another is opened anew: what is written into one that was
    moved or deleted is lost."""
    try:
        found = file.stat()
    except FileNotFoundError:
        raise RunError(f"the ledger {file} is gone; nothing changed") from None
    if record.info.setdefault("file", (found.st_dev, found.st_ino)) != (found.st_dev, found.st_ino):
        raise DisconnectionError


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def connected(engine: Engine, **options: Any) -> Generator[Connection]:
    """A transaction; what the database refuses is one sentence."""
    try:
        with engine.connect() as opened:
            connection = opened.execution_options(**options)
            with connection.begin():
                yield connection
    except DBAPIError as error:
        reason = str(error.orig).strip().split("\n")[0]
        place = engine.url.render_as_string()
        if reason in _NOT_A_LEDGER:
            raise InputError.of("ledger", place, f"a ledger: {reason}") from None
        raise RunError(f"the ledger {place} did not answer ({reason}); nothing changed") from None


def _read_check(engine: Engine) -> tuple[str, str]:
    """What tells the key of a ledger, and its name; tables of another version are refused."""
    place, version, found = engine.url.render_as_string(), None, None
    with connected(engine) as connection:
        if inspect(connection).has_table("alembic_version"):
            version = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
            found = connection.execute(select(BOOK.c.check, BOOK.c.ledger)).one_or_none()
    if found is None:
        raise InputError(f"there is no ledger at {place}; make one with expunge-ledger init")
    if version != VERSION:
        raise CertificateError(
            f"the ledger {place} is of version {version}; this expunge-ledger knows {VERSION} alone"
        )
    return found.check, found.ledger


def upgrade(engine: Engine) -> None:
    """Bring the tables to this version, in one transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    folder = Path(__file__).with_name("migrations")
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with connected(engine, writes=True) as connection:
        if engine.name != "sqlite":
            connection.execute(text("SELECT pg_advisory_xact_lock(7306)"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
