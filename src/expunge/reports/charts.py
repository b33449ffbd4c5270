"""Line charts as inline SVG text: axes, ticks, lines, points, a legend and a text alternative.

Nothing is fetched and no script runs. Colours are CSS variables (``charts.css``, which a page or a
file of charts includes), so that one drawing serves light, dark and paper; series differ by marker
and dash as well, so that no colour has to be told from another. Same chart, same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Literal

from expunge.errors import InputError
from expunge.files import write_atomic

Scale = Literal["linear", "log10", "percent"]
Mark = Literal["line", "curve", "points", "level"]

WIDTH, HEIGHT = 520.0, 340.0
LEFT, RIGHT, BOTTOM = 62.0, 16.0, 50.0
LINE_HEIGHT, LETTER = 18.0, 7.4
STYLES = 4
STYLE_FILE = Path(__file__).parent / "charts.css"
MARGIN, TITLE = 20.0, 40.0
MOST_POINTS, MOST_MARKERS = 400, 40
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """``log10`` values are exponents, so that 10⁻⁴⁰⁰ can be drawn; ``percent`` ones are fractions.

    With ``categories`` the values are positions in that list. ``include`` must be in the picture.
    """

    label: str
    scale: Scale = "linear"
    categories: tuple[str, ...] = ()
    include: tuple[float, ...] = ()


@dataclass(frozen=True)
class Series:
    """Points in order; None in ``y`` is a gap. A ``line`` of few points marks each of them; a
    ``curve`` marks none, nor does a ``level``, which is dashed."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    mark: Mark = "line"

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise InputError(f"series {self.name!r} has {len(self.x)} x and {len(self.y)} y values")


@dataclass(frozen=True)
class Chart:
    """``ident`` is unique in the page; ``description`` says in words what the picture shows."""

    ident: str
    title: str
    description: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


def draw_chart(chart: Chart) -> str:
    """The chart as one ``<svg>`` element.

    >>> line = Series("loss", (0.0, 1.0), (2.0, 0.5))
    >>> text = draw_chart(Chart("c1", "Loss", "Falls.", Axis("epoch"), Axis("loss"), (line,)))
    >>> text.startswith('<svg role="img"'), text.count("<polyline"), "Falls." in text
    (True, 1, True)
    """
    legend = _lay_out_legend([series.name for series in chart.series])
    top = 34 + LINE_HEIGHT * len(legend)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    points = [_list_points(series) for series in chart.series]
    x_low, x_high = _find_range(chart.x, [x for run in points for x, _ in run])
    y_low, y_high = _find_range(chart.y, [y for run in points for _, y in run])

    def place_x(value: float) -> float:
        return LEFT + (right - LEFT) * (value - x_low) / (x_high - x_low)

    def place_y(value: float) -> float:
        return bottom - (bottom - top) * (value - y_low) / (y_high - y_low)

    body = [
        *_draw_y_axis(chart.y, y_low, y_high, place_y),
        *_draw_x_axis(chart.x, x_low, x_high, place_x),
        f'<path class="axis" d="M{LEFT:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"/>',
        *(_draw_key(*entry, chart.series) for row in legend for entry in row),
    ]
    for place, series in enumerate(chart.series):
        body += _draw_series(place, series, place_x, place_y)
    names = f"{chart.ident}-title {chart.ident}-desc"
    return "".join(
        [
            f'<svg role="img" aria-labelledby="{names}" viewBox="0 0 {WIDTH:g} {HEIGHT:g}">',
            f'<title id="{chart.ident}-title">{escape(chart.title)}</title>',
            f'<desc id="{chart.ident}-desc">{escape(chart.description)}</desc>',
            *body,
            "</svg>",
        ]
    )


def check_name(path: str | Path) -> None:
    """Charts are written as SVG, which follows light, dark and paper; nothing else.

    >>> check_name("curve.png")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: the picture is 'curve.png'; it must be a file name ending in .svg
    """
    if Path(path).suffix != ".svg":
        raise InputError.of("the picture", str(path), "a file name ending in .svg")


def write_charts(path: str | Path, charts: Sequence[Chart]) -> None:
    """One SVG file with the charts side by side, each below its title."""
    check_name(path)
    width, height = len(charts) * (WIDTH + MARGIN) + MARGIN, TITLE + HEIGHT + MARGIN
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" '
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">'
        f"<style>{STYLE_FILE.read_text(encoding='utf-8')}</style>"
        '<rect width="100%" height="100%" fill="var(--paper)"/>'
    ]
    for place, chart in enumerate(charts):
        x = MARGIN + place * (WIDTH + MARGIN)
        parts.append(f'<text class="name" x="{x:g}" y="24">{escape(chart.title)}</text>')
        parts.append(
            f'<svg x="{x:g}" y="{TITLE:g}" width="{WIDTH:g}" height="{HEIGHT:g}">'
            f"{draw_chart(chart)}</svg>"
        )
    write_atomic(path, "".join([*parts, "</svg>\n"]).encode("utf-8"))


