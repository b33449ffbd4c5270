"""Work in the background: one thread that works on the models it was asked to, and says how far.

A server that is killed leaves what any dead worker leaves: its lease ends, and whoever works next
goes on. A server that starts asks for every model on which work had begun.
"""

from __future__ import annotations

import logging
import threading

from expunge import ExpungeError
from expunge_ledger.clocks import read_now
from expunge_ledger.ledger import Ledger
from expunge_ledger.server.schemas import Progress

LOG = logging.getLogger("expunge_ledger.server")
OVER = ("done", "nothing", "failed")


class Desk:
    """The worker of a server; ``lease`` is after how many seconds of silence it is taken for dead,
    ``pause`` how long it waits for a model on which another works."""

    def __init__(self, ledger: Ledger, *, lease: float = 60.0, pause: float = 5.0) -> None:
        self._ledger, self._lease, self._pause = ledger, lease, pause
        self._lock, self._wake, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._wanted = dict[str, tuple[int, str | None]]()  # how often asked for, and by whom last
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

    def ask(self, model: str, by: str | None = None) -> Progress:
        """Have a model worked on; how far that is."""
        if model not in self._wanted:
            self._report(model, "waiting", " ")
        with self._lock:
            self._wanted[model] = (self._wanted.get(model, (0, None))[0] + 1, by)
        self._wake.set()
        return self.show()[model]

    def show(self) -> dict[str, Progress]:
        """How far each model is that somebody asked for."""
        with self._lock:
            return dict(self._progress)

    def _run(self) -> None:
        while not self._over.is_set():
            wanted = dict(self._wanted).items()
            busy = [self._work(name, *one) for name, one in wanted if not self._over.is_set()]
            if not self._wanted or all(busy):
                self._wake.wait(self._pause if self._wanted else None)
            self._wake.clear()

    def _work(self, model: str, asked: int, by: str | None) -> bool:
        """One round; True if another is at work on the model."""
        ledger = self._ledger if by is None else self._ledger.acting(by)
        try:
            done = ledger.work(model, lease=self._lease, report=self._report)
            if not done and self._ledger.models(model)[0].running:
                self._report(model, "busy")
                return True
            if done and done[0].failed is None and done[0].requests:  # maybe there is more
                one = done[0]
                release = "no new release" if one.release is None else f"release {one.release}"
                said = f"{len(one.requests)} requests: {one.forgotten} forgotten, {one.already} "
                said += f"already forgotten, {one.not_held} not held; {release}"
                self._report(model, "checking", said)
                return False
            new = self.show()[model].stage in ("waiting", "busy")
            stage, said = "nothing" if new else "done", ""
            if done:
                stage, said = "failed", done[0].failed or "; ".join(done[0].said)
        except ExpungeError as error:
            stage, said = "failed", str(error)
        except Exception as error:
            LOG.error("%s while working on %s", type(error).__name__, model)  # noqa: TRY400
            stage, said = "failed", f"{type(error).__name__}: this is a defect"
        self._report(model, stage, said)
        with self._lock:  # over, unless somebody asked again meanwhile
            if self._wanted[model][0] == asked:
                del self._wanted[model]
        return False

    def _report(self, model: str, stage: str, said: str = "") -> None:
        with self._lock:
            before = self._progress[model].said if model in self._progress else ""
            given = {"model": model, "stage": stage, "said": (said or before).strip()}
            facts = given | {"over": stage in OVER, "since": read_now()}
            self._progress[model] = Progress.model_validate(facts)
