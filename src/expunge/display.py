"""What ``print`` and a notebook show of a plan, a guarantee or a certificate: one small table."""

from __future__ import annotations

import decimal
import re
from collections.abc import Sequence
from typing import Any

# Default_Ignorable_Code_Point of Unicode and the blank of Braille: a reader is shown nothing.
_BLANK = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


class Shown:
    """In a notebook, too, this is shown as ``print`` shows it."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def tabulate(
    title: str, rows: Sequence[tuple[str, ...]], names: tuple[str, ...] = (), note: str = ""
) -> str:
    """A title, columns whose first cells name the rows, and a sentence below.

    >>> print(tabulate("Guarantee", [("epsilon", "1"), ("delta", "1e-5")], note="Both hold."))
    Guarantee
      epsilon  1
      delta    1e-5
    Both hold.
    """
    cells = [tuple(map(clean, row)) for row in (names, *rows) if row]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([clean(title), *lines, *([clean(note)] if note else [])])


def is_visible(text: str) -> bool:
    """Whether every character can be seen; some that Unicode calls letters, signs or marks cannot.

    >>> is_visible("Zoë: 日本 ✓"), is_visible("a\\x1b"), is_visible("a\\u3164")
    (True, False, False)
    """
    return text.isprintable() and not _BLANK.search(text)


def clean(text: str) -> str:
    """One line in which every character can be seen: how words of a file reach a terminal.

    >>> clean("a\\n b\\x1b[2J")
    'a b�[2J'
    """
    return "".join(
        c if is_visible(c) else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split())
    )


def shorten(value: object) -> str:
    """A value as Python writes it, in at most 80 characters.

    >>> shorten([1.5, "a"]), len(shorten("a" * 100))
    ("[1.5, 'a']", 80)
    """
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def round_up(value: float, digits: int = 6) -> str:
    """A bound in words is never below the bound.

    >>> round_up(6.5729700671), round_up(1e-5), round_up(0.0)
    ('6.57298', '1e-5', '0')
    """
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    rounded = context.plus(decimal.Decimal(repr(value))).normalize()
    return f"{rounded:f}" if value == 0 or 1e-3 <= value < 1e9 else f"{rounded:e}"
