"""The manifest of a state folder: one JSON file with the SHA-256 of every other, and its own."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from expunge.errors import CertificateError, InputError, UnlearningError
from expunge.files import is_inside, read_limited, refuse_twice

_MOST = 1_000_000_000
_MARK = re.compile("[0-9a-f]{32}")
_WAY_OUT = (
    "restore the whole folder from one backup, then forget again whoever was forgotten since that "
    "day"
)


@dataclass(frozen=True)
class Entry:
    """A file that the manifest names."""

    file: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Announced:
    """A release that is about to be written: whom its certificate names, into which folder, the
    SHA-256 of certificate.json."""

    named: tuple[str, ...]
    out: str
    certificate: str

    def read(self, parent: bytes | None) -> bytes | None:
        """The certificate, if it is there, the next after ``parent``, and of as many people."""
        before = None if parent is None else hashlib.sha256(parent).hexdigest()
        try:
            data = read_limited(Path(self.out) / "certificate.json", _MOST, "certificate")
            said = json.loads(data, object_pairs_hook=refuse_twice)
            stated = hashlib.sha256(data).hexdigest(), said["parent"], said["forget"]["count"]
        except (CertificateError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return data if stated == (self.certificate, before, len(self.named)) else None


@dataclass(frozen=True)
class Manifest:
    """What a state is, at one generation.

    ``pending``: rows by mark of people who are gone and whom no written certificate names yet.
    """

    kind: str
    generation: int
    settings: Mapping[str, Any]
    files: Mapping[str, Entry]
    forgotten: Entry | None = None
    pending: Mapping[str, int] = field(default_factory=dict[str, int])
    announced: Announced | None = None
    format: Literal["expunge-state-1"] = "expunge-state-1"

    def to_bytes(self) -> bytes:
        """Its one file, which ends with its own SHA-256."""
        shallow = {name: _list_fields(value) for name, value in vars(self).items()}
        shallow["files"] = {name: vars(entry) for name, entry in self.files.items()}
        plain = json.dumps(shallow, sort_keys=True, ensure_ascii=False, allow_nan=False)
        digest = hashlib.sha256(plain.encode()).hexdigest()
        return f'{plain[:-1]}, "sha256": "{digest}"}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """What ``to_bytes`` wrote, and nothing else; ValueError or KeyError if not."""
        plain: dict[str, Any] = json.loads(data, object_pairs_hook=refuse_twice)
        plain.pop("sha256")
        made = _find_reader().validate_python(plain)
        named = all(entry.file == f"{n}.{entry.sha256[:24]}" for n, entry in made.files.items())
        named &= all(_MARK.fullmatch(mark) and n >= 0 for mark, n in made.pending.items())
        if made.to_bytes() != data or not named or not all(map(is_inside, made.list_files())):
            raise ValueError("not the bytes that were written")
        return made

    def list_files(self) -> set[str]:
        """Every file that it names."""
        listed = () if self.forgotten is None else (self.forgotten,)
        return {entry.file for entry in (*self.files.values(), *listed)}


@functools.cache
def _find_reader() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _list_fields(value: Any) -> Any:
    return vars(value) if isinstance(value, Entry | Announced) else value


def read_kind(path: str | Path) -> str | None:
    """The kind of the state in a folder; None where there is none.

    >>> read_kind("/nowhere") is None
    True
    """
    found = (Path(path) / "manifest.json").exists()
    return read_manifest(Path(path)).kind if found else None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a state folder; a damaged one is refused."""
    if not (folder / "manifest.json").is_file():
        raise InputError.of("state", str(folder), "a folder that holds a state")
    data = read_limited(folder / "manifest.json", _MOST, "state")
    try:
        return Manifest.from_bytes(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(folder, "manifest.json", "is not what was written") from None


def damaged(folder: Path, name: str, how: str) -> UnlearningError:
    """The sentence about a file of a state that is not what it was, with the way out."""
    return UnlearningError(f"the state {folder} is damaged: {name} {how}; {_WAY_OUT}")
