"""What happens during a run, told as it happens: ``metrics.jsonl``, TensorBoard, a callback.

Every event is a flat mapping with ``event`` and ``seconds`` since the start. The events of a run
are as private as its record: they show the old model and the noisy steps.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from expunge.certificates.record import Trace
from expunge.files import to_plain

LOG = logging.getLogger("expunge")
Callback = Callable[[dict[str, Any]], object]


class Tracker:
    """Tells a file, and whoever else asked. A callback that fails is told about once and dropped.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     heard = []
    ...     tracker = Tracker(Path(folder) / "metrics.jsonl", callback=heard.append)
    ...     tracker.tell("step", step=1)
    ...     tracker.close()
    ...     print((Path(folder) / "metrics.jsonl").read_text()[:28], len(heard))
    {"event": "step", "seconds": 1
    """

    def __init__(
        self,
        path: Path,
        *,
        callback: Callback | None = None,
        tensorboard: Path | None = None,
        interval: float = 1.0,
    ) -> None:
        self._callback, self._interval = callback, interval
        self._started = time.monotonic()
        self._last: dict[str, float] = {}
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._board: Any = None
        if tensorboard is not None:
            home = importlib.import_module("torch.utils.tensorboard")
            self._board = home.SummaryWriter(str(tensorboard))

    def close(self) -> None:
        """The end: nothing more is told."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def tell(self, event: str, **values: Any) -> None:
        """Tell everybody now."""
        told = {"event": event, "seconds": round(time.monotonic() - self._started, 3)}
        told |= to_plain(values)
        self._file.write(json.dumps(told, ensure_ascii=False, allow_nan=False) + "\n")
        if self._callback is not None:
            try:
                self._callback(dict(told))
            except Exception as error:
                LOG.warning("output.callback failed and is not called again: %r", error)
                self._callback = None
        if self._board is not None and "step" in told:
            self._draw(event, told["step"], told)

    def is_due(self, event: str) -> bool:
        """Whether it is time to tell this kind of event again: at most once per interval."""
        now = time.monotonic()
        due = now - self._last.get(event, -math.inf) >= self._interval
        if due:
            self._last[event] = now
        return due

    def draw_trace(self, trace: Trace) -> None:
        """Every noisy step for TensorBoard; the file and the callback have the record instead."""
        if self._board is None:
            return
        names = [field.name for field in fields(trace)]
        for step in range(len(trace)):
            values = {name: float(getattr(trace, name)[step]) for name in names}
            self._draw("noisy step", step + 1, values)

    def _draw(self, event: str, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name not in ("step", "seconds") and isinstance(value, int | float):
                self._board.add_scalar(f"{event}/{name}", value, step)
