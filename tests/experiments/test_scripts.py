"""The experiments' own scripts, tiny, and that what is committed is what they print."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import options
import results_page
import table_comparison
import table_noise
import table_repeated
from runs import Store

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"


def run(name: str, out: Path, *words: str) -> None:
    importlib.import_module(name).main(["--smoke", "--out", str(out), *words])


def read_runs(folder: Path, task: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_a_smoke_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    given = options.read_options("x", ("mnist",), ["--smoke"])
    assert given.out == ROOT / "runs" / "smoke"
    assert given.tasks == ("digits",)
    with pytest.raises(SystemExit, match="where the real results are"):
        options.read_options("x", ("mnist",), ["--smoke", "--out", str(RESULTS)])
    assert options.read_options("x", ("mnist",), []).out == RESULTS


def test_table_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("table_noise", tmp_path / "smoke")
    assert "| gradient clipping mnist | 1 | 2 | 6.573 | 5.276 |" in capsys.readouterr().out
    table_noise.main(["--out", str(tmp_path)])
    assert (RESULTS / "noise.md").read_text() == (tmp_path / "noise.md").read_text()


@pytest.mark.slow
def test_the_noise_of_the_comparison_is_what_is_committed() -> None:
    columns = [list(table_comparison.list_rows(k)) for k in table_comparison.GROUPS]
    committed = (RESULTS / "table_comparison.md").read_text(encoding="utf-8")
    assert table_comparison.tabulate_noise(columns) in committed


def test_some_arms_are_run_once_drawn_and_taken_up_after_a_crash(tmp_path: Path) -> None:
    words = ("--budgets", "1", "--seeds", "1", "--arms", "gradient-clipping")
    run("figure_budget", tmp_path, *words)
    done = read_runs(tmp_path, "digits")
    by_version = {entry["version"]: entry for entry in done}
    assert set(by_version) == {"printed", "certified", "centre"}
    assert 6.57 < by_version["printed"]["true_epsilon"] < 6.58
    assert 0.99 < by_version["certified"]["certified_epsilon"] <= 1.0
    assert len({entry["recipe"]["noise_std"] for entry in done}) == 1
    file = tmp_path / "runs" / "digits.jsonl"
    whole = file.read_bytes()
    run("figure_budget", tmp_path, *words)
    assert file.read_bytes() == whole, "no run is run twice"
    file.write_bytes(whole[: whole.rstrip(b"\n").rindex(b"\n") + 40])
    run("figure_budget", tmp_path, *words)
    again = Store(tmp_path, "digits").read()
    assert again[done[-1]["key"]]["test"] == done[-1]["test"], "the same run, to the digit"
    text = (tmp_path / "figure_budget_digits.md").read_text(encoding="utf-8")
    assert "| retrain, own | not run |" in text
    assert (tmp_path / "figure_budget_digits.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["figure_budget", "figure_epsilon", "figure_convergence", "figure_transfer",
     "search", "table_adapters", "table_comparison", "table_features", "table_repeated"],
)  # fmt: skip
def test_every_script_runs_whole(name: str, tmp_path: Path) -> None:
    committed = {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}
    run(name, tmp_path)
    assert list(tmp_path.glob("*.md"))
    assert {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")} == committed


@pytest.mark.slow
@pytest.mark.skipif("EXPUNGE_DATA" not in os.environ, reason="EXPUNGE_DATA names no folder of data")
def test_todays_code_gives_the_committed_numbers(tmp_path: Path) -> None:
    table_repeated.main(["--out", str(tmp_path)])
    text = (tmp_path / "table_repeated_mnist.md").read_text(encoding="utf-8")
    assert text.count("| inside |") == 4, text


def test_the_results_page_is_what_the_results_say() -> None:
    assert results_page.main(["--check"]) == 0
    assert len(results_page.PAGE.read_text(encoding="utf-8").splitlines()) <= 500


def test_every_link_of_the_results_page_is_there() -> None:
    page = results_page.PAGE.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (results_page.PAGE.parent / target).exists(), target


def test_certified_runs_are_certified_at_their_label() -> None:
    for task in ("mnist", "cifar10", "transfer_cifar10", "transfer_cifar100"):
        for entry in read_runs(RESULTS, task):
            if entry["version"] == "certified" and "certified_epsilon" in entry:
                assert entry["certified_epsilon"] <= entry["epsilon"] * (1 + 1e-9)


@pytest.fixture(autouse=True)
def models(tmp_path: Path) -> None:
    """Trained once for all tests: three epochs on digits take a moment each."""
    kept = ROOT / "runs" / "smoke" / "models"
    if kept.is_dir():
        shutil.copytree(kept, tmp_path / "models")
