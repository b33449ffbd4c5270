"""Leases: a model is worked on by one worker at a time, and not for ever by one that died.

Taken by the database's own means: ``FOR UPDATE SKIP LOCKED`` on PostgreSQL, ``BEGIN IMMEDIATE`` on
SQLite. A worker that lives renews its lease. What ends one too early, a stopped process or a clock
that was set, costs time and nothing else: whoever goes on writes the same rows and release.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from sqlalchemy import insert, select, update

from expunge import ExpungeError, InputError, RunError
from expunge_ledger.database import Database, connected
from expunge_ledger.schema import LEASES
from expunge_ledger.tables import Tables

SECONDS = 900.0


class Lease:
    """A worker of this process, and one model; ``seconds`` is how long it may be silent."""

    def __init__(self, db: Database, model: int, seconds: float = SECONDS) -> None:
        if not 0 < seconds < 1e9:
            raise InputError.of("lease", seconds, "a number of seconds > 0")
        self.db, self.seconds, self._is_this = db, seconds, LEASES.c.model == model
        self.model = model
        self.worker = f"{platform.node()[:40]}/{os.getpid()}/{secrets.token_hex(4)}"

    def take(self) -> bool:
        """Take the model's lease; False if another has it, or is taking it just now."""
        with connected(self.db.engine, writes=True) as connection:
            chosen = select(LEASES).where(self._is_this)
            row = connection.execute(chosen.with_for_update(skip_locked=True)).one_or_none()
            now = time.time()
            if row is None:
                if connection.execute(chosen).first() is not None:
                    return False
                connection.execute(insert(LEASES).values(model=self.model, until=0.0))
            elif row.worker not in (None, self.worker) and not is_dead(row.worker):
                longest = now + 2 * max(self.seconds, SECONDS)  # later than any: of a wrong clock
                if now < row.until <= longest:
                    return False
            taken = {"worker": self.worker, "until": now + self.seconds}
            connection.execute(update(LEASES).where(self._is_this).values(**taken))
            return True

    def renew(self) -> bool:
        """Go on for longer; False if another took the model meanwhile."""
        return self._change(until=time.time() + self.seconds)

    def give_back(self) -> None:
        """Let others take the model."""
        self._change(worker=None, until=0.0)

    def _change(self, **values: object) -> bool:
        with connected(self.db.engine, writes=True) as connection:
            mine = self._is_this & (LEASES.c.worker == self.worker)
            return bool(connection.execute(update(LEASES).where(mine).values(**values)).rowcount)

    def check(self, tables: Tables) -> None:
        """Refuse to go on when another did."""
        chosen = select(LEASES.c.worker).where(self._is_this)
        if tables.connection.execute(chosen).scalar_one_or_none() != self.worker:
            raise RunError("another worker went on with this model, because this one was silent")

    @contextmanager
    def taken(self) -> Generator[bool]:
        """Whether the model is this worker's while the body runs."""
        if not self.take():
            yield False
            return
        over = threading.Event()

        def go_on() -> None:
            going = True
            while going and not over.wait(self.seconds / 3):
                with suppress(ExpungeError):
                    going = self.renew()

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        try:
            yield True
        finally:
            over.set()
            thread.join()
            self.give_back()


def is_dead(worker: str) -> bool:
    """Whether a worker was a process of this machine that is not there any more."""
    host, _, process = worker.rpartition("/")[0].rpartition("/")
    if host != platform.node()[:40] or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