def thin(series: Series) -> Series:
    """At most ``MOST_POINTS`` points: the lowest and the highest of each stretch stay.

    >>> long = Series("spike", tuple(range(9999)), tuple(float(i == 5000) for i in range(9999)))
    >>> short = thin(long)
    >>> len(short.x) <= MOST_POINTS, max(short.y)
    (True, 1.0)
    """
    if len(series.x) <= MOST_POINTS:
        return series
    kept: set[int] = {0, len(series.x) - 1}
    stretch = math.ceil(2 * len(series.x) / (MOST_POINTS - 2))
    for begin in range(0, len(series.x), stretch):
        places = [
            (y, i) for i, y in enumerate(series.y[begin : begin + stretch], begin) if y is not None
        ]
        if places:
            kept |= {min(places)[1], max(places)[1]}
    order = sorted(kept)
    return Series(
        series.name,
        tuple(series.x[i] for i in order),
        tuple(series.y[i] for i in order),
        series.mark,
    )


def find_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers in [low, high], steps of 1, 2 or 5 times a power of ten.

    >>> find_ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(m * power for m in (1, 2, 5, 10) if span / (m * power) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(n * step, digits) + 0.0 for n in range(first, last + 1)]


def format_power(exponent: float) -> str:
    """10 to this power, as a tick says it.

    >>> format_power(-5), format_power(0), format_power(-1.0), format_power(1.3010299956639813)
    ('10⁻⁵', '1', '0.1', '20')
    """
    if -3 <= exponent <= 4:
        return f"{10**exponent:.3g}" if exponent < 3 else f"{10**exponent:,.0f}"
    whole = math.floor(exponent + 1e-9)
    factor = f"{10 ** (exponent - whole):.2g}"
    power = "10" + str(whole).translate(_SUPERSCRIPTS)
    return power if factor == "1" else f"{factor}·{power}"


def _list_points(series: Series) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]


def _find_range(axis: Axis, values: Iterable[float]) -> tuple[float, float]:
    if axis.categories:
        return -0.5, len(axis.categories) - 0.5
    known = [*values, *axis.include]
    low, high = min(known, default=0.0), max(known, default=1.0)
    size = max(abs(low), abs(high))
    if not all(math.isfinite(4 * value) for value in known):
        raise InputError.of(f"the range of {axis.label or 'an axis'}", (low, high), "below 4e307")
    if high - low <= max(1e-12 * size, 1e-280):
        half = 0.5 if axis.scale == "log10" or size == 0 else max(size / 2, 1e-280)
        low, high = low - half, high + half
    margin = 0.05 * (high - low)
    return (low if low in axis.include else low - margin), (
        high if high in axis.include else high + margin
    )


def _label_ticks(axis: Axis, low: float, high: float) -> list[tuple[float, str]]:
    if axis.categories:
        return [(float(place), name) for place, name in enumerate(axis.categories)]
    match axis.scale:
        case "linear":
            return [(tick, _format_plain(tick)) for tick in find_ticks(low, high)]
        case "percent":
            return [(tick, f"{100 * tick:.4g} %") for tick in find_ticks(low, high)]
        case "log10":
            return [(tick, format_power(tick)) for tick in _find_power_ticks(low, high)]


def _find_power_ticks(low: float, high: float) -> list[float]:
    """Whole exponents where there are enough of them, else 1, 2, 5 within the decades."""
    if high - low >= 2.5:
        stride = max(1, math.ceil((high - low) / 6))
        first = math.ceil(low / stride)
        return [float(n * stride) for n in range(first, math.floor(high / stride) + 1)]
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [n + math.log10(m) for n in decades for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) >= 2:
        return inside
    power = math.floor(low)
    mantissas = find_ticks(10 ** (low - power), 10 ** (high - power), 5)
    return [power + math.log10(m) for m in mantissas if m > 0]


def _format_plain(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.6g}" if abs(value) < 1e4 else f"{value:,.0f}"
    whole = math.floor(math.log10(abs(value)) + 1e-9)
    factor = f"{value / 10.0**whole:.3g}"
    return f"{factor}·10" + str(whole).translate(_SUPERSCRIPTS)


