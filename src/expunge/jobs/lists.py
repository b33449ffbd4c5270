"""Lists of people as their keepers have them: lines of text, CSV, JSON, Parquet."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from typing import Any, cast

from expunge.data.people import read_people
from expunge.errors import InputError
from expunge.files import refuse_twice

DELIMITERS = (",", ";", "\t")


def read_list(path: str | Path, column: str | None = None) -> list[str]:
    """Names from a text file, one per line; from a ``column`` of a CSV (with commas, semicolons or
    tabs) or Parquet file; from a JSON list of them, or of objects with ``column``.

    Blank lines are skipped, spaces around a name dropped, and one that is named again counts once.
    Nobody is left out without a word: a row that names nobody is refused, and so is a cell that
    goes on in the next line, as after a quote that is missing. Parquet needs ``pyarrow``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "forget.txt"
    ...     _ = file.write_text("anna\\n\\n bo \\nanna\\n")
    ...     read_list(file)
    ['anna', 'bo']
    """
    file = Path(path)
    try:
        if file.suffix == ".json":
            found = _read_json(file, column)
        elif file.suffix == ".parquet":
            found = _read_parquet(file, column)
        elif column is not None or file.suffix == ".csv":
            found = _read_csv(file, column)
        else:
            found = file.read_text(encoding="utf-8-sig").splitlines()
    except InputError:
        raise
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        if isinstance(error, UnicodeDecodeError):
            reason = f"it must be text in UTF-8 ({reason})"
        raise InputError(f"list of people {file} cannot be read: {reason}") from error
    stripped = [name for line in found if (name := line.strip())]
    if not stripped:
        raise InputError(f"list of people {file} names nobody; it must name at least 1")
    return list(read_people(dict.fromkeys(stripped)))


def _read_json(file: Path, column: str | None) -> list[str]:
    """A list of texts and whole numbers, or of objects that have one of these in ``column``."""
    text = file.read_text(encoding="utf-8-sig")
    given: object = json.loads(text, object_pairs_hook=refuse_twice)
    if not isinstance(given, list):
        raise InputError.of(str(file), f"a JSON {type(given).__name__}", "a list of names")
    found = list[str]()
    for place, item in enumerate(cast(list[object], given)):
        name = cast(dict[str, object], item).get(column or "") if isinstance(item, dict) else item
        usable = isinstance(name, str | int) and not isinstance(name, bool)
        if not usable or not str(name).strip():
            wanted = "a text or a whole number" + (f" in {column!r}" if column else "")
            raise InputError.of(f"item {place} of {file}", item, wanted)
        found.append(str(name))
    return found


def _read_parquet(file: Path, column: str | None) -> list[str]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(f"{file} is Parquet, which needs the package pyarrow") from error
    name = _check_column(file, column, parquet.read_schema(file).names)
    cells: list[object] = parquet.read_table(file, columns=[name]).column(0).to_pylist()
    found = ["" if cell is None else str(cell) for cell in cells]
    return [_check_cell(f"row {row} of {file}", name, cell) for row, cell in enumerate(found, 1)]


def _read_csv(file: Path, column: str | None) -> list[str]:
    found = list[str]()
    with file.open(encoding="utf-8-sig", newline="") as text:
        first = [text.readline()]
        heads = {mark: next(csv.reader(first, delimiter=mark), []) for mark in DELIMITERS}
        mark = max(heads, key=lambda mark: (column in heads[mark], len(heads[mark])))
        name, last = _check_column(file, column, heads[mark]), 1
        rows = csv.DictReader(text, heads[mark], delimiter=mark)
        for row in rows:
            where, last = f"line {last + 1} of {file}", rows.line_num + 1
            further = [cell for cell in row.pop(None, []) if cell.strip()]
            cells = [cell for cell in row.values() if cell is not None]
            if further:
                raise InputError(f"{where} has more cells than the {len(heads[mark])} columns")
            if any(end in cell for cell in cells for end in "\r\n"):
                raise InputError(f"{where} has a cell with a line break; is a quote missing?")
            if any(cell.strip() for cell in cells):
                found.append(_check_cell(where, name, row[name] or ""))
    return found


def _check_cell(where: str, column: str, cell: str) -> str:
    if not cell.strip():
        raise InputError(f"{where} has nothing in {column!r}; it must name somebody")
    return cell


def _check_column(file: Path, column: str | None, columns: list[str]) -> str:
    """The column, which must be there once."""
    if column is None:
        raise InputError(f"{file} needs --column, the name of the column with the names: {columns}")
    if columns.count(column) != 1:
        raise InputError.of(f"column of {file}", column, f"one of {columns}, there once")
    return column
