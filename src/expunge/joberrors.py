"""What is wrong with a job file, in sentences with a line and a key each."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from expunge.errors import InputError

Key = tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """One mistake: the key it is about (a table, or a table and a key of it), and its sentence."""

    key: Key
    sentence: str


def join_problems(path: Path, text: str, problems: Iterable[Problem]) -> InputError:
    """The one error that names all mistakes, in the order of their lines.

    >>> text = "[target]\\nepsilon = -1\\n"
    >>> problem = Problem(("target", "epsilon"), "target.epsilon is -1; it must be > 0")
    >>> str(join_problems(Path("job.toml"), text, [problem]))
    'job.toml, line 2: target.epsilon is -1; it must be > 0'
    """
    lines = find_lines(text)
    placed = [(_find_line(lines, problem.key), problem.sentence) for problem in problems]
    placed.sort(key=lambda item: item[0] or 0)
    if len(placed) == 1:
        line, sentence = placed[0]
        return InputError(f"{path}{'' if line is None else f', line {line}'}: {sentence}")
    listed = [s if line is None else f"line {line}: {s}" for line, s in placed]
    return InputError("\n  ".join([f"{path} has {len(placed)} mistakes:", *listed]))


def find_lines(text: str) -> dict[Key, int]:
    """The line on which each table and key begins.

    The parser itself says where: the key that a longer piece of the file has and the last shorter
    piece that could be parsed had not began right after that piece.

    >>> find_lines("[a]\\nx = [1,\\n     2]\\ny = 3\\n")
    {('a',): 1, ('a', 'x'): 2, ('a', 'y'): 4}
    """
    lines = text.split("\n")
    found: dict[Key, int] = {}
    parsed = 0
    for count in range(1, len(lines) + 1):
        try:
            data = tomllib.loads("\n".join(lines[:count]) + "\n")
        except tomllib.TOMLDecodeError:
            continue
        for key in _list_keys(data):
            found.setdefault(key, parsed + 1)
        parsed = count
    return found


def describe_error(table: str, kind: type[BaseModel], error: Any) -> Problem:
    """One of pydantic's findings as a sentence: field, value, and the field's description."""
    names = [part for part in cast(tuple[Any, ...], error["loc"]) if isinstance(part, str)][:1]
    key = (table, *names)
    if not names:
        return Problem(key, f"{table} is {shorten(error['input'])}; it must be a table")
    name = ".".join(key)
    if error["type"] == "extra_forbidden":
        hint = suggest(names[0], kind.model_fields)
        return Problem(key, f"{name} is not a key of [{table}]; {hint}")
    valid = kind.model_fields[names[0]].description
    if error["type"] == "missing":
        return Problem((table,), f"{name} is missing; it must be {valid}")
    return Problem(key, f"{name} is {shorten(error['input'])}; it must be {valid}")


def suggest(name: str, known: Iterable[str]) -> str:
    """The name that was probably meant, or all there are.

    >>> suggest("stepz", ["steps", "noise_std"]), suggest("colour", ["steps", "noise_std"])
    ('did you mean steps?', 'it may have steps, noise_std')
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else "it may have " + ", ".join(names)


def shorten(value: object) -> str:
    """A value as it is shown in a sentence."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _list_keys(data: dict[str, Any]) -> Iterable[Key]:
    for table, values in data.items():
        yield (table,)
        if isinstance(values, dict):
            for name in cast(dict[str, Any], values):
                yield (table, name)


def _find_line(lines: dict[Key, int], key: Key) -> int | None:
    """The line of the key, else of its table."""
    return lines.get(key, lines.get(key[:1]))
