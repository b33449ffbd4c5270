"""Jobs that are stopped, killed or run out of disk, and then resumed."""

import errno
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from expunge.certificates.verification import verify
from expunge.errors import RunError
from expunge.jobs.run import run_job
from job_folder import call, command, make_environment, write_job

WORK = ".run.unfinished"


def start(*arguments: str | Path, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), stderr=subprocess.PIPE, text=True, env=make_environment(**more)
    )


def wait_for(path: Path, process: subprocess.Popen[str], text: str = "") -> None:
    for _ in range(12000):
        assert process.poll() is None, process.communicate()[1]
        if path.is_file() and text in path.read_text(errors="replace"):
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def test_ctrl_c_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    path = write_job(tmp_path, method={"steps": 200}, output={"checkpoint_seconds": 1000.0})
    process = start("unlearn", path, STEP_SECONDS="0.1")
    wait_for(tmp_path / WORK / "metrics.jsonl", process, '"step"')
    assert not (tmp_path / WORK / "checkpoint.safetensors").exists()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=600)
    assert process.returncode == 130
    assert f"go on with: expunge unlearn {path} --resume" in told
    assert not (tmp_path / "run").exists()
    assert (tmp_path / WORK / "checkpoint.safetensors").is_file()
    assert (tmp_path / WORK).stat().st_mode & 0o077 == 0
    again = call("unlearn", path)
    assert again.returncode == 2
    assert "holds an unfinished run; go on with --resume" in again.stderr
    (tmp_path / "forget.txt").write_text("p3\np7\n")
    changed = call("unlearn", path, "--resume")
    assert changed.returncode == 2
    assert "had another forget set" in changed.stderr
    (tmp_path / "forget.txt").write_text("p3\np7\np31\n")
    done = call("unlearn", path, "--resume")
    assert done.returncode == 0, done.stderr
    found = verify(tmp_path / "run" / "certificate.json", record=tmp_path / "run" / "record.json")
    assert (found.resumed, found.noise.keys) == (1, 2)
    assert found.gradient_evaluations == 40 * 47, "no step is repeated or left out"
    assert not (tmp_path / WORK).exists()


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    path = write_job(tmp_path, method={"steps": 200}, output={"checkpoint_seconds": 0.2})
    process = start("unlearn", path, STEP_SECONDS="0.1")
    wait_for(tmp_path / WORK / "checkpoint.safetensors", process)
    busy = call("unlearn", path, "--resume")
    assert busy.returncode == 2
    assert "another process is working on the run" in busy.stderr
    process.kill()
    process.communicate()
    assert not (tmp_path / "run").exists()
    done = call("unlearn", path, "--resume")
    assert done.returncode == 0, done.stderr
    found = verify(tmp_path / "run" / "certificate.json", record=tmp_path / "run" / "record.json")
    assert (found.resumed, found.noise.keys) == (1, 2)
    assert found.gradient_evaluations == 40 * 47
    over = call("unlearn", path, "--resume")
    assert over.returncode == 2
    assert "is complete; there is nothing to resume" in over.stderr


def test_a_run_that_fails_in_the_users_data_is_one_sentence_and_can_go_on(tmp_path: Path) -> None:
    path = write_job(tmp_path, data={"load": "own.py:load_torn"}, evaluation={"sets": []})
    done = call("unlearn", path)
    assert done.returncode == 2
    assert "the run failed in the model or its data: ValueError: row 40 is torn (" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
    write_job(tmp_path, data={"load": "own.py:load_rows"}, evaluation={"sets": []})
    assert call("unlearn", path, "--resume").returncode == 0
    verify(tmp_path / "run" / "certificate.json")


def test_a_full_disk_leaves_no_certificate_and_can_be_resumed(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(RunError, match=os.strerror(errno.EFBIG)) as caught:
            run_job(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 3
    assert not list(tmp_path.rglob("certificate.json"))
    assert not (tmp_path / "run").exists()
    run_job(path, resume=True)
    verify(tmp_path / "run" / "certificate.json")
