"""A job's own files and weights: nothing of them is cached."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from expunge.errors import InputError
from expunge.jobs.checkpoints import read_metadata, read_weights
from expunge.jobs.loading import (
    importing_from,
    load_function,
    put_weights,
)
from job_folder import run, write_job


def write_shop(folder: Path, value: int = 1) -> None:
    (folder / "shop").mkdir(exist_ok=True)
    (folder / "shop" / "__init__.py").write_text("")
    (folder / "shop" / "parts.py").write_text(f"VALUE = {value}\n")
    text = "from shop.parts import VALUE\ndef build():\n    return VALUE\n"
    (folder / "shop" / "model.py").write_text(text)
    (folder / "own.py").write_text("from shop.model import build\n")


@pytest.mark.parametrize("place", ["shop.model:build", "own.py:build"])
def test_no_cache_is_written(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write_shop(tmp_path)
    with importing_from(tmp_path):
        assert load_function("model.build", place, tmp_path)() == 1
    assert not sys.dont_write_bytecode
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_real_run_leaves_no_byte_code(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    done = run("unlearn", path, PYTHONDONTWRITEBYTECODE="")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.pyc"))


def test_the_next_job_gets_its_own_modules(tmp_path: Path) -> None:
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        write_shop(folder, value)
        with importing_from(folder):
            assert load_function("model.build", "shop.model:build", folder)() == value
    assert not [name for name in sys.modules if name.partition(".")[0] == "shop"]
    assert "expunge.jobs.loading" in sys.modules
    assert str(tmp_path / "2") not in sys.path


def test_installed_modules_are_nobodys_even_from_the_root_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shop(tmp_path)
    monkeypatch.chdir("/")
    for name in ("colorsys", "shop"):
        sys.modules.pop(name, None)
    with importing_from(tmp_path):
        load_function("model.build", "colorsys:rgb_to_hsv", tmp_path)
        load_function("model.build", "shop.model:build", tmp_path)
    assert "colorsys" in sys.modules
    assert "shop.model" not in sys.modules


def test_what_cannot_be_imported_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("def build(:\n")
    (tmp_path / "bad.py").write_text("raise OSError('the disk of the shop is gone')\n")
    with importing_from(tmp_path):
        with pytest.raises(InputError, match=r"model\.build is 'torn\.py:build', .*SyntaxError"):
            load_function("model.build", "torn.py:build", tmp_path)
        with pytest.raises(InputError, match=r"cannot be imported: OSError: the disk of the shop"):
            load_function("data.load", "bad:load", tmp_path)


def test_weights_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    tensors = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)}
    save_file(tensors, tmp_path / "w.safetensors", {"expunge.certificate": "ab"})
    torch.save({"model_state_dict": tensors}, tmp_path / "w.pt")
    index = {"weight_map": dict.fromkeys(tensors, "w.safetensors")}
    (tmp_path / "w.safetensors.index.json").write_text(json.dumps(index))
    for name in ("w.safetensors", "w.pt", "w.safetensors.index.json"):
        found = read_weights(tmp_path / name, "model.weights")
        assert found.keys() == tensors.keys()
        assert torch.equal(found["weight"], tensors["weight"])
    assert read_metadata(tmp_path / "w.safetensors") == {"expunge.certificate": "ab"}
    assert read_metadata(tmp_path / "w.safetensors.index.json") == {"expunge.certificate": "ab"}
    assert read_metadata(tmp_path / "w.pt") == {}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"weight": torch.zeros(2, 3)}, "has no tensor bias"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, "the shape of weight is"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "more": torch.zeros(1)}, "more"),
    ],
)
def test_weights_that_do_not_fit_are_refused(given: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        put_weights(torch.nn.Linear(3, 2), given, "model.weights")
