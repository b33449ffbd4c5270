"""What was learned, as whole numbers by person, in a state whose bytes have no past.

A row is (name, content, features, target). ``name`` is a keyed hash of whose it is, ``content`` a
hash of the rest without a key: by it rows are ordered wherever an order matters. Rows lie in files
by the first bits of their name, in ascending order; how many files there are is a function of the
number of rows. Beside them:

    people   (person, name, rows): who is in the state, and under which name their rows are; then
             how many rows are nobody's, so that the manifest's sizes say if somebody is missing
    sums     S of all rows (``sums``)

Rows with an owner are a set with multiplicities: learning what is there already adds nothing.
Anonymous rows add up, and nobody can name them. A row of several people has a name of its own, and
goes when one of them goes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.data.people import read_ids
from expunge.errors import InputError, UnlearningError
from expunge.linear_model.numbers import Numbers, RowScaled
from expunge.linear_model.sums import Labels, Sums, add_rows, empty_sums
from expunge.manifests import Entry, damaged
from expunge.states import HASH_BYTES, State

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.void]
Owners = tuple[str, ...]
_PER_FILE, _MOST_FILES = 1024, 256
_NAME = np.dtype(f"V{HASH_BYTES}")
_PERSON = np.dtype([("person", _NAME), ("name", _NAME), ("rows", "<u4")])
_COUNT_BYTES = 8
_THREADS = 4


@dataclass(frozen=True)
class Change:
    """What a request or new rows leave: files to replace, sums, and how many rows came or went."""

    files: Mapping[str, bytes | None]
    sums: Sums
    count: int
    people: Mapping[bytes, int]
    similar: int = 0


class Store:
    """Rows and sums of one model in a :class:`State`; ``outputs`` targets, None for a class.

    >>> from expunge.linear_model.numbers import FixedPoint
    >>> store = Store(State.create(None, "example", {}), FixedPoint(), 2, None)
    >>> change = store.plan_addition([("ann",), ()], np.eye(2), np.zeros((2, 1), int), (0,))
    >>> store.state.commit(change.files); change.count, sorted(store.state.names())
    (2, ['key', 'people', 'rows/00', 'sums'])
    >>> store.find_people(["ann", "bob"])
    ['ann']
    """

    def __init__(self, state: State, numbers: Numbers, inputs: int, outputs: int | None) -> None:
        self.state, self.numbers, self.inputs, self.outputs = state, numbers, inputs, outputs
        target = ("<i8", (1,)) if outputs is None else ("<f8", (outputs,))
        features = ("features", numbers.dtype, (inputs,))
        row: Any = [("name", _NAME), ("content", _NAME), features, ("target", *target)]
        self.layout = np.dtype(row)
        empty = empty_sums(numbers, numbers.width(inputs), outputs)
        self._seen: tuple[Entry | None, Sums] = None, empty

    @property
    def sums(self) -> Sums:
        """S of everything in the state, read when another process has changed it."""
        if self._seen[0] != self.state.manifest.files.get("sums"):
            self.remember(Sums.from_bytes(bytes(self.state.read("sums"))))
        return self._seen[1]

    def remember(self, sums: Sums) -> None:
        """What was just committed need not be read again."""
        self._seen = self.state.manifest.files.get("sums"), sums

    def digest(self) -> str:
        """SHA-256 of the sums: on disk it is that of their file."""
        entry = self.state.manifest.files.get("sums")
        return entry.sha256 if entry and self.state.path else self.sums.digest()

    def _read_people(self) -> Rows:
        data = self.state.read("people") if "people" in self.state else bytes(_COUNT_BYTES)
        index = np.frombuffer(data[:-_COUNT_BYTES], _PERSON)
        rows = _count_owned(index) + int.from_bytes(data[-_COUNT_BYTES:], "little")
        stored = sum(self.state.manifest.files[file].size for file in self.state.names("rows/"))
        if stored != rows * self.layout.itemsize:
            raise self._refuse("does not say whose all rows are")
        return index

    def _refuse(self, how: str) -> UnlearningError:
        return damaged(self.state.path or Path("in memory"), "people", how)

    def _check_owners(self, rows: Rows, index: Rows) -> None:
        """Whose rows are is in the index, or they are nobody's."""
        shared = np.sort(index["name"][index["name"] != index["person"]])
        rows = rows[~_is_in(rows["name"], index["person"]) & ~_is_in(rows["name"], shared)]
        for name, content in _list_keys(rows):
            if name != self.state.hash(content, b"anonymous"):
                raise self._refuse("does not say whose all rows are")

    def _read_rows(self, file: str) -> Rows:
        return np.frombuffer(self.state.read(file), self.layout)

    def find_people(self, people: Sequence[str]) -> list[str]:
        """Those of them who have rows."""
        present = _is_in(self._join_names(people), self._read_people()["person"])
        return [person for person, found in zip(people, present, strict=True) if found]

    def _join_names(self, people: Sequence[str]) -> Array:
        return np.frombuffer(b"".join(self.state.name(person) for person in people), _NAME)

    def find_marks(self, marks: frozenset[bytes]) -> frozenset[bytes]:
        """Those of the marks of forgotten people who have rows."""
        names = set(self._read_people()["person"].tolist())
        return marks.intersection(map(self.state.mark, names))

    def commit_people(self) -> tuple[int, bytes]:
        """How many people there are, and their keyed hashes in order."""
        names = self._read_people()["person"]
        names = names[np.append(True, names[1:] != names[:-1])[: len(names)]]
        return len(names), names.tobytes()

    def plan_addition(
        self,
        owners: Sequence[Owners],
        features: Array,
        targets: Array,
        labels: Labels | None,
        sums: Sums | None = None,
    ) -> Change:
        """The state with these rows; ``sums`` are theirs, where others have added them up."""
        members = {who: sorted(map(self.state.name, who)) for who in set(owners) if who}
        names = {
            who: own[0] if len(own) == 1 else self.state.hash(b"".join(own), b"shared")
            for who, own in members.items()
        }
        rows = np.zeros(len(owners), self.layout)
        rows["features"], rows["target"] = features, targets
        contents = _hash_contents(rows)
        found = (
            names[who] if who else self.state.hash(content, b"anonymous")
            for who, content in zip(owners, contents, strict=True)
        )
        rows["content"] = np.frombuffer(b"".join(contents), _NAME)
        rows["name"] = np.frombuffer(b"".join(found), _NAME)
        rows = _arrange(rows)
        fresh, similar = self._find_fresh(rows, set(names.values()))
        if sums is None or len(fresh) < len(rows):
            sums = add_rows(self.numbers, fresh["features"], fresh["target"], labels)
        total, counts = self.sums + sums, Counter(fresh["name"].tolist())
        new = [
            (person, names[who], counts[names[who]])
            for who, own in members.items()
            for person in own
            if names[who] in counts
        ]
        people = _merge_people(self._read_people(), new)
        files = self._list_files(fresh, fresh["name"][:0], total, people)
        return Change(files, total, len(fresh), {}, similar)

    def _find_fresh(self, rows: Rows, owned: set[bytes]) -> tuple[Rows, int]:
        """Rows that are not there yet, and how many are but for a machine's rounding."""
        keep, similar, keys = np.ones(len(rows), np.bool_), 0, _list_keys(rows)
        for file, places in self._locate(rows["name"]):
            present = self._read_rows(file)
            present = present[_is_in(present["name"], rows["name"][places])]
            there = Counter(_list_keys(present))
            for at in places.tolist() if len(present) else ():
                if keys[at][0] not in owned:
                    continue
                if there[keys[at]] > 0:
                    there[keys[at]] -= 1
                    keep[at] = False
                elif self._is_similar(rows[at], present):
                    keep[at], similar = False, similar + 1
        return rows[keep], similar

    def _is_similar(self, row: Any, present: Rows) -> bool:
        """Whether this row is there but for units in the last place, as from another machine."""
        if not isinstance(self.numbers, RowScaled):
            return False
        old = present[present["name"] == row["name"]]
        same = (old["target"] == row["target"]).all(axis=1)
        apart = np.abs(old["features"].astype(np.int16) - row["features"].astype(np.int16))
        return bool((same & (apart.max(axis=1, initial=0) <= 1) & apart.any(axis=1)).any())

    def plan_removal(self, people: Sequence[str]) -> Change:
        """The state without these people's rows; nothing goes of those who have none."""
        wanted, index = np.sort(self._join_names(people)), self._read_people()
        own = index[_is_in(index["person"], wanted)]
        leaving = np.sort(own["name"])
        goes = _is_in(index["name"], leaving)
        counts = Counter[bytes]()
        for person, _, rows in own.tolist():
            counts[self.state.mark(person)] += rows
        taken = [np.empty(0, self.layout)]
        for file, _ in self._locate(np.concatenate([wanted, leaving])):
            rows = self._read_rows(file)
            self._check_owners(rows, index)
            taken.append(rows[_is_in(rows["name"], leaving)])
        gone = np.concatenate(taken)
        if len(gone) != _count_owned(index[goes]):
            raise self._refuse("says another number of rows than there are")
        labels = self.sums.labels
        total = self.sums - add_rows(self.numbers, gone["features"], gone["target"], labels)
        files = self._list_files(gone[:0], leaving, total, index[~goes])
        return Change(files, total, len(gone), counts)

    def _locate(self, names: Array) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """(file, places in ``names``) for every file that has rows of these names."""
        bucket = _find_bucket(names, count_files(self.sums.rows))
        for number in np.unique(bucket).tolist():
            if (file := f"rows/{number:02x}") in self.state:
                yield file, np.flatnonzero(bucket == number)

    def _list_files(
        self, added: Rows, leaving: Array, sums: Sums, people: Rows
    ) -> dict[str, bytes | None]:
        """What is to be written; of rows all files, where their number changes."""
        before, after = count_files(self.sums.rows), count_files(sums.rows)
        numbers = list(range(max(before, after)))
        if before == after:
            names = np.concatenate([added["name"], leaving])
            numbers = np.unique(_find_bucket(names, after)).tolist()
        there = [file for n in numbers if (file := f"rows/{n:02x}") in self.state]
        present = np.concatenate([added[:0], *map(self._read_rows, there)])
        joined = _arrange(np.concatenate([present[~_is_in(present["name"], leaving)], added]))
        bucket = _find_bucket(joined["name"], after)
        nobodys = (sums.rows - _count_owned(people)).to_bytes(_COUNT_BYTES, "little")
        files: dict[str, bytes | None] = dict.fromkeys(there)
        for number in np.unique(bucket).tolist():
            files[f"rows/{number:02x}"] = joined[bucket == number].tobytes()
        return files | {"sums": sums.to_bytes(), "people": people.tobytes() + nobodys}

    def read_ordered(self, change: Change | None = None) -> Rows:
        """All rows, or those that a change leaves, in the order of their content."""
        files = {} if change is None else change.files
        changed = [data for name, data in files.items() if name.startswith("rows/") and data]
        with ThreadPoolExecutor(_THREADS) as pool:  # each file is hashed once, several at a time
            same = pool.map(
                self._read_rows, (n for n in self.state.names("rows/") if n not in files)
            )
            parts = [*same, *(np.frombuffer(data, self.layout) for data in changed)]
        rows = np.concatenate([np.empty(0, self.layout), *parts])
        return rows[np.argsort(rows["content"], kind="stable")]

    def add_again(self) -> Sums:
        """The sums of the stored rows, added up again: what ``sums`` must be."""
        rows, index = self.read_ordered(), self._read_people()
        self._check_owners(rows, index)
        found = Counter(rows["name"].tolist())
        if any(found[name] != count for _, name, count in index.tolist()):
            raise self._refuse("says another number of rows than there are")
        return add_rows(self.numbers, rows["features"], rows["target"], self.sums.labels)


