"""``job.toml``: read and validated as a whole before anything runs.

Every mistake is found in one pass and named with its line and key. Nothing here imports torch or
runs code that the job names.
"""

from __future__ import annotations

import importlib.util
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from expunge.errors import InputError
from expunge.jobs.methods import check_method
from expunge.jobs.tables import (
    LOSSES,
    TABLES,
    DataTable,
    FinetuneTable,
    Job,
    MethodTable,
    Mistake,
    ModelTable,
    TargetTable,
    describe_error,
    join_problems,
    suggest,
)

MAX_BYTES = 100_000
REQUIRED = ("model", "data", "target", "method")
FILE_KEYS = (
    ("model", "weights"),
    ("model", "parent"),
    ("data", "forget"),
    ("data", "forgotten"),
    ("centre", "weights"),
    ("output", "sign"),
)
FUNCTIONS = (("model", "build"), ("model", "loss"), ("data", "load"), ("output", "callback"))


@dataclass(frozen=True)
class JobFile:
    """A valid job and where it stands: its paths are relative to its own folder."""

    path: Path
    job: Job

    @property
    def folder(self) -> Path:
        return self.path.absolute().parent

    def locate(self, name: str) -> Path:
        """A path of the job file as one that can be opened from here."""
        return self.folder / Path(name).expanduser()


def read_job(path: str | Path) -> JobFile:
    """The job of a file; one error names all mistakes, each with its line and key.

    >>> read_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InputError(f"job file {file} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"job file {file} is larger than {MAX_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8-sig")
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"job file {file} is not valid TOML: {error}") from None
    problems, tables = _validate(data)
    problems += [*_check_choices(tables), *_check_paths(tables, file.absolute().parent)]
    if problems:
        raise join_problems(file, text, problems)
    return JobFile(file, Job.model_validate(tables))


def _validate(data: dict[str, Any]) -> tuple[list[Mistake], dict[str, Any]]:
    """The tables one by one; the method's parameters by the rules of its own recipe."""
    problems = list[Mistake]()
    made = dict[str, Any]()
    for name in data:
        if name not in TABLES:
            hint = suggest(name, TABLES)
            problems.append(Mistake((name,), f"[{name}] is not a table of a job; {hint}"))
    for name, kind in TABLES.items():
        if name not in data:
            if name in REQUIRED:
                problems.append(Mistake((), f"[{name}] is missing; a job needs it"))
            continue
        try:
            made[name] = kind.model_validate(data[name])
        except ValidationError as error:
            problems += [describe_error(name, kind, item) for item in error.errors()]
    if isinstance(data.get("method"), dict):
        given = cast(dict[str, Any], data["method"])
        problems += check_method(given, made.get("target"))
    return problems, made


def _check_choices(tables: dict[str, Any]) -> list[Mistake]:
    """What one key asks of another, among the tables that are valid themselves."""
    found = list[Mistake]()
    model: ModelTable | None = tables.get("model")
    data: DataTable | None = tables.get("data")
    target: TargetTable | None = tables.get("target")
    method: MethodTable | None = tables.get("method")
    tuning: FinetuneTable | None = tables.get("finetune")
    if model and model.parent is not None and data and not data.forgotten:
        sentence = (
            "model.parent is given, so data.forgotten must name the lists of the earlier requests: "
            "they must stay out of the retained data"
        )
        found.append(Mistake(("model", "parent"), sentence))
    if model and model.loss is not None and model.loss not in LOSSES and ":" not in model.loss:
        valid = ModelTable.model_fields["loss"].description
        sentence = f"model.loss is {model.loss!r}; it must be {valid}"
        found.append(Mistake(("model", "loss"), sentence))
    if data and data.column is None and Path(data.forget).suffix in (".csv", ".parquet"):
        sentence = (
            f"data.column is missing; {data.forget} needs the name of the column that holds the "
            "identifiers"
        )
        found.append(Mistake(("data", "forget"), sentence))
    if method and method.name == "plan" and target and target.releases > 1:
        sentence = (
            f"target.releases is {target.releases}; it must be 1 with method.name = 'plan', which "
            "plans one release"
        )
        found.append(Mistake(("target", "releases"), sentence))
    if tuning and tuning.momentum > 0 and tuning.optimizer != "sgd":
        sentence = (
            f"finetune.momentum is {tuning.momentum}; it must be left out with "
            f"optimizer = {tuning.optimizer!r}"
        )
        found.append(Mistake(("finetune", "momentum"), sentence))
    board: str | None = getattr(tables.get("output"), "tensorboard", None)
    if board is not None and importlib.util.find_spec("tensorboard") is None:
        sentence = f"output.tensorboard is {board!r}, which needs the package tensorboard"
        found.append(Mistake(("output", "tensorboard"), sentence))
    return found


def _check_paths(tables: dict[str, Any], folder: Path) -> list[Mistake]:
    """Every file that the job reads is there, and so is the home of every function."""
    found = list[Mistake]()
    for table, name in FILE_KEYS:
        given = getattr(tables.get(table), name, None)
        for file in cast(list[str], given if isinstance(given, list) else [given] if given else []):
            if not (folder / Path(file).expanduser()).is_file():
                sentence = f"{table}.{name} is {file!r}; there is no such file in {folder}"
                found.append(Mistake((table, name), sentence))
    for table, name in FUNCTIONS:
        given = getattr(tables.get(table), name, None)
        if given is not None and ":" in given:
            missing = _find_missing(given.rpartition(":")[0], folder)
            if missing:
                found.append(Mistake((table, name), f"{table}.{name} is {given!r}; {missing}"))
    return found


def _find_missing(place: str, folder: Path) -> str | None:
    """What is missing of a function's file or package; its code is not run."""
    if place.endswith(".py"):
        there = (folder / Path(place).expanduser()).is_file()
        return None if there else f"there is no such file in {folder}"
    top = place.partition(".")[0]
    if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
        return None
    try:
        known = top.isidentifier() and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        known = False
    return None if known else f"there is no module {top} in {folder}, nor one installed"
