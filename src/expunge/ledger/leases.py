"""Leases: a model is held by one worker at a time, and not for ever by one that died.

A worker that lives renews its lease. What ends a lease too early, a stopped process or a clock that
was set, costs time and nothing else: whoever goes on writes the same rows and the same release.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine, select, update

from expunge.errors import ExpungeError, InputError, RunError
from expunge.ledger.clocks import read_now
from expunge.ledger.database import writing
from expunge.ledger.models import find_model
from expunge.ledger.names import Key
from expunge.ledger.schema import MODELS
from expunge.ledger.telling import Book

LEASE = 900.0


@dataclass(frozen=True)
class Worker:
    """Somebody at work: ``name`` is its own, ``lease`` how long it may be silent, in seconds,
    ``book`` how far it followed the chain."""

    engine: Engine
    key: Key
    name: str
    lease: float = LEASE
    book: Book = field(default_factory=Book, repr=False)

    @classmethod
    def make(cls, engine: Engine, key: Key, lease: float) -> Worker:
        if not 0 < lease < 1e9:
            raise InputError.of("lease", lease, "a number of seconds > 0")
        host = platform.node()[:40]
        return cls(engine, key, f"{host}/{os.getpid()}/{secrets.token_hex(4)}", lease)


def is_held(worker: Worker, model: Any) -> bool:
    """By another who is alive; a lease that ends later than any could is of a wrong clock."""
    if model.worker in (None, worker.name) or _is_dead(model.worker):
        return False
    now = read_now()
    longest = now + timedelta(seconds=2 * max(worker.lease, LEASE))
    return now.isoformat() < model.until <= longest.isoformat()


def _is_dead(name: str) -> bool:
    """Whether a worker was a process of this machine that is not there any more."""
    host, _, rest = name.rpartition("/")[0].rpartition("/")
    if host != platform.node()[:40] or not rest.isdigit():
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def hold(connection: Connection, worker: Worker, model: int) -> None:
    until = (read_now() + timedelta(seconds=worker.lease)).isoformat()
    connection.execute(
        update(MODELS).where(MODELS.c.id == model).values(worker=worker.name, until=until)
    )


def renew(worker: Worker, name: str) -> bool:
    """Hold the model for longer; False if another took it meanwhile."""
    with writing(worker.engine) as connection:
        model = find_model(connection, name)
        if model.worker != worker.name:
            return False
        hold(connection, worker, model.id)
        return True


@contextmanager
def renewing(worker: Worker, name: str) -> Generator[None]:
    """While the body runs the model stays held: a worker that lives is not taken for dead."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(worker.lease / 3):
            try:
                if not renew(worker, name):
                    return
            except ExpungeError:
                continue

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def let_go(worker: Worker, name: str) -> None:
    with writing(worker.engine) as connection:
        connection.execute(
            update(MODELS)
            .where(MODELS.c.name == name, MODELS.c.worker == worker.name)
            .values(worker=None, until=None)
        )


@contextmanager
def holding_model(worker: Worker, name: str) -> Generator[Any]:
    """A model's row, held by this worker; refused while another works on it."""
    with writing(worker.engine) as connection:
        model = find_model(connection, name)
        if is_held(worker, model):
            raise InputError(f"{model.worker} is at work on {name}; try again when it is done")
        hold(connection, worker, model.id)
    try:
        with renewing(worker, name):
            yield model
    finally:
        let_go(worker, name)


def check_mine(connection: Connection, worker: Worker, model: int) -> None:
    row = connection.execute(select(MODELS.c.worker).where(MODELS.c.id == model)).one()
    if row.worker != worker.name:
        raise RunError("another worker went on with this model, because this one was silent")
