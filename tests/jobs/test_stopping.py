"""Jobs that are stopped or killed, and then resumed."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import expunge
from tests.helpers.job_folder import EXACT, NOISE, call, command, make_environment, write_job

pytestmark = pytest.mark.usefixtures("one_thread")
WORK = ".run.unfinished"
LONG: dict[str, dict[str, Any]] = {
    "retraining": EXACT | {"training": {"epochs": 100, "learning_rate": 0.1, "batch_size": 10}},
    "noise": NOISE | {"method": NOISE["method"] | {"steps": 400}},
}
CHECKPOINT = {"retraining": "training.pt", "noise": "noisy.pt"}


def start(*arguments: str | Path, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), stderr=subprocess.PIPE, text=True, env=make_environment(**more)
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(12000):
        assert process.poll() is None, process.communicate()[1]
        if path.is_file():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} did not appear")


@pytest.mark.parametrize("kind", LONG)
def test_a_stopped_run_says_how_to_go_on_and_does(tmp_path: Path, kind: str) -> None:
    path = write_job(tmp_path, LONG[kind])
    process = start("unlearn", path, STEP_SECONDS="0.02")
    wait_for(tmp_path / WORK / ("run.json" if kind == "noise" else CHECKPOINT[kind]), process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=600)
    assert process.returncode == 143, told
    assert f"go on with: expunge unlearn {path} --resume" in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()
    assert (tmp_path / WORK / CHECKPOINT[kind]).is_file()
    assert (tmp_path / WORK).stat().st_mode & 0o077 == 0, "private"
    again = call("unlearn", path)
    assert again.returncode == 2
    assert "go on with it by --resume, or remove that folder" in again.stderr
    (tmp_path / "forget.txt").write_text("p3\np7\n")
    changed = call("unlearn", path, "--resume")
    assert changed.returncode == 2
    assert "belongs to a run with other people to forget" in changed.stderr
    (tmp_path / "forget.txt").write_text("p3\np7\np31\n")
    done = call("unlearn", path, "--resume")
    assert done.returncode == 0, done.stderr
    found = expunge.verify(tmp_path / "run").certificate
    assert not (tmp_path / WORK).exists()
    if kind == "noise":
        assert found.resumed == 1
    else:
        whole = expunge.run_job(path, out=tmp_path / "whole")
        assert whole.certificate.weights.after == found.weights.after, "as without a stop"


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    path = write_job(tmp_path, LONG["retraining"])
    process = start("unlearn", path, STEP_SECONDS="0.02")
    wait_for(tmp_path / WORK / "training.pt", process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    (tmp_path / ".run.0123456789abcdef.tmp").mkdir()
    (tmp_path / ".run.0123456789abcdef.tmp" / "model.safetensors").write_text("left")
    done = call("unlearn", path, "--resume")
    assert done.returncode == 0, done.stderr
    expunge.verify(tmp_path / "run")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".run")], "leftovers are removed"


def test_nothing_to_resume_begins_anew(tmp_path: Path) -> None:
    done = call("unlearn", write_job(tmp_path), "--resume")
    assert done.returncode == 0, done.stderr
    assert "there is nothing to resume" in done.stderr
