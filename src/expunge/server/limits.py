"""How much anybody may ask for: sizes, times, and rates by token buckets in memory.

A bucket holds at most ``burst`` drops and gains ``rate`` of them each second; a request takes one.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rate:
    """At most ``burst`` at once, and ``rate`` a second over time."""

    burst: float
    rate: float


@dataclass(frozen=True)
class Limits:
    """What the server takes; a reason may hold 2,000 characters of which each takes 12 bytes."""

    body_bytes: int = 65_536
    body_seconds: float = 10.0
    url_bytes: int = 2_000
    address: Rate = Rate(300, 60)
    token: Rate = Rate(200, 40)
    failures: Rate = Rate(10, 0.2)


@dataclass
class Buckets:
    """One bucket for each key; the ``most`` that were used last are kept.

    >>> now = [0.0]
    >>> buckets = Buckets(Rate(2, 0.5), clock=lambda: now[0])
    >>> [buckets.take("a") for _ in range(3)]
    [0, 0, 2]
    >>> now[0] = 2.0
    >>> buckets.take("a"), buckets.take("b")
    (0, 0)
    """

    rate: Rate
    most: int = 10_000
    clock: Callable[[], float] = time.monotonic
    _left: OrderedDict[str, tuple[float, float]] = field(
        default_factory=OrderedDict[str, tuple[float, float]]
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, key: str) -> int:
        """Take a drop: 0 if there was one, else the seconds after which there is."""
        now = self.clock()
        with self._lock:
            left, then = self._left.pop(key, (self.rate.burst, now))
            left = min(self.rate.burst, left + (now - then) * self.rate.rate)
            missing = max(0.0, 1 - left)
            self._left[key] = (left if missing else left - 1, now)
            if len(self._left) > self.most:
                self._left.popitem(last=False)
        return math.ceil(missing / self.rate.rate)
