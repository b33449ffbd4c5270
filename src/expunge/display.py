"""What a notebook and ``print`` show of a plan, a guarantee or a certificate: one small table."""

from __future__ import annotations

import decimal
import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sheet:
    """A title, rows whose first cell names them, and a sentence below.

    >>> sheet = Sheet("Guarantee", [("epsilon", "1"), ("delta", "1e-5")], note="<b>")
    >>> print(sheet.to_text())
    Guarantee
      epsilon  1
      delta    1e-5
    <b>
    >>> sheet.to_html().count("&lt;b&gt;"), sheet.to_html().count("<tr>")
    (1, 2)
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    names: tuple[str, ...] = ()
    note: str = ""

    def to_text(self) -> str:
        """The sheet in columns, one line for each row."""
        rows = [tuple(map(_clean, row)) for row in (self.names, *self.rows) if row]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = [
            "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([_clean(self.title), *lines, *([_clean(self.note)] if self.note else [])])

    def to_html(self) -> str:
        """The sheet as a table in the colours of the page around it, all text escaped."""
        head = "".join(f'<th scope="col" {_LEFT}>{_escape(name)}</th>' for name in self.names)
        body = "".join(
            f'<tr><th scope="row" {_LEFT}>{_escape(first)}</th>'
            + "".join(f"<td {_LEFT}>{_escape(cell)}</td>" for cell in rest)
            + "</tr>"
            for first, *rest in self.rows
        )
        return (
            f"<table {_PLAIN}><caption {_LEFT}>{_escape(self.title)}</caption>"
            + (f"<thead><tr>{head}</tr></thead>" if head else "")
            + f"<tbody>{body}</tbody></table>"
            + (f"<p>{_escape(self.note)}</p>" if self.note else "")
        )


_PLAIN = 'style="color: inherit; background: none"'
_LEFT = 'style="text-align: left"'


def _clean(text: str) -> str:
    """One line in which every character is one that can be seen.

    >>> _clean("a\\n b\\x1b[2J")
    'a b�[2J'
    """
    return "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split())
    )


def _escape(text: str) -> str:
    return html.escape(_clean(text))


def round_up(value: float, digits: int = 6) -> str:
    """A bound in words is never below the bound.

    >>> round_up(6.5729700671), round_up(1e-5), round_up(0.0)
    ('6.57298', '1e-5', '0')
    """
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    rounded = context.plus(decimal.Decimal(repr(value))).normalize()
    return f"{rounded:f}" if value == 0 or 1e-3 <= value < 1e9 else f"{rounded:e}"
