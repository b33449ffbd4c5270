"""``metrics.json``: what was measured on a run, as plain data in which every part is optional.

    {"title": "Digits", "task": "digits, 64-32-10 network", "arm": "gradient-clipping",
     "why": "Asked for by name.",
     "stages": [{"stage": "before", "arm": "gradient-clipping",
                 "retain": 0.98, "forget": 0.97, "test": 0.95}, …],
     "curves": [{"name": "test", "x": [0, 1], "y": [0.1, 0.9],
                 "x_label": "epoch", "y_label": "accuracy"}, …],
     "arms":   [{"arm": "retraining", "epsilon": 0.0, "delta": 0.0,
                 "gradient_evaluations": 234000, "retain": …, "forget": …, "test": …}, …],
     "cost":   {"seconds": 3.2, "retraining_seconds": 41.0}}

``retain``, ``forget`` and ``test`` are accuracies as fractions, ``retain_count`` and so on of how
many samples: of few, a page shows "29 of 30". ``stage`` is "before", "after
noise", "after fine-tuning" or (without noise) "after training". ``why`` says in words why the run
took its route. An ``arm`` is any name; "retraining", "centre" (the control that
never saw the old model) and "old model" are known ones, and left out it is the run itself. The
outer ``arm`` is the name of the run that this directory holds: the certificate's method if left
out, so give it where another run of the same method is in the table. ``cost`` is any flat table.
Null stands for "not measured", in a curve for a gap. Keys that are not named here are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from expunge.errors import InputError

Share = Annotated[float, Field(ge=0, le=1)]
Real = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
MOST_TEXT = 2000
Text = Annotated[str, Field(max_length=MOST_TEXT)]

BEFORE, AFTER_NOISE, AFTER_TUNING, AFTER_TRAINING = STAGES = (
    "before",
    "after noise",
    "after fine-tuning",
    "after training",
)
RETRAINING, CENTRE, OLD = "retraining", "centre", "old model"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Stage(_Part):
    """Accuracy of one arm at one point of the run."""

    stage: Text
    arm: Text | None = None
    retain: Share | None = None
    forget: Share | None = None
    test: Share | None = None
    retain_count: Count | None = None
    forget_count: Count | None = None
    test_count: Count | None = None


class Curve(_Part):
    """One line of a picture; curves with the same labels share a picture."""

    name: Text
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    x_label: Text = ""
    y_label: Text = ""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.x) != len(self.y):
            raise ValueError(f"x has {len(self.x)} values and y has {len(self.y)}")
        return self


class Arm(_Part):
    """One method of a comparison: what it certifies, what it cost, how well it does."""

    arm: Text
    epsilon: Real | None = None
    delta: Real | None = None
    gradient_evaluations: Real | None = None
    retain: Share | None = None
    forget: Share | None = None
    test: Share | None = None
    retain_count: Count | None = None
    forget_count: Count | None = None
    test_count: Count | None = None


class Metrics(_Part):
    """Everything in ``metrics.json`` that the report shows."""

    title: Text | None = None
    task: Text | None = None
    arm: Text | None = None
    why: Text | None = None
    stages: tuple[Stage, ...] = ()
    curves: tuple[Curve, ...] = ()
    arms: tuple[Arm, ...] = ()
    cost: dict[Text, bool | int | float | Text | None] = {}


def parse_metrics(data: Mapping[str, Any] | None) -> Metrics:
    """The metrics as typed data; one sentence says what is wrong.

    >>> parse_metrics({"stages": [{"stage": "before", "test": 0.9}]}).stages[0].test
    0.9
    >>> parse_metrics({"stages": [{"stage": "before", "test": 90.0}]})
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: metrics.stages.0.test is 90.0: input should be less than or equal...
    """
    given = {key: value for key, value in (data or {}).items() if value is not None}
    try:
        return Metrics.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(["metrics", *map(str, first["loc"])])
        shown = repr(first["input"])
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        reason = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{place} is {shown}: {reason[:1].lower()}{reason[1:]}") from None


def find_own(metrics: Metrics, method: str) -> list[Stage]:
    """The rows of the run itself, and of the old model it started from.

    >>> rows = [{"stage": "before", "arm": "old model"}, {"stage": "after noise", "arm": "centre"},
    ...         {"stage": "after noise", "arm": "model-clipping"}]
    >>> [row.arm for row in find_own(parse_metrics({"stages": rows}), "model-clipping")]
    ['old model', 'model-clipping']
    """
    names = (None, metrics.arm or method)
    return [
        row for row in metrics.stages if row.arm in names or (row.arm, row.stage) == (OLD, BEFORE)
    ]


def keep_public(metrics: Metrics, method: str) -> Metrics:
    """What may be published with the model: nothing that the noise does not cover.

    Only the released run's own accuracy after its noise, on retained and test data, is a function
    of covered weights alone. The old model's figures, those on forgotten data, other noisy runs of
    the same old model (each would count as a release) and curves of unknown origin are left out.

    >>> rows = [{"stage": "before", "test": 0.9},
    ...         {"stage": "after noise", "forget": 0.5, "test": 0.1}]
    >>> keep_public(parse_metrics({"stages": rows}), "model-clipping").stages
    (Stage(stage='after noise', arm=None, retain=None, forget=None, test=0.1, ...),)
    """
    own = [row for row in find_own(metrics, method) if row.stage in STAGES[1:]]
    single = len({row.stage for row in own}) == len(own)
    kept = (
        tuple(row.model_copy(update={"forget": None, "forget_count": None}) for row in own)
        if single
        else ()
    )
    return Metrics(title=metrics.title, task=metrics.task, arm=metrics.arm, stages=kept)
