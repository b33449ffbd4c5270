"""A directory of jobs: all checked first, none run twice, what is left is done."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from expunge import verify
from expunge.jobs.directory import hash_job
from expunge.jobs.folder import check_folder, find_shared, run_folder
from expunge.jobs.jobfile import read_job
from expunge.jobs.many import Pool
from job_folder import call, command, list_files, make_environment, write_job

torch.set_num_threads(1)

# What every job here notes when its data are loaded, and a job that waits to be killed: once, in
# its third noisy step, with the state after the second on disk.
NOTING = """
load_quietly, here = load, os.path.dirname(os.path.abspath(__file__))


def load():
    with open(os.path.join(here, "loads"), "a") as file:
        file.write(f"{os.getpid()}\\n")
    return load_quietly()


class Waiting(Slow):
    seen = 0

    def forward(self, x):
        if torch.is_grad_enabled():
            type(self).seen += 1
        if type(self).seen == 3 and not os.path.exists(os.path.join(here, "waits")):
            with open(os.path.join(here, "waits"), "w") as file:
                file.write(str(os.getpid()))
            for _ in range(1200):
                time.sleep(0 if os.path.exists(os.path.join(here, "go")) else 0.05)
        return super().forward(x)


def build_waiting():
    return Waiting(4, 3)
