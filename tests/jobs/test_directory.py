"""Run directories: all there or none, and the hidden folder of an unfinished run."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import expunge
from expunge.errors import InputError, RunError, UnlearningError
from expunge.jobs.directory import (
    FILES,
    check_free,
    check_output,
    hash_job,
    is_finished,
    open_workspace,
    workspace_of,
    write_run,
)
from expunge.jobs.jobfile import read_job
from expunge.processes.stopping import Stopped
from job_folder import write_job


def make_run() -> tuple[expunge.Run, expunge.Certificate]:
    torch.manual_seed(0)
    recipe = expunge.OutputPerturbation(start_clip=0.1, noise_std=1.0)
    batches = [(torch.eye(2), torch.tensor([0, 1]))]
    run = expunge.unlearn(nn.Linear(2, 2), batches, recipe, forget_ids=["a"], retain_ids=["b", "c"])
    return run, expunge.certify(run.record, delta=1e-5)


def test_a_run_is_written_whole_and_nothing_is_overwritten(tmp_path: Path) -> None:
    run, certificate = make_run()
    facts = {"model": run.model, "record": run.record, "certificate": certificate}
    target = write_run(tmp_path / "deep" / "run", **facts)
    assert {path.name for path in target.iterdir()} == set(FILES)
    expunge.verify(target / "certificate.json", record=target / "record.json")
    for name in ("record.json", "metrics.json", "report.html"):
        assert (target / name).stat().st_mode & 0o077 == 0, "as private as the record"
    with pytest.raises(InputError, match="already holds files"):
        write_run(target, **facts)
    assert [path.name for path in target.parent.iterdir()] == ["run"]


def test_other_weights_than_the_certificates_are_refused(tmp_path: Path) -> None:
    run, certificate = make_run()
    with torch.no_grad():
        run.model.weight[0, 0] += 1e-6
    with pytest.raises(UnlearningError, match="not the weights the certificate is about"):
        write_run(tmp_path / "run", model=run.model, record=run.record, certificate=certificate)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, certificate = make_run()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("expunge.jobs.directory.write_report", fail)
    with pytest.raises(OSError, match="No space left"):
        write_run(tmp_path / "run", model=run.model, record=run.record, certificate=certificate)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; name a directory"):
        check_free(tmp_path / "file")
    with pytest.raises(InputError, match="file is a file"):
        check_free(tmp_path / "file" / "run")
    with pytest.raises(InputError, match="there is no unfinished run"):
        check_output(tmp_path / "run", resume=True)
    with pytest.raises(InputError, match=r"needs about .* MB and .* has .* MB free"):
        check_output(tmp_path / "run", resume=False, needed=10**18)


def test_an_unfinished_run_is_kept_private_locked_and_bound_to_what_it_is(tmp_path: Path) -> None:
    target, identity = tmp_path / "run", {"forget set": "ab", "seed": None}

    def stop_inside() -> None:
        with open_workspace(target, False, identity) as work:
            assert work.stat().st_mode & 0o077 == 0
            with (
                pytest.raises(InputError, match="another process is working"),
                open_workspace(target, True, identity),
            ):
                pass
            raise Stopped(2)

    with pytest.raises(Stopped) as caught:
        stop_inside()
    assert caught.value.saved
    with (
        pytest.raises(InputError, match="had another forget set; put the job back"),
        open_workspace(target, True, identity | {"forget set": "cd"}),
    ):
        pass
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x")
    with (
        pytest.raises(RunError, match="make room and use --resume"),
        open_workspace(target, True, identity),
    ):
        raise full
    with open_workspace(target, True, identity):
        pass
    assert not workspace_of(target).exists()


def test_a_finished_run_is_known_by_its_job(tmp_path: Path) -> None:
    made, target = read_job(write_job(tmp_path)), tmp_path / "run"
    assert not is_finished(made, target)
    target.mkdir()
    (target / "certificate.json").write_text("{}")
    (target / "metrics.json").write_text(json.dumps({"job": hash_job(made)}))
    assert is_finished(made, target)
    (tmp_path / "forget.txt").write_text("p3\n")
    assert not is_finished(made, target)
