"""Work in the background: one thread, one model after another, in the order they were asked for.

A server that is killed leaves what any dead worker leaves: its lease ends, and whoever works next
goes on. A server that starts asks for every model on which work had begun.
"""

from __future__ import annotations

import queue
import threading
import time

from pydantic import BaseModel

from expunge import ExpungeError
from expunge_ledger.ledger import Ledger
from expunge_ledger.server.gate import LOG


class Working(BaseModel):
    """Work on a model that somebody asked for; said, for operators, is why something stays open."""

    model: str
    over: bool = False
    said: str = ""


class Background:
    """The worker of a server; ``pause`` is how long it waits for a model on which another works."""

    def __init__(self, ledger: Ledger, *, pause: float = 5.0) -> None:
        self._ledger, self._pause = ledger, pause
        self._queue = queue.SimpleQueue[tuple[Working, str | None]]()
        self.asked = dict[str, Working]()  # the last that was asked for, of each model

    def start(self) -> None:
        """Begin, with every model on which work had begun."""
        threading.Thread(target=self._run, daemon=True).start()
        for model in self._ledger.models():
            if model.running:
                self.ask(model.name)

    def ask(self, model: str, by: str | None = None) -> Working:
        """Have a model worked on, on behalf of a token."""
        made = self.asked[model] = Working(model=model)
        self._queue.put((made, by))
        return made

    def _run(self) -> None:
        while True:
            working, by = self._queue.get()
            said = self._work(working.model, by)
            if said is None:
                time.sleep(self._pause)
                self._queue.put((working, by))
            else:
                working.said, working.over = said, True

    def _work(self, model: str, by: str | None) -> str | None:
        """One round, and what there is to say of it; None while another works on the model."""
        try:
            for done in self._ledger.acting(by).work(model):
                return done.failed or "; ".join(done.said)
            return None if self._ledger.models(model)[0].running else ""
        except ExpungeError as error:
            return str(error)
        except Exception as error:
            LOG.error("%s while working on %s", type(error).__name__, model)
            return f"{type(error).__name__}: this is a defect"
