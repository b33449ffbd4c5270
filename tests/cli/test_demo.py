"""``expunge demo``: the real command, and what it leaves behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import expunge
from expunge.jobs.directory import FILES


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo") / "run"
    command = [sys.executable, "-m", "expunge", "demo", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return out, done.stdout


def test_it_leaves_complete_runs_that_verify(demo: tuple[Path, str]) -> None:
    out, _ = demo
    for folder in (out, out / "public-centre"):
        assert {p.name for p in folder.iterdir() if p.is_file()} == set(FILES)
        found = expunge.verify(folder / "certificate.json", record=folder / "record.json")
        assert 0.99 < found.epsilon <= 1.0
        assert found.delta == 1e-5
        assert found.releasable
    assert not list(out.parent.glob(".run*")), "no half-written directory is left"


def test_it_tells_the_whole_story(demo: tuple[Path, str]) -> None:
    _, shown = demo
    for word in (
        "gradient-clipping",
        "model-clipping",
        "output-perturbation",
        "centre control",
        "retraining",
        "around public centre",
        "What can survive",
        "expunge verify",
    ):
        assert word in shown
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) < 200


def test_the_old_model_is_gone_and_the_centre_is_not(demo: tuple[Path, str]) -> None:
    out, _ = demo
    rows = json.loads((out / "metrics.json").read_text())["stages"]
    test = {(row["arm"], row["stage"]): row["test"] for row in rows}
    assert test["old model", "before"] > 0.9
    assert test["gradient-clipping", "after noise"] < 0.5
    assert test["gradient-clipping", "after fine-tuning"] > 0.7
    assert test["around public centre", "after noise"] > test["public centre", "before"] - 0.15


def test_it_overwrites_nothing(demo: tuple[Path, str]) -> None:
    out, _ = demo
    before = (out / "certificate.json").read_bytes()
    command = [sys.executable, "-m", "expunge", "demo", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "already holds files" in done.stderr
    assert (out / "certificate.json").read_bytes() == before
