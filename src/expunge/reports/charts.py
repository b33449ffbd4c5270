"""Line charts as inline SVG text: axes, ticks, lines, points, a legend and a text alternative.

Nothing is fetched and no script runs. Colours are CSS variables (``charts.css``, which a page or a
file of charts includes), so that one drawing serves light, dark and paper; series differ by marker
and dash as well, so that no colour has to be told from another. Same chart, same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
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
_SHAPES = {
    1: "m-3.6 -3.6l7.2 0l0 7.2l-7.2 0z",
    2: "m0 -4.8l4.6 8.4l-9.2 0z",
    3: "m0 -5l5 5l-5 5l-5 -5z",
}
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
    legend, rows = _draw_legend(chart.series)
    top = 34 + LINE_HEIGHT * rows
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    points = [(x, y) for s in chart.series for x, y in zip(s.x, s.y, strict=True) if y is not None]
    x_low, x_high = _find_range(chart.x, [x for x, _ in points])
    y_low, y_high = _find_range(chart.y, [y for _, y in points])

    def place_x(value: float) -> float:
        return LEFT + (right - LEFT) * (value - x_low) / (x_high - x_low)

    def place_y(value: float) -> float:
        return bottom - (bottom - top) * (value - y_low) / (y_high - y_low)

    body = [
        *_draw_y_axis(chart.y, y_low, y_high, place_y),
        *_draw_x_axis(chart.x, x_low, x_high, place_x),
        f'<path class="axis" d="M{LEFT:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"/>',
        *legend,
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


def write_charts(path: str | Path, charts: Sequence[Chart]) -> None:
    """One SVG file with the charts side by side, each below its title."""
    if Path(path).suffix != ".svg":
        raise InputError.of("the picture", str(path), "a file name ending in .svg")
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
    return replace(series, x=tuple(series.x[i] for i in order), y=tuple(series.y[i] for i in order))


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
    factor = f"{10 ** (exponent - whole):.2g}·"
    return ("" if factor == "1·" else factor) + "10" + str(whole).translate(_SUPERSCRIPTS)


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
    below, above = (0.0 if end in axis.include else margin for end in (low, high))
    return low - below, high + above


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
        return [tick for tick in find_ticks(low, high) if tick.is_integer()]
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
    factor, power = f"{value:.2e}".split("e")
    return f"{float(factor):g}·10" + str(int(power)).translate(_SUPERSCRIPTS)


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
    room = int((WIDTH - LEFT - RIGHT) / max(len(ticks), 1) / LETTER)
    for tick, name in ticks:
        x, shown = place(tick), _cut(name, room) if axis.categories else name
        yield f'<path class="axis" d="M{x:.1f} {bottom:.1f}v5"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 19:.1f}" text-anchor="middle">{escape(shown)}</text>'
    if axis.label:
        yield (
            f'<text class="name" x="{WIDTH - RIGHT:.1f}" y="{HEIGHT - 10:.1f}" text-anchor="end">'
            f"{escape(axis.label)}</text>"
        )


def _cut(name: str, room: int) -> str:
    return name if len(name) <= room else name[: max(room - 1, 1)] + "…"


def _draw_legend(series: Sequence[Series]) -> tuple[list[str], int]:
    """Keys with shortened names, and in how many rows; a single series needs no legend."""
    if len(series) < 2:
        return [], 0
    keys: list[str] = []
    x, rows = 0.0, 1
    for place, one in enumerate(series):
        name = _cut(one.name, 52)
        width = 48 + LETTER * len(name)
        if x > 0 and x + width > WIDTH:
            x, rows = 0.0, rows + 1
        y = 20 + LINE_HEIGHT * rows
        if one.mark != "points":
            keys.append(f'<path class="line {_style(place, one)}" d="M{x:.1f} {y - 4:.1f}h26"/>')
        if _has_markers(one):
            keys.append(_draw_marker(place, x + 13, y - 4))
        keys.append(f'<text x="{x + 32:.1f}" y="{y:.1f}">{escape(name)}</text>')
        x += width
    return keys, rows


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
                yield f'<polyline class="line {_style(place, series)}" points="{path}"/>'
    for run in runs:
        if _has_markers(series) or len(run) == 1:
            yield from (_draw_marker(place, x, y) for x, y in run)


def _style(place: int, series: Series) -> str:
    dash = "level" if series.mark == "level" else f"d{place // STYLES % 3}"
    return f"s{place % STYLES} {dash}"


def _draw_marker(place: int, x: float, y: float) -> str:
    """Circle, square, triangle, diamond: one shape per colour."""
    style, shape = f'class="mark s{place % STYLES}"', _SHAPES.get(place % STYLES)
    if shape is None:
        return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    return f'<path {style} d="M{x:.1f} {y:.1f}{shape}"/>'
