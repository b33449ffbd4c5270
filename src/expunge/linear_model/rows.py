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
from expunge.linear_model.sums import Label, Sums, add_rows, empty_sums
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


def make_layout(inputs: int, dtype: np.dtype[Any], outputs: int | None) -> np.dtype[Any]:
    """A row as it is stored; ``outputs`` targets, None for the code of a class."""
    target = ("<i8", (1,)) if outputs is None else ("<f8", (outputs,))
    row = [("name", _NAME), ("content", _NAME), ("features", dtype, (inputs,)), ("target", *target)]
    return np.dtype(row)


@dataclass(frozen=True)
class Change:
    """What a request or new rows leave: files to replace, sums, and how many rows came or went."""

    files: Mapping[str, bytes | None]
    sums: Sums
    count: int
    people: Mapping[bytes, int]
    replaced: Mapping[int, Rows]
    similar: int = 0


class Store:
    """Rows and sums of one model in a :class:`State`, in memory or on disk.

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
        self.layout = make_layout(inputs, numbers.dtype, outputs)
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
        entries, rest = divmod(len(data) - _COUNT_BYTES, _PERSON.itemsize)
        stored = sum(self.state.manifest.files[file].size for file in self.state.names("rows/"))
        if entries < 0 or rest:
            raise self._refuse("people", "is not what was written")
        index = np.frombuffer(data, _PERSON, entries)
        rows = _count_owned(index) + int.from_bytes(data[-_COUNT_BYTES:], "little")
        if stored != rows * self.layout.itemsize:
            raise self._refuse("people", "does not say whose all rows are")
        return index

    def _refuse(self, name: str, how: str) -> UnlearningError:
        return damaged(self.state.path or Path("in memory"), name, how)

    def _check_owners(self, rows: Rows, index: Rows) -> None:
        """Whose rows are is in the index, or they are nobody's."""
        rows = rows[~_is_in(rows["name"], index["person"])]
        rows = rows[~_is_in(rows["name"], _sort(index["name"][index["name"] != index["person"]]))]
        for name, content in zip(rows["name"], rows["content"], strict=True):
            if name.tobytes() != self.state.hash(content.tobytes(), b"anonymous"):
                raise self._refuse("people", "does not say whose all rows are")

    def check_absent(self, people: Sequence[str]) -> None:
        """Refuse where people who are not in the index have rows."""
        names = _sort(self._join_names(people))
        for file, _ in self._locate(names):
            if _is_in(self._read_rows(file)["name"], names).any():
                raise self._refuse("people", "does not say whose all rows are")

    def _read_rows(self, file: str) -> Rows:
        return np.frombuffer(self.state.read(file), self.layout)

    def name_group(self, owners: Owners) -> bytes:
        """The name under which rows of these people are."""
        names = sorted(self.state.name(owner) for owner in owners)
        return names[0] if len(names) == 1 else self.state.hash(b"".join(names), b"shared")

    def find_people(self, people: Sequence[str]) -> list[str]:
        """Those of them who have rows."""
        present = _is_in(self._join_names(people), self._read_people()["person"])
        return [person for person, found in zip(people, present, strict=True) if found]

    def _join_names(self, people: Sequence[str]) -> Array:
        names = b"".join(self.state.name(person) for person in people)
        return np.frombuffer(names, _NAME)

    def find_marks(self, marks: frozenset[bytes]) -> set[bytes]:
        """Those of the marks of forgotten people who have rows."""
        index = self._read_people()["person"].tobytes()
        names = (index[at : at + HASH_BYTES] for at in range(0, len(index), HASH_BYTES))
        return {mark for mark in map(self.state.mark, set(names)) if mark in marks}

    def commit_people(self) -> tuple[int, bytes]:
        """How many people there are, and their keyed hashes in order."""
        names = self._read_people()["person"]
        first = np.ones(len(names), np.bool_)
        first[1:] = names[1:] != names[:-1]
        return int(first.sum()), names[first].tobytes()

    def plan_addition(
        self,
        owners: Sequence[Owners],
        features: Array,
        targets: Array,
        labels: tuple[Label, ...] | None,
        sums: Sums | None = None,
    ) -> Change:
        """The state with these rows; ``sums`` are theirs, where others have added them up."""
        names = {who: self.name_group(who) for who in set(owners) if who}
        rows = np.zeros(len(owners), self.layout)
        rows["features"], rows["target"] = features, targets
        contents = _hash_contents(rows)
        found = (
            names[who] if who else self.state.hash(content, b"anonymous")
            for who, content in zip(owners, contents, strict=True)
        )
        rows["content"] = np.frombuffer(b"".join(contents), _NAME)
        rows["name"] = np.frombuffer(b"".join(found), _NAME)
        rows = arrange(rows)
        fresh, similar = self._find_fresh(rows, set(names.values()))
        if sums is None or len(fresh) < len(rows):
            sums = add_rows(self.numbers, fresh["features"], fresh["target"], labels)
        total = self.sums + sums
        members = {name: [self.state.name(one) for one in who] for who, name in names.items()}
        counts = _count(fresh["name"])
        new = [(p, n, counts.get(n, 0)) for n, who in members.items() for p in who if n in counts]
        people = _merge_people(self._read_people(), new)
        replaced = self._replace(fresh, fresh["name"][:0], total.rows)
        files = self._list_files(replaced, total, people)
        return Change(files, total, len(fresh), {}, replaced, similar)

    def _find_fresh(self, rows: Rows, owned: set[bytes]) -> tuple[Rows, int]:
        """Rows that are not there yet, and how many are but for a machine's rounding."""
        keep, similar = np.ones(len(rows), np.bool_), 0
        keys = _read_keys(rows)
        for file, places in self._locate(rows["name"]):
            present = self._read_rows(file)
            present = present[_is_in(present["name"], rows["name"][places])]
            counts, by_name = Counter(_read_keys(present)), dict[bytes, list[int]]()
            for at, key in enumerate(_read_keys(present)):
                by_name.setdefault(key[:HASH_BYTES], []).append(at)
            for at in places.tolist():
                key = keys[at]
                if (name := key[:HASH_BYTES]) not in owned or name not in by_name:
                    continue
                if counts[key] > 0:
                    counts[key] -= 1
                    keep[at] = False
                elif self._is_similar(rows[at], present[by_name[name]]):
                    keep[at], similar = False, similar + 1
        return rows[keep], similar

    def _is_similar(self, row: Any, old: Rows) -> bool:
        """Whether this row is there but for units in the last place, as from another machine."""
        if not isinstance(self.numbers, RowScaled):
            return False
        same = (old["target"] == row["target"]).all(axis=1)
        apart = np.abs(old["features"].astype(np.int16) - row["features"].astype(np.int16))
        return bool((same & (apart.max(axis=1, initial=0) <= 1) & apart.any(axis=1)).any())

    def plan_removal(self, people: Sequence[str]) -> Change:
        """The state without these people's rows."""
        wanted, index = _sort(self._join_names(people)), self._read_people()
        leaving = _sort(index["name"][_is_in(index["person"], wanted)])
        gone_index = _is_in(index["name"], leaving)
        counts = dict.fromkeys((self.state.mark(name.tobytes()) for name in wanted), 0)
        for entry in index[gone_index]:
            if (mark := self.state.mark(entry["person"].tobytes())) in counts:
                counts[mark] += int(entry["rows"])
        taken = [self._read_rows(file) for file, _ in self._locate(leaving)]
        for rows in taken:
            self._check_owners(rows, index)
        taken = [rows[_is_in(rows["name"], leaving)] for rows in taken]
        gone = np.concatenate([np.empty(0, self.layout), *taken])
        if len(gone) != _count_owned(index[gone_index]):
            raise self._refuse("people", "says another number of rows than there are")
        total = self.sums
        if len(gone):
            labels = total.labels
            total = total - add_rows(self.numbers, gone["features"], gone["target"], labels)
        replaced = self._replace(np.empty(0, self.layout), leaving, total.rows)
        files = self._list_files(replaced, total, index[~gone_index])
        return Change(files, total, len(gone), counts, replaced)

    def _locate(self, names: Array) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """(file, places in ``names``) for every file that has rows of these names."""
        buckets = count_files(self.sums.rows)
        bucket = _find_bucket(names, buckets)
        for number in np.unique(bucket).tolist():
            if (file := f"rows/{number:02x}") in self.state:
                yield file, np.flatnonzero(bucket == number)

    def _replace(self, added: Rows, leaving: Array, rows: int) -> dict[int, Rows]:
        """Buckets as they will be; all of them where their number changes."""
        before, after = count_files(self.sums.rows), count_files(rows)
        numbers = list(range(max(before, after)))
        if before == after:
            names = np.concatenate([added["name"], leaving])
            numbers = np.unique(_find_bucket(names, after)).tolist()
        files = [name for n in numbers if (name := f"rows/{n:02x}") in self.state]
        present = np.concatenate([np.empty(0, self.layout), *map(self._read_rows, files)])
        joined = arrange(np.concatenate([present[~_is_in(present["name"], leaving)], added]))
        bucket = _find_bucket(joined["name"], after)
        return {number: joined[bucket == number] for number in numbers}

    def _list_files(
        self, replaced: Mapping[int, Rows], sums: Sums, people: Rows
    ) -> dict[str, bytes | None]:
        files: dict[str, bytes | None] = {
            f"rows/{number:02x}": rows.tobytes() or None for number, rows in replaced.items()
        }
        files = {name: data for name, data in files.items() if data or name in self.state}
        nobodys = (sums.rows - _count_owned(people)).to_bytes(_COUNT_BYTES, "little")
        return files | {"sums": sums.to_bytes(), "people": people.tobytes() + nobodys}

    def read_ordered(self, change: Change | None = None) -> Rows:
        """All rows, or those that a change leaves, in the order of their content."""
        replaced = {} if change is None else change.replaced
        files = [n for n in self.state.names("rows/") if int(n.split("/")[1], 16) not in replaced]
        with ThreadPoolExecutor(_THREADS) as pool:  # each file is hashed once, several at a time
            parts = [*pool.map(self._read_rows, files), *replaced.values()]
        contents = np.concatenate([np.empty(0, _NAME), *(p["content"] for p in parts)])
        words = _read_words(contents)
        rank = np.empty(len(contents), np.int64)
        rank[np.lexsort((words[:, 1], words[:, 0]))] = np.arange(len(contents))
        ordered, at = np.empty(len(contents), self.layout), 0
        for part in parts:
            ordered[rank[at : at + len(part)]] = part
            at += len(part)
        return ordered

    def add_again(self) -> Sums:
        """The sums of the stored rows, added up again: what ``sums`` must be."""
        rows, index = self.read_ordered(), self._read_people()
        self._check_owners(rows, index)
        found = _count(rows["name"])
        if any(found.get(entry["name"].tobytes(), 0) != entry["rows"] for entry in index):
            raise self._refuse("people", "says another number of rows than there are")
        if len(rows) == 0:
            return self.sums
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


