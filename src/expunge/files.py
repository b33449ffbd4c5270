"""The only writer and the only lock: files and folders that are complete or not there, and reads
that cannot run away."""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from io import BufferedReader
from pathlib import Path
from typing import Any

from expunge.errors import CertificateError, InputError, RunError

if sys.platform == "win32":
    _AT_ONCE = os.O_BINARY
else:
    import fcntl

    _AT_ONCE = os.O_NONBLOCK

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_SYNCED_LATER = ContextVar("_SYNCED_LATER", default=False)


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
        with open(temporary, "xb", opener=open_private if private else None) as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            if not _SYNCED_LATER.get():
                os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if not _SYNCED_LATER.get():
        sync_folder(target.parent)


def open_private(path: str, flags: int) -> int:
    """An opener for :func:`open`: a new file that only its owner may read."""
    return os.open(path, flags, 0o600)


def check_free(target: str | Path) -> Path:
    """``target`` as a path, if a folder may be written there; nothing is ever overwritten.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as empty:
    ...     check_free(empty) == Path(empty)
    True
    """
    path = Path(target)
    home = next(place for place in path.absolute().parents if place.exists())
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"folder {path} already holds files; name another one or remove it first")
    if path.exists() and not path.is_dir():
        raise InputError(f"folder {path} is a file; name a folder")
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        why = "cannot be written" if home.is_dir() else "is a file"
        raise InputError(f"folder {path} cannot be made: {home} {why}")
    return path


@contextmanager
def new_folder(target: str | Path) -> Generator[Path]:
    """A hidden sibling to write into, which becomes ``target`` by one rename when all is written.

    What is written meanwhile is made durable at the end, all at once: a disk answers many together.
    Drafts that killed processes left are removed first.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with new_folder(Path(place) / "run") as draft:
    ...         write_atomic(draft / "certificate.json", b"{}")
    ...     [str(p.relative_to(place)) for p in sorted(Path(place).rglob("*"))]
    ['run', 'run/certificate.json']
    """
    path = check_free(target).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        _remove_abandoned(left)
    draft, handle = _make_draft(path)
    token = _SYNCED_LATER.set(True)
    try:
        yield draft
        sync_files(found for found in draft.rglob("*") if found.is_file())
        for place in (*filter(Path.is_dir, draft.rglob("*")), draft):
            sync_folder(place)
        draft.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise RunError(
                f"folder {path} could not be written ({error.strerror}); nothing of it is left: "
                "make room or name another place, and try again"
            ) from None
        raise
    finally:
        _SYNCED_LATER.reset(token)
        os.close(handle)


def _make_draft(path: Path) -> tuple[Path, int]:
    """A draft, and a handle whose lock says that its writer lives."""
    while True:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        draft.mkdir()
        if sys.platform == "win32":
            return draft, os.open(os.devnull, os.O_RDONLY)
        handle = os.open(draft, os.O_RDONLY)
        if _try_lock(handle) and draft.exists():
            return draft, handle
        os.close(handle)  # another process saw it between the two calls, unlocked


def _remove_abandoned(left: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        handle = os.open(left, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if _try_lock(handle):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def lock(path: str | Path, taken: str) -> Generator[None]:
    """The lock at ``path``, a file; :class:`RunError` with the words ``taken`` if others have it.

    It ends with its process, however that ends.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        if not _try_lock(handle):
            raise RunError(taken)
        yield
    finally:
        os.close(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """Make files durable, several at once: a disk answers many together."""

    def sync(path: Path) -> None:
        with path.open("rb") as file:
            os.fsync(file.fileno())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, paths))


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system lets a folder be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        shown = ascii(str(path))[1:-1]
        raise CertificateError(f"{what} {shown} is larger than {limit:,} bytes")
    return data


def is_inside(name: str) -> bool:
    """Whether this names a file in a folder, wherever that folder is.

    >>> is_inside("adapter/config.json"), is_inside("../x"), is_inside("/x"), is_inside("c:x")
    (True, False, False, False)
    """
    return not any(part in ("", ".", "..") or set(part) & set("\\:") for part in name.split("/"))


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

    >>> to_plain({"epsilon": float("inf"), "steps": (1, 2)})
    {'epsilon': None, 'steps': [1, 2]}
    """
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value, inf_nan_mode="null")
