"""Figures at column width: colours and markers that all eyes can tell apart, bands for spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's palette; every line also has its own marker and dashes.
COLOURS = {
    "retrain": "#000000",
    "output-perturbation": "#E69F00",
    "gradient-clipping": "#0072B2",
    "model-clipping": "#009E73",
    "dp-sgd": "#CC79A7",
}
DASHES = {"own": "-", "printed": "-", "certified": "--", "centre": ":", "gaussian": "-."}
MARKERS = {"own": "o", "printed": "s", "certified": "^", "centre": "x", "gaussian": "D"}
EPSILON_COLOURS = {0.1: "#D55E00", 1.0: "#0072B2", 10.0: "#56B4E9"}
WIDTH, HEIGHT = 3.4, 2.6


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
            axes.set_xscale("log")
        axes.set(title=title, xlabel=horizontal, ylabel=vertical)
        axes.grid(alpha=0.25, linewidth=0.4)
        axes.legend(fontsize=5.5, frameon=False)
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"Date": None} if file.suffix == ".svg" else {}
            figure.savefig(file, dpi=220, metadata=metadata)
        plt.close(figure)


def style_arm(method: str, version: str) -> dict[str, Any]:
    """Colour by method, dashes and marker by version.

    >>> style_arm("retrain", "own")["marker"]
    'o'
    """
    return {
        "color": COLOURS[method],
        "linestyle": DASHES[version],
        "marker": MARKERS[version],
    }
