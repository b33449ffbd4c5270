"""Defects injected into the engine one at a time: each must be caught, and the docs say by what.

``python tests/auditing/test_mutations.py`` writes the table of docs/audit.md anew.
"""

from pathlib import Path

import pytest
import torch

from defects import AUDITED, DEFECTS, Caught, audit_engine, check_engine, injected
from expunge.auditing.mechanism import audit_mechanism

torch.set_num_threads(1)
DOCUMENT = Path(__file__).parents[2] / "docs" / "audit.md"
BEGIN, END = "<!-- written by tests/auditing/test_mutations.py -->", "<!-- end -->"


QUICK = (
    "noise 20 % too small",
    "sign of an old weight in one bit of a cell",
    "the same in a cell far into a long model",
    "no noise beyond the first 32,768 coordinates",
)


def write_row(name: str, caught: Caught) -> str:
    cells = (caught.audit, f"`{caught.contract}`" if caught.contract else "", caught.verifier)
    return f"| {name} | " + " | ".join(cell or "–" for cell in cells) + " |"


def test_the_engine_as_it_is_passes_every_check():
    assert check_engine() == Caught("", "", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", AUDITED)
def test_the_engine_as_it_is_passes_a_longer_audit(name):
    found = audit_mechanism(AUDITED[name], delta=1e-5, trials=100_000, seed=12)
    assert not found.contradicts, found.verdict


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in DEFECTS]
)
def test_the_defect_is_caught(name, monkeypatch):
    with injected(monkeypatch, name):
        caught = check_engine()
    assert caught != Caught("", "", "")
    assert write_row(name, caught) in DOCUMENT.read_text(encoding="utf-8").splitlines()


def test_the_table_lists_every_defect_and_no_other():
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in table] == list(DEFECTS)
    assert len(DEFECTS) >= 12


def test_a_defect_is_gone_when_its_test_is_over(monkeypatch):
    with injected(monkeypatch, "noise 20 % too small"):
        assert audit_engine() != ""
    assert audit_engine() == ""


def write_document() -> None:
    rows = ["| defect | the audit | a contract test | the verifier |", "|---|---|---|---|"]
    for name in DEFECTS:
        with injected(pytest.MonkeyPatch(), name):
            rows.append(write_row(name, check_engine()))
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text("\n".join([before + BEGIN, *rows, END + after]), encoding="utf-8")


if __name__ == "__main__":
    write_document()
