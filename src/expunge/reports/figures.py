"""The pictures of a report: which chart follows from which part of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from expunge.accounting.guarantee import guarantee, is_exact, log_delta
from expunge.certificates.certificate import Certificate
from expunge.certificates.record import Trace
from expunge.certificates.schema import BoundWire
from expunge.display import round_up
from expunge.errors import InputError
from expunge.recipes import (
    IDEAL,
    Bound,
    ComparedTo,
    Execution,
    GradientClipping,
    Guarantee,
    ModelClipping,
    OutputPerturbation,
    Recipe,
)
from expunge.reports.charts import STYLES, Axis, Chart, Series, write_charts
from expunge.reports.metrics import STAGES, Curve, Stage
from expunge.reports.tables import format_percent

SIDES: dict[ComparedTo, str] = {
    "retrained": "against a retrained model",
    "centre": "against the public centre",
}
CURVE_POINTS, STEP_POINTS = 61, 24
# A schedule with projections is accounted from every restart: beyond this it takes too long.
MOST_SCHEDULED_STEPS = 2000
SMALLEST_POWER = -30.0


def draw_curve(
    recipe: Recipe,
    path: str | Path,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    compared_to: ComparedTo = "retrained",
) -> None:
    """Write an SVG file of a recipe's trade-off and, if it has steps, of what each of them buys."""
    found = guarantee(recipe, epsilon=epsilon, delta=delta, compared_to=compared_to)
    if not math.isfinite(found.epsilon):
        raise InputError("there is no curve to draw: the recipe certifies no finite epsilon")
    charts = chart_trade_off(found, recipe, IDEAL), chart_forgetting(found, recipe, IDEAL)
    drawn = [chart for chart in charts if chart is not None]
    if not drawn:
        raise InputError("there is no curve to draw: delta is 0, or too small to show, everywhere")
    write_charts(path, drawn)


def list_bounds(claim: Certificate | Guarantee) -> list[tuple[ComparedTo, Bound | BoundWire]]:
    """Both sides of a claim, where they exist."""
    sides: list[tuple[ComparedTo, Bound | BoundWire]] = [("retrained", claim.retrained)]
    return sides if claim.centre is None else [*sides, ("centre", claim.centre)]


def log_delta_at(
    claim: Certificate | Guarantee,
    recipe: Recipe,
    execution: Execution,
    side: ComparedTo,
    epsilon: float,
) -> float:
    """log δ at ε as the claim's account has it.

    A μ-GDP pair is exactly as hard to tell apart as one Gaussian mechanism at distance μ, so μ is
    not computed again for every point of a curve.
    """
    mu = dict(list_bounds(claim))[side].mu
    if mu is None:
        return log_delta(recipe, epsilon, compared_to=side, execution=execution)
    tail = min(execution.tail_delta * execution.releases, 0.5)
    one = OutputPerturbation(start_clip=mu / 2, noise_std=1.0)
    return log_delta(one, epsilon, execution=Execution(tail_delta=tail))


def chart_trade_off(
    claim: Certificate | Guarantee, recipe: Recipe, execution: Execution
) -> Chart | None:
    """δ against ε for both comparisons, and the claimed point; None where nothing can be shown.

    >>> recipe = OutputPerturbation(start_clip=1.0, noise_std=4.0)
    >>> chart = chart_trade_off(guarantee(recipe, delta=1e-5), recipe, IDEAL)
    >>> [series.name for series in chart.series]  # doctest: +NORMALIZE_WHITESPACE
    ['against a retrained model', 'against the public centre',
     'certified: ε = 1.994, δ = 1e-5']
    """
    sides = list_bounds(claim)
    if is_exact(recipe) or claim.delta == 0:
        return None
    top = max([2 * bound.epsilon for _, bound in sides] + [0.1])
    series: list[Series] = []
    words: list[str] = []
    for side, bound in sides:
        curve = partial(log_delta_at, claim, recipe, execution, side)
        line = _draw_side(SIDES[side], curve, top, _find_least(claim))
        series += [] if line is None else [line]
        words.append(
            f"{SIDES[side].capitalize()}, delta is {_power(curve(0.0) / math.log(10))} at epsilon "
            f"0 and reaches {round_up(bound.delta, 3)} at epsilon {round_up(bound.epsilon, 4)}."
        )
    if not series:
        return None
    name = f"certified: ε = {round_up(claim.epsilon, 4)}, δ = {round_up(claim.delta, 3)}"
    point = Series(name, (claim.epsilon,), (math.log10(claim.delta),), "points")
    return Chart(
        "trade-off",
        "The trade-off between epsilon and delta",
        " ".join([*words, "A larger epsilon holds with a smaller delta."]),
        Axis("ε", include=(0.0,)),
        Axis("δ", "log10", include=(0.0,)),
        (*series, point),
    )


