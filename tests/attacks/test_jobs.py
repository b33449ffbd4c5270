"""Attempts to get a false certificate out of a job; each must fail."""

import shutil
import unicodedata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from expunge.certificates.identifiers import opens
from expunge.certificates.record import RunRecord
from expunge.errors import ExpungeError, InputError, UnlearningError
from expunge.jobs.run import run_job
from job_folder import call, write_job


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """One thread for these small runs."""


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A folder in which p3, p7 and p31 were forgotten by a first run."""
    run_job(write_job(tmp_path))
    return tmp_path


def ask_again(folder: Path, **model: str) -> Path:
    """A second request that starts from what the first one released."""
    (folder / "forget2.txt").write_text("p11\n")
    weights = {"weights": "run/model.safetensors"} | model
    return write_job(folder, model=weights, data={"forget": "forget2.txt"}, output={"dir": "run2"})


def test_a_second_request_without_a_parent_brings_nobody_back(first: Path) -> None:
    with pytest.raises(InputError, match=r"was unlearned itself; name its certificate in model\."):
        run_job(ask_again(first))
    with pytest.raises(InputError, match=r"data\.forgotten must name the lists"):
        run_job(ask_again(first, parent="run/certificate.json"))
    assert not (first / "run2").exists()


def test_a_parent_without_its_record_is_not_taken_on_trust(first: Path) -> None:
    shutil.copytree(first / "run", first / "public")
    (first / "public" / "record.json").unlink()
    (first / "else.txt").write_text("p20\n")
    path = ask_again(first, parent="public/certificate.json")
    path.write_text(path.read_text().replace("[data]", '[data]\nforgotten = ["else.txt"]'))
    with pytest.raises(InputError, match=r"there is no record\.json beside it"):
        run_job(path)


def test_an_earlier_list_that_is_shorter_is_refused(first: Path) -> None:
    (first / "else.txt").write_text("p3\np7\n")
    path = ask_again(first, parent="run/certificate.json")
    path.write_text(path.read_text().replace("[data]", '[data]\nforgotten = ["else.txt"]'))
    with pytest.raises(InputError, match=r"none of data\.forgotten is the list that the parent"):
        run_job(path)


def test_an_unfinished_run_is_not_resumed_for_another_request(tmp_path: Path) -> None:
    path = write_job(tmp_path, data={"load": "own.py:load_torn"}, evaluation={"sets": []})
    with pytest.raises(InputError, match="row 40 is torn"):
        run_job(path)
    (tmp_path / "forget.txt").write_text("p3\np7\np31\np40\n")
    with pytest.raises(InputError, match="had another forget set"):
        run_job(path, resume=True)
    assert not (tmp_path / "run").exists()


def test_people_with_many_rows_and_two_spellings_are_forgotten_whole(tmp_path: Path) -> None:
    path = write_job(tmp_path, data={"load": "people.py:load"})
    (tmp_path / "people.py").write_text(
        "import unicodedata\n"
        "from own import load as load_all\n\n\n"
        "def load():\n"
        "    names = ['Zoë', unicodedata.normalize('NFD', 'Zoë'), 'Max', 'Ida', 'Bo']\n"
        "    return load_all() | {'ids': [names[i % 5] for i in range(50)]}\n"
    )
    (tmp_path / "forget.txt").write_text(unicodedata.normalize("NFD", "Zoë") + "\n", "utf-8")
    done = run_job(path)
    assert done.metrics["cost"]["samples forgotten"] == 20
    record = RunRecord.load(tmp_path / "run" / "record.json")
    assert opens(record.forget, ["Zoë"])
    assert opens(record.retain, ["Max", "Ida", "Bo"])
    assert done.certificate.releasable


def test_more_or_fewer_identifiers_than_samples_are_refused(tmp_path: Path) -> None:
    path = write_job(tmp_path, data={"load": "short.py:load"})
    (tmp_path / "short.py").write_text(
        "from own import load as load_all\n\n\n"
        "def load():\n    return load_all() | {'ids': [f'p{i}' for i in range(49)]}\n"
    )
    with pytest.raises(InputError, match="the number of ids is 49; it must be 50"):
        run_job(path)


HIDING = """
import torch
from torch import nn

from own import load


class Hiding(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("old", torch.zeros(3, 4))
        self._register_load_state_dict_pre_hook(self.keep)

    def keep(self, state, *_):
        state["old"] = state["weight"].clone()


class Speaking(nn.Linear):
    def get_extra_state(self):
        return self.weight.detach().clone()

    def set_extra_state(self, state):
        pass


def build_hiding():
    return Hiding()


def build_speaking():
    return Speaking(4, 3)
"""


@pytest.mark.parametrize("build", ["build_hiding", "build_speaking"])
@pytest.mark.parametrize("public", ["build", None])
def test_old_weights_do_not_travel_beside_the_vector(
    tmp_path: Path, build: str, public: str | None
) -> None:
    path = write_job(tmp_path, model={"build": f"hiding.py:{build}", "public": public})
    (tmp_path / "hiding.py").write_text(HIDING)
    with pytest.raises(UnlearningError, match=r"old|get_extra_state"):
        run_job(path)
    assert not (tmp_path / "run").exists()


def test_the_old_model_is_not_its_own_centre_in_any_disguise(tmp_path: Path) -> None:
    write_job(tmp_path)
    old = load_file(tmp_path / "weights.safetensors")
    for number, change in enumerate((1.0, 1 + 1e-6)):
        name = f"centre{number}.safetensors"
        save_file({k: (t.double() * change) for k, t in old.items()}, tmp_path / name)
        with pytest.raises(ExpungeError, match="centre is the old model"):
            run_job(write_job(tmp_path, centre={"weights": name}))


def test_a_data_set_that_loses_its_disk_is_one_sentence(tmp_path: Path) -> None:
    path = write_job(tmp_path, data={"load": "lost.py:load"}, evaluation={"sets": []})
    (tmp_path / "lost.py").write_text(
        "from own import Rows, load as load_all, make\n\n\n"
        "class Lost(Rows):\n"
        "    def __getitem__(self, i):\n"
        "        if i > 30:\n"
        "            raise OSError(5, 'Input/output error', 'row')\n"
        "        return super().__getitem__(i)\n\n\n"
        "def load():\n"
        "    x, y = make()\n"
        "    return load_all() | {'train': Lost(x[:50], y[:50])}\n"
    )
    done = call("unlearn", path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    told = done.stderr.splitlines()[-1]
    assert told.startswith("expunge: the run failed in the model or its data: OSError: [Errno 5]")
    assert "lost.py, line 7" in told
    assert not (tmp_path / "run").exists()


def test_the_weights_that_are_written_are_those_of_the_vector(first: Path) -> None:
    found = load_file(first / "run" / "model.safetensors")
    assert found.keys() == {"weight", "bias"}
    assert not torch.equal(found["weight"], load_file(first / "weights.safetensors")["weight"])
