"""Who works on a model: one worker, as long as it lives.

The lease is taken by the database's own means: ``FOR UPDATE SKIP LOCKED`` on PostgreSQL,
``BEGIN IMMEDIATE`` on SQLite. A worker that lives renews it. What ends one too early, a stopped
process or a clock that was set, costs time and nothing else: whoever goes on writes the same rows
and release.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from sqlalchemy import Engine, insert, select, update

from expunge import ExpungeError, RunError
from expunge_ledger.database import connected
from expunge_ledger.schema import LEASES
from expunge_ledger.tables import Tables

SECONDS = 60.0  # that a worker may be silent before another goes on
SILENT = "another worker went on with this model, because this one was silent"


class Lease:
    """The lease of a worker of this process on a model."""

    def __init__(self, engine: Engine, model: int) -> None:
        self._engine, self._model, self._row = engine, model, LEASES.c.model == model
        self.worker = f"{platform.node()[:40]}/{os.getpid()}/{secrets.token_hex(4)}"

    def take(self) -> bool:
        """Take the model's lease; False if another has it, or is taking it just now."""
        with connected(self._engine, writes=True) as connection:
            chosen, now = select(LEASES).where(self._row), time.time()
            row = connection.execute(chosen.with_for_update(skip_locked=True)).one_or_none()
            if row is None:
                if connection.execute(chosen).first() is not None:
                    return False
                connection.execute(insert(LEASES).values(model=self._model, until=0.0))
            elif row.worker != self.worker and now < row.until <= now + 2 * SECONDS:
                return False  # one that ends later than any is of a wrong clock
            taken = {"worker": self.worker, "until": now + SECONDS}
            connection.execute(update(LEASES).where(self._row).values(**taken))
            return True

    def renew(self) -> bool:
        """Go on for longer; False if another took the model meanwhile."""
        return self._change(until=time.time() + SECONDS)

    def give_back(self) -> None:
        """Let others take the model."""
        self._change(worker=None, until=0.0)

    def _change(self, **values: object) -> bool:
        with connected(self._engine, writes=True) as connection:
            mine = self._row & (LEASES.c.worker == self.worker)
            return bool(connection.execute(update(LEASES).where(mine).values(**values)).rowcount)

    def check(self, tables: Tables) -> None:
        """Refuse to go on when another did."""
        chosen = select(LEASES.c.worker).where(self._row)
        if tables.connection.execute(chosen).scalar_one_or_none() != self.worker:
            raise RunError(SILENT)

    @contextmanager
    def taken(self) -> Generator[bool]:
        """Whether the model is this worker's while the body runs."""
        if not self.take():
            yield False
            return
        over = threading.Event()

        def go_on() -> None:
            going = True
            while going and not over.wait(SECONDS / 3):
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
