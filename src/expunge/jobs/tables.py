"""The tables of ``job.toml``: every key, what it may be, and its default.

What a key must be stands in its description: errors and ``docs/job_file.md`` say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

LOSSES = ("cross-entropy", "mse", "model")
RUNNABLE = ("gradient-clipping", "model-clipping", "output-perturbation")
EXACT = ("retraining", "restart")
NAMES = (*RUNNABLE, *EXACT, "plan")

_FUNCTION = '"module:function" or "path/to/file.py:function"'
_COUNT = "a whole number >= 1"
_WEIGHTS = (
    "the path of a .safetensors, .index.json, .pt, .pth, .bin or .ckpt file, or of a folder that a "
    "checkpoint was saved to"
)
_POSITIVE = "a finite number > 0"

Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
Function = Annotated[str, Field(pattern=r"^[^:\s][^:]*:[A-Za-z_]\w*$", description=_FUNCTION)]
Weights = Annotated[
    str,
    Field(
        pattern=r"\.(safetensors|(safetensors|bin)\.index\.json|pt|pth|bin|ckpt)$|(^|/)[^./]+$|/$",
        description=_WEIGHTS,
    ),
]
Count = Annotated[int, Field(ge=1, description=_COUNT)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, description=_POSITIVE)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, description="a finite number >= 0")]


def _key(valid: str, default: Any = ...) -> Any:
    """A key that must be ``valid``; without a default it is required."""
    return Field(default, description=valid)


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelTable(Table):
    """``build()`` returns the module; ``weights`` are those of the old model."""

    build: Function
    weights: Weights
    loss: Text | None = _key(f"one of {', '.join(LOSSES)}, or a function as {_FUNCTION}", None)
    buffers: Literal["refuse", "reset"] = _key("'refuse' or 'reset'", "refuse")
    public: Text | list[Text] | None = _key(
        "'build', the path of a weights file, or a list of names and patterns", None
    )
    parent: Text | None = _key("the path of the certificate of the model that weights holds", None)
    state: Text | None = _key(
        "the path of a state that expunge learn wrote, for method.name = 'plan'", None
    )
    device: Text | None = _key("the name of a torch device", None)


class DataTable(Table):
    """``load()`` returns ``{"train": …, "ids": …, "test": …}``; ``forget`` names what must go."""

    load: Function
    forget: Text = _key("the path of a text, CSV or Parquet file of identifiers")
    column: Text | None = _key("the name of a column of the file of identifiers", None)
    forgotten: list[Text] = _key("a list of paths: the lists of earlier requests", [])
    changed: bool = _key("true if samples came or went since the parent's run, else false", False)
    workers: Annotated[int, Field(ge=0)] = _key("a whole number >= 0", 0)


class TargetTable(Table):
    """The (ε, δ) that the certificate must not exceed."""

    epsilon: Annotated[Positive, Field(le=709)] = _key("a number > 0, at most 709")
    delta: Annotated[float, Field(gt=0, lt=1)] = _key("a number between 0 and 1, both excluded")
    compared_to: Literal["retrained", "centre"] = _key("'retrained' or 'centre'", "retrained")
    releases: Count = 1


class MethodTable(Table):
    """``name``, and the recipe's parameters by their API names as further keys."""

    model_config = ConfigDict(extra="allow")

    name: Literal[NAMES] = _key("one of " + ", ".join(NAMES))  # pyright: ignore[reportInvalidTypeForm]
    batch_size: Count = 128
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = _key(
        "a whole number >= 0: of retraining, its public seed; of a noisy method, noise for "
        "experiments, not for release",
        None,
    )

    @property
    def parameters(self) -> dict[str, Any]:
        """What the method itself is given."""
        return dict(self.model_extra or {})


