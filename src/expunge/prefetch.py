"""One thread that draws noise while the gradient is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Prefetch:
    """Runs one job at a time beside the caller; ``wait`` says whether one had been begun.

    >>> ahead, seen = Prefetch(), []
    >>> ahead.begin(lambda: seen.append(1))
    >>> ahead.wait(), ahead.wait(), seen
    (True, False, [1])
    >>> ahead.close()
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = False

    def begin(self, job: Callable[[], object]) -> None:
        """Start ``job``; the one before it must have been waited for."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._pending = True
        self._jobs.put(job)

    def wait(self) -> bool:
        """Wait for the job that was begun, raise what it raised; False if there was none."""
        if not self._pending:
            return False
        self._pending = False
        error = self._done.get()
        if error is not None:
            raise error
        return True

    def close(self) -> None:
        """End the thread; a job still running is finished first."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)