def arrange(rows: Rows) -> Rows:
    """Rows in their one order: ascending by name, then by content."""
    (a, b), (c, d) = _read_words(rows["name"]).T, _read_words(rows["content"]).T
    return rows[np.lexsort((d, c, b, a))]


def _read_words(names: Array) -> npt.NDArray[np.uint64]:
    """Names as pairs of words, in the order of their bytes."""
    return np.frombuffer(names.tobytes(), ">u8").reshape(-1, 2).astype(np.uint64)


def _sort(names: Array) -> Array:
    words = _read_words(names)
    return names[np.lexsort((words[:, 1], words[:, 0]))]


def _is_in(names: Array, known: Array) -> npt.NDArray[np.bool_]:
    """Which names are among the ``known`` ones, which are ascending."""
    if len(known) == 0:
        return np.zeros(len(names), np.bool_)
    one, other = _read_words(names), _read_words(known)
    place = np.minimum(np.searchsorted(other[:, 0], one[:, 0]), len(other) - 1)
    return (other[place] == one).all(axis=1)


def _find_bucket(names: Array, files: int) -> npt.NDArray[np.int64]:
    first = np.frombuffer(names.tobytes(), np.uint8).reshape(-1, HASH_BYTES)[:, 0]
    return first.astype(np.int64) * files // 256