class PlanTable(Table):
    """The further keys of ``name = "plan"``: ``choose`` asks for a noisy method, the others are
    those of :func:`expunge.accounting.planning.plan` for it."""

    choose: Literal[RUNNABLE] | None = _key("one of " + ", ".join(RUNNABLE), None)  # pyright: ignore[reportInvalidTypeForm]
    scale: Positive | None = _key(_POSITIVE, None)
    steps: Count = 10
    learning_rate: Positive = 0.01
    weight_decay: NonNegative = 10.0


class CentreTable(Table):
    """The public point that clips and weight decay pull towards: what ``build()`` draws under a
    public seed, unless ``weights`` or ``kind`` say otherwise."""

    weights: Weights | None = _key(_WEIGHTS, None)
    kind: Literal["initialisation", "zero"] | None = _key("'initialisation' or 'zero'", None)
    seed: Text | Annotated[int, Field(ge=0)] | None = _key(
        "a public text or a whole number >= 0, written down before anybody looked", None
    )


class FinetuneTable(Table):
    """Training on retained data: after the last noise; of retraining and restart, all of it."""

    epochs: Positive
    learning_rate: Positive
    batch_size: Count = 128
    optimizer: Literal["sgd", "adam", "adamw"] = _key("'sgd', 'adam' or 'adamw'", "sgd")
    momentum: Annotated[NonNegative, Field(lt=1)] = _key("a number in [0, 1)", 0.0)
    weight_decay: NonNegative = 0.0
    schedule: Literal["constant", "one-cycle"] = _key("'constant' or 'one-cycle'", "constant")
    features: Text | None = _key(
        "the name of a frozen module, whose output is computed once per sample", None
    )


class EvaluationTable(Table):
    """What is measured before, after the noise and after fine-tuning."""

    sets: list[Literal["retain", "forget", "test"]] = _key(
        "a list of 'retain', 'forget', 'test'", ["retain", "forget", "test"]
    )
    batch_size: Count = 512
    most: Count | None = _key(f"{_COUNT}: at most so many samples of each set", None)
    control: bool = _key("true or false: also run from the centre, to compare", False)
    retraining_epochs: Positive | None = _key(
        f"{_POSITIVE}: the epochs that training again would take, to compare", None
    )


class OutputTable(Table):
    """Where the run directory goes, and who else hears of the run."""

    dir: Text = _key("the path of a directory", "run")
    sign: Text | None = _key("the path of an Ed25519 private key in PEM format", None)
    title: Text | None = _key("a text for the report", None)
    checkpoint_seconds: NonNegative = 30.0
    callback: Function | None = _key(_FUNCTION, None)


class ProcessesTable(Table):
    """A job under torchrun: how its processes work together."""

    shard: bool = _key("true or false: each process keeps a part of the model", False)
    check_every: Count = _key(f"{_COUNT}: steps between two checks that all processes agree", 50)
    timeout_seconds: Positive = _key(f"{_POSITIVE}: how long a process waits for the others", 600.0)


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


HEADS = ("statistics-head", "convex-head", "shards")
_NAME = "one of " + ", ".join(HEADS)
_CLASSES = "a whole number >= 2: targets are 0 … classes - 1"
_OUTPUTS = "a whole number >= 1 in place of classes: targets are so many numbers"
_SCALE = f"{_POSITIVE}: targets are kept as round(target_scale · target)"


class HeadModelTable(Table):
    """``build()`` returns the public network; without it the inputs are vectors already."""

    build: Function | None = _key(_FUNCTION, None)
    weights: Weights | None = _key(_WEIGHTS, None)
    device: Text | None = _key("the name of a torch device", None)


class HeadDataTable(Table):
    """``load()`` returns ``{"train": …, "ids": …, "test": …}``: what is to be learned."""

    load: Function


class FeaturesTable(Table):
    """From the network's outputs to whole numbers: public, and the same for ever."""

    bits: int = _key("a whole number from 4 to 12", 8)
    lift: int = _key("a whole number >= 0: random features from the seed, beside the others", 0)
    seed: str = _key("a public text", "")
    tangent: Count | None = _key(f"{_COUNT}: gradients projected to so many features", None)
    parameters: list[Text] = _key("a list of names and patterns, with tangent", ["*"])
    batch_size: Count = 32


