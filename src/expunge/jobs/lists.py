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
    _find_column(file, column, parquet.read_schema(file).names)
    cells: list[object] = parquet.read_table(file, columns=[column]).column(0).to_pylist()
    found = ["" if cell is None else str(cell) for cell in cells]
    for row, cell in enumerate(found, 1):
        if not cell.strip():
            raise InputError(
                f"row {row} of {file} has nothing in {column!r}; it must name somebody"
            )
    return found


def _read_csv(file: Path, column: str | None) -> list[str]:
    found = list[str]()
    with file.open(encoding="utf-8-sig", newline="") as text:
        first = text.readline()
        heads = {mark: next(csv.reader([first], delimiter=mark), []) for mark in DELIMITERS}
        fits = [mark for mark, names in heads.items() if column in names]
        mark = fits[0] if fits else max(heads, key=lambda mark: len(heads[mark]))
        columns = heads[mark]
        if any(end in cell for cell in columns for end in "\r\n"):
            raise InputError(f"line 1 of {file} has a cell with a line break; is a quote missing?")
        place = _find_column(file, column, columns)
        rows, line = csv.reader(text, delimiter=mark), 2
        for row in rows:
            where = f"line {line} of {file}"
            line = rows.line_num + 2
            if any(end in cell for cell in row for end in "\r\n"):
                raise InputError(f"{where} has a cell with a line break; is a quote missing?")
            if any(cell.strip() for cell in row[len(columns) :]):
                raise InputError(f"{where} has {len(row)} cells; it must have {len(columns)}")
            cell = "".join(row[place : place + 1])
            if not cell.strip() and any(other.strip() for other in row):
                raise InputError(f"{where} has nothing in {column!r}; it must name somebody")
            found.append(cell)
    return found


def _find_column(file: Path, column: str | None, columns: list[str]) -> int:
    """Where the column is, which must be there once."""
    if column is None or column not in columns:
        raise InputError.of(f"column of {file}", column, f"one of {columns}")
    if columns.count(column) > 1:
        raise InputError.of(f"column of {file}", column, f"there once, not twice as in {columns}")
    return columns.index(column)
