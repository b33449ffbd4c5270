"""Files that are either complete or not there, and reads that cannot run away."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import stat
import sys
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from expunge.errors import CertificateError, InputError

if sys.platform == "win32":
    _AT_ONCE = os.O_BINARY
else:
    import fcntl

    _AT_ONCE = os.O_NONBLOCK


_LATER = ContextVar("_LATER", default=False)


def write_atomic(
    path: str | Path, data: bytes | Iterable[bytes | memoryview], *, private: bool = False
) -> None:
    """Write ``data`` to ``path``: a temporary file beside it, fsync, then one rename.

    What is ``private`` only its owner may read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(Path(folder) / "x.json", b"{}")
    ...     sorted(p.name for p in Path(folder).iterdir())
    ['x.json']
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError.of("path", str(target), "inside a folder that exists")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=_open_private if private else None) as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            if not _LATER.get():
                os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if not _LATER.get():
        _sync_folder(target.parent)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def synced_together(folder: Path) -> Generator[None]:
    """Files written into a new folder meanwhile are made durable at the end, all at once."""
    token = _LATER.set(True)
    try:
        yield
    finally:
        _LATER.reset(token)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_sync_file, [path for path in folder.rglob("*") if path.is_file()]))
    for place in (*filter(Path.is_dir, folder.rglob("*")), folder):
        _sync_folder(place)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def open_regular(path: str | Path, what: str) -> BufferedReader:
    """A regular file, opened; anything else is refused at once, a pipe or device included.

    >>> open_regular("/dev/null", "certificate")
    Traceback (most recent call last):
    ...
    expunge.errors.CertificateError: certificate /dev/null is not a file that can be read: not a...
    """
    try:
        handle = os.open(path, os.O_RDONLY | _AT_ONCE)
        mode = os.fstat(handle).st_mode
        if stat.S_ISREG(mode):
            return os.fdopen(handle, "rb")
        os.close(handle)
        reason = "is a directory" if stat.S_ISDIR(mode) else "not a regular file"
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
    except ValueError as error:
        reason = str(error)
    shown = ascii(str(path))[1:-1]
    raise CertificateError(f"{what} {shown} is not a file that can be read: {reason}") from None


def read_limited(path: str | Path, limit: int, what: str) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes.

    >>> read_limited("/nowhere/c.json", 10, "certificate")
    Traceback (most recent call last):
    ...
    expunge.errors.CertificateError: certificate /nowhere/c.json is not a file that can be read: ...
    """
    with open_regular(path, what) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CertificateError(f"{what} {path} is larger than {limit:,} bytes")
    return data


@contextmanager
def hold_lock(path: Path, taken: str) -> Generator[None]:
    """Hold the lock file at ``path``; :class:`InputError` with the words ``taken`` if others do."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(taken) from None
        yield
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for ``json.loads(…, object_pairs_hook=…)``: a key that it has twice would mean
    one thing here and another elsewhere.

    >>> refuse_twice([("person", "anna"), ("person", "bert")])
    Traceback (most recent call last):
    ...
    ValueError: an object has the key 'person' twice; each key may stand once
    """
    found = dict[str, Any]()
    for key, value in pairs:
        if key in found:
            raise ValueError(f"an object has the key {key!r} twice; each key may stand once")
        found[key] = value
    return found


def to_plain(value: Any) -> Any:
    """Dataclasses as dictionaries; infinities and NaN, which JSON does not have, as None.

    >>> to_plain({"epsilon": math.inf, "steps": (1, 2)})
    {'epsilon': None, 'steps': [1, 2]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return {key: to_plain(item) for key, item in items}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in cast(list[Any], value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
