"""The documents name functions, tests and options that exist."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from expunge.cli.main import app
from expunge.recipes import METHODS

ROOT = Path(__file__).parents[2]
ACCOUNTANTS = ("gaussian", "iteration", "theorems", "group", "calibration", "planning", "paper")
DOCUMENTS = [ROOT / "docs" / name for name in ("errata.md", "notation.md", "theory.md")]


def resolve(name: str) -> object:
    package, module, *rest = name.split(".")
    found: object = importlib.import_module(f"{package}.{module}")
    for part in rest:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_function_and_test_file_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"`(expunge(?:\.\w+)+)`", text):
        assert resolve(name) is not None, name
    for path in re.findall(r"tests/\w+\.py", text):
        assert (ROOT / path).is_file(), path


def test_theory_has_a_row_for_every_public_function_of_the_accountants() -> None:
    text = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    for module in ACCOUNTANTS:
        source = (ROOT / "src" / "expunge" / f"{module}.py").read_text(encoding="utf-8")
        for function in re.findall(r"^def ([a-z]\w*)\(", source, flags=re.MULTILINE):
            if (module, function) != ("iteration", "ratio"):
                assert f"`expunge.{module}.{function}`" in text, f"{module}.{function}"


def test_notation_has_every_parameter_and_only_options_that_exist() -> None:
    text = (ROOT / "docs" / "notation.md").read_text(encoding="utf-8")
    for recipe in METHODS.values():
        for field in fields(recipe):
            assert f"`{field.name}`" in text, field.name
    usage = CliRunner().invoke(app, ["account", "--help"]).output
    options = set(re.findall(r"`(--[\w-]+)`", text))
    assert len(options) >= 12
    for option in options:
        assert option in usage, option
