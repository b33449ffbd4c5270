"""The further keys of a job's tables: options that are declared where they are used.

``[training]`` takes the fields of ``expunge.Training``, ``[method]`` the parameters of a recipe, an
estimator or ``expunge.Shards``, ``[features]`` those of ``expunge.Features``: each by the signature
of its class. A key is tried by itself, among values that fit anything, so that one wrong value does
not hide the next.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import expunge
from expunge.accounting.calibration import calibrate
from expunge.accounting.guarantee import guarantee
from expunge.errors import ExpungeError, UnlearningError
from expunge.jobs.tables import (
    NOISY,
    OWN_LOSS,
    DataTable,
    FeaturesTable,
    LinearTable,
    ModelTable,
    NoisyTable,
    OpenTable,
    ShardsTable,
    TrainingTable,
)
from expunge.recipes import METHODS, Execution, NoisyRecipe, from_dict

Mistake = tuple[tuple[str, ...], str]  # the table, or the table and its key, and the sentence
Make = Callable[..., Any]
NOT_IN_FILES = (
    "network", "build", "train", "features", "state", "progress", "ray", "kwargs", "loss", "loader",
)  # fmt: skip
HARMLESS = {"seed": "1", "learning_rate": 0.0, "weight_decay": 0.0}  # others: 1


def suggest(name: str, names: Iterable[str]) -> str:
    """The name that was probably meant, or all there are.

    >>> suggest("stepz", ["steps", "noise_std"]), suggest("colour", ["steps", "noise_std"])
    ('did you mean steps?', 'it may have steps, noise_std')
    """
    listed = list(names)
    near = difflib.get_close_matches(name, listed, 1)
    return f"did you mean {near[0]}?" if near else "it may have " + ", ".join(listed)


def check_options(
    route: str, tables: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[Mistake]:
    """What is wrong with options, and what one key asks of another, among tables that are valid
    by themselves; ``given`` is the job as it was written."""
    training, method, model = (tables.get(name) for name in ("training", "method", "model"))
    match tables.get("data"):
        case DataTable(forget=forget, column=None) if Path(forget).suffix in (".csv", ".parquet"):
            said = f"data.column is missing; {forget} needs the name of the column with the names"
            yield ("data", "forget"), said
        case _:
            pass
    if isinstance(training, TrainingTable):
        yield from _check_training(training, asked=route not in NOISY)
    elif "training" not in given and route == "retraining":
        said = "[training] is missing; retraining needs its function, or epochs and the like"
        yield (), said
    match method:
        case NoisyTable():
            yield from _check_noisy(method)
            if isinstance(model, ModelTable) and model.old is None and method.parent is None:
                said = f"model.old is missing; {method.name} starts from the weights that must"
                yield ("model",), f"{said} forget"
        case LinearTable():
            kind = find_estimator(method.estimator)
            yield from _check_each("method", method, method.estimator, kind, kind)
        case ShardsTable():
            make = functools.partial(expunge.Shards, _no_code, _no_code)
            yield from _check_each("method", method, "shards", expunge.Shards, make)
        case _:
            pass
    if isinstance(features := tables.get("features"), FeaturesTable):
        yield from _check_each("features", features, "Features", expunge.Features, None)
        if "model" not in given:
            said = "[features] is given without [model]; they are those of the network of its build"
            yield ("features",), said


def find_estimator(name: str) -> Make:
    """The class of a linear model by its name."""
    from expunge import linear_model

    return getattr(linear_model, name)


def list_options(kind: Make) -> dict[str, bool]:
    """The options of a class that a file can hold, and whether each is required.

    >>> list_options(METHODS["output-perturbation"])
    {'start_clip': True, 'noise_std': True}
    """
    return {
        name: parameter.default is inspect.Parameter.empty
        for name, parameter in inspect.signature(kind).parameters.items()
        if name not in NOT_IN_FILES
    }


def find_loss(name: str) -> Make | None:
    """A loss of ``torch.nn.functional`` by its name, hyphens or not; None where it has none.

    >>> find_loss("cross-entropy").__name__, find_loss("perplexity")
    ('cross_entropy', None)
    """
    import torch.nn.functional

    plain = name.replace("-", "_")
    found = None if plain.startswith("_") else getattr(torch.nn.functional, plain, None)
    return found if callable(found) else None


def _no_code(model: Any = None, examples: Any = None, seed: Any = None) -> Any:
    """What stands for build and train where options alone are tried."""


def _check_training(table: TrainingTable, asked: bool) -> Iterator[Mistake]:
    named = table.loss is not None and ":" not in table.loss and table.loss != OWN_LOSS
    if named and find_loss(cast(str, table.loss)) is None:
        valid = TrainingTable.model_fields["loss"].description
        yield ("training", "loss"), f"training.loss is {table.loss!r}; it must be {valid}"
    if table.function is not None:
        for key in table.options:
            said = f"training.{key} is given; it must be left out with training.function"
            yield ("training", key), f"{said}, which trains as it likes"
    elif table.options:
        kind = expunge.Training
        yield from _check_each("training", table, "expunge.Training", kind, kind)
    elif asked:
        said = "training.function is missing; name it, or give epochs and the like"
        yield ("training",), said


def _check_each(
    table: str,
    given: OpenTable,
    owner: str,
    kind: Make,
    make: Make | None,
    implied: Mapping[str, Any] | None = None,
) -> Iterator[Mistake]:
    """Unknown and missing options, those whose value is refused, and what is wrong with all of
    them together; ``implied`` are options that come from elsewhere."""
    declared, options, good = list_options(kind), given.options, True
    for key in [key for key in options if key not in declared]:
        good, hint = False, suggest(key, [*declared, *type(given).model_fields])
        yield (table, key), f"{table}.{key} is not an option of {owner}; {hint}"
    needed = [key for key, required in declared.items() if required and key not in (implied or ())]
    for key in needed:
        if key not in options:
            good = False
            yield (table,), f"{table}.{key} is missing; {owner} needs it"
    harmless = {key: HARMLESS.get(key, 1) for key, required in declared.items() if required}
    if type(options.get("steps")) is int and options["steps"] > 0:
        harmless["steps"] = options["steps"]  # a schedule has one value for each
    for key in [key for key in options if key in declared]:
        said = _refuse(make, harmless | {key: options[key]})
        if said is not None and not any(said.startswith(f"{k} ") for k in declared if k != key):
            good = False
            yield (table, key), f"{table}.{said}"
    if good and (said := _refuse(make, {**options, **(implied or {})})):
        names = [key for key in options if said.startswith(f"{key} ")]
        yield (table, *names[:1]), f"{table}{'.' if names else ': '}{said}"


def _refuse(make: Make | None, options: Mapping[str, Any]) -> str | None:
    """The sentence in which these options are refused."""
    try:
        _ = None if make is None else make(**options)
    except ExpungeError as error:
        return str(error)
    return None


def _check_noisy(method: NoisyTable) -> Iterator[Mistake]:
    """The recipe's parameters, and whether they can meet the target."""
    found = list[Mistake]()
    if method.epsilon is None and "noise_std" not in method.options:
        said = "method.epsilon is missing; give it, or noise_std and the recipe's parameters"
        found.append((("method",), said))
    if method.releases > 1 and not method.options:
        said = f"method.releases is {method.releases}; it must be 1 without the recipe's parameters"
        found.append((("method", "releases"), f"{said}: a plan is of one release"))
    if method.options:
        implied = {} if "noise_std" in method.options else {"noise_std": 1.0}
        kind = METHODS[method.name]
        found += _check_each("method", method, method.name, kind, kind, implied)
    if not found:
        try:
            settle_recipe(method, None)
        except UnlearningError as error:
            found.append((("method", "noise_std"), f"method.noise_std: {error}"))
        except ExpungeError as error:
            found.append((("method",), f"method: {error}"))
    yield from found


def settle_recipe(method: NoisyTable, parameters: int | None) -> NoisyRecipe | None:
    """The recipe for this many certified parameters, in exact arithmetic without them; None where
    the job leaves the plan to ``expunge.unlearn``, which refuses what misses its target."""
    own = {"method": method.name, **method.options}
    asked: dict[str, Any] = {
        "delta": method.delta,
        "compared_to": method.compared_to,
        "execution": Execution(releases=method.releases),
    }
    if not method.options:
        return None
    if "noise_std" not in own:
        return calibrate(
            lambda noise_std: cast(NoisyRecipe, from_dict(own | {"noise_std": noise_std})),
            epsilon=cast(float, method.epsilon),
            parameters=parameters,
            **asked,
        )
    recipe = cast(NoisyRecipe, from_dict(own))
    found = guarantee(recipe, **asked)
    if method.epsilon is not None and not found.epsilon <= method.epsilon:
        raise UnlearningError(
            f"this recipe certifies epsilon = {found.epsilon:.6g} at delta = {method.delta:g}, and "
            f"the target is {method.epsilon:g}; leave noise_std out to have it calibrated"
        )
    return recipe
