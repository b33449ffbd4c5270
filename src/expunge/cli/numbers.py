"""``expunge account``, ``calibrate`` and ``plan``: their options are the fields of the recipes."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from expunge.cli.text import AsJson, print_json, write
from expunge.display import tabulate
from expunge.errors import InputError
from expunge.files import to_plain
from expunge.recipes import (
    FIELDS,
    METHODS,
    ExactRecipe,
    Recipe,
    from_dict,
    list_required,
    to_dict,
)

if TYPE_CHECKING:
    from expunge.recipes import Guarantee

FREE: dict[str, Literal["smallest", "fewest", "largest"]] = {
    "noise_std": "smallest",
    "steps": "fewest",
    "start_clip": "largest",
    "model_clip": "largest",
    "grad_clip": "largest",
}
ComparedTo = Annotated[
    str,
    typer.Option(help="retrained: the same run from a model that never saw them; or centre."),
]


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command METHOD and an option for every parameter of every method.

    The command gets them as ``data``, the recipe as plain data.
    """
    method = typer.Argument(metavar="METHOD", help=f"one of {', '.join(METHODS)}.")
    added: dict[str, Any] = {"method": Annotated[str, method]}
    for name, (kind, meaning) in FIELDS.items():
        number = int if kind == "whole" else float
        added[name] = Annotated[number | None, typer.Option(help=meaning)]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in added}
        command({name: v for name, v in options.items() if v is not None}, **given)

    keyword, own = inspect.Parameter.KEYWORD_ONLY, inspect.signature(command, eval_str=True)
    made = [
        inspect.Parameter(n, keyword, default=... if n == "method" else None, annotation=a)
        for n, a in added.items()
    ]
    kept = [p.replace(kind=keyword) for p in own.parameters.values() if p.name != "data"]
    run.__dict__["__signature__"] = inspect.Signature([*made, *kept])
    run.__annotations__ = {}
    return run


@takes_recipe
def account(
    data: dict[str, Any],
    epsilon: Annotated[float | None, typer.Option(help="Solve for delta at this epsilon.")] = None,
    delta: Annotated[float | None, typer.Option(help="Solve for epsilon at this delta.")] = None,
    compared_to: ComparedTo = "retrained",
    as_json: AsJson = False,
) -> None:
    """What a recipe certifies: --delta from --epsilon, or back."""
    from expunge.accounting.guarantee import guarantee

    made = from_dict(data)
    found = guarantee(made, epsilon=epsilon, delta=delta, compared_to=cast(Any, compared_to))
    print_guarantee(made, found, as_json)


@takes_recipe
def calibrate(
    data: dict[str, Any],
    epsilon: Annotated[float, typer.Option(help="Target epsilon.")],
    delta: Annotated[float, typer.Option(help="Target delta.")],
    parameters: Annotated[
        int | None, typer.Option(help="Certified parameters: count their finite precision too.")
    ] = None,
    compared_to: ComparedTo = "retrained",
    as_json: AsJson = False,
) -> None:
    """The parameter you leave out, so that it meets a target.

    One of noise, steps and the clips.
    """
    from expunge.accounting.calibration import calibrate as find_best
    from expunge.accounting.guarantee import guarantee

    noisy = [name for name, kind in METHODS.items() if not issubclass(kind, ExactRecipe)]
    if data["method"] not in noisy:
        raise InputError.of("method", data["method"], "one of " + ", ".join(noisy))
    missing = [name for name in list_required(data["method"]) if name not in data]
    if len(missing) != 1 or missing[0] not in FREE:
        names = (field.name for field in fields(METHODS[data["method"]]))
        choice = ", ".join(name for name in names if name in FREE)
        raise InputError(
            f"calibrate needs exactly one of {choice} left out; missing here: "
            f"{', '.join(missing) or 'nothing'}"
        )
    free = missing[0]

    def make(value: float) -> Recipe:
        return from_dict(data | {free: int(value) if free == "steps" else value})

    target: dict[str, Any] = {"delta": delta, "compared_to": compared_to}
    find = FREE[free]
    best = find_best(cast(Any, make), epsilon=epsilon, find=find, parameters=parameters, **target)
    print_guarantee(best, guarantee(best, **target), as_json)


def plan(
    epsilon: Annotated[float | None, typer.Option(help="Target epsilon.")] = None,
    delta: Annotated[float | None, typer.Option(help="Target delta.")] = None,
    parameters: Annotated[int | None, typer.Option(help="Number of certified parameters.")] = None,
    job: Annotated[
        Path | None, typer.Option(help="In their place: a job, whose routes are listed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Noisy recipes for a target; of a job, all its routes."""
    from expunge.accounting.planning import plan as make_plan
    from expunge.accounting.planning import plan_to_dict

    given = {"--epsilon": epsilon, "--delta": delta, "--parameters": parameters}
    if job is not None:
        for name, value in given.items():
            if value is not None:
                raise InputError.of(name, value, "left out with --job, which has its own")
        from expunge.cli.runs import print_routes
        from expunge.jobs.routes import find_routes

        print_routes(find_routes(job), as_json)
        return
    if epsilon is None or delta is None or parameters is None:
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise InputError(f"missing: {missing}; give what is missing, or --job")
    found = make_plan(epsilon=epsilon, delta=delta, parameters=parameters)
    if as_json:
        print_json(plan_to_dict(found))
        return
    write(str(found))
    for candidate in found.candidates:
        if rows := _list_values(candidate.recipe):
            write(f"{candidate.method}: {', '.join(f'{k}={v}' for k, v in rows)}", "  ")
    for note in found.notes:
        write(note)


def print_guarantee(recipe: Recipe, found: Guarantee, as_json: bool) -> None:
    """The recipe and what it certifies, as two small tables or as one object."""
    if as_json:
        print_json(to_plain(to_dict(recipe)) | to_plain(found))
        return
    rows = _list_values(recipe)
    write(tabulate(recipe.method, rows))
    write(str(found))
    if math.isinf(found.epsilon):
        write("This is no guarantee: epsilon is infinite.")


def _list_values(recipe: Recipe) -> list[tuple[str, str]]:
    """A recipe's values, exact, so that they can be pasted back; of a schedule its range."""
    given = {name: value for name, value in to_dict(recipe).items() if value and name != "method"}
    return [
        (name, f"{min(v)!r} … {max(v)!r} ({len(v)} values)" if isinstance(v, list) else str(v))
        for name, v in given.items()
    ]
