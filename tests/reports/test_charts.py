"""Charts: well-formed, inside their frame, nothing lost, nothing that a name could inject."""

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.errors import InputError
from expunge.reports.charts import (
    HEIGHT,
    MOST_POINTS,
    WIDTH,
    Axis,
    Chart,
    Series,
    draw_chart,
    find_ticks,
    format_power,
    thin,
)

REAL = st.floats(-1e300, 1e300, allow_subnormal=True)


def chart_of(*series: Series, x: Axis | None = None, y: Axis | None = None, **texts: str) -> Chart:
    words = {"ident": "one", "title": "Title", "description": "Description."} | texts
    return Chart(x=x or Axis("x"), y=y or Axis("y"), series=series, **words)


def read_numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?\d+\.?\d*", text)]


def list_places(root: ET.Element) -> list[tuple[float, float]]:
    """Where lines and markers are drawn."""
    places: list[tuple[float, float]] = []
    for node in root.iter():
        if node.tag == "polyline":
            numbers = read_numbers(node.attrib["points"])
            places += zip(numbers[::2], numbers[1::2], strict=True)
        if node.tag == "circle":
            places.append((float(node.attrib["cx"]), float(node.attrib["cy"])))
    return places


@settings(max_examples=150, deadline=None)
@given(
    points=st.lists(st.tuples(REAL, st.none() | REAL), min_size=1, max_size=30),
    scale=st.sampled_from(["linear", "percent"]),
)
def test_any_points_stay_in_the_frame(points: Any, scale: Any) -> None:
    x, y = zip(*points, strict=True)
    text = draw_chart(chart_of(Series("s", x, y), y=Axis("y", scale)))
    root = ET.fromstring(text)
    known = [value for value in y if value is not None]
    assert len(root.findall("circle")) == len(known)
    for left, down in list_places(root):
        assert 0 <= left <= WIDTH
        assert 0 <= down <= HEIGHT
    assert "nan" not in text
    assert "inf" not in text


def test_points_are_where_their_values_say() -> None:
    axes = {"x": Axis("x", include=(0.0, 10.0)), "y": Axis("y", include=(0.0, 1.0))}
    line = Series("s", (0.0, 5.0, 10.0), (0.0, 1.0, 0.25))
    places = list_places(ET.fromstring(draw_chart(chart_of(line, **axes))))[:3]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert (y0 - y2) / (y0 - y1) == pytest.approx(0.25, abs=1e-3)
    assert y1 < y0, "larger is higher"


def test_gaps_break_the_line_and_levels_have_no_markers() -> None:
    gap = Series("s", (0.0, 1.0, 2.0, 3.0, 4.0), (1.0, 2.0, None, 3.0, 4.0))
    text = draw_chart(chart_of(gap, Series("level", (0.0, 4.0), (2.0, 2.0), "level")))
    assert text.count("<polyline") == 3
    assert text.count("<circle") == 4 + 1, "four points and the key of the legend"
    assert text.count('class="mark s1"') == 0


@given(
    place=st.floats(-1e5, 1e5),
    span=st.floats(1e-9, 1e12),
)
def test_ticks_are_round_even_and_inside(place: float, span: float) -> None:
    low, high = place * span, (place + 1) * span
    ticks = find_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    slack = 1e-6 * span
    assert low - slack <= ticks[0] <= ticks[-1] <= high + slack
    gaps = [b - a for a, b in pairwise(ticks)]
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-3)
    mantissa = gaps[0] / 10 ** math.floor(math.log10(gaps[0]) + 1e-6)
    assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-2


@pytest.mark.parametrize(
    ("exponent", "text"),
    [(-400, "10⁻⁴⁰⁰"), (-5, "10⁻⁵"), (-2, "0.01"), (0, "1"), (3, "1,000"), (6, "10⁶"),
     (math.log10(5) - 5, "5·10⁻⁵")],
)  # fmt: skip
def test_powers_are_written_as_people_write_them(exponent: float, text: str) -> None:
    assert format_power(exponent) == text


@pytest.mark.parametrize("values", [(-400.0, 0.0), (0.99, 1.05), (0.3, 0.31), (-1.0, 2.0)])
def test_every_logarithmic_axis_has_two_ticks_or_more(values: tuple[float, float]) -> None:
    text = draw_chart(chart_of(Series("s", (0.0, 1.0), values), y=Axis("y", "log10")))
    assert text.count('class="grid"') >= 2


@pytest.mark.slow
@given(
    values=st.lists(st.none() | st.floats(-1e9, 1e9), min_size=MOST_POINTS + 1, max_size=3000),
)
@settings(max_examples=30, deadline=None)
def test_thinning_keeps_ends_and_extremes(values: list[float | None]) -> None:
    series = Series("s", tuple(map(float, range(len(values)))), tuple(values))
    short = thin(series)
    assert len(short.x) <= MOST_POINTS
    assert (short.x[0], short.x[-1]) == (series.x[0], series.x[-1])
    known = [value for value in values if value is not None]
    kept = [value for value in short.y if value is not None]
    if known:
        assert (min(kept), max(kept)) == (min(known), max(known))


def test_text_alternatives_and_no_injection() -> None:
    hostile = "</desc><script>alert('x')</script>\"&"
    categories = Axis("", categories=(hostile, "after fine-tuning and a long name"))
    text = draw_chart(
        chart_of(
            Series(hostile, (0.0, 1.0), (0.5, 0.6)),
            Series("b", (0.0, 1.0), (0.1, 0.2)),
            x=categories,
            y=Axis(hostile, "percent"),
            title=hostile,
            description=hostile,
        )
    )
    root = ET.fromstring(text)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-labelledby"] == "one-title one-desc"
    assert [root.findtext("title"), root.findtext("desc")] == [hostile, hostile]
    assert {node.tag for node in root.iter()} == {
        "svg", "title", "desc", "text", "path", "polyline", "circle",
    }  # fmt: skip


def test_series_differ_without_colour() -> None:
    series = [Series(str(n), (0.0, 1.0), (float(n), n + 1.0)) for n in range(8)]
    root = ET.fromstring(draw_chart(chart_of(*series)))
    styles = [node.attrib["class"] for node in root.iter("polyline")]
    assert len(set(styles)) == 8
    kinds = {
        node.attrib["d"].count("l") for node in root.iter("path") if "mark" in node.get("class", "")
    }
    assert kinds == {2, 3}, "triangles beside squares and diamonds; circles are their own element"


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e308])
def test_what_cannot_be_drawn_is_one_sentence(value: float) -> None:
    with pytest.raises(InputError, match="the range of loss"):
        draw_chart(chart_of(Series("s", (0.0, 1.0), (0.0, value)), y=Axis("loss")))


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="has 1 x and 2 y values"):
        Series("s", (0.0,), (0.0, 1.0))
