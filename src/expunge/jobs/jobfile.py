"""``job.toml``: its tables and keys, what each may be, and every mistake in one pass.

A job is read and validated as a whole before anything runs. Every mistake is named with its line
and key. Nothing here imports torch or runs code that the job names.
"""

from __future__ import annotations

import difflib
import importlib.util
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from expunge.accounting.calibration import calibrate
from expunge.accounting.guarantee import guarantee
from expunge.accounting.planning import Plan, plan
from expunge.accounting.precision import NoisyRecipe
from expunge.certificates.consistency import MAX_MIXING_STEPS
from expunge.errors import CalibrationError, InputError
from expunge.recipes import Execution, ModelClipping, describe_fields, from_dict

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
FUNCTIONS = (("model", "build"), ("model", "loss"), ("data", "load"), ("output", "callback"))
_HARMLESS = {"schedule": 0.0, "nonnegative": 0.0}
LOSSES = ("cross-entropy", "mse", "model")
RUNNABLE = ("gradient-clipping", "model-clipping", "output-perturbation")
NAMES = (*RUNNABLE, "plan")

Function = Annotated[str, Field(pattern=r"^[^:\s][^:]*:[A-Za-z_]\w*$")]
Text = Annotated[str, Field(min_length=1)]
Weights = Annotated[str, Field(pattern=r"\.(safetensors|safetensors\.index\.json|pt|pth|bin)$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]

_FUNCTION = '"module:function" or "path/to/file.py:function"'
_WEIGHTS = "the path of a .safetensors, .index.json, .pt, .pth or .bin file"
_COUNT = "a whole number >= 1"
_POSITIVE = "a finite number > 0"


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelTable(Table):
    """``build()`` returns the module; ``weights`` are those of the old model."""

    build: Function = Field(description=_FUNCTION)
    weights: Weights = Field(description=_WEIGHTS)
    loss: Text | None = Field(
        None, description=f"one of {', '.join(LOSSES)}, or a function as {_FUNCTION}"
    )
    buffers: Literal["refuse", "reset"] = Field("refuse", description="'refuse' or 'reset'")
    public: Text | list[Text] | None = Field(
        None, description="'build', the path of a weights file, or a list of names and patterns"
    )
    parent: Text | None = Field(
        None, description="the path of the certificate of the model that weights holds"
    )
    device: Text | None = Field(None, description="the name of a torch device")


class DataTable(Table):
    """``load()`` returns ``{"train": …, "ids": …, "test": …}``; ``forget`` names what must go."""

    load: Function = Field(description=_FUNCTION)
    forget: Text = Field(description="the path of a text, CSV or Parquet file of identifiers")
    column: Text | None = Field(None, description="the name of a column of the file of identifiers")
    forgotten: list[Text] = Field([], description="a list of paths: the lists of earlier requests")
    changed: bool = Field(
        False, description="true if samples came or went since the parent's run, else false"
    )
    workers: Annotated[int, Field(ge=0)] = Field(0, description="a whole number >= 0")


class TargetTable(Table):
    """The (ε, δ) that the certificate must not exceed."""

    epsilon: Annotated[Positive, Field(le=709)] = Field(description="a number > 0, at most 709")
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="a number between 0 and 1, both excluded"
    )
    compared_to: Literal["retrained", "centre"] = Field(
        "retrained", description="'retrained' or 'centre'"
    )
    releases: Count = Field(1, description=_COUNT)


class MethodTable(Table):
    """``name``, and the recipe's parameters by their API names as further keys."""

    model_config = ConfigDict(extra="allow")

    name: Literal[NAMES] = Field(description="one of " + ", ".join(NAMES))  # pyright: ignore[reportInvalidTypeForm]
    batch_size: Count = Field(128, description=_COUNT)
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = Field(
        None, description="a whole number >= 0 (noise for experiments, not for release)"
    )

    @property
    def parameters(self) -> dict[str, Any]:
        """What the method itself is given."""
        return dict(self.model_extra or {})


class PlanTable(Table):
    """The further keys of ``name = "plan"``: those of :func:`expunge.accounting.planning.plan`."""

    choose: Literal[RUNNABLE] | None = Field(None, description="one of " + ", ".join(RUNNABLE))  # pyright: ignore[reportInvalidTypeForm]
    scale: Positive | None = Field(None, description=_POSITIVE)
    steps: Count = Field(10, description=_COUNT)
    learning_rate: Positive = Field(0.01, description=_POSITIVE)
    weight_decay: NonNegative = Field(10.0, description="a finite number >= 0")


class CentreTable(Table):
    """Public weights that never depended on the forget data."""

    weights: Weights = Field(description=_WEIGHTS)


class FinetuneTable(Table):
    """Training on retained data after the last noise."""

    epochs: Positive = Field(description=_POSITIVE)
    learning_rate: Positive = Field(description=_POSITIVE)
    batch_size: Count = Field(128, description=_COUNT)
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="'sgd', 'adam' or 'adamw'"
    )
    momentum: Annotated[NonNegative, Field(lt=1)] = Field(0.0, description="a number in [0, 1)")
    weight_decay: NonNegative = Field(0.0, description="a finite number >= 0")
    schedule: Literal["constant", "one-cycle"] = Field(
        "constant", description="'constant' or 'one-cycle'"
    )