def _draw_y_axis(
    axis: Axis, low: float, high: float, place: Callable[[float], float]
) -> Iterable[str]:
    yield f'<text class="name" x="0" y="14">{escape(axis.label)}</text>'
    for tick, name in _label_ticks(axis, low, high):
        y = place(tick)
        yield f'<path class="grid" d="M{LEFT:.1f} {y:.1f}H{WIDTH - RIGHT:.1f}"/>'
        yield f'<text x="{LEFT - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'


def _draw_x_axis(
    axis: Axis, low: float, high: float, place: Callable[[float], float]
) -> Iterable[str]:
    bottom = HEIGHT - BOTTOM
    ticks = _label_ticks(axis, low, high)
    room = (WIDTH - LEFT - RIGHT) / max(len(ticks), 1) / LETTER
    for tick, name in ticks:
        x = place(tick)
        yield f'<path class="axis" d="M{x:.1f} {bottom:.1f}v5"/>'
        for row, part in enumerate(_wrap(name, int(room)) if axis.categories else [name]):
            y = bottom + 19 + 14 * row
            yield f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(part)}</text>'
    if axis.label:
        yield (
            f'<text class="name" x="{WIDTH - RIGHT:.1f}" y="{HEIGHT - 10:.1f}" text-anchor="end">'
            f"{escape(axis.label)}</text>"
        )


def _wrap(name: str, room: int) -> list[str]:
    """At most two lines, broken at a space or after a hyphen, each cut to its room."""
    if len(name) > room:
        cuts = [i + 1 for i, letter in enumerate(name) if letter in " -" and i + 1 <= room + 1]
        if cuts:
            parts = [name[: cuts[-1]].rstrip(" "), name[cuts[-1] :]]
            return [_cut(part, room + 1) for part in parts]
    return [_cut(name, room + 1)]


def _cut(name: str, room: int) -> str:
    return name if len(name) <= room else name[: max(room - 1, 1)] + "…"


def _lay_out_legend(names: Sequence[str]) -> list[list[tuple[int, str, float, float]]]:
    """Rows of (series, shortened name, x, y); a single series needs no legend."""
    if len(names) < 2:
        return []
    rows: list[list[tuple[int, str, float, float]]] = [[]]
    x = 0.0
    for place, name in enumerate(names):
        short = _cut(name, 52)
        width = 34 + LETTER * len(short) + 14
        if rows[-1] and x + width > WIDTH:
            rows.append([])
            x = 0.0
        rows[-1].append((place, short, x, 20 + LINE_HEIGHT * len(rows)))
        x += width
    return rows


def _draw_key(place: int, name: str, x: float, y: float, series: Sequence[Series]) -> str:
    one, middle = series[place], y - 4
    line = f'<path class="line {_style(place, one.mark)}" d="M{x:.1f} {middle:.1f}h26"/>'
    point = _draw_marker(place, x + 13, middle)
    drawn = ("" if one.mark == "points" else line) + (point if _has_markers(one) else "")
    return f'{drawn}<text x="{x + 32:.1f}" y="{y:.1f}">{escape(name)}</text>'


def _has_markers(series: Series) -> bool:
    return series.mark == "points" or (series.mark == "line" and len(series.x) <= MOST_MARKERS)


def _draw_series(
    place: int,
    series: Series,
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
) -> Iterable[str]:
    shown = thin(series)
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(shown.x, shown.y, strict=True):
        if y is None:
            runs.append([])
        else:
            runs[-1].append((place_x(x), place_y(y)))
    if series.mark != "points":
        for run in runs:
            if len(run) > 1:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
                yield f'<polyline class="line {_style(place, series.mark)}" points="{path}"/>'
    for run in runs:
        if _has_markers(series) or len(run) == 1:
            yield from (_draw_marker(place, x, y) for x, y in run)


def _style(place: int, mark: Mark) -> str:
    return f"s{place % STYLES} " + ("level" if mark == "level" else f"d{place // STYLES % 3}")


def _draw_marker(place: int, x: float, y: float) -> str:
    """Circle, square, triangle, diamond: one shape per colour."""
    style = f'class="mark s{place % STYLES}"'
    corners = {
        1: ((-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)),
        2: ((0.0, -4.8), (4.6, 3.6), (-4.6, 3.6)),
        3: ((0.0, -5.0), (5.0, 0.0), (0.0, 5.0), (-5.0, 0.0)),
    }.get(place % STYLES)
    if corners is None:
        return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    first, *rest = corners
    moves = "".join(f"l{b[0] - a[0]:.1f} {b[1] - a[1]:.1f}" for a, b in pairwise([first, *rest]))
    return f'<path {style} d="M{x + first[0]:.1f} {y + first[1]:.1f}{moves}z"/>'
