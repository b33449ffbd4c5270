"""Means over seeds, paired differences with confidence intervals, and tables of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from arms import Arm

Entry = dict[str, Any]


@dataclass(frozen=True)
class Mean:
    """A mean over ``count`` seeds, and its spread (the sample standard deviation).

    >>> str(Mean.of([80.0, 82.0])), str(Mean.of([]))
    ('81.00 ± 1.41', 'not run')
    """

    value: float
    spread: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        n = len(values)
        if n == 0:
            return cls(math.nan, math.nan, 0)
        spread = float(np.std(values, ddof=1)) if n > 1 else 0.0
        return cls(float(np.mean(values)), spread, n)

    def __str__(self) -> str:
        if self.count < 2:
            return f"{self.value:.2f}, 1 seed" if self.count else "not run"
        return f"{self.value:.2f} ± {self.spread:.2f}"


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its 95 % interval (Student's t over the pairs).

    >>> str(Difference.of([3.0, 4.0, 5.0], [1.0, 2.0, 3.5]))
    '+1.83 [+1.12, +2.55], 3 pairs'
    """

    value: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Difference:
        d = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
        if len(d) < 2:
            value = float(d.mean()) if len(d) else math.nan
            return cls(value, math.nan, math.nan, len(d))
        half = float(stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / math.sqrt(len(d)))
        return cls(float(d.mean()), float(d.mean()) - half, float(d.mean()) + half, len(d))

    def is_above_zero(self, comparisons: int = 1) -> bool:
        """Whether the mean is above 0 by more than chance, as one of so many comparisons.

        >>> found = Difference.of([3.0, 4.0, 5.0], [1.0, 2.0, 3.5])
        >>> found.is_above_zero(), found.is_above_zero(comparisons=20)
        (True, False)
        """
        if self.count < 2:
            return False
        quantiles = stats.t.ppf([0.975, 1 - 0.025 / comparisons], self.count - 1)
        half = (self.high - self.value) * quantiles[1] / quantiles[0]
        return bool(self.value > half)

    def __str__(self) -> str:
        if self.count < 2:
            return f"{self.value:+.2f}, 1 pair" if self.count else "not run"
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}], {self.count} pairs"


def select(entries: Iterable[Entry], **wanted: Any) -> dict[int, Entry]:
    """The entries with these values, by seed.

    >>> select([{"seed": 1, "budget": 4}, {"seed": 0, "budget": 1}], budget=4)
    {1: {'seed': 1, 'budget': 4}}
    """
    return {
        entry["seed"]: entry
        for entry in entries
        if all(entry.get(name) == value for name, value in wanted.items())
    }


def average(entries: Iterable[Entry], measure: str = "test", **wanted: Any) -> Mean:
    """The mean of a measure over the seeds of the entries with these values."""
    return Mean.of([entry[measure] for entry in select(entries, **wanted).values()])


def compare(
    entries: Sequence[Entry], first: Entry, second: Entry, measure: str = "test", **wanted: Any
) -> Difference:
    """``first`` minus ``second`` over the seeds that both have.

    >>> runs = [{"seed": s, "arm": a, "test": t} for s, a, t in
    ...         [(0, "x", 2.0), (1, "x", 3.0), (0, "y", 1.0), (1, "y", 1.0), (2, "y", 9.0)]]
    >>> compare(runs, {"arm": "x"}, {"arm": "y"}).value
    1.5
    """
    one, two = select(entries, **(wanted | first)), select(entries, **(wanted | second))
    seeds = sorted(set(one) & set(two))
    return Difference.of([one[s][measure] for s in seeds], [two[s][measure] for s in seeds])


def span(differences: Iterable[Difference]) -> str:
    """The smallest and the largest of some mean differences.

    >>> span([Difference.of([3.0], [1.0]), Difference.of([3.0], [4.0])])
    '-1.00 … +2.00'
    """
    values = [d.value for d in differences if not math.isnan(d.value)]
    if not values:
        return "–"
    low, high = f"{min(values):+.2f}", f"{max(values):+.2f}"
    return low if low == high else f"{low} … {high}"


def count_level(differences: Iterable[Difference]) -> str:
    """In how many of several comparisons 0 lies inside the interval."""
    found = [d for d in differences if d.count > 1]
    return f"0 inside the interval at {sum(d.low <= 0 <= d.high for d in found)} of {len(found)}"


def make_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table.

    >>> print(make_table(["a", "b"], [[1, 2]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def count_epochs(number: float) -> str:
    """A budget in words.

    >>> count_epochs(1.0), count_epochs(0.5)
    ('1 epoch', '0.5 epochs')
    """
    return f"{number:g} epoch{'' if number == 1 else 's'}"


def list_budgets(entries: Iterable[Entry]) -> list[float]:
    """All budgets that were run, in order."""
    return sorted({entry["budget"] for entry in entries})


def tabulate_arms(
    entries: Sequence[Entry],
    arms: Iterable[Arm],
    pairs: Iterable[tuple[Arm, Arm]],
    grid: Sequence[float] = (),
) -> str:
    """Means by arm and budget of the grid and beyond, then paired differences; a cell that was not
    run says so."""
    budgets = sorted({*grid, *list_budgets(entries)})
    header = [count_epochs(b) for b in budgets]
    means = [[a.name, *(average(entries, budget=b, **a.fields) for b in budgets)] for a in arms]
    ran = list_budgets(entries)
    paired = [
        [f"{a.name} − {b.name}", *(compare(entries, a.fields, b.fields, budget=n) for n in ran)]
        for a, b in pairs
    ]
    text = make_table(["arm", *header], means) + "\n\n"
    return text + make_table(["paired difference, 95 %", *map(count_epochs, ran)], paired) + "\n"


def publish(text: str, path: Path) -> None:
    """Write a table, and print it."""
    path.write_text(text, encoding="utf-8")
    print(text)
