"""What happens during a run, told as it happens: to ``metrics.jsonl`` and to a callback.

Every event is a flat mapping with ``event`` and ``seconds`` since the start. The events of a run
are as private as its record: they show the old model and the noisy steps.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from expunge.files import to_plain

LOG = logging.getLogger("expunge")
INTERVAL = 1.0
SETS = ("retain", "forget", "test")
Callback = Callable[[dict[str, Any]], object]


class Tracker:
    """Tells a file and a callback. A callback that fails is told about once and dropped.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     heard = []
    ...     tracker = Tracker(Path(folder) / "metrics.jsonl", heard.append)
    ...     tracker.tell("step", step=1)
    ...     tracker.close()
    ...     print((Path(folder) / "metrics.jsonl").read_text()[:28], len(heard))
    {"event": "step", "seconds": 1
    """

    def __init__(self, path: Path, callback: Callback | None = None) -> None:
        self._callback, self._started = callback, time.monotonic()
        self._last: dict[str, float] = {}
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self.close = self._file.close

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

    def is_due(self, event: str) -> bool:
        """Whether it is time to tell this kind of event again: at most once per interval."""
        now = time.monotonic()
        due = now - self._last.get(event, -math.inf) >= INTERVAL
        if due:
            self._last[event] = now
        return due


def describe_scores(row: Mapping[str, Any], names: Iterable[str] = SETS) -> str:
    """The accuracies of a row of measurements; its losses where there are no classes.

    >>> describe_scores({"test": 0.913}), describe_scores({"test": None, "test_loss": 0.5})
    ('test 91.3 %', 'test loss 0.5')
    >>> describe_scores({"forget": 29 / 30, "forget_count": 30})
    'forget 29 of 30'
    """
    from expunge.reports.tables import format_percent

    known = [n for n in names if row.get(n) is not None]
    shares = [f"{n} {format_percent(row[n], row.get(f'{n}_count'))}" for n in known]
    losses = [f"{n} loss {row[f'{n}_loss']:.4g}" for n in names if row.get(f"{n}_loss") is not None]
    return ", ".join(shares or losses)
