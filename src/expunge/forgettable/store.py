"""What was learned, as whole numbers by identifier, in files that have no past.

A store is a *set* of rows (identifier, integers, target). Its bytes are a function of that set and
of the key it was created with, never of what happened:

    name = BLAKE2b-128(key, identifier)        no identifier is written
    bucket = ⌊name · buckets / 2^128⌋          the number of buckets is fixed at creation
    file = rows of the bucket, ascending       by name, then by content; an empty bucket has no file

A request rewrites its own buckets only. A change is written beside the store, made durable, and
renamed into place; between the two stands ``journal/ready``, so that a kill at any moment leaves
either all of it or nothing. At rest the journal is empty. One process writes at a time, others may
read: a reader holds maps of files that a later change replaces but does not touch.

The names of the forgotten are in ``forgotten``, apart, hashed once more: nothing is computed from
them but "already forgotten" and "held again". What is on disk is private: integers of people's
data, and the key that finds a person's rows.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.errors import InputError, RunError

if sys.platform != "win32":
    import fcntl

Rows = npt.NDArray[np.void]
Words = npt.NDArray[np.uint64]
NAME_BYTES = 16
BUCKETS = 256
_FEW_FILES = 8
_AT_FIRST = {"lock", "working", "rows", "journal"}
_THREADS = 4  # a disk answers several at once


@dataclass(frozen=True)
class Layout:
    """A row: its name, ``inputs`` integers of ``dtype``, ``targets`` whole numbers."""

    inputs: int
    dtype: str
    targets: int

    @property
    def row(self) -> np.dtype[Any]:
        fields = [
            ("name", f"V{NAME_BYTES}"),
            ("features", self.dtype, (self.inputs,)),
            ("target", "<i8", (self.targets,)),
        ]
        return np.dtype(fields)


@dataclass(frozen=True)
class Taken:
    """Rows that were found, the buckets without them, and the identifiers that have none."""

    rows: Rows
    changes: Mapping[int, Rows]
    missing: Sequence[str]


@dataclass
class Store:
    """The set of rows, in memory or in ``folder``.

    >>> store = Store(Layout(inputs=2, dtype="i1", targets=1), key=bytes(32))
    >>> row = store.make_rows(["ann"], np.array([[3, -4]], np.int8), np.array([[1]]))
    >>> store.apply(store.plan_addition(row)[0])
    >>> taken = store.take(["ann", "bob"])
    >>> len(store), taken.rows["features"].tolist(), taken.missing
    (1, [[3, -4]], ['bob'])
    >>> store.apply(taken.changes); len(store)
    0
    """

    layout: Layout
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    folder: Path | None = None
    buckets: int = BUCKETS
    _memory: dict[int, Rows] = field(default_factory=dict[int, Rows], repr=False)

    def __len__(self) -> int:
        if self.folder is None:
            return sum(len(rows) for rows in self._memory.values())
        size = sum(path.stat().st_size for path in self.folder.glob("rows/*"))
        return size // self.layout.row.itemsize

    def name(self, identifier: str, purpose: bytes = b"row") -> bytes:
        """The keyed hash that stands for an identifier."""
        data = identifier.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=NAME_BYTES, key=self.key, person=purpose).digest()

    def mark(self, name: bytes) -> bytes:
        """The keyed hash that stands for a name once it is forgotten."""
        size, key = NAME_BYTES, self.key
        return hashlib.blake2b(name, digest_size=size, key=key, person=b"forgotten").digest()

    def make_rows(
        self, ids: Sequence[str], features: npt.NDArray[Any], targets: npt.NDArray[Any]
    ) -> Rows:
        """Rows in the store's layout, in the order given."""
        rows = np.zeros(len(ids), self.layout.row)
        known = {identifier: self.name(identifier) for identifier in set(ids)}
        rows["name"] = np.frombuffer(b"".join(known[i] for i in ids), f"V{NAME_BYTES}")
        rows["features"], rows["target"] = features, targets
        return rows

    def read(self, bucket: int) -> Rows:
        """The rows of a bucket; on disk, a map of its file."""
        if self.folder is None:
            return self._memory.get(bucket, np.empty(0, self.layout.row))
        try:
            with open(f"{self.folder}/rows/{bucket:04x}", "rb") as file:  # noqa: PTH123
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return np.empty(0, self.layout.row)
        return np.frombuffer(mapped, self.layout.row)

    def list_buckets(self) -> list[int]:
        """The buckets that hold rows."""
        if self.folder is None:
            return sorted(self._memory)
        return sorted(int(path.name, 16) for path in self.folder.glob("rows/*"))

    def read_all(self, replaced: Mapping[int, Rows]) -> Iterator[Rows]:
        """All rows, bucket by bucket, in their one order; as they will be, where ``replaced``."""
        for bucket in sorted({*self.list_buckets(), *replaced}):
            yield replaced[bucket] if bucket in replaced else self.read(bucket)

    def take(self, ids: Iterable[str]) -> Taken:
        """All rows of these identifiers, and the store as it will be without them."""
        names = sorted((self.name(identifier), identifier) for identifier in ids)
        wanted = _read_words(b"".join(name for name, _ in names))
        changes: dict[int, Rows] = {}
        found = [np.empty(0, self.layout.row)]
        for bucket, (start, stop) in _list_runs(_bucket_of(wanted[:, 0], self.buckets)):
            rows = self.read(bucket)
            mask = _is_in(_read_words(rows["name"].tobytes()), wanted[start:stop])
            if mask.any():
                found.append(rows[mask])
                changes[bucket] = rows[~mask]
        taken = np.concatenate(found)
        held = _is_in(wanted, _read_words(taken["name"].tobytes()))
        missing = [names[place][1] for place in np.flatnonzero(~held)]
        return Taken(taken, changes, missing)

    def plan_addition(self, rows: Rows) -> tuple[dict[int, Rows], Rows]:
        """The buckets as they will be, and the rows that are new: a row is held once."""
        rows = arrange(rows)
        place = _bucket_of(_read_words(rows["name"].tobytes())[:, 0], self.buckets)
        changes: dict[int, Rows] = {}
        fresh: list[Rows] = []
        for bucket, (start, stop) in _list_runs(place):
            held, added = self.read(bucket), rows[start:stop]
            if len(held):
                known = {row.tobytes() for row in held[np.isin(held["name"], added["name"])]}
                added = added[[row.tobytes() not in known for row in added]]
            if len(added):
                changes[bucket] = arrange(np.concatenate([held, added])) if len(held) else added
                fresh.append(added)
        return changes, np.concatenate(fresh) if fresh else np.empty(0, self.layout.row)

    def apply(self, changes: Mapping[int, Rows], files: Mapping[str, bytes] = {}) -> None:
        """Replace whole buckets and ``files`` beside them, all or nothing."""
        if self.folder is None:
            for bucket, rows in changes.items():
                self._memory[bucket] = rows
                if len(rows) == 0:
                    del self._memory[bucket]
            return
        named = {f"rows/{bucket:04x}": rows.tobytes() for bucket, rows in changes.items()}
        write_together(self.folder, named | dict(files))