def read_owners(ids: Iterable[Any] | None, rows: int) -> list[Owners]:
    """Whose each row is; nobody's where ``ids`` is None."""
    if ids is None:
        return [()] * rows
    owners = list(read_ids(ids))
    if len(owners) != rows:
        raise InputError.of("ids", len(owners), f"one entry per row: {rows}")
    return owners


def count_files(rows: int) -> int:
    """How many files so many rows lie in: 1, 4, 16, 64 or 256.

    >>> count_files(0), count_files(1025), count_files(50_000)
    (1, 4, 64)
    """
    files = 1
    while files < _MOST_FILES and rows > files * _PER_FILE:
        files *= 4
    return files


def _arrange(rows: Rows) -> Rows:
    """Rows in their one order: ascending by name, then by content."""
    return rows[np.lexsort((rows["content"], rows["name"]))]


def _is_in(names: Array, known: Array) -> npt.NDArray[np.bool_]:
    """Which names are among the ``known`` ones, which are ascending."""
    if len(known) == 0:
        return np.zeros(len(names), np.bool_)
    return known[np.minimum(np.searchsorted(known, names), len(known) - 1)] == names


def _find_bucket(names: Array, files: int) -> npt.NDArray[np.int64]:
    return np.frombuffer(names.tobytes(), np.uint8)[::HASH_BYTES].astype(np.int64) * files // 256


