"""``job.toml`` as a whole: every mistake in one pass, with its line and key.

A job is read and validated before anything runs. Nothing here imports torch or runs code that the
job names. The keys are in :mod:`expunge.jobs.tables`.
"""

from __future__ import annotations

import difflib
import importlib.util
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from expunge.errors import ExpungeError, InputError, UnlearningError
from expunge.jobs.methods import (
    NOISE_KEYS,
    choose_route,
    find_public_weights,
    make_recipe,
    settle,
)
from expunge.jobs.tables import (
    EXACT,
    HEAD_TABLES,
    HEADS,
    LOSSES,
    NAMES,
    SHARDS_TABLES,
    TABLES,
    CentreTable,
    ConvexTable,
    DataTable,
    FinetuneTable,
    HeadJob,
    Job,
    MethodTable,
    ModelTable,
    PlanTable,
    ShardsJob,
)
from expunge.recipes import MAX_STEPS, describe_fields

MAX_BYTES = 100_000
FILE_KEYS = (
    ("model", "weights"),
    ("model", "public"),
    ("model", "parent"),
    ("data", "forget"),
    ("data", "forgotten"),
    ("centre", "weights"),
    ("output", "sign"),
)
FOLDER_KEYS = (("model", "weights"), ("model", "public"), ("centre", "weights"))
FUNCTIONS = (
    ("model", "build"),
    ("model", "loss"),
    ("data", "load"),
    ("method", "train"),
    ("output", "callback"),
)
_HARMLESS = {"schedule": 0.0, "nonnegative": 0.0}

Key = tuple[str, ...]
Mistake = tuple[Key, str]  # the table, or the table and its key, and the sentence


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

    def find_target(self, out: str | Path | None) -> Path:
        """Where the run goes: ``out``, else the job's own ``output.dir``."""
        return self.locate(self.job.output.dir) if out is None else Path(out)


@dataclass(frozen=True)
class HeadJobFile:
    """A valid job of a model built to forget, and where it stands."""

    path: Path
    job: HeadJob | ShardsJob

    @property
    def folder(self) -> Path:
        return self.path.absolute().parent

    def locate(self, name: str) -> Path:
        """A path of the job file as one that can be opened from here."""
        return self.folder / Path(name).expanduser()

    def find_state(self, out: str | Path | None) -> Path:
        """The state folder: ``out``, else the job's own ``output.dir``."""
        return self.locate(self.job.output.dir) if out is None else Path(out)


def read_job(path: str | Path) -> JobFile:
    """The job of a file; one error names all mistakes, each with its line and key.

    >>> read_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    file, text, data = _parse(path)
    if (name := _name_method(data)) in HEADS:
        raise InputError(f"{file} is a job for expunge learn: its method is {name!r}")
    tables, mistakes = _validate(data, TABLES, Job)
    mistakes += _check_method(data.get("method"), tables)
    mistakes += _check_choices(tables)
    mistakes += _check_route(tables, data)
    mistakes += _check_paths(Job.model_construct(**tables), file.absolute().parent)
    if mistakes:
        raise join_mistakes(file, text, mistakes)
    return JobFile(file, Job.model_validate(tables))


def read_head_job(path: str | Path) -> HeadJobFile:
    """The job of a file for ``expunge learn``; one error names all mistakes."""
    file, text, data = _parse(path)
    name = _name_method(data)
    if name in NAMES:
        raise InputError(f"{file} is a job for expunge unlearn: its method is {name!r}")
    kinds, whole = dict(SHARDS_TABLES if name == "shards" else HEAD_TABLES), HeadJob
    if name == "convex-head":
        kinds["method"] = ConvexTable
    if name == "shards":
        whole = ShardsJob
    tables, mistakes = _validate(data, kinds, whole)
    model, features = tables.get("model"), tables.get("features")
    needing = {
        ("model", "weights"): getattr(model, "weights", None),
        ("features", "tangent"): getattr(features, "tangent", None),
    }
    for key, given in needing.items():
        if given is not None and getattr(model, "build", None) is None:
            mistakes.append((key, f"{'.'.join(key)} is given, so model.build must be too"))
    mistakes += _check_paths(whole.model_construct(**tables), file.absolute().parent)
    if mistakes:
        raise join_mistakes(file, text, mistakes)
    return HeadJobFile(file, whole.model_validate(tables))


def find_method(path: str | Path) -> object:
    """The name of the method in a job file, whatever else is in it."""
    return _name_method(_parse(path)[2])


def _name_method(data: Mapping[str, Any]) -> object:
    method = data.get("method")
    return cast(Mapping[str, Any], method).get("name") if isinstance(method, Mapping) else None


def _parse(path: str | Path) -> tuple[Path, str, dict[str, Any]]:
    """A job file, its text and its tables."""
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
    except (ValueError, RecursionError) as error:  # TOML's own errors are among them
        raise InputError(f"job file {file} is not valid TOML: {error}") from None
    return file, text, data


def join_mistakes(path: Path, text: str, mistakes: Iterable[Mistake]) -> InputError:
    """The one error that names all mistakes, in the order of their lines.

    >>> text = "[target]\\nepsilon = -1\\n"
    >>> mistake = ("target", "epsilon"), "target.epsilon is -1; it must be > 0"
    >>> str(join_mistakes(Path("job.toml"), text, [mistake]))
    'job.toml, line 2: target.epsilon is -1; it must be > 0'
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


