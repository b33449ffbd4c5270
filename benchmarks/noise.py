"""Drawing noise against numpy's bare counter-based normals (Philox), which are neither rounded
exactly nor cryptographic. The target is the draw's share of the whole noisy update's limit."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.timing import compare, measure
from expunge.noisy.noise import Noise, SeededNoise, SystemNoise

NETWORK, LARGE = 11_000_000, 100_000_000
SMALL = {"784-5-10": 3_985, "CIFAR": 20_042}
CELLS = 2.0**25  # σ over the grid, as the engine chooses it for millions of parameters
FINEST = 2.0**34


def run() -> list[dict[str, Any]]:
    """Ratios, each with the issue's limit for the whole update and the target for the draw."""
    rows = _compare_long(np.empty(NETWORK))
    for name, size in SMALL.items():
        rows += _compare_small(name, np.empty(size))
    return [*rows, _compare_growth(), _measure_scratch(np.empty(NETWORK))]


def _drawer(noise: Noise, out: Any, std: float = CELLS, times: int = 1) -> Callable[[], None]:
    stream, steps = noise.begin(), iter(range(2**62))

    def draw() -> None:
        for _ in range(times):
            stream.draw(out, step=next(steps), position=0, std=std)

    return draw


def _philox(out: Any, times: int = 1) -> Callable[[], None]:
    generator = np.random.Generator(np.random.Philox(0))

    def draw() -> None:
        for _ in range(times):
            generator.standard_normal(out=out)

    return draw


def _compare_long(out: Any) -> list[dict[str, Any]]:
    times = measure(
        {
            "Philox": _philox(out),
            "seeded": _drawer(SeededNoise(0), out),
            "system": _drawer(SystemNoise(), out),
            "system, finest grid": _drawer(SystemNoise(), out, std=FINEST),
        },
        repeats=5,
    )
    return [
        compare(f"SeededNoise / Philox, {NETWORK:,}", times, "seeded", "Philox", target=1.1)
        | {"limit": 1.5},
        compare(f"SystemNoise / Philox, {NETWORK:,}", times, "system", "Philox", target=2.2)
        | {"limit": 3.0},
        compare(
            f"SystemNoise at 2³⁴ cells / Philox, {NETWORK:,}",
            times,
            "system, finest grid",
            "Philox",
            target=2.2,
        )
        | {"limit": 3.0},
    ]


def _compare_small(name: str, out: Any) -> list[dict[str, Any]]:
    times = measure(
        {
            "Philox": _philox(out, 200),
            "seeded": _drawer(SeededNoise(0), out, times=200),
            "system": _drawer(SystemNoise(), out, times=200),
        },
        repeats=9,
    )
    return [
        compare(f"{kind} noise / Philox, {name}, {out.size:,}", times, kind, "Philox", target=limit)
        | {"limit": limit}
        for kind, limit in (("seeded", 1.2), ("system", 2.2))
    ]


def _compare_growth() -> dict[str, Any]:
    """Time per value at a hundred million over that at eleven million."""
    times = measure(
        {
            "large": _drawer(SystemNoise(), np.empty(LARGE)),
            "network": _drawer(SystemNoise(), np.empty(NETWORK)),
        },
        repeats=3,
    )
    name = f"time per value, {LARGE:,} / {NETWORK:,}"
    growth = compare(name, times, "large", "network", scale=NETWORK / LARGE, target=1.2)
    return growth | {"limit": 1.2}


def _measure_scratch(out: Any) -> dict[str, Any]:
    """Peak memory beside the vector itself, as a part of the vector."""
    draw = _drawer(SystemNoise(), out)
    tracemalloc.start()
    draw()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ratio = peak / out.nbytes
    name = f"scratch memory / vector, {out.size:,}"
    return {"name": name, "ratio": ratio, "limit": 2.0, "target": 0.05, "met": ratio <= 0.05}


if __name__ == "__main__":
    for row in run():
        print(f"{row['ratio']:8.3f}  ≤ {row['target']:<5g} {row['name']}")