class EvaluationTable(Table):
    """What is measured before, after the noise and after fine-tuning."""

    sets: list[Literal["retain", "forget", "test"]] = Field(
        ["retain", "forget", "test"], description="a list of 'retain', 'forget', 'test'"
    )
    batch_size: Count = Field(512, description=_COUNT)
    most: Count | None = Field(None, description=f"{_COUNT}: at most so many samples of each set")
    control: bool = Field(False, description="true or false: also run from the centre, to compare")
    retraining_epochs: Positive | None = Field(
        None, description=f"{_POSITIVE}: the epochs that training again would take, to compare"
    )


class OutputTable(Table):
    """Where the run directory goes, and who else hears of the run."""

    dir: Text = Field("run", description="the path of a directory")
    sign: Text | None = Field(None, description="the path of an Ed25519 private key in PEM format")
    title: Text | None = Field(None, description="a text for the report")
    checkpoint_seconds: NonNegative = Field(30.0, description="a finite number >= 0")
    tensorboard: Text | None = Field(None, description="the path of a directory for TensorBoard")
    callback: Function | None = Field(None, description=_FUNCTION)


class ProcessesTable(Table):
    """A job under torchrun: how its processes work together."""

    shard: bool = Field(False, description="true or false: each process keeps a part of the model")
    check_every: Count = Field(
        50, description=f"{_COUNT}: steps between two checks that all processes agree"
    )
    timeout_seconds: Positive = Field(
        600.0, description=f"{_POSITIVE}: how long a process waits for the others"
    )


class Job(Table):
    """A whole job."""

    model: ModelTable
    data: DataTable
    target: TargetTable
    method: MethodTable
    centre: CentreTable | None = None
    finetune: FinetuneTable | None = None
    evaluation: EvaluationTable = EvaluationTable.model_validate({})
    output: OutputTable = OutputTable.model_validate({})
    processes: ProcessesTable = ProcessesTable.model_validate({})


TABLES: Mapping[str, type[Table]] = {
    "model": ModelTable,
    "data": DataTable,
    "target": TargetTable,
    "method": MethodTable,
    "centre": CentreTable,
    "finetune": FinetuneTable,
    "evaluation": EvaluationTable,
    "output": OutputTable,
    "processes": ProcessesTable,
}

Key = tuple[str, ...]


@dataclass(frozen=True)
class Mistake:
    """One mistake: the key it is about (a table, or a table and a key of it), and its sentence."""

    key: Key
    sentence: str


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

    def list_files(self) -> list[tuple[Key, str]]:
        """Every file that the job reads as data, by the key that names it."""
        return list(_list_files(self.job))


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
    mistakes, tables = _validate(data)
    valid = Job.model_construct(**tables)
    mistakes += [*_check_choices(tables), *_check_paths(valid, file.absolute().parent)]
    if mistakes:
        raise join_mistakes(file, text, mistakes)
    return JobFile(file, Job.model_validate(tables))


def join_mistakes(path: Path, text: str, mistakes: Iterable[Mistake]) -> InputError:
    """The one error that names all mistakes, in the order of their lines.

    >>> text = "[target]\\nepsilon = -1\\n"
    >>> mistake = Mistake(("target", "epsilon"), "target.epsilon is -1; it must be > 0")
    >>> str(join_mistakes(Path("job.toml"), text, [mistake]))
    'job.toml, line 2: target.epsilon is -1; it must be > 0'
    """
    lines = find_lines(text)
    placed = [(lines.get(m.key, lines.get(m.key[:1])), m.sentence) for m in mistakes]
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