def _hash_contents(rows: Rows) -> list[bytes]:
    size, data, skip = rows.dtype.itemsize, rows.tobytes(), 2 * HASH_BYTES
    parts = (data[at + skip : at + size] for at in range(0, len(data), size))
    return [hashlib.blake2b(part, digest_size=HASH_BYTES).digest() for part in parts]


def _count(names: Array) -> dict[bytes, int]:
    found, counts = np.unique(names, return_counts=True)
    return {name.tobytes(): int(count) for name, count in zip(found, counts, strict=True)}


def _count_owned(index: Rows) -> int:
    """How many rows have an owner: those of several people have a name of their own."""
    shared = index[index["person"] != index["name"]]
    if len(shared) == 0:
        return int(index["rows"].sum())
    once = np.unique(_read_words(shared["name"]), axis=0, return_index=True)[1]
    return int(index["rows"].sum() - shared["rows"].sum() + shared["rows"][once].sum())


def _read_keys(rows: Rows) -> list[bytes]:
    """Name and content of every row."""
    size = rows.dtype.itemsize
    data = rows.tobytes()
    return [data[at : at + 2 * HASH_BYTES] for at in range(0, len(data), size)]


def _merge_people(index: Rows, new: Sequence[tuple[bytes, bytes, int]]) -> Rows:
    """The index with more rows of some; a person's entry for a name is there once."""
    added = np.frombuffer(b"".join(p + n + c.to_bytes(4, "little") for p, n, c in new), _PERSON)
    both = np.concatenate([index, added])
    (a, b), (c, d) = _read_words(both["person"]).T, _read_words(both["name"]).T
    both = both[np.lexsort((d, c, b, a))]
    first = np.ones(len(both), np.bool_)
    first[1:] = both[["person", "name"]][1:] != both[["person", "name"]][:-1]
    made = both[first]
    if len(both):
        made["rows"] = np.add.reduceat(both["rows"], np.flatnonzero(first))
    return made
