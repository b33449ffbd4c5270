"""Files from their official places: checked, resumed where they stopped, never half-written.

A transfer is written to ``name.part`` and renamed to ``name`` only when its checksum is right. A
transfer that breaks off leaves the part, and the next call goes on from there.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from expunge.errors import InputError
from expunge.files import write_atomic
from readers import check_digest

if sys.platform != "win32":
    import fcntl

VARIABLE = "EXPUNGE_DATA"
CHUNK = 1 << 20


def data_folder(root: str | Path | None = None) -> Path:
    """Where data files are: ``root``, else the folder EXPUNGE_DATA names, else ~/.cache/expunge.

    >>> data_folder("/srv/data").as_posix()
    '/srv/data'
    """
    if root is not None:
        return Path(root).expanduser()
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "expunge"


def fetch(
    urls: Sequence[str],
    path: Path,
    checksum: str,
    *,
    attempts: int = 3,
    timeout: float = 30.0,
) -> Path:
    """Download ``path`` from the first of ``urls`` that gives a file with this checksum.

    ``checksum`` is ``sha256:…`` or ``md5:…``. A transfer that breaks off goes on where it
    stopped, up to ``attempts`` times per place. A file already at ``path`` is only checked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked_part(path) as part:
            if path.exists():
                check_digest(path.read_bytes(), checksum, path)
                return path
            reasons = _try_places(urls, part, path.name, checksum, attempts, timeout)
            if not reasons:
                os.fsync(part.fileno())
                Path(part.name).replace(path)
                return path
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    raise InputError(
        f"{path.name} could not be downloaded ({'; '.join(reasons)}); put it at {path} by hand, or "
        f"name the folder that has it with root= or {VARIABLE}"
    )


def unpack(archive: Path, members: Mapping[str, str], folder: Path) -> None:
    """Write the named members of a tar archive below ``folder``, each only if its digest is right.

    Nothing else in the archive is touched, so no name in it can lead outside the folder.
    """
    try:
        with tarfile.open(archive) as tar:
            for name, checksum in members.items():
                content = tar.extractfile(name)
                if content is None:
                    raise InputError(f"{archive} has no file {name}")
                data = content.read()
                check_digest(data, checksum, f"{name} in {archive.name}")
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(target, data)
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise InputError(f"{archive} cannot be unpacked: {error}") from error


def _try_places(
    urls: Sequence[str],
    part: BufferedRandom,
    name: str,
    checksum: str,
    attempts: int,
    timeout: float,
) -> list[str]:
    """Fill ``part`` from the first place that works; the reasons, by place, if none does."""
    reasons: list[str] = []
    kind, _, expected = checksum.partition(":")
    for url in urls:
        host, reason = urlsplit(url).netloc, ""
        for _ in range(attempts):
            resumed = part.seek(0, os.SEEK_END) > 0
            try:
                _receive(url, part, name, timeout)
            except urllib.error.HTTPError as error:
                reason = f"{host} answers {error.code} {error.reason}"
                error.close()
                break
            except urllib.error.URLError as error:
                reason = f"{host} cannot be reached: {error.reason}"
                break
            except (OSError, http.client.HTTPException) as error:
                reason = f"{host}: {error}"
                continue
            part.flush()
            part.seek(0)
            actual = hashlib.file_digest(part, kind).hexdigest()
            if actual == expected:
                return []
            reason = f"{host} gives a file with {kind} {actual} instead of {expected}"
            part.truncate(0)
            if not resumed:
                break
        reasons.append(reason)
    return reasons


def _receive(url: str, part: BufferedRandom, name: str, timeout: float) -> None:
    """Append what ``part`` still lacks; an answer that does not continue it starts it anew."""
    start = part.seek(0, os.SEEK_END)
    headers = {"User-Agent": "expunge"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        answer = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        error.close()
        return
    with cast(http.client.HTTPResponse, answer) as response:
        continues = response.status == http.HTTPStatus.PARTIAL_CONTENT and response.headers.get(
            "Content-Range", ""
        ).startswith(f"bytes {start}-")
        if not continues:
            start = 0
            part.truncate(0)
        length = response.headers.get("Content-Length")
        total = start + int(length) if length and length.isdigit() else None
        with _show_transfer(name, total, start) as advance:
            while block := response.read(CHUNK):
                part.write(block)
                advance(len(block))
        size = part.seek(0, os.SEEK_END)
        if total is not None and size < total:
            raise ConnectionError(f"stopped after {size} of {total} bytes")


@contextmanager
def _show_transfer(name: str, total: int | None, done: int) -> Generator[Callable[[int], None]]:
    """A bar on stderr while the block runs; nothing at all when stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda step: bar.advance(task, step)


def _is_named(name: Path, part: BufferedRandom) -> bool:
    """Whether the open file is still the one of that name: another process may rename it at any
    moment."""
    try:
        return name.stat().st_ino == os.fstat(part.fileno()).st_ino
    except FileNotFoundError:
        return False


@contextmanager
def _locked_part(path: Path) -> Generator[BufferedRandom]:
    """``path.part`` open for appending, held by one process at a time, removed if left empty."""
    name = path.with_name(path.name + ".part")
    while True:
        part = name.open("a+b")
        if sys.platform != "win32":
            fcntl.flock(part, fcntl.LOCK_EX)
        if _is_named(name, part):
            break
        part.close()
    try:
        yield part
    finally:
        part.flush()
        if os.fstat(part.fileno()).st_size == 0:
            name.unlink(missing_ok=True)
        part.close()