def make_recipe(name: str, parameters: Mapping[str, Any]) -> NoisyRecipe:
    """The recipe of a method with these parameters."""
    return cast(NoisyRecipe, from_dict({"method": name, **parameters}))


def calibrate_recipe(
    name: str, own: Mapping[str, Any], target: TargetTable, parameters: int | None
) -> NoisyRecipe:
    """The recipe whose noise just meets the target; in exact arithmetic without ``parameters``."""

    def make(noise_std: float) -> Any:
        return make_recipe(name, {**own, "noise_std": noise_std})

    return calibrate(
        make,
        epsilon=target.epsilon,
        delta=target.delta,
        compared_to=target.compared_to,
        parameters=parameters,
        execution=Execution(releases=target.releases),
    )


def plan_recipes(options: PlanTable, target: TargetTable, parameters: int, batch_size: int) -> Plan:
    """A recipe of each method for the target and this many parameters."""
    return plan(
        epsilon=target.epsilon,
        delta=target.delta,
        parameters=parameters,
        compared_to=target.compared_to,
        batch_size=batch_size,
        **options.model_dump(exclude={"choose"}),
    )


def describe_miss(epsilon: float, target: TargetTable) -> str:
    """The sentence about a recipe that does not meet its target."""
    return (
        f"this recipe certifies epsilon = {epsilon:.6g} at delta = {target.delta:g}, and the "
        f"target is {target.epsilon:g}; leave noise_std out to have it calibrated"
    )


def _validate(data: dict[str, Any]) -> tuple[list[Mistake], dict[str, Any]]:
    """The tables one by one; the method's parameters by the rules of its own recipe."""
    mistakes, made = list[Mistake](), dict[str, Any]()
    for name in data:
        if name not in TABLES:
            hint = suggest(name, TABLES)
            mistakes.append(Mistake((name,), f"[{name}] is not a table of a job; {hint}"))
    for name, kind in TABLES.items():
        if name in data:
            try:
                made[name] = kind.model_validate(data[name])
            except ValidationError as error:
                mistakes += [_describe(name, kind, item) for item in error.errors()]
        elif Job.model_fields[name].is_required():
            mistakes.append(Mistake((), f"[{name}] is missing; a job needs it"))
    if isinstance(data.get("method"), dict):
        mistakes += _check_method(cast(dict[str, Any], data["method"]), made.get("target"))
    return mistakes, made


