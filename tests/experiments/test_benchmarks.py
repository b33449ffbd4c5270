"""Every suite of ``make bench`` imports, says what it compares, and has targets."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.run import SUITES, tabulate
from benchmarks.timing import Row, compare, skip


@pytest.mark.parametrize("name", SUITES)
def test_suite_has_targets(name: str) -> None:
    suite = importlib.import_module(f"benchmarks.{name}")
    assert suite.__doc__
    assert callable(suite.run)
    assert suite.TARGETS
    assert all(0 < target < 100 for target in suite.TARGETS.values())


def test_table_says_what_holds() -> None:
    times = {"a": [2.0, 4.0, 3.0], "b": [1.0, 1.0, 1.0]}
    rows = [(compare("x", times, "a", "b"), 2.0), (skip("y", "needs data"), 1.0)]
    found = {"step": {"rows": [vars(row) | {"target": target} for row, target in rows]}}
    table = tabulate(found, ["step"])
    assert [list(column.cells) for column in table.columns[2:]] == [
        ["≤ 2", "≤ 1"], ["3", "needs data"], ["2 … 4", ""], ["NO", "–"],
    ]  # fmt: skip
    assert rows[0][0] == Row("x", 3.0, 2.0, 4.0)
