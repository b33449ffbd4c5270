"""What commands print: recipes, guarantees and plans as tables for people, JSON for programs."""

from __future__ import annotations

import decimal
import json
import math
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from expunge.accounting.planning import Plan
    from expunge.jobs.prepare import Preview
    from expunge.recipes import Guarantee, Recipe

ComparedTo = Annotated[str, typer.Option(help="retrained or centre.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2))


def print_preview(found: Preview) -> None:
    """The plan if there is one, the recipe and its certificate, and what it will cost."""
    if found.plan is not None:
        print_plan(found.plan)
        print()
    print_guarantee(found.recipe, found.guarantee)
    how = "calibrated to the target" if found.calibrated else "as given"
    how = how if found.plan is None else "planned: of the candidates, most can survive in it"
    print(f"  The recipe is {how}; finite precision on {found.parameters:,} parameters is counted.")
    print()
    print(f"  {found.retain:,} samples are kept and {found.forget:,} forgotten.")
    print(
        f"  {found.steps:,} noisy steps see {found.gradient_evaluations:,} examples, fine-tuning "
        f"{found.finetune_gradient_evaluations:,}: about {found.seconds:,.1f} s here "
        f"({_count_threads()})."
    )
    print(f"  It would write {found.directory}; this was a dry run and wrote nothing.")


COMPARISONS = {
    "retrained": "the same run from a model retrained without the forget data",
    "centre": "the same run from the public centre",
}


def format_exact(value: Any) -> str:
    """A recipe's value, which must survive being pasted back; schedules as their range.

    >>> format_exact(0.14915065275996015), format_exact((0.1, 0.2, 0.3))
    ('0.14915065275996015', '0.1 … 0.3 (3 values)')
    """
    if isinstance(value, list | tuple):
        values = cast(list[float], value)
        return f"{min(values)!r} … {max(values)!r} ({len(values)} values)"
    return str(value)


def format_up(value: float | None, digits: int = 8) -> str:
    """A claim, rounded to the safe side: never less than it is.

    >>> format_up(6.57300578736), format_up(1e-5), format_up(None)
    ('6.5730058', '1e-05', '–')
    >>> format_up(0.28621071)
    '0.28621071'
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(context.create_decimal(repr(value))):.{digits}g}"


def print_guarantee(recipe: Recipe, found: Guarantee, as_json: bool = False) -> None:
    """The recipe and what it certifies, as two small tables or as one object."""
    from expunge.accounting.guarantee import guarantee_to_dict
    from expunge.recipes import ModelClipping, to_dict

    if as_json:
        print_json(guarantee_to_dict(recipe, found))
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    made = Table(
        title=to_dict(recipe)["method"], box=SIMPLE, show_header=False, title_justify="left"
    )
    for key, value in to_dict(recipe).items():
        if key != "method" and value is not None:
            made.add_row(key, format_exact(value))
    console.print(made)
    table = Table(box=SIMPLE, title="certifies", title_justify="left")
    for name in ("compared to", "epsilon", "delta", "mu"):
        table.add_column(name, overflow="fold")
    for name, bound in (("retrained", found.retrained), ("centre", found.centre)):
        if bound is not None:
            mark = " ←" if name == found.compared_to else ""
            numbers = map(format_up, (bound.epsilon, bound.delta, bound.mu))
            table.add_row(name + mark, *numbers)
    console.print(table)
    for name, meaning in COMPARISONS.items():
        if name == "centre" and isinstance(recipe, ModelClipping):
            meaning = "the same run with nothing but the public centre before its first noise"
        if name == "retrained" or found.centre is not None:
            console.print(f"  {name}: indistinguishable from {meaning}")
    console.print(f"  by {found.theorem}")
    if found.survival_bound is not None:
        console.print(
            f"  survival bound {format_up(found.survival_bound, 6)}: no event about the new model "
            "differs by more in probability from runs that never saw the old model"
        )
    if math.isinf(found.epsilon):
        console.print("  This is no guarantee: epsilon is infinite.")


def print_plan(found: Plan) -> None:
    """One row per candidate, then the advice."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from expunge.recipes import to_dict

    console = Console(highlight=False)
    console.print(
        f"target epsilon = {found.epsilon:g}, delta = {found.delta:g}; {found.parameters:,} "
        f"parameters; noise left in each weight {found.scale:.4g}"
    )
    table = Table(box=SIMPLE, pad_edge=False)
    names = ("method", "T", "σ", "‖noise‖", "‖kept‖", "examples", "survives")
    for name in names:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for candidate in found.candidates:
        table.add_row(
            candidate.method,
            str(candidate.steps),
            f"{candidate.noise_per_step:.4g}",
            f"{candidate.expected_norm:.4g}",
            f"{candidate.kept_norm:.4g}",
            f"{candidate.gradient_evaluations:,}",
            f"≤ {100 * candidate.survival_bound:.1f} %",
        )
    console.print(table)
    for candidate in found.candidates:
        fields = to_dict(candidate.recipe)
        values = [f"{k}={format_exact(v)}" for k, v in fields.items() if v and k != "method"]
        if values:
            console.print(f"  {candidate.method}: " + ", ".join(values))
    console.print("\n" + found.advice)


def _count_threads() -> str:
    import torch

    threads = torch.get_num_threads()
    return "1 thread" if threads == 1 else f"{threads} threads"
