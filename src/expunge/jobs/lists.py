"""Lists of identifiers as people have them: lines of text, CSV, JSON, Parquet."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from typing import Any, cast

from expunge.certificates import identifiers
from expunge.errors import InputError
from expunge.files import refuse_twice

TABLES = (".csv", ".parquet")
DELIMITERS = (",", ";", "\t")


def read_ids(path: str | Path, column: str | None = None) -> list[str]:
    """Identifiers from a text file, one per line; from a ``column`` of a CSV (with commas,
    semicolons or tabs) or Parquet file; from a JSON list of them, or of objects with ``column``.

    Blank lines are skipped, spaces around an identifier dropped, and one that is named again counts
    once. Parquet needs ``pyarrow``.
    """
    file = Path(path)
    try:
        if file.suffix == ".json":
            found = _read_json(file, column)
        elif column is not None or file.suffix in TABLES:
            found = _read_column(file, column)
        else:
            found = file.read_text(encoding="utf-8-sig").splitlines()
    except InputError:
        raise
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        if isinstance(error, UnicodeDecodeError):
            reason = f"it must be text in UTF-8 ({reason})"
        raise InputError(f"file of identifiers {file} cannot be read: {reason}") from error
    names = identifiers.read_ids([name for line in found if (name := line.strip())])
    if not names:
        raise InputError(f"file of identifiers {file} names no identifier; it must name at least 1")
    return list(dict.fromkeys(names))


def _read_json(file: Path, column: str | None) -> list[str]:
    """A list of texts and whole numbers, or of objects that have one of these in ``column``."""
    text = file.read_text(encoding="utf-8-sig")
    given: object = json.loads(text, object_pairs_hook=refuse_twice)
    if not isinstance(given, list):
        raise InputError.of(str(file), f"a JSON {type(given).__name__}", "a list of identifiers")
    found = list[str]()
    for place, item in enumerate(cast(list[object], given)):
        name = cast(dict[str, object], item).get(column or "") if isinstance(item, dict) else item
        if isinstance(name, bool) or not isinstance(name, str | int):
            wanted = "a text or a whole number" + (f" in {column!r}" if column else "")
            raise InputError.of(f"item {place} of {file}", item, wanted)
        found.append(str(name))
    return found


def _read_column(file: Path, column: str | None) -> list[str]:
    """A column of a CSV or Parquet file."""
    if file.suffix == ".parquet":
        try:
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise InputError(f"{file} is Parquet, which needs the package pyarrow") from error
        columns: list[str] = parquet.read_schema(file).names
        chosen = [column] if column in columns else []
        rows: list[dict[str, Any]] = parquet.read_table(file, columns=chosen).to_pylist()
    else:
        with file.open(encoding="utf-8-sig", newline="") as text:
            first = text.readline()
            heads = {mark: next(csv.reader([first], delimiter=mark), []) for mark in DELIMITERS}
            fits = [mark for mark, names in heads.items() if column in names]
            mark = fits[0] if fits else max(heads, key=lambda mark: len(heads[mark]))
            columns = heads[mark]
            rows = list(csv.DictReader(text, columns, delimiter=mark))
    if column is None or column not in columns:
        raise InputError.of(f"column of {file}", column, f"one of {columns}")
    return ["" if row[column] is None else str(row[column]) for row in rows]
