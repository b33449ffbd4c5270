"""Interleaved timing: absolute times mean nothing here, ratios of medians do.

``python -m benchmarks.timing NAME`` measures one suite and prints its rows as JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

# For glibc: mmap_threshold is -3, mmap_max -4, trim_threshold -1.
KEPT = {-4: 0, -1: 2**31 - 1}
HELD = {-3: 2**17}


def set_malloc(options: dict[int, int]) -> None:
    """Keep freed memory for the next step (``KEPT``), or give all of it back at once (``HELD``).

    By default glibc does one or the other as the heap happens to lie: up to 9,000 page faults, a
    sixth, in a step of the CIFAR network or none, and a peak that differs by a tenth.
    """
    for name, value in options.items():
        ctypes.CDLL(None).mallopt(name, value)


@dataclass(frozen=True)
class Row:
    """One ratio with the least and the largest of its rounds; None, and why, if not measured."""

    name: str
    ratio: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""


def measure(cases: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, list[float]]:
    """Seconds of each case, all cases once per round so that drift hits them alike."""
    for case in cases.values():
        case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            begun = time.perf_counter()
            case()
            times[name].append(time.perf_counter() - begun)
    return times


def compare(
    name: str, times: dict[str, list[float]], case: str, base: str, *, scale: float = 1.0
) -> Row:
    """median(case)/median(base) · scale, with the spread of the ratios by round.

    >>> compare("a / b", {"a": [2.0, 4.0, 3.0], "b": [1.0, 1.0, 1.0]}, "a", "b")
    Row(name='a / b', ratio=3.0, low=2.0, high=4.0, note='')
    """
    by_round = [scale * a / b for a, b in zip(times[case], times[base], strict=True)]
    ratio = scale * statistics.median(times[case]) / statistics.median(times[base])
    return Row(name, ratio, min(by_round), max(by_round))


def skip(name: str, why: str) -> Row:
    """A row that cannot be measured here."""
    return Row(name, None, note=why)


def main(name: str) -> None:
    """The rows of a suite, each with its target, as the last line."""
    suite = importlib.import_module(f"benchmarks.{name}")
    rows: list[Row] = suite.run()
    if missing := set(suite.TARGETS) - {row.name for row in rows}:
        raise SystemExit(f"{name} has targets for what it does not measure: {sorted(missing)}")
    print(json.dumps([asdict(row) | {"target": suite.TARGETS.get(row.name)} for row in rows]))


if __name__ == "__main__":
    main(sys.argv[1])
