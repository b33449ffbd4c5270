"""The tables of ``job.toml``: every key, what it may be, and its default.

What a key must be is its description: errors and ``docs/job_file.md`` use the same words. The
further keys of an :class:`OpenTable` are options that are declared where they are used, and read
from there (:mod:`expunge.jobs.options`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

NOISY = ("gradient-clipping", "model-clipping", "output-perturbation")
LEARNED = ("linear-model", "shards")
NAMES = ("retraining", *NOISY, *LEARNED)
OWN_LOSS = "model"  # the model returns its loss
ESTIMATORS = ("LogisticRegression", "Ridge", "RidgeClassifier")

_FUNCTION = '"module:function" or "path/to/file.py:function"'
_SEED = "a whole number from 0 to 2^53"
_NAME = "one of " + ", ".join(NAMES)

Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
Function = Annotated[str, Field(pattern=r"^[^:\s][^:]*:[A-Za-z_]\w*$", description=_FUNCTION)]
Seed = Annotated[int, Field(ge=0, lt=2**53)]
Count = Annotated[int, Field(ge=1)]


def _key(valid: str, default: Any = ...) -> Any:
    """A key that must be ``valid``; without a default it is required."""
    return Field(default, description=valid)


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class OpenTable(Table):
    """A table with further keys, which are options declared elsewhere."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})


class BuildTable(Table):
    """``build()`` returns a fresh module."""

    build: Function


class ModelTable(BuildTable):
    """``old`` are the weights that must forget."""

    old: Text | None = _key(
        "the path of a weights file, or of a folder that a checkpoint was saved to", None
    )
    key: Text | None = _key("the key of the weights in a checkpoint that holds several", None)
    published: Text | None = _key(
        "the path of published weights: what is frozen in build() is compared with it", None
    )
    unchanged: list[Text] = _key("a list of names that training never touched", [])
    strict: bool = _key("true, or false: trainable names that old lacks start at the centre", True)
    device: Text | None = _key("the name of a torch device", None)


class NetworkTable(Table):
    """``build()`` returns the published network whose features are learned from; without it the
    examples are vectors already."""

    build: Function | None = _key(_FUNCTION, None)


class LoadTable(Table):
    """``load()`` returns ``expunge.Data``."""

    load: Function


class DataTable(LoadTable):
    """``forget`` lists the people who leave."""

    forget: Text = _key("the path of a text, CSV, JSON or Parquet file of names")
    column: Text | None = _key("the name of a column of that file", None)


class TrainingTable(OpenTable):
    """Your function, or options of ``expunge.Training``; and the loss."""

    function: Function | None = _key(_FUNCTION, None)
    loss: Text | None = _key(
        f"a name in torch.nn.functional, {OWN_LOSS!r} (it returns its own), or {_FUNCTION}", None
    )
    seed: Seed = _key(f"{_SEED}, which is public", 0)


class FeaturesTable(OpenTable):
    """The keywords of ``expunge.Features``."""


class RetrainingTable(Table):
    """Training anew on the retained data: exact."""

    name: Literal["retraining"] = _key(_NAME, "retraining")
    parent: Text | None = _key("the folder of the release before this one", None)


class NoisyTable(OpenTable):
    """The paper's methods: ``epsilon`` and ``delta``, or the recipe's parameters, or both."""

    name: Literal[NOISY] = _key(_NAME)  # pyright: ignore[reportInvalidTypeForm]
    epsilon: Annotated[float, Field(gt=0, le=709)] | None = _key("a number > 0, at most 709", None)
    delta: Annotated[float, Field(gt=0, lt=1)] = _key(
        "a number between 0 and 1, both excluded", 1e-5
    )
    compared_to: Literal["retrained", "centre"] = _key("'retrained' or 'centre'", "retrained")
    centre: Literal["build", "zero"] = _key("'build' or 'zero'", "build")
    batch_size: Count = _key("a whole number >= 1", 128)
    parent: Text | None = _key("the folder of the release before this one", None)
    releases: Count = _key(
        "a whole number >= 1: noisy releases of the same old model, this one included", 1
    )
    noise_seed: Seed | None = _key(f"{_SEED}: noise for experiments, not for release", None)


class LinearTable(OpenTable):
    """The estimator and its keywords."""

    name: Literal["linear-model"] = _key(_NAME)
    estimator: Literal[ESTIMATORS] = _key(  # pyright: ignore[reportInvalidTypeForm]
        "one of " + ", ".join(ESTIMATORS), "LogisticRegression"
    )


class ShardsTable(OpenTable):
    """The keywords of ``expunge.Shards``."""

    name: Literal["shards"] = _key(_NAME)


class StateTable(Table):
    """Where what was learned is kept; it is private."""

    dir: Text = _key("the path of a folder", "state")


class OutputTable(Table):
    """Where the release goes, and the key that signs its certificate."""

    dir: Text = _key("the path of a folder", "run")
    sign: Text | None = _key("the path of an Ed25519 private key in PEM format", None)


class ReleaseTable(OutputTable):
    """Where ``learn`` writes the first release; without this table it writes none."""

    dir: Text = _key("the path of a folder", "release-1")


class UnlearnJob(Table):
    """A job for ``expunge unlearn``."""

    model: ModelTable
    data: DataTable
    training: TrainingTable | None = None
    method: RetrainingTable | NoisyTable = RetrainingTable()
    output: OutputTable = OutputTable()


class LinearJob(Table):
    """A job for ``expunge learn``: a linear model."""

    model: NetworkTable = NetworkTable()
    data: LoadTable
    features: FeaturesTable | None = None
    method: LinearTable
    state: StateTable = StateTable()
    output: ReleaseTable | None = None


class ShardsJob(Table):
    """A job for ``expunge learn``: shards."""

    model: BuildTable
    data: LoadTable
    training: TrainingTable
    method: ShardsTable
    state: StateTable = StateTable()
    output: ReleaseTable | None = None


LearnJob = LinearJob | ShardsJob
Job = UnlearnJob | LearnJob


def find_tables(method: str) -> tuple[type[Job], Mapping[str, type[Table]]]:
    """The job of a method, and the tables it may have.

    >>> kind, tables = find_tables("shards")
    >>> kind.__name__, tables["state"].__name__
    ('ShardsJob', 'StateTable')
    """
    kinds: dict[str, type[Job]] = {"linear-model": LinearJob, "shards": ShardsJob}
    kind, tables = kinds.get(method, UnlearnJob), dict[str, type[Table]]()
    for name, field in kind.model_fields.items():
        asked: Any = field.annotation
        declared = [one for one in getattr(asked, "__args__", (asked,)) if one is not type(None)]
        tables[name] = declared[-1 if method in NOISY else 0]
    return kind, tables
