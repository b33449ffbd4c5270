"""Pictures as inline SVG: nothing is fetched, no script runs, same numbers give the same bytes.

Colours are CSS variables of the page, so one drawing serves light, dark and paper; lines differ by
dash too, and every picture has its words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 480.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 34.0, 38.0
_CELL, _SIDE = 22.0, 10


def draw_hundred(count: float, words: str) -> str:
    """A hundred squares, as many of them filled as of a hundred runs may differ.

    >>> drawn = draw_hundred(8.2, "At most 8.2 % of runs.")
    >>> drawn.count('class="on"'), drawn.count('class="off"')
    (9, 91)
    """
    filled = math.ceil(count)
    squares = "".join(
        f'<rect class="{"on" if n < filled else "off"}" x="{n % _SIDE * _CELL:g}" '
        f'y="{n // _SIDE * _CELL:g}" width="{_CELL - 3:g}" height="{_CELL - 3:g}" rx="3"/>'
        for n in range(_SIDE * _SIDE)
    )
    size = _SIDE * _CELL
    return _wrap(words, size, size, squares)


def draw_lines(lines: Mapping[str, Points], words: str, x_label: str, y_label: str) -> str:
    """Lines over one pair of axes; y is an exponent of ten.

    >>> drawn = draw_lines({"centre": [(0, -1.0), (1, -2.0)]}, "It falls.", "epsilon", "delta")
    >>> drawn.count("<polyline"), "It falls." in drawn
    (1, True)
    """
    points = [point for line in lines.values() for point in line]
    (x_low, x_high), (y_low, y_high) = (
        _find_range([point[axis] for point in points]) for axis in (0, 1)
    )

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (point[0] - x_low) / (x_high - x_low)
        y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (point[1] - y_low) / (y_high - y_low)
        return x, y

    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>']
    for value in find_ticks(x_low, x_high):
        x, _ = place((value, y_low))
        parts.append(_write(x, HEIGHT - BOTTOM + 15, f"{value:g}", "middle"))
    for value in find_ticks(y_low, y_high):
        _, y = place((x_low, value))
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_write(LEFT - 6, y + 4, f"1e{value:g}", "end"))
    parts.append(_write((LEFT + WIDTH) / 2, HEIGHT - 4, x_label, "middle"))
    parts.append(_write(4, 14, y_label, "start"))
    for number, (name, line) in enumerate(lines.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line))
        parts.append(f'<polyline class="line s{number % 4}" points="{path}"/>')
        start = 90 + 190 * number
        parts.append(f'<path class="line s{number % 4}" d="M{start} 10h22"/>')
        parts.append(_write(start + 28, 14, name, "start"))
    return _wrap(words, WIDTH, HEIGHT, "".join(parts))


def find_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers in [low, high], steps of 1, 2 or 5 times a power of ten.

    >>> find_ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(m * power for m in (1, 2, 5, 10) if (high - low) / (m * power) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def _find_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5 * abs(low) or 0.5
    return low - margin, high + margin


def _write(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _wrap(words: str, width: float, height: float, body: str) -> str:
    said = escape(words, quote=True)
    return f'<svg role="img" aria-label="{said}" viewBox="0 0 {width:g} {height:g}">{body}</svg>'
