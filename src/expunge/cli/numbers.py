"""``expunge account``, ``calibrate`` and ``plan``: their options are the fields of the recipes."""

from __future__ import annotations

import functools
import inspect
import math
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from expunge.cli.text import AsJson, ComparedTo, print_json, write
from expunge.display import tabulate
from expunge.errors import InputError
from expunge.files import to_plain
from expunge.recipes import (
    FIELDS,
    METHODS,
    Recipe,
    from_dict,
    list_required,
    method_name,
    to_dict,
)

if TYPE_CHECKING:
    from expunge.recipes import Guarantee

app = typer.Typer(rich_markup_mode=None)

FREE: dict[str, Literal["smallest", "fewest", "largest"]] = {
    "noise_std": "smallest",
    "steps": "fewest",
    "start_clip": "largest",
    "model_clip": "largest",
    "grad_clip": "largest",
}
TYPES: dict[str, type] = {"whole": int, "flag": bool}


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command METHOD, an option for every field of every recipe, and --recipe.

    The command gets them as ``data``, the recipe as plain data.
    """
    file = typer.Option(
        "--recipe", help="TOML file with method = … and its parameters; may hold lists."
    )
    said = f"one of {', '.join(METHODS)}; left out with --recipe."
    method = typer.Argument(metavar="METHOD", show_default=False, help=said)
    added: dict[str, Any] = {"method": Annotated[str | None, method]}
    for name, (kind, meaning) in FIELDS.items():
        added[name] = Annotated[TYPES.get(kind, float) | None, typer.Option(help=meaning)]
    added["recipe"] = Annotated[Path | None, file]
    own = inspect.signature(command, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    made = [inspect.Parameter(n, keyword, default=None, annotation=a) for n, a in added.items()]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in added}
        command(_collect(options), **given)

    kept = [parameter.replace(kind=keyword) for parameter in own if parameter.name != "data"]
    run.__dict__["__signature__"] = inspect.Signature([*made, *kept])
    run.__annotations__ = {}
    return run


@app.command()
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

    made, against = from_dict(data), cast(Any, compared_to)
    found = guarantee(made, epsilon=epsilon, delta=delta, compared_to=against)
    print_guarantee(made, found, as_json)


@app.command()
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

    if data.get("method") not in METHODS:
        from_dict(data)
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

    best = find_best(
        cast(Any, make),
        epsilon=epsilon,
        delta=delta,
        compared_to=cast(Any, compared_to),
        find=FREE[free],
        parameters=parameters,
    )
    found = guarantee(best, delta=delta, compared_to=cast(Any, compared_to))
    print_guarantee(best, found, as_json)


@app.command()
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
    write(tabulate(method_name(recipe), rows))
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


def _collect(options: dict[str, Any]) -> dict[str, Any]:
    """The recipe as plain data from the options, or from --recipe with options on top."""
    path, method = options.pop("recipe"), options.pop("method")
    data = {} if path is None else _read_recipe(path)
    if method is not None and data.setdefault("method", method) != method:
        raise InputError(f"METHOD is {method!r} but the recipe file says {data['method']!r}")
    return data | {name: value for name, value in options.items() if value is not None}


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--recipe {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"--recipe {path} is not valid TOML: {error}") from None
