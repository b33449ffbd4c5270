"""Defects of the engine, one at a time: the audit catches each, as docs/audit.md says."""

from pathlib import Path

import pytest

from tests.audit.defects import DEFECTS, audit_engine

pytestmark = pytest.mark.usefixtures("one_thread")
DOCUMENT = Path(__file__).parents[2] / "docs" / "audit.md"
LONG = ("noise key is a constant", "the same in a cell far into a long model")


@pytest.mark.slow
def test_the_engine_as_it_is_passes():
    assert audit_engine() == ""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in DEFECTS]
)
def test_the_defect_is_caught(name, monkeypatch):
    DEFECTS[name](monkeypatch)
    caught = audit_engine()
    assert caught != ""
    assert f"| {name} | {caught} |" in DOCUMENT.read_text(encoding="utf-8").splitlines()
