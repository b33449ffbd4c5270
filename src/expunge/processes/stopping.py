"""Ctrl-C and termination: a noisy step is finished and saved first, anything else stops at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

LOG = logging.getLogger("expunge")


class Stopped(KeyboardInterrupt):
    """A signal ended the run; ``exit_code`` is 128 + its number, as shells count.

    ``saved`` says whether there is something to resume.

    >>> Stopped(signal.SIGINT).exit_code
    130
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code, self.saved = 128 + number, False


class Stopper:
    """Whether somebody asked to stop, and whether to wait for a good moment."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.patient = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: raises, or takes note when ``patient``; the second time it raises."""
        if not self.patient or self.asked is not None:
            raise Stopped(number)
        self.asked = number
        LOG.warning("stopping after this step; once more stops at once")

    def check(self) -> None:
        """Raise if somebody asked: this is a good moment."""
        if self.asked is not None:
            raise Stopped(self.asked)


@contextmanager
def catch_signals() -> Generator[Stopper]:
    """Handle SIGINT and SIGTERM while inside; the handlers before are put back."""
    stopper = Stopper()
    if threading.current_thread() is not threading.main_thread():
        yield stopper
        return
    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stopper.receive)
        yield stopper
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