def chart_forgetting(
    claim: Certificate | Guarantee, recipe: Recipe, execution: Execution
) -> Chart | None:
    """δ at the claimed ε after each number of noisy steps."""
    if not isinstance(recipe, GradientClipping | ModelClipping) or recipe.steps < 2:
        return None
    scheduled = isinstance(recipe.learning_rate, tuple) or isinstance(recipe.noise_std, tuple)
    if scheduled and recipe.steps > MOST_SCHEDULED_STEPS:
        return None
    counts = sorted({round(n) for n in np.geomspace(1, recipe.steps, STEP_POINTS).tolist()})
    side, epsilon, least = claim.compared_to, claim.epsilon, _find_least(claim)
    powers = list_powers(
        [
            log_delta(take_steps(recipe, n), epsilon, compared_to=side, execution=execution)
            for n in counts
        ]
    )
    drawn = [(float(n), power) for n, power in zip(counts, powers, strict=True) if power >= least]
    if len(drawn) < 2:
        return None
    shown = round_up(epsilon, 4)
    return Chart(
        "forgetting",
        "What each noisy step buys",
        f"At epsilon {shown}, delta is {_power(powers[0])} after one step and "
        f"{_power(powers[-1])} after all {recipe.steps}.",
        Axis("noisy steps", include=(float(recipe.steps),)),
        Axis(f"δ at ε = {shown}, {SIDES[side]}", "log10", include=(0.0,)),
        (Series("δ", tuple(n for n, _ in drawn), tuple(power for _, power in drawn)),),
    )


def take_steps(
    recipe: GradientClipping | ModelClipping, count: int
) -> GradientClipping | ModelClipping:
    """The recipe's first ``count`` steps.

    >>> recipe = ModelClipping(model_clip=1.0, learning_rate=0.1, weight_decay=0.0,
    ...                        noise_std=[1.0, 2.0], steps=2)
    >>> take_steps(recipe, 1).noise_std
    (1.0,)
    """
    schedules = {name: getattr(recipe, name) for name in ("learning_rate", "noise_std")}
    cut = {name: value[:count] for name, value in schedules.items() if isinstance(value, tuple)}
    return dataclasses.replace(recipe, steps=count, **cut)


def list_powers(logs: Sequence[float]) -> list[float]:
    """log₁₀ δ along a curve, never rising.

    δ falls as ε or the number of steps grows, so a bound for a smaller one holds for a larger one
    too: the running minimum is valid where an accountant's fallback is not monotone. What no
    picture could show is told as 10^-1000000.

    >>> list_powers([-math.log(10), -math.log(1000), -math.log(100)])
    [-1.0, -3.0, -3.0]
    """
    powers = np.maximum(np.asarray(logs) / math.log(10), -1e6)
    return np.round(np.minimum.accumulate(powers), 12).tolist()


def _draw_side(
    name: str, log_delta_of: Callable[[float], float], top: float, least: float
) -> Series | None:
    """δ from ε = 0 to ``top``, or to where it is below 10^``least``; None if it is so at once."""

    def is_visible(epsilon: float) -> bool:
        return log_delta_of(epsilon) >= least * math.log(10)

    if not is_visible(0.0):
        return None
    low, high = 0.0, top
    while not is_visible(high) and high - low > 1e-3 * high > 1e-9 * top:
        middle = (low + high) / 2
        low, high = (middle, high) if is_visible(middle) else (low, middle)
    grid = [high * n / (CURVE_POINTS - 1) for n in range(CURVE_POINTS)]
    powers = list_powers([log_delta_of(epsilon) for epsilon in grid])
    shown = sum(power >= least for power in powers)
    return Series(name, tuple(grid[:shown]), tuple(powers[:shown]), "curve")


