"""Where the files of data are, and that they are the official ones."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from expunge import InputError

VARIABLE = "EXPUNGE_DATA"


def data_folder(root: str | Path | None = None) -> Path:
    """Where data files are: ``root``, else the folder EXPUNGE_DATA names, else ~/.cache/expunge.

    >>> data_folder("/srv/data").as_posix()
    '/srv/data'
    """
    return Path(root or os.environ.get(VARIABLE) or "~/.cache/expunge").expanduser()


def find(name: str, address: str, root: str | Path | None = None) -> Path:
    """The file of this name below the folder of the data.

    >>> find("mnist/x.gz", "https://example.org/", "/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: /nowhere has no mnist/x.gz, which https://example.org/ gives; ...
    """
    path = data_folder(root) / name
    if not path.is_file():
        raise InputError(
            f"{data_folder(root)} has no {name}, which {address} gives; put it there, or name the "
            f"folder that has it with --root or {VARIABLE}"
        )
    return path


def check_digest(data: bytes, checksum: str, path: str | Path) -> None:
    """Refuse ``data`` whose digest is not ``checksum``, written ``sha256:…`` or ``md5:…``.

    >>> check_digest(b"a", "md5:0cc175b9c0f1b6a831c399e269772661", "a.bin")
    """
    name, _, expected = checksum.partition(":")
    actual = hashlib.new(name, data, usedforsecurity=False).hexdigest()
    if actual != expected:
        raise InputError(
            f"{path} is not the official file: its {name} is {actual}, the official one {expected}"
        )