def suggest(name: str, known: Iterable[str]) -> str:
    """The name that was probably meant, or all there are.

    >>> suggest("stepz", ["steps", "noise_std"]), suggest("colour", ["steps", "noise_std"])
    ('did you mean steps?', 'it may have steps, noise_std')
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else "it may have " + ", ".join(names)


def list_files(job: Job | HeadJob | ShardsJob) -> list[tuple[Key, str]]:
    """Every file that a job reads as data, by the key that names it."""
    found = list[tuple[Key, str]]()
    for key in FILE_KEYS:
        given = getattr(getattr(job, key[0], None), key[1], None)
        if key == ("model", "public") and (given == "build" or not isinstance(given, str)):
            continue
        names = cast(list[str], given if isinstance(given, list) else [given] if given else [])
        found += [(key, name) for name in names]
    return found


def _validate(
    data: dict[str, Any], kinds: Mapping[str, type[BaseModel]], whole: type[BaseModel]
) -> tuple[dict[str, Any], list[Mistake]]:
    """The tables that are valid by themselves, and what is wrong with the others."""
    made, mistakes = dict[str, Any](), list[Mistake]()
    for name in data:
        if name not in kinds:
            hint = suggest(name, kinds)
            mistakes.append(((name,), f"[{name}] is not a table of a job; {hint}"))
    for name, kind in kinds.items():
        if name in data:
            try:
                made[name] = kind.model_validate(data[name])
            except ValidationError as error:
                mistakes += dict.fromkeys(_describe(name, kind, item) for item in error.errors())
        elif whole.model_fields[name].is_required():
            mistakes.append(((), f"[{name}] is missing; a job needs it"))
    return made, mistakes


def _describe(table: str, kind: type[BaseModel], error: Any) -> Mistake:
    """One of pydantic's findings as a sentence: field, value, and the field's description."""
    names = [part for part in cast(tuple[Any, ...], error["loc"]) if isinstance(part, str)][:1]
    key = (table, *names)
    shown = repr(error["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if not names:
        return key, f"{table} is {shown}; it must be a table"
    name = ".".join(key)
    if error["type"] == "extra_forbidden":
        hint = suggest(names[0], kind.model_fields)
        return key, f"{name} is not a key of [{table}]; {hint}"
    valid = kind.model_fields[names[0]].description
    if error["type"] == "missing":
        return (table,), f"{name} is missing; it must be {valid}"
    return key, f"{name} is {shown}; it must be {valid}"


def _check_method(given: Any, tables: Mapping[str, Any]) -> list[Mistake]:
    """Every mistake in the parameters of ``[method]``, and whether they can meet the target."""
    name = given.get("name") if isinstance(given, dict) else None
    if name not in NAMES:
        return []
    own = {key: value for key, value in given.items() if key not in MethodTable.model_fields}
    method, target = tables.get("method"), tables.get("target")
    try:
        if name == "plan":
            PlanTable.model_validate(own)
        elif name in EXACT:
            if mistakes := list(_refuse_noise(name, given)):
                return mistakes
        elif mistakes := list(_check_parameters(name, own)):
            return mistakes
        if method is not None and target is not None:
            settle(method, target, None)
    except ValidationError as error:
        return [_describe("method", PlanTable, item) for item in error.errors()]
    except UnlearningError as error:
        return [(("method", "noise_std"), f"method.noise_std: {error}")]
    except ExpungeError as error:
        return [(("method",), f"method: {error}")]
    return []


def _refuse_noise(name: str, given: Mapping[str, Any]) -> Iterator[Mistake]:
    """Retraining has a seed; how it trains stands in ``[finetune]``."""
    for key in given:
        if key not in ("name", "seed"):
            asked = "its training stands in [finetune]" if key in FinetuneTable.model_fields else ""
            hint = asked or suggest(key, ["name", "seed"])
            yield ("method", key), f"method.{key} is not known to {name}; {hint}"


def _check_route(tables: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Mistake]:
    """What a route without noise asks of the other tables."""
    if not {"model", "method"} <= tables.keys():
        return
    job = Job.model_construct(**tables)
    route, method = choose_route(job), job.method
    if job.model.state is not None and method.name != "plan":
        said = f"model.state is {job.model.state!r}; it must be left out"
        yield ("model", "state"), f"{said} with method.name = {method.name!r}"
    if route not in (*EXACT, "state"):
        return
    for key in NOISE_KEYS if method.name == "plan" else ():
        if key in method.parameters:
            asked = "name one with choose, or leave it out"
            said = f"method.{key} is for a noisy method, and the plan takes {route}; {asked}"
            yield ("method", key), said
    if route != "state" and "finetune" not in given:
        said = f"[finetune] is missing; {route} trains with its epochs and learning_rate"
        yield ("method", "name"), said
    yield from _refuse_centre(job, route)
    known = "centre" in tables or "centre" not in given
    if route == "restart" and known and find_public_weights(job) is None:
        said = "centre.weights is missing; a restart begins from public weights"
        yield ("method", "name"), said


def _refuse_centre(job: Job, route: str) -> Iterator[Mistake]:
    """What stands in ``[centre]`` and has no effect without noise."""
    hints = {"kind": "", "seed": "; the public seed of its start is method.seed"}
    if route == "retraining":
        hints["weights"] = "; name = 'restart' begins from them"
    for key, hint in hints.items():
        value = None if job.centre is None else getattr(job.centre, key)
        if value is not None:
            said = (
                f"centre.{key} is {value!r}; it must be left out with {route}, which has no noise"
            )
            yield ("centre", key), f"{said}{hint}"


def _check_parameters(name: str, own: Mapping[str, Any]) -> Iterator[Mistake]:
    """Unknown, missing and wrong ones, each by itself: the others are such that any value fits."""
    described = {parameter.name: parameter for parameter in describe_fields(name)}
    for key, parameter in described.items():
        if parameter.required and key not in own and key != "noise_std":
            yield ("method",), f"method.{key} is missing; {name} needs it"
    others = {key: _HARMLESS.get(parameter.kind, 1) for key, parameter in described.items()}
    steps = own.get("steps")
    if "steps" in described and type(steps) is int and 0 < steps <= MAX_STEPS:
        others["steps"] = steps
    for key, value in own.items():
        if key not in described:
            hint = suggest(key, [*described, *MethodTable.model_fields])
            yield ("method", key), f"method.{key} is not known to {name}; {hint}"
            continue
        try:
            make_recipe(name, others | {key: value})
        except InputError as error:
            yield ("method", key), f"method.{error}"


def _check_choices(tables: Mapping[str, Any]) -> Iterator[Mistake]:
    """What one key asks of another, among the tables that are valid themselves."""
    model: ModelTable | None = tables.get("model")
    data: DataTable | None = tables.get("data")
    tuning: FinetuneTable | None = tables.get("finetune")
    centre: CentreTable | None = tables.get("centre")
    if model and model.parent is not None and data and not data.forgotten:
        asked = "data.forgotten must name the lists of the earlier requests"
        said = f"model.parent is given, so {asked}: they must stay out of the retained data"
        yield ("model", "parent"), said
    if model and model.loss is not None and model.loss not in LOSSES and ":" not in model.loss:
        valid = ModelTable.model_fields["loss"].description
        yield ("model", "loss"), f"model.loss is {model.loss!r}; it must be {valid}"
    if data and data.column is None and Path(data.forget).suffix in (".csv", ".parquet"):
        asked = f"{data.forget} needs the name of the column that holds the identifiers"
        yield ("data", "forget"), f"data.column is missing; {asked}"
    if centre and centre.weights is not None:
        for name in ("kind", "seed"):
            if (given := getattr(centre, name)) is not None:
                said = f"centre.{name} is {given!r}; it must be left out with centre.weights"
                yield ("centre", name), said
    elif centre and centre.kind == "zero" and centre.seed is not None:
        said = f"centre.seed is {centre.seed!r}; it must be left out with centre.kind = 'zero'"
        yield ("centre", "seed"), said
    if tuning and tuning.momentum > 0 and tuning.optimizer != "sgd":
        asked = f"left out with optimizer = {tuning.optimizer!r}"
        said = f"finetune.momentum is {tuning.momentum}; it must be {asked}"
        yield ("finetune", "momentum"), said


def _check_paths(job: Job | HeadJob | ShardsJob, folder: Path) -> Iterator[Mistake]:
    """Every file that the job reads is there, and so is the home of every function."""
    for key, file in list_files(job):
        path = folder / Path(file).expanduser()
        if not (path.is_file() or (path.is_dir() and key in FOLDER_KEYS)):
            yield key, f"{'.'.join(key)} is {file!r}; there is no such file in {folder}"
    state = getattr(getattr(job, "model", None), "state", None)
    if state is not None and not (folder / Path(state).expanduser() / "meta.json").is_file():
        said = f"model.state is {state!r}; there is no state of expunge learn in {folder}"
        yield ("model", "state"), said
    for key in FUNCTIONS:
        given = getattr(getattr(job, key[0], None), key[1], None) or ""
        home = given.rpartition(":")[0]
        if missing := _find_missing(home, folder) if home else None:
            yield key, f"{'.'.join(key)} is {given!r}; {missing}"


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
