"""docs/architecture.md is the house as it stands: every room, every file, every layer."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "src" / "expunge"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = {
    row[1]: set(re.findall(r"`([^`]+)`", row[2]))
    for row in re.finditer(r"^\| `(\w+)` \|[^|]+\|([^|]+)\|$", TEXT, flags=re.MULTILINE)
}
LINES = re.findall(r"^\| [^|`]+ \| `([\w/.]+)` \| (?:`(\w+)`|–) \|$", TEXT, flags=re.MULTILINE)


def list_files(folder: Path) -> set[str]:
    """What lies in a room: modules by their names, the rest as it is called."""
    found = [path for path in folder.iterdir() if not path.name.startswith(("__", "py.typed"))]
    return {f"{path.name}/" if path.is_dir() else path.name.removesuffix(".py") for path in found}


def test_every_room_and_every_file_is_named_and_nothing_else() -> None:
    rooms = {path.name for path in HOUSE.iterdir() if (path / "__init__.py").is_file()}
    assert set(ROOMS) == rooms
    for room, files in ROOMS.items():
        assert files == list_files(HOUSE / room), room
    shared = re.search(r"^At the root .*$", TEXT, flags=re.MULTILINE)
    modules = {path.stem for path in HOUSE.glob("*.py")} - {"__init__"}
    assert shared
    assert set(re.findall(r"`(\w+)`", shared[0])) == modules


def test_every_path_named_exists() -> None:
    paths = set(re.findall(r"`([a-z_]+/[\w.]+\.py)`", TEXT))
    assert len(paths) > 25
    for path in paths:
        assert (HOUSE / path).is_file(), path


def test_whose_line_it_is() -> None:
    assert len(LINES) >= 15
    for path, name in LINES:
        tree = ast.parse((HOUSE / path).read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.ClassDef)
        defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        assert not name or name in defined, f"{path} has no {name}"


def test_the_layers_are_those_of_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["type"] == "layers")
    assert layers["exhaustive"]
    assert "\n".join(["```", *layers["layers"], "```"]) in TEXT


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_says_its_purpose_and_holds_nothing_at_its_door(room: str) -> None:
    tree = ast.parse((HOUSE / room / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_no_file_is_longer_than_600_lines() -> None:
    for path in HOUSE.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, path
