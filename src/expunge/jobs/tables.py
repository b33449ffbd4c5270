"""The tables of a job file, their keys, and what each value must be, in words.

What is wrong with a job file is said in sentences with a line and a key each.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from expunge.errors import InputError

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
    public_buffers: list[Text] = Field([], description="a list of names of buffers")
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


def join_problems(path: Path, text: str, problems: Iterable[Mistake]) -> InputError:
    """The one error that names all mistakes, in the order of their lines.

    >>> text = "[target]\\nepsilon = -1\\n"
    >>> problem = Mistake(("target", "epsilon"), "target.epsilon is -1; it must be > 0")
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


def describe_error(table: str, kind: type[BaseModel], error: Any) -> Mistake:
    """One of pydantic's findings as a sentence: field, value, and the field's description."""
    names = [part for part in cast(tuple[Any, ...], error["loc"]) if isinstance(part, str)][:1]
    key = (table, *names)
    if not names:
        return Mistake(key, f"{table} is {shorten(error['input'])}; it must be a table")
    name = ".".join(key)
    if error["type"] == "extra_forbidden":
        hint = suggest(names[0], kind.model_fields)
        return Mistake(key, f"{name} is not a key of [{table}]; {hint}")
    valid = kind.model_fields[names[0]].description
    if error["type"] == "missing":
        return Mistake((table,), f"{name} is missing; it must be {valid}")
    return Mistake(key, f"{name} is {shorten(error['input'])}; it must be {valid}")


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
