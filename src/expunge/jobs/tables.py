"""The tables of ``job.toml``: every key, what it may be, its default, and what it asks of others.

What a key must be is its description: errors and ``docs/job_file.md`` use the same words. The
further keys of an :class:`OpenTable` are options of a class, declared there and read from there
(:mod:`expunge.jobs.options`). Tables are validated with the folder of the job as context.
"""

# A table is frozen, so that a key may be narrower in a subclass.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

import expunge
from expunge.certificates.signing import sign_bytes
from expunge.errors import ExpungeError
from expunge.jobs.options import find_loss, list_options, suggest, try_options
from expunge.recipes import METHODS, Execution, NoisyRecipe, from_dict

NOISY = ("gradient-clipping", "model-clipping", "output-perturbation")
LEARNED = ("linear-model", "shards")
NAMES = ("retraining", *NOISY, *LEARNED)
OWN_LOSS = "model"  # the model returns its loss
ESTIMATORS = ("LogisticRegression", "Ridge", "RidgeClassifier")

_FUNCTION = '"module:function" or "path/to/file.py:function"'
_SEED = "a whole number from 0 to 2^53"
_NAME = "one of " + ", ".join(NAMES)


def _check_path(given: str, info: ValidationInfo) -> str:
    folder = cast(Path, info.context)
    if not (folder / Path(given).expanduser()).exists():
        raise ValueError(f"there is no such file in {folder}")
    return given


def _check_key(given: str, info: ValidationInfo) -> str:
    """A key that cannot sign is refused before anything is trained, not after."""
    try:
        sign_bytes(b"", cast(Path, info.context) / Path(given).expanduser())
    except ExpungeError as error:
        raise ValueError(str(error)) from None
    return given


Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
Function = Annotated[
    str, Field(pattern=r"^[^:\s\x00][^:\x00]*:[A-Za-z_]\w*$", description=_FUNCTION)
]
Existing = Annotated[Text, AfterValidator(_check_path)]
Seed = Annotated[int, Field(ge=0, lt=2**53)]
Count = Annotated[int, Field(ge=1)]


def _key(valid: str, default: Any = ...) -> Any:
    """A key that must be ``valid``; without a default it is required."""
    return Field(default, description=valid)


class Table(BaseModel):
    """Keys that are valid by themselves, and then together."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="after")
    def _refuse_mistakes(self) -> Self:
        if found := self.find_mistakes():
            raise ValueError(*found)
        return self

    def find_mistakes(self) -> list[str]:
        """What is wrong with the keys together, and with further keys: one sentence each."""
        return []


class OpenTable(Table):
    """A table with further keys, which are options of a class."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def try_options(
        self, owner: str, kind: Callable[..., Any], *given: Any, **more: Any
    ) -> list[str]:
        """Options that ``kind`` has not, or would not take; ``more`` are taken for granted."""
        return try_options(owner, kind, given, more | self.options, type(self).model_fields)


class BuildTable(Table):
    """``build()`` returns a fresh module."""

    build: Function


