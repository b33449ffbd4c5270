"""What commands print: recipes, guarantees and plans as tables for people, JSON for programs."""

from __future__ import annotations

import decimal
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from expunge.accounting.planning import Plan
    from expunge.jobs.pilot import Pilot
    from expunge.jobs.preview import Preview
    from expunge.jobs.routes import Cost, Setting
    from expunge.recipes import Guarantee, Recipe

ComparedTo = Annotated[str, typer.Option(help="retrained or centre.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout, in ASCII where that cannot hold every character."""
    whole = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    typer.echo(json.dumps(data, ensure_ascii=not whole, allow_nan=False, indent=2))


def print_preview(found: Preview) -> None:
    """The plan if there is one, the recipe and its certificate, and what it will cost."""
    import torch

    from expunge.jobs.timing import tell_load

    settled = found.settled
    if found.why is not None:
        _echo(f"route: {found.route}. {found.why}\n")
    if found.route == "state":
        took = (
            ""
            if found.seconds is None
            else f", in about {found.seconds:,.2f} s here, writing aside"
        )
        _echo(f"  {found.forget:,} examples are forgotten{took}; epsilon = 0.")
        _echo(f"  It would write {found.directory}; this was a dry run and wrote nothing.")
        return
    how = "calibrated to the target" if settled.calibrated else "as given"
    if settled.plan is not None:
        print_plan(settled.plan)
        print()
        how = "planned for the target"
    print_guarantee(settled.recipe, settled.guarantee)
    counted = f"; finite precision on {found.parameters:,} parameters is counted"
    if settled.guarantee.mu == 0:
        how, counted = "without noise", f"; {found.parameters:,} parameters are trained"
    threads = torch.get_num_threads()
    several = (found.retain_people, found.forget_people) != (found.retain, found.forget)
    told = f", those of {found.retain_people:,} and of {found.forget_people:,} people"
    people = told if several else ""
    print(
        f"  The recipe is {how}{counted}.\n"
        f"\n  {found.retain:,} samples are kept and {found.forget:,} forgotten{people}."
    )
    seen = f"the training sees {found.finetune_gradient_evaluations:,} examples"
    if settled.guarantee.mu != 0:
        seen = (
            f"{found.steps:,} noisy steps see {found.gradient_evaluations:,} examples, fine-tuning "
            f"{found.finetune_gradient_evaluations:,}"
        )
    print(
        f"  {seen[:1].upper()}{seen[1:]}: about {found.seconds or 0:,.1f} s here on idle cores "
        f"({threads} thread{'' if threads == 1 else 's'}), measured with the job's own steps."
    )
    if (load := tell_load()) is not None:
        _echo(f"  {load}")
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


def print_table(
    names: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, **looks: Any
) -> None:
    """A table without frames, of which the first ``left`` columns are aligned to the left."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, title_justify="left", show_header=any(names), **looks)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def print_guarantee(recipe: Recipe, found: Guarantee, as_json: bool = False) -> None:
    """The recipe and what it certifies, as two small tables or as one object."""
    from expunge.accounting.guarantee import guarantee_to_dict
    from expunge.recipes import ModelClipping, to_dict

    if as_json:
        print_json(guarantee_to_dict(recipe, found))
        return
    given = {
        key: format_exact(value) for key, value in to_dict(recipe).items() if value is not None
    }
    print_table(("", ""), list(given.items())[1:], left=2, title=given["method"])
    bounds = {"retrained": found.retrained, "centre": found.centre}
    rows = [
        (
            name + (" ←" if name == found.compared_to else ""),
            *map(format_up, (bound.epsilon, bound.delta, bound.mu)),
        )
        for name, bound in bounds.items()
        if bound is not None
    ]
    print_table(("compared to", "epsilon", "delta", "mu"), rows, left=4, title="certifies")
    for name, meaning in COMPARISONS.items() if found.mu != 0 else ():
        if name == "centre" and isinstance(recipe, ModelClipping):
            meaning = "the same run with nothing but the public centre before its first noise"
        if name == "retrained" or found.centre is not None:
            _echo(f"  {name}: indistinguishable from {meaning}")
    if found.mu == 0:
        _echo("  equal to training again without the forget data, with delta = 0 too")
    _echo(f"  by {found.theorem}")
    if found.survival_bound is not None:
        _echo(
            f"  survival bound {format_up(found.survival_bound, 6)}: no event about the new model "
            "differs by more in probability from runs that never saw the old model"
        )
    if math.isinf(found.epsilon):
        _echo("  This is no guarantee: epsilon is infinite.")


def print_plan(found: Plan) -> None:
    """One row per candidate, then the advice."""
    from expunge.recipes import to_dict

    _echo(
        f"target epsilon = {found.epsilon:g}, delta = {found.delta:g}; {found.parameters:,} "
        f"parameters; noise left in each weight {found.scale:.4g}"
    )
    rows = [
        (
            candidate.method,
            str(candidate.steps),
            f"{candidate.noise_per_step:.4g}",
            f"{candidate.expected_norm:.4g}",
            f"{candidate.kept_norm:.4g}",
            f"{candidate.gradient_evaluations:,}",
            f"≤ {100 * candidate.survival_bound:.1f} %",
        )
        for candidate in found.candidates
    ]
    names = ("method", "T", "σ", "‖noise‖", "‖kept‖", "examples", "survives")
    print_table(names, rows, pad_edge=False)
    for candidate in found.candidates:
        fields = to_dict(candidate.recipe)
        values = [f"{k}={format_exact(v)}" for k, v in fields.items() if v and k != "method"]
        if values:
            _echo(f"  {candidate.method}: " + ", ".join(values))
    _echo("\n" + found.advice)
    for note in found.notes:
        _echo(note)


def print_routes(found: Setting) -> None:
    """The routes of a job, what they cost, why it takes one of them, and the next command."""
    if found.plan is not None:
        _print_measured(found, found.plan)
        typer.echo(f"next: {found.next}")
        return
    if found.routes and not found.costs:
        why = "The network is public and frozen" if found.network else "The inputs are vectors"
        _echo(f"\n{why}, so a head built to forget is open to you:")
    for route in found.routes:
        _echo(f"  {route.name}: {route.guarantee}; keeps {route.keeps}")
        _echo(f"    a request costs {route.costs}; it asks for {route.asks_for}")
        if route.seconds is not None and route.of_retraining is not None:
            takes = "trains for" if route.name == "shards" else "takes"
            _echo(
                f"    here a request of one person {takes} about {route.seconds:,.2f} s, "
                f"{route.of_retraining:.3f} × learning all anew"
            )
    if found.assumption is not None:
        _echo(found.assumption)
    if found.costs:
        title = "part of all training that a request repeats"
        _print_costs(found.costs, title, lambda cost: f"{cost.part:.3f}")
        _print_costs(found.costs, "seconds of it, here", lambda cost: f"{cost.seconds:,.2f}")
        if found.pilot is not None:
            _print_pilot(found.pilot)
    elif found.routes:
        _echo("A head that was trained otherwise is learned anew, once, from the data that remain.")
    typer.echo(f"next: {found.next}")


def _print_costs(costs: Sequence[Cost], title: str, show: Callable[[Cost], str]) -> None:
    """One row for each number of shards and slices, one column for each number of people."""
    counts, rows = sorted({cost.people for cost in costs}), dict[tuple[int, int], list[str]]()
    for cost in costs:
        rows.setdefault((cost.shards, cost.slices), []).append(show(cost))
    names = ("shards", "slices", *("1 person" if n == 1 else f"{n:,} people" for n in counts))
    print_table(names, [(str(S), str(R), *r) for (S, R), r in rows.items()], left=0, title=title)


def _print_pilot(found: Pilot) -> None:
    whole = found.prices[0].test
    rows = [
        (
            "whole" if (p.shards, p.slices) == (1, 1) else f"{p.shards} x {p.slices}",
            f"{p.test:.1f} ± {p.error:.1f}",
            f"{p.test - whole:+.1f}",
        )
        for p in found.prices
    ]
    names = ("shards x slices", "test %", "minus whole")
    print_table(names, rows, title="accuracy, one run each on the pilot's examples")
    _echo(
        f"  The pilot has {found.examples:,} examples, the job {found.of:,}: the fewer a "
        "shard has, the higher the price. Whoever is learned was not looked at, so shards and "
        "slices may be chosen by this table."
    )


def _print_measured(found: Setting, plan: Plan) -> None:
    """One row for each route with its cost here, then the facts, what survives, and why."""
    rows = [
        (
            route.name + (" ←" if route.name == found.route else ""),
            route.guarantee if len(route.guarantee) < 16 else "(0, 0) …",
            "–" if route.epochs is None else f"{route.epochs:,.3g}",
            "–" if route.seconds is None else f"{route.seconds:,.2f}",
            "–" if route.of_retraining is None else f"{route.of_retraining:.2f} ×",
        )
        for route in found.routes
    ]
    names = ("route", "(ε, δ)", "epochs", "seconds", "of retraining")
    print_table(names, rows, left=2, pad_edge=False)
    for route in found.routes:
        _echo(f"  {route.name}: keeps {route.keeps}; asks for {route.asks_for}")
    _echo(
        f"\n{found.assumption} Seconds are measured here, with evaluation; those of shards are a "
        "part of the training's, those of a head are timed on random numbers."
    )
    _echo(plan.advice)
    for note in plan.notes:
        _echo(note)
    _echo(f"\nroute: {found.route}. {found.why}")


def _echo(text: str) -> None:
    """A paragraph, wrapped at the width of the terminal."""
    from rich.console import Console

    Console(highlight=False, markup=False).print(text)
