"""Jobs under torchrun: a rank that dies, hangs or differs leaves a valid certificate or none."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from expunge import InputError, VerificationError, verify
from expunge.certificates.hashing import INDEX
from expunge.certificates.record import RunRecord
from expunge.jobs.checkpoints import read_weights
from expunge.jobs.ranks import check_kind
from expunge.processes.group import Processes
from job_folder import call, write_job
from ranks import (
    HERE,
    finish_ranks,
    kill_all,
    list_children,
    make_environment,
    start_ranks,
    start_torchrun,
)

UNLEARN = ["-m", "expunge", "unlearn"]
STEPS = 150


def check_nothing_written(folder: Path) -> None:
    assert not (folder / "run").exists()
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
def test_mixed_versions_and_sizes_that_do_not_divide_are_refused(tmp_path):
    job = write_job(tmp_path / "mixed")
    ranks = start_ranks(2, [str(HERE / "mixed_driver.py"), "unlearn", str(job)])
    (code, out, err), (other, told, quiet) = finish_ranks(ranks, timeout=600)
    assert (code, other) == (2, 2)
    assert out == told == quiet == ""
    assert err.startswith("expunge: rank 1 has torch version '2.0.0' and rank 0 has '2.")
    assert err.count("\n") == 1
    check_nothing_written(job.parent)

    job = write_job(tmp_path / "odd", method={"batch_size": 9})
    (code, _, err), (other, _, quiet) = finish_ranks(start_ranks(2, [*UNLEARN, str(job)]), 600)
    assert (code, other) == (2, 2)
    refused = "expunge: method.batch_size is 9; it must be a multiple of 2, the number of processes"
    assert err.strip() == refused
    assert quiet == ""
    check_nothing_written(job.parent)


@pytest.mark.slow
def test_one_rank_that_is_asked_to_stop_stops_all_and_the_run_can_be_resumed(tmp_path):
    job = write_job(tmp_path, method={"steps": 1000}, finetune={"epochs": 1})
    ranks = start_ranks(2, [*UNLEARN, str(job)], STEP_SECONDS="0.01")
    wait_for_a_step(tmp_path)
    ranks[1].send_signal(signal.SIGTERM)
    (code, out, err), (other, quiet, silent) = finish_ranks(ranks, timeout=600)
    assert (code, other) == (143, 143)
    assert out == quiet == ""
    assert "expunge: stopped by SIGTERM; what is done is saved" in err
    assert "go on with: torchrun … -m expunge unlearn" in err
    assert silent == ""
    check_nothing_written(tmp_path)
    refused = call("unlearn", job, "--resume")
    assert refused.returncode == 2
    assert "is of several processes; go on with torchrun" in refused.stderr
    again = finish_ranks(start_ranks(2, [*UNLEARN, str(job), "--resume"]), timeout=600)
    assert [code for code, _, _ in again] == [0, 0], again[0][2]
    record = RunRecord.load(tmp_path / "run" / "record.json")
    assert (record.resumed, record.noise_keys) == (1, 2)
    assert record.gradient_evaluations == count_examples(1000)
    verify(tmp_path / "run" / "certificate.json", record=tmp_path / "run" / "record.json")


def wait_for_a_step(folder: Path) -> None:
    state = folder / ".run.unfinished" / "metrics.jsonl"
    patience = time.monotonic() + 600
    while not (state.exists() and '"step"' in state.read_text()):
        assert time.monotonic() < patience
        time.sleep(0.05)


@pytest.mark.slow
def test_a_rank_that_hangs_stops_the_run_without_a_certificate(tmp_path):
    job = write_job(
        tmp_path, method={"steps": 2000}, processes={"timeout_seconds": 5.0, "check_every": 10}
    )
    ranks = start_ranks(2, [*UNLEARN, str(job)], STEP_SECONDS="0.01")
    wait_for_a_step(tmp_path)
    ranks[1].send_signal(signal.SIGSTOP)
    try:
        out, err = ranks[0].communicate(timeout=600)
    finally:
        for rank in ranks:
            rank.kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 3
    assert out == ""
    assert "expunge: rank 0 of 2 lost another process while" in err
    assert "nothing is certified" in err
    check_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("kills", "shard", "last"), [(6, False, 2), (4, True, 5)], ids=["whole", "sharded"]
)
@pytest.mark.slow
def test_killed_at_random_moments_it_leaves_a_valid_certificate_or_none(
    tmp_path, kills, shard, last
):
    """Sharded, the last start has five processes, of which two hold no row of this small model."""
    job = write_job(
        tmp_path,
        method={"steps": STEPS},
        processes={"shard": shard, "check_every": 20},
        output={"dir": "run", "checkpoint_seconds": 0.05},
    )
    done = subprocess.run(
        [sys.executable, str(HERE / "kill_driver.py"), str(job), str(kills), str(last)],
        capture_output=True,
        text=True,
        timeout=600,
        env=make_environment(STEP_SECONDS="0.004"),
    )
    log = (tmp_path / "log").read_text()
    assert done.returncode == 0, done.stderr + log
    report = json.loads(done.stdout)
    assert report["killed"] == kills
    assert report["codes"][-1] == [0] * last, log
    check_finished(tmp_path, kills, last, shard)


@pytest.mark.slow
def test_torchrun_restarts_what_was_killed(tmp_path):
    job = write_job(
        tmp_path,
        method={"steps": STEPS},
        processes={"check_every": 20},
        output={"dir": "run", "checkpoint_seconds": 0.05},
    )
    arguments = ["--max-restarts", "2", *UNLEARN, str(job)]
    started = start_torchrun(arguments, tmp_path / "log", STEP_SECONDS="0.004")
    try:
        state = tmp_path / ".run.unfinished" / "checkpoint" / "state.safetensors"
        patience = time.monotonic() + 600
        while not state.exists() and time.monotonic() < patience:
            time.sleep(0.002)
        os.kill(list_children(started.pid)[-1], signal.SIGKILL)
        code = started.wait(timeout=600)
    finally:
        kill_all(started)
    assert code == 0, (tmp_path / "log").read_text()[-3000:]
    check_finished(tmp_path, 1, 2, shard=False)


@pytest.mark.slow
def test_a_run_is_resumed_by_as_many_as_began_it_one_or_several(tmp_path):
    check_kind(tmp_path, Processes())
    (tmp_path / "checkpoint").mkdir()
    check_kind(tmp_path, Processes(0, 2, 50))
    with pytest.raises(InputError, match="is of several processes; go on with torchrun"):
        check_kind(tmp_path, Processes())
    (tmp_path / "checkpoint.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="is of one process; go on without torchrun"):
        check_kind(tmp_path, Processes(0, 2, 50))


def check_finished(folder: Path, kills: int, count: int, shard: bool) -> None:
    """A complete run directory, a record that tells all, and nothing else left."""
    run = folder / "run"
    verify(run / "certificate.json", record=run / "record.json")
    record = RunRecord.load(run / "record.json")
    assert record.noise_keys == 1 + record.resumed
    assert 1 <= record.resumed <= kills
    assert record.processes["count"] == count
    assert record.processes["layout"] == ("sharded" if shard else "replicated")
    assert len(set(record.trace.noise_norm)) == STEPS
    assert record.gradient_evaluations == count_examples(STEPS)
    left = sorted(p.name for p in folder.iterdir())
    assert left == ["forget.txt", "job.toml", "log", "own.py", "run", "weights.safetensors"]
    names = sorted(p.name for p in run.glob("*.safetensors"))
    assert len(names) == (2 if shard else 1)
    spoil_and_check(run / names[-1])


def spoil_and_check(weights: Path) -> None:
    """The verification above can fail."""
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(VerificationError, match="have hash"):
        verify(weights.with_name("certificate.json"))


def count_examples(steps: int) -> int:
    """47 are kept, in batches of 10: four whole ones and one of 7 per pass."""
    passes, rest = divmod(steps, 5)
    return 47 * passes + 10 * rest


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_a_whole_job_by_two_processes_is_that_of_one(tmp_path, shard):
    method = {"seed": 3, "steps": 6}
    one = write_job(tmp_path / "one", method=method)
    assert call("unlearn", one).returncode == 0
    two = write_job(tmp_path / "two", method=method, processes={"shard": shard})
    with (two.parent / "own.py").open("a") as own:  # as threads of torch did, now and then
        own.write("\nimport atexit\natexit.register(os.abort)\n")
    (code, out, err), (other, quiet, silent) = finish_ranks(
        start_ranks(2, [*UNLEARN, str(two)]), 600
    )
    assert (code, other, quiet, silent) == (0, 0, "", ""), err
    assert "epsilon = 1, delta = 1e-05" in out
    assert call("verify", two.parent / "run").returncode == 0
    name = INDEX if shard else "model.safetensors"
    found = read_weights(two.parent / "run" / name, "model.weights")
    for name, tensor in load_file(one.parent / "run" / "model.safetensors").items():
        assert (tensor - found[name]).abs().max() < 1e-6 * 10
    metrics = [json.loads((j.parent / "run" / "metrics.json").read_text()) for j in (one, two)]
    for a, b in zip(metrics[0]["stages"], metrics[1]["stages"], strict=True):
        assert a["retain"] == b["retain"]
        assert a["test_loss"] == pytest.approx(b["test_loss"], rel=1e-4)
