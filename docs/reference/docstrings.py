"""Our docstrings as the site's generator reads them: doctests as code, roles as names."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"(?:^|(?<=\n\n)|(?<=\n))(>>> .*?)(?=\n\n(?!>>> )|\Z)", flags=re.DOTALL)
ROLE = re.compile(r":(?:func|class|meth|mod|data):`~?([^`]+)`")


def to_markdown(text: str) -> str:
    """A docstring with each run of doctests fenced, and ``:func:`name``` as a name."""
    named = ROLE.sub(r"`\1`", text)
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[1].rstrip()}\n```", named)


class Docstrings(Extension):
    """Turns every docstring into Markdown before it is shown."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
