"""The table of shards, tiny, and that the committed pages are what their runs say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "table_shards.py"


@pytest.mark.slow
def test_the_script_runs_prints_and_resumes(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--smoke", "--out", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert first.count("| seed 0 {") == 5
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "seed 0 {" not in again, "what is finished is not run again"
    assert again in first
    assert "| 8 x 4 |" in again


@pytest.mark.parametrize("task", ["mnist", "cifar10"])
def test_the_committed_page_is_what_the_runs_say(task: str) -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from runs import Store
        from table_shards import write_table
    finally:
        sys.path.pop(0)
    results = ROOT / "experiments" / "results"
    entries = list(Store(results, f"shards_{task}").read().values())
    page = results / f"table_shards_{task}.md"
    assert bool(entries) == page.exists()
    if entries:
        assert page.read_text() == write_table(task, entries)
        for entry in entries:
            if entry["arm"] == "8 x 4":
                assert entry["costs"]["1"] <= 0.10
                assert entry["costs"]["worst"] <= 0.135
