"""What a head remembers: its rows, their sums, and the files both lie in.

``meta.json`` says what the rows are and is written once; ``sums`` holds the statistics and their
SHA-256; ``rows/`` and ``key`` are the store's; ``forgotten`` lies apart, marks and then the SHA-256
of the sums they go with: where the two differ, files of another day were put back, and whoever was
forgotten and is held again must go first. A head may add files of its own to a change.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from expunge.certificates.identifiers import read_ids
from expunge.errors import CertificateError, InputError, UnlearningError
from expunge.forgettable.integers import Integers
from expunge.forgettable.store import (
    BUCKETS,
    NAME_BYTES,
    Layout,
    Rows,
    Store,
    create_folder,
    hold,
    holds_store,
    write_together,
)
from expunge.forgettable.sums import Sums, add_blocks, check_room

FORMAT = "expunge-state-1"
BLOCK = 8320
_HASH_BYTES = 32
Whole = npt.NDArray[np.int64]
Block = tuple[npt.NDArray[np.float32], Whole]


@dataclass(frozen=True)
class Targets:
    """One of ``classes``, or ``outputs`` numbers y kept as round(scale · y), at most ``limit``.

    >>> Targets(classes=3).encode([2, 0]).tolist(), Targets(classes=3).expand(np.array([[2]]))
    ([[2], [0]], array([[0, 0, 1]]))
    >>> Targets(outputs=1, scale=100.0).encode([0.256]).tolist()
    [[26]]
    """

    classes: int | None = None
    outputs: int = 0
    scale: float = 1.0
    limit: int = 2**20

    def __post_init__(self) -> None:
        given, least = ("outputs", 1) if self.classes is None else ("classes", 2)
        value = getattr(self, given)
        if type(value) is not int or value < least:
            raise InputError.of(given, value, f"a whole number >= {least}")
        if not 0 < self.scale < float("inf"):
            raise InputError.of("target_scale", self.scale, "a finite number > 0")

    @property
    def width(self) -> int:
        return self.outputs if self.classes is None else self.classes

    @property
    def columns(self) -> int:
        """How many whole numbers a row keeps of its target."""
        return self.outputs if self.classes is None else 1

    @property
    def reach(self) -> int:
        """N: no component of t is beyond it."""
        return self.limit if self.classes is None else 1

    def encode(self, targets: Any) -> Whole:
        """The whole numbers to store; labels outside the classes are refused."""
        y = np.asarray(targets.tolist() if hasattr(targets, "tolist") else targets)
        y = y.reshape(len(y), -1)
        if y.size == 0:
            return np.empty((len(y), self.columns), np.int64)
        if y.shape[1] != self.columns or y.dtype.kind not in "iuf":
            raise InputError.of("targets", (y.dtype.name, *y.shape), f"{self.columns} per example")
        if self.classes is None:
            whole = np.rint(y.astype(np.float64) * self.scale)
            bad = ~(np.abs(whole) <= self.limit)
            valid = f"finite, and at most {self.limit} after scaling by {self.scale}"
        else:
            whole = y.astype(np.float64)
            bad = ~((whole >= 0) & (whole < self.classes) & (whole == np.floor(whole)))
            valid = f"one of the classes 0 … {self.classes - 1}"
        if bad.any():
            raise InputError.of("targets", y[bad][0].item(), valid)
        return whole.astype(np.int64)

    def expand(self, stored: Whole) -> Whole:
        """t of every row."""
        if self.classes is None:
            return np.asarray(stored)
        return (stored == np.arange(self.classes)).astype(np.int64)


@dataclass(frozen=True)
class Request:
    """Identifiers to forget, those of them that were forgotten before, and what remains."""

    names: tuple[str, ...]
    already: frozenset[str]
    changes: Mapping[int, Rows]
    sums: Sums


class Memory:
    """Rows and sums of one head, in memory or, from the first row on, in ``folder``."""

    def __init__(
        self,
        describe: Callable[[], Mapping[str, Any]],
        integers: Integers,
        targets: Targets,
        settings: Mapping[str, Any],
        folder: Path | None,
        key: bytes | None = None,
    ) -> None:
        self.describe, self.integers, self.targets = describe, integers, targets
        self.settings, self.folder = dict(settings), folder
        self.key = secrets.token_bytes(32) if key is None else key
        self.store: Store | None = None
        self.sums = Sums.empty(0, targets.width)
        self.evaluation = "by construction"
        self.forgotten: set[bytes] = set()
        self._apart = False
        self._seen: object = None
        if folder is not None and holds_store(folder):
            with hold(folder, writing=False):
                self.refresh()

    @property
    def unit(self) -> float:
        """U: features are φ/U where they meet real numbers."""
        return 1.0 if self.store is None else self.integers.unit(self.store.layout.inputs)

    def learn(
        self,
        features: npt.NDArray[Any],
        targets: Whole,
        ids: Sequence[str],
        sums: Sums | None = None,
    ) -> int:
        """Add rows, all or nothing; returns how many were new: a row that is held is not added.

        Somebody who was forgotten and is learned again leaves the list of the forgotten. ``sums``
        are those of all rows given, where others have added them up: used if every one is new.
        """
        with self.writing():
            if self.store is None:
                self._create(features.shape[1])
            self.check_returned(ids)
            store = self._get_store()
            if features.shape[1] != store.layout.inputs:
                raise InputError.of("features", features.shape[1], f"{store.layout.inputs} wide")
            changes, fresh = store.plan_addition(store.make_rows(ids, features, targets))
            largest, reach = self.integers.largest, self.targets.reach
            check_room(self.sums.rows + len(fresh), largest, reach)
            back = self._find_forgotten(ids)
            if back:
                warnings.warn(
                    f"forgotten before, and learned again now: {len(back)} of the identifiers, "
                    f"such as {', '.join(map(repr, list(back)[:3]))}",
                    stacklevel=4,
                )
            forgotten = self.forgotten.difference(back.values())
            if sums is None or len(fresh) < len(ids):
                sums = self.add(fresh)
            self._commit(changes, self.sums + sums, forgotten, {})
            return len(fresh)

    def plan(self, ids: Iterable[object]) -> Request:
        """What forgetting leaves; an identifier that was never learned is refused by name."""
        names = tuple(dict.fromkeys(read_ids(ids)))
        if not names:
            raise InputError("ids is empty; name at least one identifier to forget")
        taken = None if self.store is None else self.store.take(names)
        missing = names if taken is None else taken.missing
        self._check_known(missing)
        assert taken is not None
        self.check_returned(names)
        if missing:
            warnings.warn(f"already forgotten: {len(missing)} of {len(names)}", stacklevel=3)
        sums = self.sums - self.add(taken.rows) if len(taken.rows) else self.sums
        return Request(names, frozenset(missing), taken.changes, sums)

    def count_rows(self, ids: Iterable[object]) -> dict[bytes, int]:
        """How many rows each identifier has, by its mark; one never learned is refused by name."""
        names = tuple(dict.fromkeys(read_ids(ids)))
        if self.store is None:
            self._check_known(names)
        store = self._get_store()
        taken = store.take(names)
        self._check_known(taken.missing)
        rows = Counter(name.tobytes() for name in taken.rows["name"])
        return {self.mark(name): rows[store.name(name)] for name in names}

    def count_people(self) -> int:
        """How many identifiers have rows."""
        if self.store is None:
            return 0
        found = (self.store.read(bucket)["name"] for bucket in self.store.list_buckets())
        return sum(1 + int((names[1:] != names[:-1]).sum()) for names in found)

    def forget(self, request: Request, files: Mapping[str, bytes]) -> int:
        """Commit what was planned, together with files of the head; returns how many rows went."""
        new = {self.mark(name) for name in request.names if name not in request.already}
        before = self.sums.rows
        self._commit(request.changes, request.sums, self.forgotten | new, files)
        return before - request.sums.rows

    def find_returned(self) -> set[bytes]:
        """Marks of the forgotten whose rows are held."""
        if self.store is None or not self.forgotten:
            return set()
        found = set[bytes]()
        for bucket in self.store.list_buckets():
            names = self.store.read(bucket)["name"].tobytes()
            cut = range(0, len(names), NAME_BYTES)
            held = {names[at : at + NAME_BYTES] for at in cut}
            found.update(self.forgotten.intersection(map(self.store.mark, held)))
        return found

    def check_returned(self, names: Iterable[str] = ()) -> None:
        """Refuse while the forgotten are held again, as in rows from a backup, but for ``names``.

        All rows are looked at only where ``forgotten`` and ``sums`` are not of one change.
        """
        again = self.find_returned() if self._apart else set[bytes]()
        if again and (left := again.difference(map(self.mark, names))):
            raise UnlearningError(
                f"{len(left)} of the forgotten are held again, as after a backup was put "
                "back; forget them again, all in one request, before anything else"
            )

    def add(self, rows: Rows, block: int = 0) -> Sums:
        """S of stored rows."""
        cut = range(0, len(rows), BLOCK)
        return self._add((self._expand(rows[start : start + BLOCK]) for start in cut), block)

    def add_all(self, block: int = 0) -> Sums:
        """S of everything that is held, from the rows: what ``sums`` must be."""
        return self._add(self.read_blocks(), block)

    def _add(self, blocks: Iterable[Block], block: int) -> Sums:
        shape = self.sums.gram.shape[0], self.targets.width
        return add_blocks(blocks, self.integers.largest, shape, block)

    def read_blocks(
        self, replaced: Mapping[int, Rows] | None = None, length: int = BLOCK
    ) -> Iterator[Block]:
        """(φ, t) of all rows in the store's order, in blocks; with buckets ``replaced``."""
        if self.store is None:
            return
        waiting: list[Rows] = []
        for rows in self.store.read_all(replaced or {}):
            waiting.append(rows)
            while (count := sum(map(len, waiting))) >= length:
                joined = np.concatenate(waiting)
                yield self._expand(joined[:length])
                waiting = [joined[length:]] if count > length else []
        if waiting:
            yield self._expand(np.concatenate(waiting))

    def save(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """Write everything to a new folder."""
        if self.store is None:
            raise InputError("nothing was learned yet; there is nothing to save")
        with hold(self.folder, writing=False):
            buckets = {b: self.store.read(b) for b in self.store.list_buckets()}
        folder.mkdir(parents=True, exist_ok=True)
        with hold(folder, writing=True):
            self._prepare(folder, self.store.layout.inputs)
            copy = Store(self.store.layout, self.key, folder, self.store.buckets)
            copy.apply(buckets, dict(files) | _seal(self.sums, self.forgotten))

    @contextmanager
    def writing(self) -> Generator[None]:
        """The writer's lock, with what is on disk read again if another process changed it."""
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"state {self.folder} cannot be made: {error.strerror}") from None
        with hold(self.folder, writing=True):
            self.refresh()
            self._check_rows()
            yield

    def refresh(self) -> None:
        """Read sums and forgotten names again if the files are not the ones that were read."""
        if self.folder is None or not (self.folder / "meta.json").exists():
            return
        seen = _stamp(self.folder / "sums")
        if self.store is None or seen != self._seen:
            self._open(self.folder)

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Replace files of the head alone."""
        if self.folder is not None and self.store is not None:
            write_together(self.folder, files)

    def read_file(self, name: str) -> bytes | None:
        """A file that the head wrote, if it did."""
        if self.folder is None or not (self.folder / name).exists():
            return None
        return (self.folder / name).read_bytes()

    def mark(self, name: str) -> bytes:
        """The keyed hash by which somebody who was forgotten is known."""
        store = self._get_store()
        return store.mark(store.name(name))

    def _check_rows(self) -> None:
        """Sums of one day and rows of another are told apart by how many there are."""
        if self.store is not None and len(self.store) != self.sums.rows:
            raise CertificateError(
                f"state {self.folder} is damaged: its sums are of {self.sums.rows} rows, and it "
                f"holds {len(self.store)}; put back a whole backup, then forget again"
            )

    def _check_known(self, missing: Sequence[str]) -> None:
        known = self.store is not None
        unknown = [n for n in missing if not known or self.mark(n) not in self.forgotten]
        if unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            raise InputError(f"ids holds {unknown[0]!r}{more}, which was never learned")

    def _find_forgotten(self, ids: Sequence[str]) -> dict[str, bytes]:
        if not self.forgotten:
            return {}
        marks = {name: self.mark(name) for name in dict.fromkeys(ids)}
        return {name: mark for name, mark in marks.items() if mark in self.forgotten}

    def _get_store(self) -> Store:
        assert self.store is not None
        return self.store

    def _expand(self, rows: Rows) -> Block:
        return self.integers.expand(rows["features"]), self.targets.expand(rows["target"])

    def _commit(
        self,
        changes: Mapping[int, Rows],
        sums: Sums,
        forgotten: set[bytes],
        files: Mapping[str, bytes],
    ) -> None:
        store = self._get_store()
        if store.folder is None:
            store.apply(changes)
        else:
            store.apply(changes, dict(files) | _seal(sums, forgotten))
            self._seen = _stamp(store.folder / "sums")
        self.sums, self.forgotten, self._apart = sums, forgotten, False

    def _create(self, inputs: int) -> None:
        layout = Layout(inputs, self.integers.dtype.str, self.targets.columns)
        if self.folder is not None:
            self._prepare(self.folder, inputs)
        self.store = Store(layout, self.key, self.folder)
        self.sums = Sums.empty(self.integers.width(inputs), self.targets.width)

    def _prepare(self, folder: Path, inputs: int) -> None:
        create_folder(folder)
        meta = {
            "format": FORMAT,
            "settings": self.settings,
            "features": dict(self.describe()),
            "evaluation": self.evaluation,
            "targets": asdict(self.targets),
            "inputs": inputs,
            "buckets": BUCKETS,
        }
        empty = Sums.empty(self.integers.width(inputs), self.targets.width)
        files = {
            "key": self.key,
            "meta.json": json.dumps(meta, indent=1, sort_keys=True).encode(),
        }
        write_together(folder, files | _seal(empty, set()))

    def _open(self, folder: Path) -> None:
        meta = read_meta(folder)
        for name, ours in (
            ("features", dict(self.describe())),
            ("settings", self.settings),
            ("targets", asdict(self.targets)),
        ):
            for field, value in cast(dict[str, Any], meta[name]).items():
                if ours.get(field) != value:
                    found = ours.get(field)
                    raise InputError.of(f"{name}.{field}", found, f"{value!r}, as in {folder}")
        try:
            self.key, sums = (folder / "key").read_bytes(), (folder / "sums").read_bytes()
        except OSError as error:
            raise CertificateError(f"state {folder} is damaged: {error}") from None
        self.evaluation = meta["evaluation"]
        layout = Layout(meta["inputs"], self.integers.dtype.str, self.targets.columns)
        self.store = Store(layout, self.key, folder, meta["buckets"])
        self._seen = _stamp(folder / "sums")
        sums, digest = sums[:-_HASH_BYTES], sums[-_HASH_BYTES:]
        if hashlib.sha256(sums).digest() != digest:
            raise CertificateError(f"state {folder} is damaged: its sums are not what was written")
        self.sums = Sums.from_bytes(sums)
        told = self.read_file("forgotten") or digest
        marks = told[:-_HASH_BYTES]
        if len(told) < _HASH_BYTES or len(marks) % NAME_BYTES:
            raise CertificateError(f"state {folder} is damaged: its list forgotten is cut short")
        self.forgotten = {marks[at : at + NAME_BYTES] for at in range(0, len(marks), NAME_BYTES)}
        self._apart = told[-_HASH_BYTES:] != digest


def _seal(sums: Sums, forgotten: set[bytes]) -> dict[str, bytes]:
    """The files ``sums`` and ``forgotten``, each with the SHA-256 of the sums at its end."""
    data = sums.to_bytes()
    digest = hashlib.sha256(data).digest()
    marks = b"".join(sorted(forgotten))
    return {"sums": data + digest, "forgotten": marks + digest if marks else b""}


def open_memory(folder: Path) -> Memory:
    """What a state folder remembers, by what it says about itself."""
    meta = read_meta(folder)
    integers = Integers(*(meta["features"][name] for name in ("bits", "lift", "seed")))
    targets = Targets(**meta["targets"])
    return Memory(lambda: meta["features"], integers, targets, meta["settings"], folder)


def read_meta(folder: Path) -> dict[str, Any]:
    """What a state folder says about itself."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError):
        raise InputError.of("state", str(folder), "a folder that learn or save wrote") from None
    if not isinstance(meta, dict) or cast(dict[str, Any], meta).get("format") != FORMAT:
        raise CertificateError(f"{folder} is not a state of {FORMAT!r}")
    return cast(dict[str, Any], meta)


def _stamp(path: Path) -> object:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
