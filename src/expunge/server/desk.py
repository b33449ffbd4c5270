"""Work in the background: one thread that works on the models it was asked to, and says how far.

A server that is killed leaves what any dead worker leaves: its lease ends, and whoever works next
goes on. A server that starts asks for every model on which work had begun.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from expunge.errors import ExpungeError
from expunge.ledger.clocks import read_now
from expunge.ledger.fulfilment import Done
from expunge.ledger.ledger import Ledger

LOG = logging.getLogger("expunge.server")
Stage = Literal[
    "waiting", "held", "taken", "looking", "forgetting", "checking", "done", "nothing", "failed"
]
WORDS: dict[Stage, str] = {
    "waiting": "waiting for its turn",
    "held": "another worker holds this model; waiting until it is done or its lease ends",
    "taken": "the requests are taken",
    "looking": "looking for the people in the model",
    "forgetting": "forgetting, and writing the release",
    "checking": "checking the certificate",
    "done": "done",
    "nothing": "there was nothing to do",
    "failed": "failed; the requests stay open",
}
STEPS: tuple[Stage, ...] = ("waiting", "taken", "looking", "forgetting", "checking", "done")


@dataclass(frozen=True)
class Progress:
    """How far the work on a model is; ``said`` is for operators."""

    model: str
    stage: Stage
    since: datetime
    said: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self.stage in ("done", "nothing", "failed")

    @property
    def step(self) -> int:
        """How many steps of :data:`STEPS` are behind it."""
        return STEPS.index(self.stage) if self.stage in STEPS else 0


class Desk:
    """The worker of a server; ``lease`` is after how many seconds of silence it is taken for dead,
    ``pause`` how long it waits for a model that another holds."""

    def __init__(self, ledger: Ledger, *, lease: float = 60.0, pause: float = 5.0) -> None:
        self._ledger, self._lease, self._pause = ledger, lease, pause
        self._lock, self._wake, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._wanted = dict[str, int]()  # how often a model was asked for
        self._progress = dict[str, Progress]()
        self._thread = threading.Thread(target=self._run, name="expunge-desk", daemon=True)

    def start(self) -> None:
        """Begin, with every model on which work had begun."""
        for model in self._ledger.models():
            if model.running:
                self.ask(model.name)
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Begin nothing more; what runs may take a moment, and is a dead worker's after that."""
        self._over.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def ask(self, model: str) -> Progress:
        """Work on a model, until nothing is open there; asking twice is asking once."""
        with self._lock:
            if model not in self._wanted:
                self._progress[model] = Progress(model, "waiting", read_now())
            self._wanted[model] = self._wanted.get(model, 0) + 1
            found = self._progress[model]
        self._wake.set()
        return found

    def show(self) -> dict[str, Progress]:
        """How far each model is that somebody asked for."""
        with self._lock:
            return dict(self._progress)

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                wanted = dict(self._wanted)
            held = [self._work(*one) for one in wanted.items() if not self._over.is_set()]
            with self._lock:
                left = bool(self._wanted)
            if not left or (held and all(held)):
                self._wake.wait(self._pause if left else None)
            self._wake.clear()

    def _work(self, model: str, asked: int) -> bool:
        """One round; True if another holds the model."""
        try:
            done = self._ledger.work(model, lease=self._lease, tell=self._tell)
            if not done:
                if self._ledger.models(model)[0].running:
                    self._tell(model, "held")
                    return True
                self._finish(model, asked, "nothing" if self._is_new(model) else "done")
            elif done[0].failed is not None:
                self._finish(model, asked, "failed", done[0].failed)
            elif not done[0].forgotten + done[0].already + done[0].not_held:
                self._finish(model, asked, "failed", "; ".join(done[0].said))
            else:
                self._tell(model, "checking", _describe(done[0]))
        except ExpungeError as error:
            self._finish(model, asked, "failed", str(error))
        except Exception as error:
            LOG.error("%s while working on %s", type(error).__name__, model)  # noqa: TRY400
            self._finish(model, asked, "failed", f"{type(error).__name__}: this is a defect")
        return False

    def _is_new(self, model: str) -> bool:
        with self._lock:
            return self._progress[model].stage in ("waiting", "held")

    def _tell(self, model: str, stage: str, said: str = "") -> None:
        found: Stage = stage if stage in WORDS else "taken"
        with self._lock:
            before = self._progress.get(model)
            kept = said or ("" if before is None else before.said)
            self._progress[model] = Progress(model, found, read_now(), kept)

    def _finish(self, model: str, asked: int, stage: Stage, said: str = "") -> None:
        """Over, unless somebody asked again meanwhile."""
        self._tell(model, stage, said)
        with self._lock:
            if self._wanted[model] == asked:
                del self._wanted[model]


def _describe(done: Done) -> str:
    release = "no new release" if done.release is None else f"release {done.release}"
    return (
        f"{len(done.requests)} requests: {done.forgotten} forgotten, {done.already} already "
        f"forgotten, {done.not_held} not held; {release}"
    )
