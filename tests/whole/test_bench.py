"""``make bench``: what was measured is kept, whatever fails after it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import heads, run, timing


def fail() -> list[dict[str, object]]:
    raise RuntimeError("no such processor")


def test_a_suite_that_fails_takes_no_row_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"name": "this / that", "ratio": 2.0, "target": 3.0, "met": True}
    for name, suite in {"first": lambda: [row], "second": fail, "third": lambda: [row]}.items():
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", SimpleNamespace(run=suite))
    monkeypatch.setattr(run, "SUITES", {"first": 1, "second": 1, "third": 1})
    monkeypatch.setattr(run, "HERE", tmp_path)
    assert run.main([]) == 1
    found = json.loads((tmp_path / "results" / "latest.json").read_text())["ratios"]
    assert found == [{"suite": "first"} | row, {"suite": "third"} | row]
    told = capsys.readouterr().out
    assert "no such processor" in told
    assert "failed: second" in told


def test_one_suite_keeps_the_rows_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, ratio in {"first": 1.0, "second": 2.0}.items():
        rows = [{"name": "this / that", "ratio": ratio}]
        monkeypatch.setitem(
            sys.modules, f"benchmarks.{name}", SimpleNamespace(run=lambda rows=rows: rows)
        )
    monkeypatch.setattr(run, "SUITES", {"first": 1, "second": 1})
    monkeypatch.setattr(run, "HERE", tmp_path)
    assert run.main([]) == 0
    changed = SimpleNamespace(run=lambda: [{"name": "this / that", "ratio": 3.0}])
    monkeypatch.setitem(sys.modules, "benchmarks.first", changed)
    assert run.main(["--only", "first"]) == 0
    found = json.loads((tmp_path / "results" / "latest.json").read_text())["ratios"]
    assert [(row["suite"], row["ratio"]) for row in found] == [("first", 3.0), ("second", 2.0)]


def test_the_page_shows_what_was_measured_last() -> None:
    root = Path(run.__file__).parents[1]
    facts = run.read()
    page = (root / run.PAGE).read_text(encoding="utf-8")
    shown = page.partition(run.START)[2].partition(run.END)[0]
    assert shown == run.list_ratios(facts)
    assert "request of 1 of 50,000" in shown
    assert "| 8 shards / one network, as many steps | " in shown
    assert {row["suite"] for row in facts["ratios"]} <= run.SUITES.keys()
    for name in run.SUITES:
        assert len(run.describe(name)) > 40, f"{name} does not say what it compares"


def test_all_suites_together_are_allowed_ten_minutes() -> None:
    assert sum(run.SUITES.values()) <= run.MOST_SECONDS
    files = {path.stem for path in run.HERE.glob("*.py") if "\ndef run() ->" in path.read_text()}
    assert files == run.SUITES.keys(), "a suite that is in no list is never measured"


def test_an_allowance_that_is_spent_leaves_three_rounds() -> None:
    calls: list[int] = []
    with timing.within(0):
        found = timing.measure({"case": lambda: calls.append(1)}, repeats=9)
    assert (len(found["case"]), len(calls)) == (3, 4)
    assert len(timing.measure({"case": lambda: calls.append(1)}, repeats=9)["case"]) == 9


def test_a_suite_that_fails_keeps_what_it_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SUITES", {"first": 1, "second": 1})
    monkeypatch.setattr(run, "HERE", tmp_path)
    for name in run.SUITES:
        suite = SimpleNamespace(run=lambda: [{"name": "this / that", "ratio": 1.0}])
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", suite)
    assert run.main([]) == 0
    monkeypatch.setitem(sys.modules, "benchmarks.first", SimpleNamespace(run=fail))
    better = SimpleNamespace(run=lambda: [{"name": "this / that", "ratio": 2.0}])
    monkeypatch.setitem(sys.modules, "benchmarks.second", better)
    assert run.main([]) == 1
    facts = run.read()
    assert [(row["suite"], row["ratio"]) for row in facts["ratios"]] == [
        ("first", 1.0), ("second", 2.0)
    ]  # fmt: skip
    assert set(facts["suites"]) == {"first", "second"}
    assert run.main(["--only", "third"]) == 2


@pytest.mark.filterwarnings("ignore:forgotten before")
def test_a_request_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    life = heads.Life(tmp_path, 200, 8)
    digest = life.head.digest()
    seconds, spent = life.request(5)
    assert set(spent) == set(heads.PARTS), "a part that is never entered measures nothing"
    assert min(spent.values()) > 0
    assert sum(spent.values()) < seconds
    assert life.head.digest() == digest, "the next round finds what this one found"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["release-1", "state"]
