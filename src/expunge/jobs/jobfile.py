"""``job.toml`` as a whole: every mistake in one pass, with its line and key.

A job is read and validated before anything runs; no code that it names is run here.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ValidationError

from expunge.errors import InputError
from expunge.jobs.options import Mistake, check_options, suggest
from expunge.jobs.tables import LEARNED, NAMES, Job, LearnJob, Table, UnlearnJob, find_tables

MAX_BYTES = 100_000
FILES = (("model", "old"), ("model", "published"), ("data", "forget"), ("output", "sign"))
FOLDERS = (("model", "old"), ("model", "published"), ("method", "parent"))
FUNCTIONS = (("model", "build"), ("data", "load"), ("training", "function"), ("training", "loss"))

AnyJob = TypeVar("AnyJob", bound=Job, covariant=True)
Key = tuple[str, ...]


@dataclass(frozen=True)
class JobFile(Generic[AnyJob]):
    """A valid job and where it is: its paths are relative to its own folder."""

    path: Path
    job: AnyJob

    @property
    def folder(self) -> Path:
        return self.path.absolute().parent

    def locate(self, name: str) -> Path:
        """A path of the job file as one that can be opened from here."""
        return self.folder / Path(name).expanduser()


def read_job(path: str | Path) -> JobFile[Job]:
    """The job of a file; one error names all mistakes, each with its line and key.

    >>> read_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    file = Path(path)
    text, data = _parse(file)
    method: object = data.get("method", {})
    name = cast(Any, method).get("name", "retraining") if isinstance(method, dict) else None
    whole, kinds = find_tables(name if isinstance(name, str) else "")
    tables, mistakes = _validate(data, kinds, whole)
    if name in NAMES:
        mistakes += check_options(name, tables, data)
    else:  # which keys [method] may have is not decided
        mistakes = [m for m in mistakes if m[0][:1] != ("method",) or m[0][1:] == ("name",)]
    mistakes += _check_paths(tables, file.absolute().parent)
    if mistakes:
        raise join_mistakes(file, text, mistakes)
    return JobFile(file, whole.model_validate(tables))


def read_unlearn_job(path: str | Path) -> JobFile[UnlearnJob]:
    """The job of a file for ``expunge unlearn``."""
    found = read_job(path)
    if not isinstance(found.job, UnlearnJob):
        raise InputError(
            f"{path} is a job for expunge learn: its method is {found.job.method.name!r}; what it "
            f"learned forgets by expunge forget {found.job.state.dir} LIST"
        )
    return JobFile(found.path, found.job)


def read_learn_job(path: str | Path) -> JobFile[LearnJob]:
    """The job of a file for ``expunge learn``."""
    found = read_job(path)
    if isinstance(found.job, UnlearnJob):
        raise InputError(
            f"{path} is a job for expunge unlearn: its method is {found.job.method.name!r}; "
            f"expunge learn takes {' and '.join(LEARNED)}"
        )
    return JobFile(found.path, found.job)


def join_mistakes(path: Path, text: str, mistakes: Iterable[Mistake]) -> InputError:
    """The one error that names all mistakes, in the order of their lines.

    >>> text = "[method]\\nepsilon = -1\\n"
    >>> mistake = ("method", "epsilon"), "method.epsilon is -1; it must be > 0"
    >>> str(join_mistakes(Path("job.toml"), text, [mistake]))
    'job.toml, line 2: method.epsilon is -1; it must be > 0'
    """
    lines = find_lines(text)
    placed = [(lines.get(key, lines.get(key[:1])), sentence) for key, sentence in mistakes]
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
        for table, values in data.items():
            found.setdefault((table,), parsed + 1)
            for name in cast(dict[str, Any], values if isinstance(values, dict) else {}):
                found.setdefault((table, name), parsed + 1)
        parsed = count
    return found


def _parse(file: Path) -> tuple[str, dict[str, Any]]:
    """The text of a job file and its tables."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InputError(f"job file {file} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"job file {file} is larger than {MAX_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8-sig")
        return text, tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOML's own errors are among them
        raise InputError(f"job file {file} is not valid TOML: {error}") from None


def _validate(
    data: dict[str, Any], kinds: Mapping[str, type[Table]], whole: type[Table]
) -> tuple[dict[str, Any], list[Mistake]]:
    """The tables that are valid by themselves, and what is wrong with the others."""
    made, mistakes = dict[str, Any](), list[Mistake]()
    for name in [name for name in data if name not in kinds]:
        hint = suggest(name, kinds)
        mistakes.append(((name,), f"[{name}] is not a table of this job; {hint}"))
    for name, kind in kinds.items():
        if name in data:
            try:
                made[name] = kind.model_validate(data[name])
            except ValidationError as error:
                mistakes += dict.fromkeys(_describe(name, kind, item) for item in error.errors())
        elif whole.model_fields[name].is_required():
            mistakes.append(((), f"[{name}] is missing; this job needs it"))
    return made, mistakes


def _describe(table: str, kind: type[BaseModel], error: Any) -> Mistake:
    """One of pydantic's findings as a sentence: field, value, and the field's description."""
    names = [part for part in cast(tuple[Any, ...], error["loc"]) if isinstance(part, str)][:1]
    key, name = (table, *names), ".".join((table, *names))
    shown = repr(error["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if not names:
        return key, f"{table} is {shown}; it must be a table"
    if error["type"] == "extra_forbidden":
        exact = table == "method"  # other methods have tables that are open
        why = " with name = 'retraining', which adds no noise" if exact else ""
        hint = suggest(names[0], kind.model_fields)
        return key, f"{name} is not a key of [{table}]{why}; {hint}"
    valid = kind.model_fields[names[0]].description
    if error["type"] == "missing":
        return (table,), f"{name} is missing; it must be {valid}"
    return key, f"{name} is {shown}; it must be {valid}"


def _check_paths(tables: Mapping[str, Any], folder: Path) -> Iterator[Mistake]:
    """Every file that the job reads is there, and so is the home of every function."""
    for table, name in dict.fromkeys(FILES + FOLDERS):
        given = getattr(tables.get(table), name, None)
        if given is not None:
            path = folder / Path(given).expanduser()
            is_file = path.is_file() and (table, name) in FILES
            if not (is_file or (path.is_dir() and (table, name) in FOLDERS)):
                what = "file" if (table, name) in FILES else "folder"
                said = f"{table}.{name} is {given!r}; there is no such {what} in {folder}"
                yield (table, name), said
    for table, name in FUNCTIONS:
        given = getattr(tables.get(table), name, None) or ""
        home = given.rpartition(":")[0]
        if missing := _find_missing(home, folder) if home else None:
            yield (table, name), f"{table}.{name} is {given!r}; {missing}"


def _find_missing(place: str, folder: Path) -> str | None:
    """What is missing of a function's file or package; its code is not run."""
    if place.endswith(".py"):
        there = (folder / Path(place).expanduser()).is_file()
        return None if there else f"there is no such file in {folder}"
    top = place.partition(".")[0]
    try:
        there = top.isidentifier() and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        there = False
    if there or (folder / top).is_dir() or (folder / f"{top}.py").is_file():
        return None
    return f"there is no module {top} in {folder}, nor one installed"