def arrange(rows: Rows) -> Rows:
    """A set of rows in its one order: ascending by name, then by content, each once."""
    words = _read_words(rows["name"].tobytes())
    rows = rows[np.lexsort((words[:, 1], words[:, 0]))]
    same = rows["name"][1:] == rows["name"][:-1]
    if not same.any():
        return rows
    parts: list[Rows] = []
    for _, (start, stop) in _list_runs(np.concatenate([[0], np.cumsum(~same)])):
        group = sorted({row.tobytes() for row in rows[start:stop]}) if stop - start > 1 else None
        part = rows[start:stop] if group is None else np.frombuffer(b"".join(group), rows.dtype)
        parts.append(part)
    return np.concatenate(parts)


def _read_words(names: bytes) -> Words:
    """Names as pairs of 64-bit words, in the order of their bytes."""
    return np.frombuffer(names, ">u8").reshape(-1, 2).astype(np.uint64)


def _is_in(names: Words, known: Words) -> npt.NDArray[np.bool_]:
    """Which names are among the ``known`` ones, which are ascending."""
    if len(known) == 0:
        return np.zeros(len(names), np.bool_)
    place = np.searchsorted(known[:, 0], names[:, 0])
    found = known[np.minimum(place, len(known) - 1)]
    return (found == names).all(axis=1)


