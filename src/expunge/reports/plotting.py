"""Pictures of a guarantee: the ε–δ trade-off of a recipe, and δ against its steps."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from expunge.accounting.guarantee import guarantee, log_delta
from expunge.errors import InputError
from expunge.recipes import ComparedTo, GradientClipping, ModelClipping, Recipe, method_name

FORMATS = (".svg", ".png", ".pdf")


def draw_curve(
    recipe: Recipe,
    path: str | Path,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    compared_to: ComparedTo = "retrained",
) -> None:
    """Write the ε–δ curve of ``recipe`` (and δ against steps, if it has any) to ``path``."""
    target = Path(path)
    if target.suffix not in FORMATS:
        raise InputError.of("curve", str(path), "a file name ending in " + ", ".join(FORMATS))
    if not target.parent.is_dir():
        raise InputError.of("curve", str(path), "in a directory that exists")
    found = guarantee(recipe, epsilon=epsilon, delta=delta, compared_to=compared_to)
    if not math.isfinite(found.epsilon):
        raise InputError("there is no curve to draw: the recipe certifies no finite epsilon")
    from matplotlib.figure import Figure

    has_steps = isinstance(recipe, GradientClipping | ModelClipping)
    figure = Figure(figsize=(9.0 if has_steps else 4.6, 3.6), layout="constrained")
    axes: Any = figure.subplots(1, 2 if has_steps else 1, squeeze=False)[0]
    _draw_trade_off(axes[0], recipe, found.epsilon, found.delta, compared_to)
    if isinstance(recipe, GradientClipping | ModelClipping):
        _draw_steps(axes[1], recipe, found.epsilon, compared_to)
    figure.suptitle(f"{method_name(recipe)}, compared to {compared_to}", fontsize=10)
    figure.savefig(target)


def _draw_trade_off(
    axes: Any, recipe: Recipe, epsilon: float, delta: float, compared_to: ComparedTo
) -> None:
    grid = np.linspace(0.0, max(2 * epsilon, 0.1), 120)
    values = [log_delta(recipe, float(e), compared_to=compared_to) / math.log(10) for e in grid]
    axes.plot(grid, np.maximum(values, -300), color="#0072b2")
    axes.plot([epsilon], [math.log10(max(delta, 1e-300))], "o", color="#d55e00")
    axes.annotate(
        f"  ε = {epsilon:.4g}, δ = {delta:.3g}", (epsilon, math.log10(max(delta, 1e-300)))
    )
    axes.set(xlabel="ε", ylabel="log₁₀ δ", title="trade-off")
    axes.grid(alpha=0.3)


def _draw_steps(
    axes: Any, recipe: GradientClipping | ModelClipping, epsilon: float, compared_to: ComparedTo
) -> None:
    counts = np.unique(np.geomspace(1, recipe.steps, 60).round().astype(int))
    values = [
        log_delta(take_steps(recipe, int(n)), epsilon, compared_to=compared_to) / math.log(10)
        for n in counts
    ]
    axes.plot(counts, np.maximum(values, -300), marker=".", color="#009e73")
    axes.set(xlabel="noisy steps", ylabel=f"log₁₀ δ at ε = {epsilon:.4g}", title="forgetting")
    axes.grid(alpha=0.3)


def take_steps(
    recipe: GradientClipping | ModelClipping, count: int
) -> GradientClipping | ModelClipping:
    """The recipe's first ``count`` steps.

    >>> recipe = ModelClipping(model_clip=1.0, learning_rate=0.1, weight_decay=0.0,
    ...                        noise_std=[1.0, 2.0], steps=2)
    >>> take_steps(recipe, 1).noise_std
    (1.0,)
    """
    cut = {
        name: value[:count]
        for name, value in (
            ("learning_rate", recipe.learning_rate),
            ("noise_std", recipe.noise_std),
        )
        if isinstance(value, tuple)
    }
    return dataclasses.replace(recipe, steps=count, **cut)
