"""What a job is refused for: one sentence, and nothing is written."""

import errno
import os
import shutil
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from expunge.errors import InputError
from expunge.jobs.run import run_job
from job_folder import list_files, write_job

WORK = ".run.unfinished"


WRONG = {
    "build fails": (
        {"model": {"build": "own.py:fail"}},
        r"model\.build failed: RuntimeError: the disk of the shop is on fire \(.*own\.py, line \d+",
    ),
    "build returns no module": (
        {"model": {"build": "own.py:nothing"}},
        r"model\.build returned a int; it must return an nn\.Module",
    ),
    "no such function": (
        {"model": {"build": "own.py:biuld"}, "data": {"load": "own.py:laod"}},
        r"own\.py has no function biuld; data\.load is .*own\.py has no function laod",
    ),
    "load fails": ({"data": {"load": "own.py:fail"}}, r"data\.load failed: RuntimeError: the disk"),
    "load returns no mapping": (
        {"data": {"load": "own.py:nothing"}},
        r"data\.load returned a int; it must return a mapping with the key 'train'",
    ),
    "the loss does not fit": (
        {"model": {"loss": "mse"}},
        r"the model and its loss cannot be run on retained data: ",
    ),
    "samples do not fit": (
        {"data": {"load": "own.py:load_dicts"}},
        r"the model and its loss cannot be run on retained data: TypeError",
    ),
    "no such device": ({"model": {"device": "abacus"}}, r"model\.device is 'abacus', which cannot"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_users_own_code_does_wrong_is_one_sentence(tmp_path: Path, case: str) -> None:
    changes, sentence = WRONG[case]
    path = write_job(tmp_path, **changes)
    before = list_files(tmp_path)
    with pytest.raises(InputError, match=sentence) as caught:
        run_job(path)
    assert "\n" not in str(caught.value)
    assert list_files(tmp_path) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_cannot_be_read_are_one_sentence_and_the_run_can_go_on(
    tmp_path: Path, workers: int
) -> None:
    path = write_job(tmp_path, data={"load": "own.py:load_lost", "workers": workers})
    sentence = (
        r"failed in the model or its data: OSError.*\[Errno 5\] Input/output error: '/data/40'"
    )
    with pytest.raises(InputError, match=sentence) as caught:
        run_job(path)
    assert "\n" not in str(caught.value)
    if workers == 0:
        own = tmp_path / "own.py"
        own.write_text(own.read_text().replace("i == 40", "i == 400"))
        assert run_job(path, resume=True).certificate.releasable


LISTS = {
    "unknown": ("p3\np99\n", r"data\.forget names 1 unknown samples, the first is 'p99'"),
    "nothing": ("\n\n", r"names no identifier"),
    "everything": (
        "\n".join(f"p{i}" for i in range(50)),
        r"names 50 of the 50 samples that are left",
    ),
}


@pytest.mark.parametrize("case", LISTS)
def test_a_list_that_cannot_be_forgotten_is_refused(tmp_path: Path, case: str) -> None:
    text, sentence = LISTS[case]
    path = write_job(tmp_path)
    (tmp_path / "forget.txt").write_text(text)
    with pytest.raises(InputError, match=sentence):
        run_job(path)


WEIGHTS = {
    "not a weights file": (lambda path: path.write_bytes(b"PK"), r"which cannot be read"),
    "a tensor is missing": (
        lambda path: save_file({"weight": torch.zeros(3, 4)}, path),
        r"model\.weights has no tensor bias; it must have every trainable parameter",
    ),
    "a tensor too many": (
        lambda path: save_file(
            {"weight": torch.zeros(3, 4), "bias": torch.zeros(3), "head": torch.zeros(1)}, path
        ),
        r"model\.weights has the tensor head, which the model has not",
    ),
    "another shape": (
        lambda path: save_file({"weight": torch.zeros(4, 3), "bias": torch.zeros(3)}, path),
        r"model\.weights: the shape of weight is \(4, 3\); it must be \(3, 4\)",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, case: str) -> None:
    make, sentence = WEIGHTS[case]
    path = write_job(tmp_path)
    make(tmp_path / "weights.safetensors")
    with pytest.raises(InputError, match=sentence):
        run_job(path)


def test_a_torch_file_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trapped"),))

    path = write_job(tmp_path, model={"weights": "old.pt"})
    torch.save({"weight": Trap()}, tmp_path / "old.pt")
    with pytest.raises(InputError, match=r"only by running code of posix\.mkdir"):
        run_job(path)
    assert not (tmp_path / "trapped").exists()


def test_validation_runs_no_code_of_the_job(tmp_path: Path) -> None:
    path = write_job(tmp_path, target={"epsilon": -1})
    (tmp_path / "own.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(InputError, match=r"target\.epsilon is -1"):
        run_job(path)


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    run_job(path)
    before = list_files(tmp_path)
    with pytest.raises(InputError, match="already holds files; name another one"):
        run_job(path)
    with pytest.raises(InputError, match="there is no unfinished run"):
        run_job(path, out=tmp_path / "elsewhere", resume=True)
    assert list_files(tmp_path) == before


def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = write_job(tmp_path, data={"load": "own.py:fail"})
    with pytest.raises(InputError, match="cannot be made"):
        run_job(path, out=tmp_path / "job.toml" / "run")
    path = write_job(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(InputError, match="run cannot be written: Permission denied"):
            run_job(path)
    usage = types.SimpleNamespace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match="has 1 MB free"):
        run_job(path)
    assert not (tmp_path / WORK).exists()
