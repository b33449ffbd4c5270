"""One root finder for everything that must come out on the safe side."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, cast


def tighten(
    excess: Callable[[float], float], bad: float, good: float, *, relative: float = 1e-12
) -> float:
    """An ``x`` with ``excess(x) <= 0``, within ``relative`` of where the excess changes its sign.

    ``excess(bad) > 0 >= excess(good)``; the answer is always a point that was evaluated and is
    good, so a rounding error in ``excess`` can never push it over to the bad side.

    >>> x = tighten(lambda x: 2 - x * x, 0.0, 3.0)
    >>> x * x >= 2, abs(x - 2**0.5) < 1e-11
    (True, True)
    """
    from scipy import optimize

    excess = functools.cache(excess)
    if excess(good) > 0:
        raise ValueError("the good end of the bracket is not good")
    if excess(bad) <= 0:
        return bad
    close = max(relative / 8, 1e-15)
    solve = cast(Any, optimize.brentq)
    x = float(solve(excess, bad, good, xtol=5e-324, rtol=close, maxiter=3000))
    step = math.copysign(2 * close * abs(x), good - bad)
    while excess(x) > 0:
        x = min(x + step, good) if good > bad else max(x + step, good)
        step *= 2
    return x


def bracket(
    excess: Callable[[float], float], start: float, *, lowest: float, highest: float
) -> tuple[float, float] | None:
    """(bad, good) with ``excess(bad) > 0 >= excess(good)``, ``bad < good``, by doubling from start.

    For an excess that falls as x grows, from any start. None when even ``highest`` is bad; ``bad``
    is ``lowest`` when everything above it is good.

    >>> bracket(lambda x: 10 - x, 1.0, lowest=0.0, highest=1e300)
    (8.0, 16.0)
    """
    start = min(max(start, sys.float_info.min), sys.float_info.max)
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
