"""A job's own files: nothing of them is cached, and what they raise is one sentence."""

import sys
from pathlib import Path

import pytest

from expunge.errors import InputError
from expunge.jobs.loading import importing_from, load_function


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


@pytest.mark.parametrize("place", ["shop.model:build", "own.py:build"])
def test_the_next_job_gets_its_own_modules(tmp_path: Path, place: str) -> None:
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        write_shop(folder, value)
        with importing_from(folder):
            assert load_function("model.build", place, folder)() == value
    assert not [name for name in sys.modules if name.partition(".")[0] in ("shop", "own")]
    assert "expunge.jobs.loading" in sys.modules
    assert str(tmp_path / "2") not in sys.path


def test_a_file_keeps_its_name_and_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(): ...\ndef load(): ...\n")
    (tmp_path / "json.py").write_text("def build(): ...\n")
    with importing_from(tmp_path):
        build = load_function("model.build", "own.py:build", tmp_path)
        load = load_function("data.load", "own.py:load", tmp_path)
        assert build.__module__ == "own"
        assert build.__globals__ is load.__globals__
        other = load_function("model.build", "json.py:build", tmp_path)
        assert other.__module__.startswith("json_"), "it hides no module that is there"


def test_a_file_outside_of_the_folder_is_dropped_too(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "other_own.py"
    for value in (1, 2):
        file.write_text(f"def build(): return {value}\n")
        with importing_from(tmp_path / "here"):
            assert load_function("model.build", f"{file}:build", tmp_path)() == value


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
        with pytest.raises(InputError, match=r"own\.py:biuld'|which cannot be imported"):
            load_function("model.build", "own.py:biuld", tmp_path)