def chart_trace(trace: Trace, grad_clip: float | None) -> Chart | None:
    """Norms of gradient, model and noise at every step, on one logarithmic axis."""
    steps = tuple(float(t + 1) for t in range(len(trace)))
    series: list[Series] = []
    words: list[str] = []
    for name, values in (
        ("noise added", trace.noise_norm),
        ("model before noise", trace.model_norm),
        ("gradient before clipping", trace.gradient_norm),
    ):
        if any(values):
            powers = tuple(math.log10(v) if v > 0 else None for v in values)
            series.append(Series(name, steps, powers))
            words.append(
                f"The norm of the {name} lies between {min(values):.6g} and {max(values):.6g}."
            )
    if grad_clip is not None and 0 < grad_clip < math.inf and len(steps) > 1:
        ends = (steps[0], steps[-1]), (math.log10(grad_clip),) * 2
        series.append(Series("gradient clip", *ends, "level"))
        words.append(f"Gradients are clipped to {grad_clip:.4g}.")
    if not series:
        return None
    return Chart(
        "trace",
        "Norms at every noisy step",
        " ".join(words),
        Axis("noisy step"),
        Axis("norm", "log10"),
        tuple(series),
    )


def chart_accuracy(rows: Sequence[Stage]) -> Chart | None:
    """Accuracy of one arm from stage to stage; None when there are fewer than two.

    >>> rows = [Stage(stage="after noise", test=0.1), Stage(stage="before", test=0.9)]
    >>> chart = chart_accuracy(rows)
    >>> chart.description
    'On test data: before 90.0 %, after noise 10.0 %.'
    """
    order = [*STAGES, *sorted({row.stage for row in rows} - set(STAGES))]
    ordered = sorted(rows, key=lambda row: order.index(row.stage))
    stages = tuple(row.stage for row in ordered)
    places = tuple(float(n) for n in range(len(ordered)))
    series: list[Series] = []
    words: list[str] = []
    for name, found in (
        ("retained data", [(row.retain, row.retain_count) for row in ordered]),
        ("forgotten data", [(row.forget, row.forget_count) for row in ordered]),
        ("test data", [(row.test, row.test_count) for row in ordered]),
    ):
        values = tuple(value for value, _ in found)
        pairs = zip(stages, found, strict=True)
        told = [f"{stage} {format_percent(*one)}" for stage, one in pairs if one[0] is not None]
        if told:
            series.append(Series(name, places, values))
            words.append(f"On {name}: {', '.join(told)}.")
    if len(stages) < 2 or not series:
        return None
    return Chart(
        "accuracy",
        "Accuracy from stage to stage",
        " ".join(words),
        Axis("", categories=stages),
        Axis("accuracy", "percent", include=(0.0, 1.0)),
        tuple(series),
    )


def chart_curves(curves: Sequence[Curve]) -> list[Chart]:
    """One chart for all curves with the same labels, at most eight lines each.

    >>> curves = [Curve(name=n, x=(0, 1), y=(2, 1), y_label=n[0]) for n in ("a1", "b1", "a2")]
    >>> [[series.name for series in chart.series] for chart in chart_curves(curves)]
    [['a1', 'a2'], ['b1']]
    """
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        if any(y is not None for y in curve.y):
            groups.setdefault((curve.x_label, curve.y_label), []).append(curve)
    parts = [
        members[begin : begin + 2 * STYLES]
        for members in groups.values()
        for begin in range(0, len(members), 2 * STYLES)
    ]
    return [_chart_group(f"curve-{number}", members) for number, members in enumerate(parts)]


def _chart_group(ident: str, members: Sequence[Curve]) -> Chart:
    words: list[str] = []
    for curve in members:
        known = [y for y in curve.y if y is not None]
        words.append(
            f"{curve.name}: from {known[0]:.4g} to {known[-1]:.4g}, between {min(known):.4g} and "
            f"{max(known):.4g}."
        )
    x, y = members[0].x_label, members[0].y_label
    title = f"{y or 'value'} against {x or 'position'}"
    if len(members) == 1 and members[0].name != y:
        title = f"{members[0].name}: {title}"
    series = tuple(Series(curve.name, curve.x, curve.y) for curve in members)
    return Chart(ident, title[0].upper() + title[1:], " ".join(words), Axis(x), Axis(y), series)


def _find_least(claim: Certificate | Guarantee) -> float:
    """The exponent at which a picture of δ ends: below what is claimed, and readable."""
    return min(SMALLEST_POWER, 1.5 * math.log10(claim.delta)) if claim.delta > 0 else SMALLEST_POWER


def _power(exponent: float) -> str:
    """10 to this power in words, rounded up, never to 0."""
    return round_up(10 ** max(min(exponent, 0.0), -307.0), 3)
