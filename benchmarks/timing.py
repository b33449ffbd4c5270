"""Interleaved timing: absolute times mean nothing here, ratios of medians do."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

FEWEST = 3
_UNTIL = ContextVar("_UNTIL", default=math.inf)


@contextmanager
def within(seconds: float) -> Generator[None]:
    """An allowance: once it is spent, no more rounds than the fewest are measured."""
    token = _UNTIL.set(time.perf_counter() + seconds)
    try:
        yield
    finally:
        _UNTIL.reset(token)


def is_spent() -> bool:
    """Whether the allowance is."""
    return time.perf_counter() > _UNTIL.get()


def measure(cases: dict[str, Callable[[], object]], *, repeats: int = 7) -> dict[str, list[float]]:
    """Seconds of each case, all cases once per round so that drift hits them alike."""
    for case in cases.values():
        case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats):
        if number >= FEWEST and is_spent():
            break
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            times[name].append(time.perf_counter() - start)
    return times


def compare(
    name: str,
    times: dict[str, list[float]],
    case: str,
    base: str,
    *,
    target: float | None = None,
    at_least: bool = False,
    scale: float = 1.0,
) -> dict[str, Any]:
    """median(case)/median(base) · scale, with the spread of the per-round ratios."""
    rounds = [scale * a / b for a, b in zip(times[case], times[base], strict=False)]
    ratio = scale * statistics.median(times[case]) / statistics.median(times[base])
    met = None if target is None else (ratio >= target if at_least else ratio <= target)
    return {
        "name": name,
        "ratio": ratio,
        "spread": [min(rounds), max(rounds)],
        "of": case,
        "against": base,
        "target": target,
        "direction": "at least" if at_least else "at most",
        "met": met,
    }
