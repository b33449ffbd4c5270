"""Where the files of data are, and that they are the official ones."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from expunge import InputError


def data_folder() -> Path:
    """Where data files are: the folder that EXPUNGE_DATA names, else ~/.cache/expunge."""
    return Path(os.environ.get("EXPUNGE_DATA") or "~/.cache/expunge").expanduser()


def find(name: str, source: str) -> Path:
    """The file of this name below the folder of the data.

    >>> find("mnist/x.gz", "https://example.org/")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: ... has no mnist/x.gz, which https://example.org/ gives; ...
    """
    path = data_folder() / name
    if not path.is_file():
        raise InputError(
            f"{data_folder()} has no {name}, which {source} gives; put it there, or name the "
            "folder that has it with EXPUNGE_DATA"
        )
    return path


def check_digest(data: bytes, sha256: str, path: Path) -> None:
    """Refuse what is not the official file."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise InputError(f"{path} is not the official file: its SHA-256 is {actual}, not {sha256}")
