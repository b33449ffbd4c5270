"""The pictures of a report: which chart follows from which part of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from expunge.accounting.guarantee import log_delta
from expunge.certificates.certificate import Certificate
from expunge.certificates.record import Trace
from expunge.certificates.schema import BoundWire
from expunge.certificates.wording import round_up
from expunge.recipes import (
    ComparedTo,
    Execution,
    GradientClipping,
    ModelClipping,
    OutputPerturbation,
)
from expunge.reports.charts import STYLES, Axis, Chart, Series
from expunge.reports.metrics import STAGES, Arm, Curve, Stage
from expunge.reports.plotting import take_steps

SIDES: dict[ComparedTo, str] = {
    "retrained": "against a retrained model",
    "centre": "against the public centre",
}
CURVE_POINTS, STEP_POINTS = 61, 24
# A schedule with projections is accounted from every restart: beyond this it takes too long.
MOST_SCHEDULED_STEPS = 2000


def list_bounds(certificate: Certificate) -> list[tuple[ComparedTo, BoundWire]]:
    """Both sides of a certificate, where they exist."""
    sides: list[tuple[ComparedTo, BoundWire | None]] = [
        ("retrained", certificate.retrained),
        ("centre", certificate.centre),
    ]
    return [(side, bound) for side, bound in sides if bound is not None]


def log_delta_at(certificate: Certificate, side: ComparedTo, epsilon: float) -> float:
    """log δ at ε as the certificate's account has it.

    A μ-GDP pair is exactly as hard to tell apart as one Gaussian mechanism at distance μ, so μ is
    not computed again for every point of a curve.
    """
    mu = dict(list_bounds(certificate))[side].mu
    if mu is None:
        return log_delta(
            certificate.method, epsilon, compared_to=side, execution=certificate.execution
        )
    tail = min(certificate.finite_precision.tail_delta * certificate.releases, 0.5)
    one = OutputPerturbation(start_clip=mu / 2, noise_std=1.0)
    return log_delta(one, epsilon, execution=Execution(tail_delta=tail))


def chart_trade_off(certificate: Certificate) -> Chart | None:
    """δ against ε for both comparisons, and the certified point; None where δ is 0 everywhere."""
    sides = list_bounds(certificate)
    if certificate.recipe.method == "retraining":
        return None
    top = max([2 * bound.epsilon for _, bound in sides] + [0.1])
    grid = [top * n / (CURVE_POINTS - 1) for n in range(CURVE_POINTS)]
    series: list[Series] = []
    words: list[str] = []
    for side, bound in sides:
        logs = [log_delta_at(certificate, side, e) / math.log(10) for e in grid]
        known = [value if value > -1e6 else None for value in logs]
        series.append(Series(SIDES[side], tuple(grid), tuple(known), "line"))
        words.append(
            f"{SIDES[side].capitalize()}, delta is {_power(logs[0])} at "
            f"epsilon 0 and reaches {round_up(bound.delta, 3)} at epsilon "
            f"{round_up(bound.epsilon, 4)}."
        )
    point = (certificate.epsilon,), (math.log10(certificate.delta),)
    if not any(value is not None for one in series for value in one.y):
        return None
    certified = f"certified: ε = {round_up(certificate.epsilon, 4)}, δ = " + round_up(
        certificate.delta, 3
    )
    return Chart(
        "trade-off",
        "The trade-off between epsilon and delta",
        " ".join([*words, "Both curves fall: a larger epsilon holds with a smaller delta."]),
        Axis("ε", include=(0.0,)),
        Axis("δ", "log10", include=(0.0,)),
        (*series, Series(certified, *point, "points")),
    )


def chart_forgetting(certificate: Certificate) -> Chart | None:
    """δ at the certified ε after each number of noisy steps."""
    recipe = certificate.method
    if not isinstance(recipe, GradientClipping | ModelClipping) or recipe.steps < 2:
        return None
    scheduled = isinstance(recipe.learning_rate, tuple) or isinstance(recipe.noise_std, tuple)
    if scheduled and recipe.steps > MOST_SCHEDULED_STEPS:
        return None
    counts = sorted({round(n) for n in np.geomspace(1, recipe.steps, STEP_POINTS).tolist()})
    side, epsilon = certificate.compared_to, certificate.epsilon
    logs = [
        log_delta(take_steps(recipe, n), epsilon, compared_to=side, execution=certificate.execution)
        / math.log(10)
        for n in counts
    ]
    if min(logs) <= -1e6:
        return None
    shown = round_up(epsilon, 4)
    return Chart(
        "forgetting",
        "What each noisy step buys",
        f"At epsilon {shown}, delta is {_power(logs[0])} after one step and "
        f"{_power(logs[-1])} after all {recipe.steps}.",
        Axis("noisy steps"),
        Axis(f"δ at ε = {shown}, {SIDES[side]}", "log10", include=(0.0,)),
        (Series("δ", tuple(map(float, counts)), tuple(logs)),),
    )


def chart_trace(trace: Trace, grad_clip: float | None) -> Chart | None:
    """Norms of gradient, model and noise at every step, on one logarithmic axis."""
    if len(trace) == 0:
        return None
    steps = tuple(float(t + 1) for t in range(len(trace)))
    columns = {
        "noise added": trace.noise_norm,
        "model before noise": trace.model_norm,
        "gradient before clipping": trace.gradient_norm,
    }
    series = [
        Series(name, steps, tuple(math.log10(v) if v > 0 else None for v in values))
        for name, values in columns.items()
        if any(values)
    ]
    words = [
        f"The norm of the {name} lies between {min(values):.4g} and {max(values):.4g}."
        for name, values in columns.items()
        if any(values)
    ]
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
    if len(ordered) < 2:
        return None
    places = tuple(float(n) for n in range(len(ordered)))
    series: list[Series] = []
    words: list[str] = []
    for name, values in (
        ("retained data", tuple(row.retain for row in ordered)),
        ("forgotten data", tuple(row.forget for row in ordered)),
        ("test data", tuple(row.test for row in ordered)),
    ):
        told = [
            f"{row.stage} {100 * v:.1f} %"
            for row, v in zip(ordered, values, strict=True)
            if v is not None
        ]
        if told:
            series.append(Series(name, places, values))
            words.append(f"On {name}: {', '.join(told)}.")
    if not series:
        return None
    return Chart(
        "accuracy",
        "Accuracy from stage to stage",
        " ".join(words),
        Axis("", categories=tuple(row.stage for row in ordered)),
        Axis("accuracy", "percent", include=(0.0, 1.0)),
        tuple(series),
    )


def chart_cost(arms: Sequence[Arm]) -> Chart | None:
    """Test accuracy against the examples each arm took a gradient of.

    >>> arms = [Arm(arm="a", gradient_evaluations=n, test=0.5) for n in (10, 2000)]
    >>> chart_cost(arms).description
    'a: 50.0 % for 10 gradients. a: 50.0 % for 2,000 gradients.'
    """
    known = [a for a in arms if a.gradient_evaluations is not None and a.test is not None]
    if len(known) < 2:
        return None
    series = tuple(
        Series(arm.arm, (arm.gradient_evaluations or 0.0,), (arm.test,), "points") for arm in known
    )
    words = [
        f"{arm.arm}: {100 * (arm.test or 0.0):.1f} % for {arm.gradient_evaluations:,.0f} gradients."
        for arm in known
    ]
    return Chart(
        "cost-chart",
        "Test accuracy against cost",
        " ".join(words),
        Axis("gradient evaluations (examples)", include=(0.0,)),
        Axis("test accuracy", "percent"),
        series,
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
    charts: list[Chart] = []
    for (x_label, y_label), members in groups.items():
        for begin in range(0, len(members), 2 * STYLES):
            charts.append(
                _chart_group(len(charts), x_label, y_label, members[begin:][: 2 * STYLES])
            )
    return charts


def _chart_group(number: int, x_label: str, y_label: str, members: Sequence[Curve]) -> Chart:
    words: list[str] = []
    for curve in members:
        known = [y for y in curve.y if y is not None]
        words.append(
            f"{curve.name}: from {known[0]:.4g} to {known[-1]:.4g}, between {min(known):.4g} and "
            f"{max(known):.4g}."
        )
    title = f"{y_label or 'value'} against {x_label or 'position'}"
    if len(members) == 1:
        title = f"{members[0].name}: {title}"
    return Chart(
        f"curve-{number}",
        title[0].upper() + title[1:],
        " ".join(words),
        Axis(x_label),
        Axis(y_label),
        tuple(Series(curve.name, curve.x, curve.y) for curve in members),
    )


def _power(exponent: float) -> str:
    """10 to this power in words, rounded up, never to 0."""
    return round_up(10 ** max(min(exponent, 0.0), -307.0), 3)
