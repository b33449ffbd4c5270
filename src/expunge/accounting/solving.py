"""One root finder for everything that must come out on the safe side."""

from __future__ import annotations

import math
from collections.abc import Callable


def tighten(
    excess: Callable[[float], float], bad: float, good: float, *, relative: float = 1e-12
) -> float:
    """The last ``x`` found with ``excess(x) <= 0`` when [bad, good] shrinks to ``relative`` width.

    ``excess(bad) > 0 >= excess(good)``; the answer is always a point that was evaluated and is
    good, so a rounding error in ``excess`` can never push it over to the bad side. Inverse
    quadratic interpolation where it is safe, halving otherwise (Chandrupatla 1997).

    >>> x = tighten(lambda x: 2 - x * x, 0.0, 3.0)
    >>> x * x >= 2, abs(x - 2**0.5) < 1e-11
    (True, True)
    """
    a, b = good, bad
    fa, fb = excess(a), excess(b)
    if fa > 0:
        raise ValueError("the good end of the bracket is not good")
    if fb <= 0:
        return b
    c, fc = a, fa
    fraction = 0.5
    for _ in range(300):
        x = a + fraction * (b - a)
        if x in (a, b):
            break
        fx = excess(x)
        if (fx <= 0) == (fa <= 0):
            c, fc = a, fa
        else:
            c, b, fc, fb = b, a, fb, fa
        a, fa = x, fx
        best = a if abs(fa) < abs(fb) else b
        width = abs(b - a)
        tolerance = relative * abs(best) + 5e-324
        if width <= tolerance:
            break
        fraction = _next_fraction(a, b, c, fa, fb, fc, 0.45 * tolerance / width)
    return a if fa <= 0 else b


def _next_fraction(
    a: float, b: float, c: float, fa: float, fb: float, fc: float, least: float
) -> float:
    fraction = 0.5
    if all(map(math.isfinite, (fa, fb, fc))) and fa != fb and fb != fc and fa != fc and c != b:
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        if phi * phi < xi and (1 - phi) * (1 - phi) < 1 - xi:
            fraction = fa / (fb - fa) * fc / (fb - fc)
            fraction += (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
    return min(max(fraction, least), 1 - least) if least < 0.5 else 0.5


def bracket(
    excess: Callable[[float], float], start: float, *, lowest: float, highest: float
) -> tuple[float, float] | None:
    """(bad, good) with ``excess(bad) > 0 >= excess(good)``, ``bad < good``, by doubling from start.

    For an excess that falls as x grows. None when even ``highest`` is bad; ``bad`` is ``lowest``
    when everything above it is good.

    >>> bracket(lambda x: 10 - x, 1.0, lowest=0.0, highest=1e300)
    (8.0, 16.0)
    """
    x, factor = start, 2.0
    if excess(x) > 0:
        while True:
            if x >= highest:
                return None
            bad, x = x, min(x * factor, highest)
            if excess(x) <= 0:
                return bad, x
            factor = min(factor * factor, 1e32) if x > 1e3 * start else factor
    while True:
        good, x = x, x / factor
        if x <= lowest:
            return lowest, good
        if excess(x) > 0:
            return x, good
        factor = min(factor * factor, 1e32) if x < 1e-3 * start else factor