"""


def write_jobs(folder: Path, count: int, waiting: int | None = None) -> list[Path]:
    """Jobs ``job00``, ``job01``, … in folders of their own; one of them waits to be killed."""
    paths = list[Path]()
    for i in range(count):
        build = "own.py:build_waiting" if i == waiting else "own.py:build"
        output = {"checkpoint_seconds": 0.0}
        paths.append(write_job(folder / f"job{i:02d}", model={"build": build}, output=output))
        own = paths[-1].with_name("own.py")
        own.write_text(own.read_text() + NOTING)
    return paths


def count_loads(paths: list[Path]) -> list[int]:
    logs = [path.with_name("loads") for path in paths]
    return [len(log.read_text().split()) if log.exists() else 0 for log in logs]


def check_runs(paths: list[Path]) -> list[str]:
    """The digests of all certificates, which hold, with their records; nothing else is left."""
    found = []
    for path in paths:
        made = path.parent / "run"
        certificate = verify(made / "certificate.json", record=made / "record.json")
        assert certificate.noise.source == "system"
        found.append(certificate.digest)
        assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []
    return found


def wait_for_pid(path: Path) -> int:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def kill_in(path: Path, number: int) -> threading.Thread:
    """Send a signal to the process that waits in a job, as soon as it does."""
    thread = threading.Thread(target=lambda: os.kill(wait_for_pid(path), number))
    thread.start()
    return thread


@pytest.mark.slow
def test_twenty_jobs_on_ray_with_a_worker_killed_give_twenty_certificates_none_twice(
    tmp_path: Path,
) -> None:
    paths = write_jobs(tmp_path, 20, waiting=7)
    killer = kill_in(paths[7].with_name("waits"), signal.SIGKILL)
    outcomes = run_folder(tmp_path, pool=Pool(workers=2))
    killer.join()
    assert {name: o.error for name, o in outcomes.items() if o.error} == {}
    digests = check_runs(paths)
    assert len(set(digests)) == 20
    tries = [2 if i == 7 else 1 for i in range(20)]
    assert count_loads(paths) == tries
    assert [o.value["resumed"] for o in outcomes.values()] == [int(i == 7) for i in range(20)]
    record = json.loads((tmp_path / "job07" / "run" / "record.json").read_text())
    assert record["gradient_evaluations"] == 4 * 10, "no step is repeated or left out"

    again = run_folder(tmp_path, pool=Pool(workers=2))
    assert all(o.kept for o in again.values())
    assert count_loads(paths) == tries
    assert check_runs(paths) == digests


@pytest.mark.slow
def test_the_command_on_ray_gives_each_job_a_process_of_its_own(tmp_path: Path) -> None:
    paths = write_jobs(tmp_path, 2)
    bad = write_job(tmp_path / "torn", data={"load": "own.py:load_torn"}, evaluation={"sets": []})
    done = call("unlearn", tmp_path, "--ray", "--workers", "2", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["done"], found["failed"]) == (2, 1)
    assert [job["status"] for job in found["jobs"]] == ["done", "done", "failed"]
    assert "ValueError: row 40 is torn" in found["jobs"][2]["error"]
    assert "2 of 3 done, 1 failed, 0 left" in done.stderr
    assert "expunge: 1 of 3 jobs failed: torn" in done.stderr
    check_runs(paths)
    workers = {path.with_name("loads").read_text().strip() for path in paths}
    assert len(workers) == 2
    assert str(os.getpid()) not in workers
    assert not (bad.parent / "run").exists()


def test_in_sequence_what_is_done_is_kept_and_what_failed_is_tried_again(tmp_path: Path) -> None:
    paths = write_jobs(tmp_path, 2)
    torn = {"data": {"load": "own.py:load_torn"}, "evaluation": {"sets": []}}
    bad = write_job(tmp_path / "a-torn", **torn)
    first = call("unlearn", tmp_path)
    assert first.returncode == 1
    lines = first.stdout.splitlines()
    assert lines[0].split() == ["job", "epsilon", "delta", "accuracy", "status"]
    assert "failed: the run failed in the model or its data: ValueError: row 40" in lines[1]
    assert lines[2].split()[:4] == ["job00", "1", "1e-05", "test"]
    assert lines[2].endswith("%  done")
    assert "Traceback" not in first.stderr
    digests = check_runs(paths)
    write_job(tmp_path / "a-torn", evaluation={"sets": []}, data={"load": "own.py:load_rows"})
    second = call("unlearn", tmp_path)
    assert second.returncode == 0, second.stderr
    assert [line.split("%")[-1].strip() for line in second.stdout.splitlines()[2:]] == [
        "done before",
        "done before",
    ]
    assert second.stderr.splitlines()[0] == "2 of 3 done, 1 left"
    assert check_runs(paths) == digests
    assert count_loads(paths) == [1, 1]
    verify(bad.parent / "run" / "certificate.json")


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow), (signal.SIGINT, 130)],
)
def test_a_stopped_sequence_goes_on_where_it_was(tmp_path: Path, number: int, code: int) -> None:
    paths = write_jobs(tmp_path, 3, waiting=1)
    process = subprocess.Popen(
        command("unlearn", tmp_path), stderr=subprocess.PIPE, text=True, env=make_environment()
    )
    pid = wait_for_pid(paths[1].with_name("waits"))
    assert pid == process.pid
    process.send_signal(number)
    paths[1].with_name("go").touch()
    _, told = process.communicate(timeout=600)
    assert process.returncode == code, told
    if number == signal.SIGINT:
        assert "the same command goes on with the others" in told
    assert [(path.parent / "run").exists() for path in paths] == [True, False, False]
    shown = call("unlearn", tmp_path, "--dry-run", "--json")
    states = [job["status"] for job in json.loads(shown.stdout)["jobs"]]
    assert states == ["done before", "to go on with", "to do"]
    outcomes = run_folder(tmp_path)
    assert [o.kept for o in outcomes.values()] == [True, False, False]
    assert [o.value["resumed"] for o in outcomes.values()] == [0, 1, 0]
    assert count_loads(paths) == [1, 2, 1]
    check_runs(paths)


def test_what_a_killed_worker_leaves_behind_is_removed_or_begun_afresh(tmp_path: Path) -> None:
    paths = write_jobs(tmp_path, 2)
    (tmp_path / "job00" / ".run.unfinished").mkdir()
    (tmp_path / "job00" / ".run.0123456789abcdef.tmp").mkdir()
    run_folder(tmp_path)
    digests = check_runs(paths)
    (tmp_path / "job01" / ".run.unfinished").mkdir()
    (tmp_path / "job01" / ".run.unfinished" / "checkpoint.safetensors").write_text("private")
    run_folder(tmp_path)
    assert check_runs(paths) == digests


def test_jobs_with_modules_of_the_same_name_get_their_own(tmp_path: Path) -> None:
    for i, name in enumerate(("x", "y")):
        functions = {"model": {"build": "shop.net:build"}, "data": {"load": "shop.data:load"}}
        path = write_job(tmp_path / name, **functions)
        (path.parent / "shop").mkdir()
        own = path.with_name("own.py").read_text()
        (path.parent / "shop" / "net.py").write_text(own)
        (path.parent / "shop" / "data.py").write_text(
            f"from shop.net import load as load_all\nSIZE = {30 + i}\n"
            "def load():\n"
            "    found = load_all()\n"
            "    x, y = found['train'].tensors\n"
            "    ids = found['ids'][:SIZE] + ['p31']\n"
            "    return {'train': (x[:SIZE + 1], y[:SIZE + 1]), 'ids': ids}\n"
        )
    before = set(sys.modules)
    assert all(o.error is None for o in run_folder(tmp_path).values())
    kept = [
        json.loads((tmp_path / name / "run" / "metrics.json").read_text())["cost"]["samples kept"]
        for name in ("x", "y")
    ]
    assert kept == [28, 29]
    assert not [name for name in set(sys.modules) - before if name.startswith("shop")]


def test_all_that_is_wrong_is_told_at_once_and_nothing_runs(tmp_path: Path) -> None:
    paths = write_jobs(tmp_path, 2)
    write_job(tmp_path / "bad1", target={"epsilon": -1.0}, method={"steps": 0})
    (tmp_path / "bad2.toml").write_text("[model")
    write_job(tmp_path / "same1", output={"dir": "../there"})
    write_job(tmp_path / "same2", output={"dir": "../same1/../there"})
    write_job(tmp_path / "same3", output={"dir": "../there/inside"})
    taken = write_job(tmp_path / "taken", output={"dir": "."})
    before = list_files(tmp_path)
    for more in ((), ("--dry-run",), ("--json",), ("--ray",)):
        done = call("unlearn", tmp_path, *more)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "mistakes in 8 jobs, nothing was run:" in done.stderr
        assert "target.epsilon is -1.0; it must be a number > 0" in done.stderr
        assert "method.steps is 0" in done.stderr
        assert "bad2.toml is not valid TOML" in done.stderr
        assert done.stderr.count("have the same output directory") == 1
        assert done.stderr.count("have output directories one inside the other") == 2
        assert f"{taken}: output directory {tmp_path / 'taken'} already holds files" in done.stderr
    assert list_files(tmp_path) == before
    assert count_loads(paths) == [0, 0]


def test_a_run_of_another_job_or_one_that_does_not_hold_is_refused(tmp_path: Path) -> None:
    paths = write_jobs(tmp_path, 2)
    assert call("unlearn", tmp_path).returncode == 0
    write_job(tmp_path / "job00", finetune={"epochs": 3})
    certificate = tmp_path / "job01" / "run" / "certificate.json"
    good = certificate.read_bytes()
    certificate.write_bytes(good.replace(b'"delta":0.00001', b'"delta":0.00002'))
    before = list_files(tmp_path)
    done = call("unlearn", tmp_path)
    assert done.returncode == 2
    assert "job00/run holds a run of another job; name another one or remove it" in done.stderr
    assert "does not hold: " in done.stderr
    assert "remove that run to do it again" in done.stderr
    assert list_files(tmp_path) == before
    assert count_loads(paths) == [1, 1]


def test_the_hash_of_a_job_is_about_what_comes_out(tmp_path: Path) -> None:
    def find(**changes: dict) -> str:
        return hash_job(read_job(write_job(tmp_path, **changes)))

    plain = find()
    assert find() == plain == hash_job(read_job(tmp_path / "job.toml"))
    assert find(output={"dir": "elsewhere", "title": "T"}, data={"workers": 1}) == plain
    assert find(finetune={"epochs": 3}) != plain
    assert find(target={"epsilon": 2.0}) != plain
    (tmp_path / "forget.txt").write_text("p3\np7\n")
    shorter = find()
    assert shorter != plain
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert find() not in (plain, shorter)


def test_job_files_side_by_side_go_to_out(tmp_path: Path) -> None:
    path = write_job(tmp_path / "jobs")
    for name in ("first", "second"):
        (tmp_path / "jobs" / f"{name}.toml").write_text(path.read_text())
    path.unlink()
    (tmp_path / "jobs" / ".hidden.toml").write_text("no job")
    refused = call("unlearn", tmp_path / "jobs")
    assert refused.returncode == 2
    assert "have the same output directory" in refused.stderr
    done = call("unlearn", tmp_path / "jobs", "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    shared = "2 jobs start from weights.safetensors (first, second): their certificates count 1; if"
    assert shared in done.stderr
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["first", "second"]
    verify(tmp_path / "runs" / "second" / "certificate.json")
    for name in ("first", "second"):
        counted = path.parent / f"{name}.toml"
        counted.write_text(counted.read_text().replace("[target]", "[target]\nreleases = 2"))
    assert find_shared(check_folder(tmp_path / "jobs", out=tmp_path / "counted")) == []
    assert not (tmp_path / "jobs" / "run").exists()


def test_commands_that_cannot_be_are_one_sentence(tmp_path: Path, monkeypatch) -> None:
    path = write_job(tmp_path / "jobs" / "one")
    (tmp_path / "empty").mkdir()
    before = list_files(tmp_path)
    cases = [
        (("unlearn", tmp_path / "empty"), "holds no jobs; they must be named *.toml or */job.toml"),
        (("unlearn", path, "--ray"), "--ray needs a directory of jobs"),
        (("unlearn", tmp_path / "jobs", "--workers", "2"), "--workers is 2, which needs --ray"),
        (("unlearn", tmp_path / "jobs", "--ray", "--workers", "0"), "workers is 0; it must be"),
        (("unlearn", tmp_path / "jobs", "--ray-address", "nowhere"), "it must be HOST:PORT"),
        (("unlearn", tmp_path / "jobs", "--ray-address", "127.0.0.1:1"), "does not answer: "),
    ]
    for arguments, sentence in cases:
        done = call(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert sentence in done.stderr
    monkeypatch.setitem(sys.modules, "ray", None)
    done = call("unlearn", tmp_path / "jobs", "--ray")
    assert done.returncode == 2
    assert "Ray is not installed; install it with pip install 'expunge[ray]'" in done.stderr
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        done = call("unlearn", tmp_path / "jobs")
    assert done.returncode == 2
    assert "is a directory of jobs; under torchrun, name one job file" in done.stderr
    (tmp_path / "jobs" / "one.toml").write_text(path.read_text())
    twins = call("unlearn", tmp_path / "jobs")
    assert twins.returncode == 2
    assert "are two jobs named one; rename one" in twins.stderr
    (tmp_path / "jobs" / "one.toml").unlink()
    assert list_files(tmp_path) == before
