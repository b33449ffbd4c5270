"""Where the tables lie: SQLite in a file, or PostgreSQL; who writes, writes alone.

Every transaction that writes begins by locking: ``BEGIN IMMEDIATE`` on SQLite, the one row of
``book`` on PostgreSQL. They are short; nothing is trained or forgotten inside one.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, NoSuchModuleError

from expunge.errors import CertificateError, InputError, RunError
from expunge.ledger.schema import BOOK, VERSION

WAIT = 60.0
_VALID = "sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
_NOT_A_LEDGER = ("unable to open database file", "file is not a database")  # what SQLite says


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


def connect(url: URL) -> Engine:
    """The engine; what it reports never shows the values of a statement."""
    file = find_file(url)
    try:
        if file is None:
            return create_engine(url, hide_parameters=True, pool_pre_ping=True)
        engine = create_engine(url, hide_parameters=True, connect_args={"timeout": WAIT})
    except NoSuchModuleError:
        raise InputError.of("ledger", url.render_as_string(), _VALID) from None
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "checkout", functools.partial(_check_file, file))
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, record: object) -> None:
    """What is deleted is overwritten; what is committed is on the disk."""
    connection.isolation_level = None
    for setting in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
        connection.execute(f"PRAGMA {setting}")
    connection.execute("PRAGMA foreign_keys = ON")


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
def reading(engine: Engine) -> Generator[Connection]:
    """A transaction that reads one state of all tables."""
    again = {} if engine.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}
    with _explaining(engine), _connected(engine, **again) as connection:
        yield connection


@contextmanager
def writing(engine: Engine) -> Generator[Connection]:
    """A transaction in which nobody else writes: all of it, or nothing."""
    with _explaining(engine), _connected(engine, writes=True) as connection:
        if engine.name != "sqlite":
            connection.execute(select(BOOK.c.id).with_for_update())
        yield connection


@contextmanager
def _connected(engine: Engine, **options: Any) -> Generator[Connection]:
    with engine.connect() as opened:
        connection = opened.execution_options(**options)
        with connection.begin():
            yield connection


@contextmanager
def _explaining(engine: Engine) -> Generator[None]:
    try:
        yield
    except DBAPIError as error:
        reason = str(error.orig).strip().split("\n")[0]
        place = engine.url.render_as_string()
        if reason in _NOT_A_LEDGER:
            raise InputError.of("ledger", place, f"a ledger: {reason}") from None
        raise RunError(f"the ledger {place} did not answer ({reason}); nothing changed") from None


def read_version(connection: Connection) -> str | None:
    """The version of the tables; None where there are none."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()


def check_version(engine: Engine) -> None:
    """Refuse tables of another version, and say what to do."""
    place = engine.url.render_as_string()
    with reading(engine) as connection:
        found = read_version(connection)
    if found is None:
        raise InputError(f"there is no ledger at {place}; make one with expunge ledger init")
    if found < VERSION:
        raise InputError(
            f"the ledger {place} is of version {found}; expunge ledger init brings it to {VERSION}"
        )
    if found > VERSION:
        raise CertificateError(
            f"the ledger {place} is of version {found}; this expunge knows none after {VERSION}"
        )


def upgrade(engine: Engine, version: str = VERSION) -> None:
    """Bring the tables to a version, from none or an earlier one, in one transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    folder = Path(__file__).with_name("migrations")
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _explaining(engine), _connected(engine, writes=True) as connection:
        if engine.name != "sqlite":
            connection.execute(text("SELECT pg_advisory_xact_lock(7306)"))
        config.attributes["connection"] = connection
        command.upgrade(config, version)