def _hash_contents(rows: Rows) -> list[bytes]:
    size, data, skip = rows.dtype.itemsize, rows.tobytes(), 2 * HASH_BYTES
    parts = (data[at + skip : at + size] for at in range(0, len(data), size))
    return [hashlib.blake2b(part, digest_size=HASH_BYTES).digest() for part in parts]


def _list_keys(rows: Rows) -> list[tuple[bytes, bytes]]:
    """Name and content of every row."""
    return list(zip(rows["name"].tolist(), rows["content"].tolist(), strict=True))


def _count_owned(index: Rows) -> int:
    """How many rows have an owner: those of several people have a name of their own."""
    shared = index[index["person"] != index["name"]]
    once = np.unique(shared["name"], return_index=True)[1]
    return int(index["rows"].sum() - shared["rows"].sum() + shared["rows"][once].sum())


def _merge_people(index: Rows, new: Sequence[tuple[bytes, bytes, int]]) -> Rows:
    """The index with more rows of some; a person's entry for a name is there once."""
    both = np.concatenate([index, np.array(new, _PERSON)])
    both = both[np.lexsort((both["name"], both["person"]))]
    keys = both[["person", "name"]]
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(both)])
    made = both[first]
    made["rows"] = np.add.reduceat(both["rows"], first) if len(both) else 0
    return made