def _describe(table: str, kind: type[BaseModel], error: Any) -> Mistake:
    """One of pydantic's findings as a sentence: field, value, and the field's description."""
    names = [part for part in cast(tuple[Any, ...], error["loc"]) if isinstance(part, str)][:1]
    key = (table, *names)
    shown = repr(error["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if not names:
        return Mistake(key, f"{table} is {shown}; it must be a table")
    name = ".".join(key)
    if error["type"] == "extra_forbidden":
        hint = suggest(names[0], kind.model_fields)
        return Mistake(key, f"{name} is not a key of [{table}]; {hint}")
    valid = kind.model_fields[names[0]].description
    if error["type"] == "missing":
        return Mistake((table,), f"{name} is missing; it must be {valid}")
    return Mistake(key, f"{name} is {shown}; it must be {valid}")


def _check_method(given: Mapping[str, Any], target: TargetTable | None) -> list[Mistake]:
    """Every mistake in the parameters of ``[method]``; ``target`` too, if it is valid itself."""
    name = given.get("name")
    own = {key: value for key, value in given.items() if key not in MethodTable.model_fields}
    if name not in NAMES:
        return []
    try:
        if name == "plan":
            options = PlanTable.model_validate(own)
            if target is not None:  # a plan fails for no size of model or for all
                plan_recipes(options, target, 1000, 1)
            return []
        mistakes = _check_parameters(name, own)
        return mistakes or _check_reach(name, own, target)
    except ValidationError as error:
        return [_describe("method", PlanTable, item) for item in error.errors()]
    except (CalibrationError, InputError) as error:
        return [Mistake(("method",), f"method: {error}")]


def _check_parameters(name: str, own: Mapping[str, Any]) -> list[Mistake]:
    """Unknown, missing and wrong ones, each by itself: the others are such that any value fits."""
    described = {parameter.name: parameter for parameter in describe_fields(name)}
    found = [
        Mistake(("method",), f"method.{key} is missing; {name} needs it")
        for key, parameter in described.items()
        if parameter.required and key not in own and key != "noise_std"
    ]
    others = {key: _HARMLESS.get(parameter.kind, 1) for key, parameter in described.items()}
    steps = own.get("steps")
    if "steps" in described and type(steps) is int and steps > 0:
        others["steps"] = steps
    for key, value in own.items():
        if key not in described:
            hint = suggest(key, [*described, *MethodTable.model_fields])
            found.append(Mistake(("method", key), f"method.{key} is not known to {name}; {hint}"))
            continue
        try:
            make_recipe(name, others | {key: value})
        except InputError as error:
            found.append(Mistake(("method", key), f"method.{error}"))
    return found


def _check_reach(name: str, own: Mapping[str, Any], target: TargetTable | None) -> list[Mistake]:
    """Whether the target can be met at all, in exact arithmetic."""
    recipe = make_recipe(name, {"noise_std": 1.0, **own})
    if isinstance(recipe, ModelClipping) and recipe.steps > MAX_MIXING_STEPS:
        valid = f"at most {MAX_MIXING_STEPS:,} for model-clipping"
        return [Mistake(("method", "steps"), f"method.steps is {recipe.steps}; it must be {valid}")]
    if target is None:
        return []
    if "noise_std" not in own:
        calibrate_recipe(name, own, target, None)
        return []
    execution = Execution(releases=target.releases)
    found = guarantee(
        recipe, delta=target.delta, compared_to=target.compared_to, execution=execution
    )
    if found.epsilon <= target.epsilon:
        return []
    sentence = f"method.noise_std: {describe_miss(found.epsilon, target)}"
    return [Mistake(("method", "noise_std"), sentence)]


def _check_choices(tables: dict[str, Any]) -> list[Mistake]:
    """What one key asks of another, among the tables that are valid themselves."""
    found = list[Mistake]()

    def refuse(key: Key, sentence: str) -> None:
        found.append(Mistake(key, sentence))

    model: ModelTable | None = tables.get("model")
    data: DataTable | None = tables.get("data")
    target: TargetTable | None = tables.get("target")
    method: MethodTable | None = tables.get("method")
    tuning: FinetuneTable | None = tables.get("finetune")
    if model and model.parent is not None and data and not data.forgotten:
        refuse(
            ("model", "parent"),
            "model.parent is given, so data.forgotten must name the lists of the earlier requests: "
            "they must stay out of the retained data",
        )
    if model and model.loss is not None and model.loss not in LOSSES and ":" not in model.loss:
        valid = ModelTable.model_fields["loss"].description
        refuse(("model", "loss"), f"model.loss is {model.loss!r}; it must be {valid}")
    if data and data.column is None and Path(data.forget).suffix in (".csv", ".parquet"):
        refuse(
            ("data", "forget"),
            f"data.column is missing; {data.forget} needs the name of the column that holds the "
            "identifiers",
        )
    if method and method.name == "plan" and target and target.releases > 1:
        refuse(
            ("target", "releases"),
            f"target.releases is {target.releases}; it must be 1 with method.name = 'plan', which "
            "plans one release",
        )
    if tuning and tuning.momentum > 0 and tuning.optimizer != "sgd":
        refuse(
            ("finetune", "momentum"),
            f"finetune.momentum is {tuning.momentum}; it must be left out with "
            f"optimizer = {tuning.optimizer!r}",
        )
    board: str | None = getattr(tables.get("output"), "tensorboard", None)
    if board is not None and importlib.util.find_spec("tensorboard") is None:
        refuse(
            ("output", "tensorboard"),
            f"output.tensorboard is {board!r}, which needs the package tensorboard",
        )
    return found


def _list_files(job: Job) -> Iterable[tuple[Key, str]]:
    for table, name in FILE_KEYS:
        given = getattr(getattr(job, table, None), name, None)
        if (table, name) == ("model", "public"):
            given = given if isinstance(given, str) and given != "build" else None
        names = cast(list[str], given if isinstance(given, list) else [given] if given else [])
        yield from (((table, name), file) for file in names)


def _check_paths(job: Job, folder: Path) -> list[Mistake]:
    """Every file that the job reads is there, and so is the home of every function."""
    found = [
        Mistake(key, f"{'.'.join(key)} is {file!r}; there is no such file in {folder}")
        for key, file in _list_files(job)
        if not (folder / Path(file).expanduser()).is_file()
    ]
    for table, name in FUNCTIONS:
        given = getattr(getattr(job, table, None), name, None)
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