class ModelTable(BuildTable):
    """``old`` are the weights that must forget."""

    old: Existing | None = _key(
        "the path of a weights file, or of a folder that a checkpoint was saved to", None
    )
    key: Text | None = _key("the key of the weights in a checkpoint that holds several", None)
    published: Existing | None = _key(
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

    forget: Existing = _key("the path of a text, CSV, JSON or Parquet file of names")
    column: Text | None = _key("the name of a column of that file", None)

    def find_mistakes(self) -> list[str]:
        if self.column is not None or Path(self.forget).suffix not in (".csv", ".parquet"):
            return []
        return [f"column is missing; {self.forget} needs the name of the column with the names"]


class TrainingTable(OpenTable):
    """Your function, or options of ``expunge.Training``; and the loss."""

    function: Function | None = _key(_FUNCTION, None)
    loss: Text | None = _key(
        f"a name in torch.nn.functional, {OWN_LOSS!r} (it returns its own), or {_FUNCTION}", None
    )
    seed: Seed = _key(f"{_SEED}, which is public", 0)

    def find_mistakes(self) -> list[str]:
        found, loss = list[str](), self.loss or OWN_LOSS
        if ":" not in loss and loss != OWN_LOSS and find_loss(loss) is None:
            valid = type(self).model_fields["loss"].description
            found.append(f"loss is {loss!r}; it must be {valid}")
        if self.function is not None:
            with_it = "must be left out with training.function, which trains as it likes"
            return found + [f"{key} is given; it {with_it}" for key in self.options]
        if self.options:
            found += self.try_options("expunge.Training", expunge.Training)
        return found


class FeaturesTable(OpenTable):
    """The keywords of ``expunge.Features``."""

    def find_mistakes(self) -> list[str]:
        names = list_options(expunge.Features)
        unknown = [key for key in self.options if key not in names]
        return [f"{key} is not an option of Features; {suggest(key, names)}" for key in unknown]


class RetrainingTable(Table):
    """Training anew on the retained data: exact."""

    name: Literal["retraining"] = _key(_NAME, "retraining")
    parent: Existing | None = _key("the folder of the release before this one", None)


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
    parent: Existing | None = _key("the folder of the release before this one", None)
    releases: Count = _key(
        "a whole number >= 1: noisy releases of the same old model, this one included", 1
    )
    noise_seed: Seed | None = _key(f"{_SEED}: noise for experiments, not for release", None)

    def find_mistakes(self) -> list[str]:
        if self.epsilon is None and "noise_std" not in self.options:
            return ["epsilon is missing; give it, or noise_std and the recipe's parameters"]
        # noise_std that is left out is calibrated
        kind = METHODS[self.name]
        return self.try_options(self.name, kind, noise_std=1.0) if self.options else []

    @property
    def recipe(self) -> Callable[[int], NoisyRecipe] | None:
        """What makes the recipe for a number of parameters; None: it is planned."""
        return self._make_recipe if self.options else None

    def _make_recipe(self, parameters: int) -> NoisyRecipe:
        own = {"method": self.name, **self.options}
        if "noise_std" in own:
            return cast(NoisyRecipe, from_dict(own))
        return expunge.calibrate(
            lambda noise_std: cast(NoisyRecipe, from_dict(own | {"noise_std": noise_std})),
            epsilon=cast(float, self.epsilon),
            delta=self.delta,
            parameters=parameters,
            compared_to=self.compared_to,
            execution=Execution(releases=self.releases),
        )


class LinearTable(OpenTable):
    """The estimator and its keywords."""

    name: Literal["linear-model"] = _key(_NAME)
    estimator: Literal[ESTIMATORS] = _key(  # pyright: ignore[reportInvalidTypeForm]
        "one of " + ", ".join(ESTIMATORS), "LogisticRegression"
    )

    @property
    def kind(self) -> Callable[..., Any]:
        from expunge import linear_model

        return getattr(linear_model, self.estimator)

    def find_mistakes(self) -> list[str]:
        return self.try_options(self.estimator, self.kind)


class ShardsTable(OpenTable):
    """The keywords of ``expunge.Shards``."""

    name: Literal["shards"] = _key(_NAME)

    def find_mistakes(self) -> list[str]:
        def do_nothing(model: Any = None, examples: Any = None, seed: Any = None) -> None: ...

        return self.try_options("shards", expunge.Shards, do_nothing, do_nothing)


class StateTable(Table):
    """Where what was learned is kept; it is private."""

    dir: Text = _key("the path of a folder", "state")


class OutputTable(Table):
    """Where the release goes, and the key that signs its certificate."""

    dir: Text = _key("the path of a folder", "run")
    sign: Annotated[Text, AfterValidator(_check_key)] | None = _key(
        "the path of an Ed25519 private key in PEM format", None
    )


class UnlearnJob(Table):
    """A job for ``expunge unlearn``: retraining, or noise."""

    command: ClassVar[str] = "unlearn"
    model: ModelTable
    data: DataTable
    training: TrainingTable | None
    method: RetrainingTable | NoisyTable
    output: OutputTable = OutputTable()


class RetrainJob(UnlearnJob):
    training: TrainingTable
    method: RetrainingTable = RetrainingTable()


class NoisyJob(UnlearnJob):
    training: TrainingTable | None = None
    method: NoisyTable


class LearnJob(Table):
    """A job for ``expunge learn``: a model that is built to forget."""

    command: ClassVar[str] = "learn"
    model: BuildTable | NetworkTable
    data: LoadTable
    method: LinearTable | ShardsTable
    state: StateTable = StateTable()
    output: OutputTable | None = None  # without it no release is written yet


class LinearJob(LearnJob):
    model: NetworkTable = NetworkTable()
    method: LinearTable
    features: FeaturesTable | None = None


class ShardsJob(LearnJob):
    model: BuildTable
    method: ShardsTable
    training: TrainingTable


Job = UnlearnJob | LearnJob
JOBS: dict[str, type[Job]] = {
    "retraining": RetrainJob,
    **dict.fromkeys(NOISY, NoisyJob),
    "linear-model": LinearJob,
    "shards": ShardsJob,
}


def list_tables(job: type[Job]) -> dict[str, type[Table]]:
    """The tables that a job may have.

    >>> [table.__name__ for table in list_tables(LinearJob).values()][:2]
    ['NetworkTable', 'LoadTable']
    """
    kinds = {name: cast(Any, field.annotation) for name, field in job.model_fields.items()}
    return {
        name: next(one for one in getattr(kind, "__args__", (kind,)) if one is not NoneType)
        for name, kind in kinds.items()
    }
