"""``expunge init``: a folder with a commented job that runs as it is, to be made one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from expunge.errors import InputError
from expunge.files import write_atomic

Kind = Literal["plain", "lora"]
TEMPLATES = Path(__file__).parent / "templates" / "init"
FILES = ("job.toml", "own.py", "forget.txt")


def write_template(folder: str | Path, kind: Kind = "plain") -> list[Path]:
    """Write job.toml, own.py and forget.txt; refuse if any of them is there already.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in write_template(folder)]
    ['job.toml', 'own.py', 'forget.txt']
    """
    target = Path(folder)
    paths = [target / name for name in FILES]
    taken = [path for path in paths if path.exists()]
    if taken:
        raise InputError(f"{taken[0]} exists already; nothing was written, name another folder")
    texts = [_read(kind, name) for name in FILES]
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts, strict=True):
            write_atomic(path, text)
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}") from None
    return paths


def _read(kind: Kind, name: str) -> bytes:
    """A template; Python is kept as text, so that no tool takes it for a part of the package."""
    return (TEMPLATES / kind / (f"{name}.txt" if name.endswith(".py") else name)).read_bytes()
