"""The page about the house and the house are the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
OWN = ROOT / "src" / "expunge"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def read_rows(section: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_room_is_on_the_page_in_the_order_of_imports():
    rooms = {p.stem for p in OWN.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    rows = [re.findall(r"`(\w+)`", row[0]) for row in read_rows("Rooms")]
    shown = [name for row in rows for name in row]
    assert sorted(shown) == sorted(rooms - {"__init__", "__main__"})
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    level = {name: n for n, layer in enumerate(layers) for name in layer.split(" | ")}
    assert [level[name] for name in shown] == sorted(level[name] for name in shown)


def test_every_answer_is_in_the_file_that_is_named():
    rows = read_rows("Where is it?")
    assert len(rows) >= 6
    for question, file, answer in rows:
        source = (OWN / file.strip("`")).read_text()
        for name in re.findall(r"`([\w.]+)`", answer):
            assert name.rpartition(".")[2] in source, (question, name)


def test_every_name_on_the_page_is_somewhere():
    sources = [path.read_text() for path in OWN.rglob("*.py")]
    everything = "\n".join(sources)
    for kind, method in re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE):
        there = [s for s in sources if f"class {kind}" in s and f"def {method}(" in s]
        assert there, f"{kind}.{method}"
    for name in re.findall(r"`(?:\w+\.)?(\w+)`", PAGE):
        assert re.search(rf"\b{name}\b", everything) or (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+/\w+\.py)`", PAGE):
        assert (OWN / name).exists(), name
