"""The documents name functions, tests and options that exist."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from expunge.cli.main import app
from expunge.recipes import METHODS

ROOT = Path(__file__).parents[2]
ACCOUNTANTS = ("gaussian", "theorems", "dpsgd", "calibration", "planning")
HELPERS = ("ratio", "count_parameters")
DOCUMENTS = [ROOT / "docs" / name for name in ("errata.md", "notation.md", "theory.md")]


def resolve(name: str) -> object:
    """What a dotted name means: a module, or what hangs on one."""
    first, *rest = name.split(".")
    found: object = importlib.import_module(first)
    for part in rest:
        first = f"{first}.{part}"
        found = importlib.import_module(first) if is_module(first) else getattr(found, part)
    return found


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_function_and_test_file_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:expunge|paper)(?:\.\w+)+)`", text):
        assert resolve(name) is not None, name
    for path in re.findall(r"(?:tests|experiments|src)/[\w/]+\.py", text):
        assert (ROOT / path).is_file(), path


def test_theory_has_a_row_for_every_public_function_of_the_accountants() -> None:
    text = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    sources = {
        f"expunge.accounting.{name}": ROOT / "src" / "expunge" / "accounting" / f"{name}.py"
        for name in ACCOUNTANTS
    } | {"paper": ROOT / "experiments" / "paper.py"}
    for module, source in sources.items():
        found = re.findall(r"^def ([a-z]\w*)\(", source.read_text(encoding="utf-8"), re.MULTILINE)
        for function in found:
            if function not in HELPERS and not function.endswith("_to_dict"):
                assert f"`{module}.{function}`" in text, f"{module}.{function}"


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
