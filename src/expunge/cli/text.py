"""What commands print: sentences and tables for people, JSON for programs.

Words that come from files may hold anything; here they lose the power to move a terminal's cursor.
"""

from __future__ import annotations

import json
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from expunge.display import is_visible

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a release.")]
WIDEST = 100


def visible(text: str, lines: bool = False) -> str:
    """The text with every character that cannot be seen written as an escape; ``lines`` stay.

    >>> visible("run\\x1b[2J holds\\n\\u202e"), visible("two\\nlines", lines=True)
    ('run\\\\x1b[2J holds\\\\n\\\\u202e', 'two\\nlines')
    """
    return "".join(c if is_visible(c) or (lines and c == "\n") else ascii(c)[1:-1] for c in text)


def echo(text: str, *, err: bool = False) -> None:
    typer.echo(visible(text, lines=True), err=err)


def write(text: str, indent: str = "") -> None:
    """Paragraphs, wrapped at the width of the terminal; further lines begin with ``indent``."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    for line in text.split("\n"):
        filled = textwrap.fill(
            line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        )
        echo(line if len(line) <= width else filled)


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout; in ASCII, which every terminal can show."""
    typer.echo(json.dumps(data, allow_nan=False, indent=2))


def show(facts: dict[str, Any], text: str, as_json: bool) -> None:
    """The facts for a program, or the text for people."""
    print_json(facts) if as_json else echo(text)


def quote(path: str | Path) -> str:
    """A path as it is typed here."""
    full = Path(path).absolute()
    return shlex.quote(
        str(full.relative_to(Path.cwd()) if full.is_relative_to(Path.cwd()) else path)
    )