def _bucket_of(first: Words, buckets: int) -> npt.NDArray[np.int64]:
    high = first >> np.uint64(32)
    return (high * np.uint64(buckets) >> np.uint64(32)).astype(np.int64)


def _list_runs(values: npt.NDArray[np.int64]) -> Iterator[tuple[int, tuple[int, int]]]:
    """(value, its [start, stop)) for runs of equal values in a sorted array."""
    if len(values) == 0:
        return
    ends = np.flatnonzero(np.diff(values)) + 1
    starts = np.concatenate([[0], ends])
    for start, stop in zip(starts, np.concatenate([ends, [len(values)]]), strict=True):
        yield int(values[start]), (int(start), int(stop))


def holds_store(folder: Path) -> bool:
    """Whether there is a store, or what a kill left of one; a folder of anything else is refused.

    >>> holds_store(Path("/nowhere"))
    False
    """
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise InputError.of("state", str(folder), "a folder, not a file")
    found = {path.name for path in folder.iterdir()}
    started = (folder / "journal/ready").exists()
    if not started and "meta.json" not in found and found - _AT_FIRST:
        raise InputError.of("state", str(folder), "a new or empty folder, or a store")
    return bool(found)


def create_folder(folder: Path) -> None:
    """The empty folders of a store; what holds anything else already is refused."""
    if {path.name for path in folder.iterdir()} - _AT_FIRST:
        raise InputError.of("state", str(folder), "a new or empty folder, or a store")
    for name in ("rows", "journal"):
        (folder / name).mkdir(exist_ok=True)
    folder.chmod(0o700)


def write_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace several files, all or nothing; an empty one is removed. Needs the writer's lock."""
    journal = folder / "journal"
    names = list(files)
    try:
        few = len(names) <= _FEW_FILES
        _do_all(
            lambda number: _write_new(journal / f"{number}.new", files[names[number]], few),
            range(len(names)),
        )
        if not few:
            os.sync()
        _write_new(journal / "ready.new", "\n".join(names).encode())
        (journal / "ready.new").replace(journal / "ready")
        _sync_folder(journal)
    except OSError as error:
        clean(journal)
        raise RunError(
            f"{folder} could not be written ({error.strerror}); nothing changed"
        ) from None
    complete(folder)


def complete(folder: Path) -> None:
    """Finish a change that was made durable, drop one that was not; then the journal is empty."""
    journal = folder / "journal"
    ready = journal / "ready"
    if not journal.exists():
        return
    if ready.exists():
        names = ready.read_text().split("\n")
        _do_all(
            lambda number: _put(journal / f"{number}.new", folder / names[number]),
            range(len(names)),
        )
        _sync_folder(folder / "rows")
        _sync_folder(folder)
        ready.unlink()
    clean(journal)


def clean(journal: Path) -> None:
    """Remove what a killed process left in the journal."""
    for path in journal.iterdir():
        path.unlink()


def _do_all(work: Callable[[int], None], numbers: range) -> None:
    if len(numbers) == 1:
        work(0)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(work, numbers):
            pass


def _put(new: Path, place: Path) -> None:
    if not new.exists():
        return
    if new.stat().st_size == 0:
        place.unlink(missing_ok=True)
        new.unlink()
    else:
        new.replace(place)


def _write_new(path: Path, data: bytes, durably: bool = True) -> None:
    with open(path, "xb", opener=_open_private) as file:
        file.write(data)
        file.flush()
        if durably:
            os.fsync(file.fileno())


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def hold(folder: Path | None, *, writing: bool) -> Generator[None]:
    """One writer, or several readers; a change that was cut short is completed first."""
    if folder is None or sys.platform == "win32":
        yield
        return
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise RunError(f"{folder} cannot be locked ({error.strerror}); nothing changed") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        complete(folder)
        if not writing:
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)
