"""Figures at column width: colours and markers that all eyes can tell apart, bands for spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from arms import Arm
from summary import average, list_budgets

mpl.rcParams["svg.hashsalt"] = "expunge"  # the same picture is the same file

# Okabe and Ito's palette; every line also has its own marker and dashes.
COLOURS = {
    "retrain": "#000000",
    "output-perturbation": "#E69F00",
    "gradient-clipping": "#0072B2",
    "model-clipping": "#009E73",
    "dp-sgd": "#CC79A7",
}
LOOKS = {  # version: dashes, marker
    "initialisation": ("-", "*"),
    "own": ("-", "o"),
    "printed": ("-", "s"),
    "certified": ("--", "^"),
    "centre": (":", "x"),
    "gaussian": ("-.", "D"),
}
EPSILON_COLOURS = {0.1: "#D55E00", 1.0: "#0072B2", 10.0: "#56B4E9"}
WIDTH, HEIGHT = 5.0, 2.6


def draw_lines(
    lines: Mapping[str, Sequence[tuple[float, float, float]]],
    styles: Mapping[str, Mapping[str, Any]],
    *,
    title: str,
    horizontal: str,
    vertical: str,
    files: Iterable[Path],
    logarithmic: bool = False,
) -> None:
    """One panel; a line is (x, mean, spread) in order of x, with a band of one spread."""
    with plt.rc_context({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
        for name, points in lines.items():
            if not points:
                continue
            x, mean, spread = (list(column) for column in zip(*points, strict=True))
            style = {"linewidth": 1.1, "markersize": 3, "label": name} | dict(styles[name])
            axes.plot(x, mean, **style)
            low = [m - s for m, s in zip(mean, spread, strict=True)]
            high = [m + s for m, s in zip(mean, spread, strict=True)]
            axes.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
        if logarithmic:
            ticks = sorted({x for points in lines.values() for x, *_ in points})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.set_xticks([], minor=True)
        axes.set(title=title, xlabel=horizontal, ylabel=vertical)
        axes.grid(alpha=0.25, linewidth=0.4)
        axes.legend(fontsize=5.5, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
        save_figure(figure, files)


def draw_arms(
    entries: list[dict[str, Any]],
    styles: Mapping[Arm, tuple[str, Mapping[str, Any]]],
    out: Path,
    name: str,
    *,
    title: str,
    logarithmic: bool = False,
) -> None:
    """Mean test accuracy against budget, an arm a line: its legend and its style."""
    lines, looks = dict[str, list[tuple[float, float, float]]](), dict[str, Mapping[str, Any]]()
    for arm, (label, style) in styles.items():
        points = [(b, average(entries, budget=b, **arm.fields)) for b in list_budgets(entries)]
        lines[label] = [(b, m.value, m.spread) for b, m in points if m.count]
        looks[label] = style
    draw_lines(
        lines, looks, title=title, horizontal="budget (epochs)", vertical="test accuracy (%)",
        files=[out / f"{name}.{kind}" for kind in ("png", "svg")], logarithmic=logarithmic,
    )  # fmt: skip


def draw_panels(
    panels: Mapping[str, Mapping[str, tuple[float, float, float]]],
    *,
    styles: Mapping[str, Mapping[str, str]],
    controls: Iterable[str],
    title: str,
    horizontal: str,
    vertical: str,
    files: Iterable[Path],
    window: float = 8.0,
) -> None:
    """Panels side by side of one point (x, mean, spread) for each name; one legend beside them.

    The x axis is logarithmic with plain numbers; x = 0 stands at its left end. The y axis shows at
    most ``window`` points below the best: what lies lower stands at the bottom, with its value.
    ``controls`` are hollow, lighter and behind; the legend has one line for all of them.
    """
    faded = set(controls)
    points = [point for panel in panels.values() for point in panel.values()]
    least = min((x for x, *_ in points if x > 0), default=1.0) / 2
    top = max(mean for _, mean, _ in points)
    floor = min(mean for _, mean, _ in points if mean >= top - window) - 0.5
    roof = max(mean + spread for _, mean, spread in points)
    with plt.rc_context({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False}):
        figure, several = plt.subplots(
            1, len(panels), figsize=(8.6, 1.2 * HEIGHT), sharex=True, sharey=True,
            layout="constrained", squeeze=False,
        )  # fmt: skip
        known: dict[str, Any] = {}
        for axes, (heading, panel) in zip(several[0], panels.items(), strict=True):
            for name, (x, mean, spread) in panel.items():
                light, low = name in faded, mean < floor
                style = dict(styles[name]) | ({"markerfacecolor": "none"} if light else {})
                drawn = axes.errorbar(
                    max(x, least), floor if low else mean, yerr=0 if low or light else spread,
                    markersize=6 if light else 4.5, linestyle="", elinewidth=0.8,
                    alpha=0.4 if light else 1.0, zorder=1 if light else 2, clip_on=False, **style,
                )  # fmt: skip
                known.setdefault("a control: never saw the old model" if light else name, drawn)
                if low:
                    axes.annotate(f"{mean:.0f} ↓", (max(x, least), floor), fontsize=5,
                                  xytext=(3, 3), textcoords="offset points")  # fmt: skip
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axes.set(title=heading, xlabel=horizontal, ylim=(floor, roof + 0.03 * (roof - floor)))
            axes.grid(alpha=0.25, linewidth=0.4)
        several[0][0].set_ylabel(vertical)
        figure.suptitle(title)
        ordered = [name for name in dict.fromkeys([*styles, *known]) if name in known]
        figure.legend(
            [known[name] for name in ordered], ordered, fontsize=5.5, frameon=False,
            loc="outside right center",
        )  # fmt: skip
        save_figure(figure, files)


def save_figure(figure: Any, files: Iterable[Path]) -> None:
    """Write a figure in every format asked for, and close it."""
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if file.suffix == ".svg" else {}
        figure.savefig(file, dpi=220, metadata=metadata)
    plt.close(figure)


def style_arm(method: str, version: str) -> dict[str, Any]:
    """Colour by method, dashes and marker by version; controls are lighter than the routes.

    >>> style_arm("retrain", "own")["marker"]
    'o'
    """
    dashes, marker = LOOKS[version]
    alpha = 0.45 if version in ("centre", "gaussian") else 1.0
    return {"color": COLOURS[method], "linestyle": dashes, "marker": marker, "alpha": alpha}
