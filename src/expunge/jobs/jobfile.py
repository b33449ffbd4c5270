"""``job.toml`` as a whole: every mistake in one pass, each with its key.

A job is read and validated before anything runs; no code that it names is run here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError

from expunge.display import shorten
from expunge.errors import InputError
from expunge.jobs.loading import load_function
from expunge.jobs.options import suggest
from expunge.jobs.tables import JOBS, LEARNED, NAMES, NOISY, Job, LearnJob, list_tables

AnyJob = TypeVar("AnyJob", bound=Job, covariant=True)
OneJob = TypeVar("OneJob", bound=Job)


@dataclass(frozen=True)
class JobFile(Generic[AnyJob]):
    """A valid job and where it is: its paths are relative to its own folder."""

    path: Path
    job: AnyJob

    def of(self, kind: type[OneJob]) -> JobFile[OneJob]:
        """The same, if it is a job of this kind; else an error says which command takes it."""
        if isinstance(self.job, kind):
            return JobFile(self.path, self.job)
        job, takes = self.job, f"expunge learn takes {' and '.join(LEARNED)}"
        if isinstance(job, LearnJob):
            takes = f"what it learned forgets by expunge forget {job.state.dir} LIST"
        raise InputError(
            f"{self.path} is a job for expunge {job.command}: its method is {job.method.name!r}; "
            f"{takes}"
        )

    @property
    def folder(self) -> Path:
        return self.path.absolute().parent

    def locate(self, name: str) -> Path:
        """A path of the job file as one that can be opened from here."""
        return self.folder / Path(name).expanduser()

    def find(self, name: str | None) -> Path | None:
        """The same of a key that may be left out."""
        return None if name is None else self.locate(name)

    def load(self, field: str) -> Callable[..., Any]:
        """The function that a key names, such as ``model.build``."""
        table, key = field.split(".")
        return load_function(field, getattr(getattr(self.job, table), key), self.folder)


def read_job(path: str | Path) -> JobFile[Job]:
    """The job of a file; one error names all mistakes.

    >>> read_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    file = Path(path)
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"job file {file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML's own errors are among them
        raise InputError(f"job file {file} is not valid TOML: {error}") from None
    method: Any = data.get("method", {})
    name: object = method.get("name", "retraining") if isinstance(method, dict) else "retraining"
    if name not in NAMES:  # which tables and keys there may be is not decided
        valid = f"one of {', '.join(NAMES)}"
        raise InputError(f"{file}: method.name is {name!r}; it must be {valid}")
    kind, mistakes = JOBS[cast(str, name)], _check_together(cast(str, name), data)
    job = None
    try:
        job = kind.model_validate(data, context=file.absolute().parent)
    except ValidationError as error:
        mistakes[:0] = [sentence for item in error.errors() for sentence in _describe(kind, item)]
    refuse_mistakes(file, dict.fromkeys(mistakes))
    return JobFile(file, cast(Job, job))


def refuse_mistakes(path: Path, mistakes: Iterable[str]) -> None:
    """Refuse a job for all of its mistakes at once, if there are any.

    >>> refuse_mistakes(Path("job.toml"), ["method.epsilon is -1; it must be > 0"])
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job.toml: method.epsilon is -1; it must be > 0
    """
    match list(mistakes):
        case []:
            return
        case [one]:
            raise InputError(f"{path}: {one}")
        case many:
            raise InputError("\n  ".join([f"{path} has {len(many)} mistakes:", *many]))


def _check_together(name: str, data: dict[str, Any]) -> list[str]:
    """What one table asks of another, whether or not each is valid by itself."""
    tables = {key: cast(dict[str, Any], v) for key, v in data.items() if isinstance(v, dict)}
    found = list[str]()
    start = tables.get("method", {}) | tables.get("model", {"old": None})
    if name in NOISY and not start.keys() & {"old", "parent"}:
        found.append(f"model.old is missing; {name} starts from the weights that must forget")
    if name == "linear-model" and "features" in data and "model" not in data:
        said = "[features] is given without [model]; they are those of the network of its build"
        found.append(said)
    training = tables.get("training", {"function": None})
    if name in ("retraining", "shards") and not training.keys() - {"loss", "seed"}:
        found.append("training.function is missing; name it, or give epochs and the like")
    return found


def _describe(job: type[Job], error: Any) -> list[str]:
    """One of pydantic's findings as sentences: field, value, and the field's description."""
    (table, *keys), tables = error["loc"], list_tables(job)
    name, shown = ".".join([table, *map(str, keys[:1])]), shorten(error["input"])
    if table not in tables:
        return [f"[{table}] is not a table of this job; {suggest(table, tables)}"]
    fields = tables[table].model_fields
    match error["type"], bool(keys):
        case "missing", False:
            return [f"[{table}] is missing; this job needs it"]
        case "value_error", False:  # of keys that are valid by themselves
            return [f"{table}.{sentence}" for sentence in error["ctx"]["error"].args]
        case _, False:
            return [f"{table} is {shown}; it must be a table"]
        case "missing", True:
            return [f"{name} is missing; it must be {fields[keys[0]].description}"]
        case "value_error", True:
            return [f"{name} is {shown}; {error['ctx']['error']}"]
        case "extra_forbidden", True:
            why = " with name = 'retraining', which adds no noise" if table == "method" else ""
            hint = suggest(keys[0], fields)
            return [f"{name} is not a key of [{table}]{why}; {hint}"]
        case _:
            return [f"{name} is {shown}; it must be {fields[keys[0]].description}"]