class StatisticsTable(Table):
    """The keywords of :class:`expunge.StatisticsHead`."""

    name: Literal["statistics-head"] = _key(_NAME)
    classes: int | None = _key(_CLASSES, None)
    outputs: int = _key(_OUTPUTS, 0)
    target_scale: float = _key(_SCALE, 1.0)
    regularisation: Positive | list[Positive] = _key(
        f"{_POSITIVE}, or several to choose among by cross-validation", 1e-4
    )


class ConvexTable(Table):
    """The keywords of :class:`expunge.ConvexHead`."""

    name: Literal["convex-head"] = _key(_NAME)
    classes: int | None = _key(_CLASSES, None)
    outputs: int = _key(_OUTPUTS, 0)
    target_scale: float = _key(_SCALE, 1.0)
    weight_decay: Positive = 1e-5
    tolerance: Positive = 1e-9
    loss: Text = _key("one of softmax, logistic, squared-hinge, poisson", "softmax")


class ShardsDataTable(HeadDataTable):
    """``pilot()`` returns the same of examples that are never learned, for ``plan --pilot``."""

    pilot: Function | None = _key(f"{_FUNCTION}, for plan --pilot", None)


class ShardsModelTable(Table):
    """``build()`` makes a fresh network; what it does not draw from its seed must be public."""

    build: Function
    public: Text | list[Text] | None = _key(
        "the path of a weights file, or a list of names and patterns", None
    )
    loss: Text | None = _key(f"one of {', '.join(LOSSES)}, or a function as {_FUNCTION}", None)


class ShardsTable(Table):
    """The keywords of :class:`expunge.Shards`."""

    name: Literal["shards"] = _key(_NAME)
    seed: Text = _key("a public text, written down beforehand")
    shards: int = _key("a whole number from 1 to 4096", 8)
    slices: int = _key("a whole number from 1 to 4096", 4)
    combination: Literal["probabilities", "logits", "votes"] = _key(
        "'probabilities', 'logits' or 'votes'", "probabilities"
    )
    deterministic: bool = _key("true, or false if training cannot be had again bit for bit", True)
    epochs: Positive | None = _key(f"{_POSITIVE}: passes over a shard in all", None)
    learning_rate: Positive | None = _key(_POSITIVE, None)
    batch_size: Count = 128
    optimizer: Literal["sgd", "adam", "adamw"] = _key("'sgd', 'adam' or 'adamw'", "sgd")
    momentum: Annotated[NonNegative, Field(lt=1)] = _key("a number in [0, 1)", 0.0)
    weight_decay: NonNegative = 0.0
    schedule: Literal["constant", "one-cycle"] = _key("'constant' or 'one-cycle'", "constant")
    train: Function | None = _key(f"{_FUNCTION}, in place of the options of training", None)


class StateTable(Table):
    """Where the state goes; it is private."""

    dir: Text = _key("the path of a directory", "state")


class HeadJob(Table):
    """A whole job for ``expunge learn``."""

    data: HeadDataTable
    method: StatisticsTable | ConvexTable
    model: HeadModelTable = HeadModelTable.model_validate({})
    features: FeaturesTable = FeaturesTable.model_validate({})
    output: StateTable = StateTable.model_validate({})


class ShardsJob(Table):
    """A whole job of shards for ``expunge learn``."""

    model: ShardsModelTable
    data: ShardsDataTable
    method: ShardsTable
    output: StateTable = StateTable.model_validate({})


SHARDS_TABLES: Mapping[str, type[Table]] = {
    "model": ShardsModelTable,
    "data": ShardsDataTable,
    "method": ShardsTable,
    "output": StateTable,
}
HEAD_TABLES: Mapping[str, type[Table]] = {
    "model": HeadModelTable,
    "data": HeadDataTable,
    "features": FeaturesTable,
    "method": StatisticsTable,
    "output": StateTable,
}
