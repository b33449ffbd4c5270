"""Which chart follows from what: curves of δ are bounds, fall, and end where a person can read."""

import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from expunge.accounting.guarantee import guarantee, log_delta
from expunge.errors import InputError
from expunge.recipes import (
    IDEAL,
    GradientClipping,
    GroupDPSGD,
    ModelClipping,
    OutputPerturbation,
    Retraining,
)
from expunge.reports import figures
from expunge.reports.charts import draw_chart
from expunge.reports.figures import SMALLEST_POWER, chart_forgetting, chart_trade_off, draw_curve

SVG = "{http://www.w3.org/2000/svg}"
STEEP = ModelClipping(model_clip=0.5, learning_rate=1e-3, weight_decay=10.0, noise_std=3.0, steps=9)
RECIPES = [
    STEEP,
    ModelClipping(0.5, 1e-3, 10.0, 0.5, 6),
    OutputPerturbation(1.0, 400.0),
    GradientClipping(0.01, 100.0, 1e-4, 10.0, 40, 0.5),
    GroupDPSGD(clip=1.0, noise_multiplier=4.0, sampling_rate=0.01, steps=100, group_size=2),
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("delta", [1e-5, 1e-40])
def test_curves_fall_are_bounds_and_end_in_sight(recipe: Any, delta: float) -> None:
    claim = guarantee(recipe, delta=delta)
    chart = chart_trade_off(claim, recipe, IDEAL)
    assert chart is not None
    *curves, point = chart.series
    assert point.y == (math.log10(delta),)
    least = min(SMALLEST_POWER, 1.5 * math.log10(delta))
    for name, curve in zip(("retrained", "centre"), curves, strict=False):
        powers = [y for y in curve.y if y is not None]
        assert all(b <= a for a, b in pairwise(powers))
        assert least <= min(powers) <= max(powers) <= 0
        assert len(powers) > 30, "enough points to see the shape"
        at = curve.x[20], curve.x[-1]
        for epsilon, power in zip(at, (powers[20], powers[-1]), strict=True):
            proved = log_delta(recipe, epsilon, compared_to=name) / math.log(10)  # type: ignore[arg-type]
            assert power == pytest.approx(proved, abs=1e-6)
    assert "10⁻⁴⁰⁰" not in draw_chart(chart)


def test_a_fallback_that_rises_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """log10 δ of -682,816 at ε = 1.81 and of -2,274 at 1.82 was seen: both are bounds."""

    def rise(recipe: Any, epsilon: float, **_: Any) -> float:
        return -math.log(10) * (20 * epsilon if epsilon < 0.5 else 5.0)

    monkeypatch.setattr(figures, "log_delta", rise)
    recipe = RECIPES[1]
    chart = chart_trade_off(guarantee(recipe, delta=1e-5), recipe, IDEAL)
    assert chart is not None
    for curve in chart.series[:-1]:
        powers = [y for y in curve.y if y is not None]
        assert all(b <= a for a, b in pairwise(powers))
        assert min(powers) == pytest.approx(-10, abs=0.6)


def test_steps_below_sight_are_left_out() -> None:
    recipe = ModelClipping(0.5, 1e-3, 10.0, 3.0, 60)
    claim = guarantee(recipe, epsilon=0.01)
    chart = chart_forgetting(claim, recipe, IDEAL)
    assert chart is not None
    (line,) = chart.series
    shown = [y for y in line.y if y is not None]
    assert min(shown) >= min(SMALLEST_POWER, 1.5 * math.log10(max(claim.delta, 1e-307)))
    assert len(shown) >= 2
    assert chart_forgetting(claim, OutputPerturbation(1.0, 1.0), IDEAL) is None


def test_a_file_of_charts_is_one_svg_with_its_colours(tmp_path: Path) -> None:
    draw_curve(RECIPES[1], tmp_path / "curve.svg", delta=1e-5)
    root = ET.parse(tmp_path / "curve.svg").getroot()
    assert root.tag == f"{SVG}svg"
    assert len(root.findall(f"{SVG}svg")) == 2, "the trade-off and the steps"
    titles = [node.text for node in root.findall(f"{SVG}text")]
    assert titles == ["The trade-off between epsilon and delta", "What each noisy step buys"]
    style = root.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme: dark" in style
    for used in ("--paper", "--ink", "--soft", "--rule", "--s0"):
        assert f"{used}: #" in style
    draw_curve(RECIPES[2], tmp_path / "one.svg", epsilon=0.0)
    assert len(ET.parse(tmp_path / "one.svg").getroot().findall(f"{SVG}svg")) == 1


@pytest.mark.parametrize(
    ("recipe", "name", "sentence"),
    [
        (RECIPES[1], "curve.png", "a file name ending in .svg"),
        (RECIPES[1], "none/curve.svg", "inside a folder that exists"),
        (Retraining(), "curve.svg", "there is no curve to draw"),
        (OutputPerturbation(1.0, 0.0), "curve.svg", "certifies no finite epsilon"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    tmp_path: Path, recipe: Any, name: str, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        draw_curve(recipe, tmp_path / name, delta=1e-5)
    assert list(tmp_path.iterdir()) == []
