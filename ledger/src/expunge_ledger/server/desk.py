"""Work in the background: a thread for each model that was asked for, one at work at a time.

A server that is killed leaves what any dead worker leaves: its lease ends, and whoever works next
goes on. A server that starts asks for every model on which work had begun.
"""

from __future__ import annotations

import threading
from typing import Literal

from pydantic import BaseModel

from expunge import ExpungeError
from expunge_ledger.ledger import Ledger
from expunge_ledger.server.gate import LOG

Stage = Literal[
    "waiting", "busy", "taken", "looking", "forgetting", "checking", "done", "nothing", "failed"
]


class Progress(BaseModel):
    """How far the work on a model is; said is for operators."""

    model: str
    stage: Stage
    said: str = ""
    over: bool = False


class Desk:
    """The worker of a server; ``pause`` is how long it waits for a model on which another works."""

    def __init__(self, ledger: Ledger, *, pause: float = 5.0) -> None:
        self._ledger, self._pause = ledger, pause
        self._lock, self._turn, self._over = threading.RLock(), threading.Lock(), threading.Event()
        self._asked = dict[str, tuple[threading.Thread, int]]()  # at work, how often asked for
        self.progress = dict[str, Progress]()

    def start(self) -> None:
        """Begin, with every model on which work had begun."""
        for model in self._ledger.models():
            if model.running:
                self.ask(model.name)

    def stop(self, seconds: float = 5.0) -> None:
        """Begin nothing more; what runs may take a moment, and is a dead worker's after that."""
        self._over.set()
        for thread, _ in list(self._asked.values()):
            thread.join(seconds)

    def ask(self, model: str, by: str | None = None) -> Progress:
        """Have a model worked on; how far that is."""
        with self._lock:
            if model not in self._asked:
                self._report(model, "waiting", " ")
                thread = threading.Thread(target=self._run, args=(model, by), daemon=True)
                self._asked[model] = thread, 0
                thread.start()
            thread, count = self._asked[model]
            self._asked[model] = thread, count + 1
            return self.progress[model]

    def _run(self, model: str, by: str | None) -> None:
        while not self._over.is_set():
            count = self._asked[model][1]
            with self._turn:
                stage, said = self._work(model, by)
            self._report(model, stage, said)
            if stage == "busy":
                self._over.wait(self._pause)
            with self._lock:  # over, unless there may be more, or somebody asked again meanwhile
                if self.progress[model].over and self._asked[model][1] == count:
                    del self._asked[model]
                    return

    def _work(self, model: str, by: str | None) -> tuple[str, str]:
        """One round: what it came to, and what there is to say."""
        try:
            done = self._ledger.acting(by).work(model, report=self._report)
            if not done and self._ledger.models(model)[0].running:
                return "busy", ""
            if not done:
                new = self.progress[model].stage in ("waiting", "busy")
                return ("nothing" if new else "done"), ""
            one = done[0]
            if one.failed is not None or not one.requests:
                return "failed", one.failed or "; ".join(one.said)
            said = f"{len(one.requests)} requests: {one.forgotten} forgotten, {one.already} already"
            return "checking", f"{said}, {one.not_held} not held"  # noqa: TRY300
        except ExpungeError as error:
            return "failed", str(error)
        except Exception as error:
            LOG.error("%s while working on %s", type(error).__name__, model)
            return "failed", f"{type(error).__name__}: this is a defect"

    def _report(self, model: str, stage: str, said: str = "") -> None:
        with self._lock:
            before = self.progress[model].said if model in self.progress else ""
            facts = {"model": model, "stage": stage, "said": (said or before).strip()}
            facts |= {"over": stage in ("done", "nothing", "failed")}
            self.progress[model] = Progress.model_validate(facts)
