"""What a state remembers of the examples, slice by slice, and where the examples come from."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from expunge.data.data import Data
from expunge.data.examples import join_rows
from expunge.data.people import read_people
from expunge.errors import InputError
from expunge.exact.shards_examples import (
    TRAINING,
    VALIDATION,
    Assignment,
    Found,
    Index,
    Place,
    Row,
    decode,
    encode,
    index_examples,
    read_example,
    select_examples,
)
from expunge.manifests import damaged
from expunge.states import HASH_BYTES, State

FEWEST = 2  # a batch normalisation has no statistics of one example


@dataclass(frozen=True)
class Slice:
    """The rows of one slice, as the bytes of their file: a function of their set."""

    data: bytes = b""

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Slice:
        ordered = sorted(set(rows))
        head = (struct.pack("<BH", row.role, len(row.owners)) + row.key for row in ordered)
        made = cls(b"".join(a + b"".join(row.owners) for a, row in zip(head, ordered, strict=True)))
        made.__dict__["rows"] = frozenset(ordered)
        return made

    @cached_property
    def rows(self) -> frozenset[Row]:
        rows, at, raw = list[Row](), 0, self.data
        while at < len(raw):
            role, count = struct.unpack_from("<BH", raw, at)
            end = at + 3 + HASH_BYTES * (count + 1)
            key, *owners = (raw[i : i + HASH_BYTES] for i in range(at + 3, end, HASH_BYTES))
            rows.append(Row(role, key, tuple(owners)))
            at = end
        return frozenset(rows)

    @cached_property
    def count(self) -> int:
        """How many examples are trained on; the others are for validation."""
        return sum(row.role == TRAINING for row in self.rows)


@dataclass(frozen=True)
class Slices:
    """All slices of a state."""

    state: State
    assignment: Assignment
    parts: Mapping[Place, Slice]

    @classmethod
    def read(cls, state: State) -> Slices:
        """Those of a state, which says itself how it is cut."""
        settings: dict[str, Any] = {n: state.settings.get(n) for n in ("shards", "slices", "seed")}
        if list(map(type, settings.values())) != [int, int, str]:
            raise damaged(state.path or Path(), "manifest.json", "has settings of no shards")
        assignment = Assignment(**settings)
        names = {place: f"slices/{spell(place)}" for place in assignment.list_places()}
        parts = {p: Slice(bytes(state.read(n)) if n in state else b"") for p, n in names.items()}
        return cls(state, assignment, parts)

    def count(self) -> tuple[tuple[int, ...], ...]:
        """How many examples each slice of each shard has."""
        shards = range(self.assignment.shards)
        places = map(self.assignment.list_places, shards)
        return tuple(tuple(self.parts[place].count for place in part) for part in places)

    @property
    def total(self) -> int:
        return sum(part.count for part in self.parts.values())

    def list_owners(self) -> set[bytes]:
        """Keyed hashes of everybody who has an example."""
        return {owner for part in self.parts.values() for row in part.rows for owner in row.owners}

    def find_people(self, people: Iterable[Any]) -> list[str]:
        """Those of them who have an example."""
        names, owners = dict.fromkeys(read_people(people)), self.list_owners()
        return [name for name in names if self.state.name(name) in owners]

    def check_returned(self, leaving: Iterable[bytes] = ()) -> None:
        """Refuse while people of a newer list of the forgotten are here, but for those leaving."""
        mark, owners = self.state.mark, self.list_owners
        self.state.check_returned(lambda marks: marks.intersection(map(mark, owners())), leaving)

    def measure(self, owners: set[bytes]) -> float:
        """What forgetting these people costs, as a part of training all: stage j of a shard costs
        n_1 + … + n_j, with n_i examples in slice i, and is trained again from the first touched."""
        touched, total = 0, 0
        for shard, counts in enumerate(self.count()):
            places, found = self.assignment.list_places(shard), False
            for place, stage in zip(places, itertools.accumulate(counts), strict=True):
                rows = self.parts[place].rows
                found = found or any(not owners.isdisjoint(row.owners) for row in rows)
                touched, total = touched + found * stage, total + stage
        return touched / max(total, 1)

    def add(self, index: Index) -> Slices:
        parts = dict(self.parts)
        for place, found in index.items():
            new = {one.row for one in found.values()}
            if not new <= parts[place].rows:
                parts[place] = Slice.of(parts[place].rows | new)
        return replace(self, parts=parts)

    def remove(self, names: Iterable[str]) -> tuple[Slices, dict[bytes, int]]:
        """Without these people, and {mark: examples} of each who was there: an example of several
        of them is counted once."""
        wanted, gone = set(map(self.state.name, names)), dict[bytes, int]()
        parts = dict(self.parts)
        for place, part in self.parts.items():
            leaving = {row for row in part.rows if not wanted.isdisjoint(row.owners)}
            if leaving:
                parts[place] = Slice.of(part.rows - leaving)
            for row in sorted(leaving):
                first, *others = (self.state.mark(o) for o in row.owners if o in wanted)
                gone[first] = gone.get(first, 0) + (row.role == TRAINING)
                for mark in others:
                    gone.setdefault(mark, 0)
        return replace(self, parts=parts), gone

    def list_changed(self, before: Slices) -> dict[Place, Slice]:
        return {place: p for place, p in self.parts.items() if p.data != before.parts[place].data}

    def list_lineages(self, settings: Mapping[str, Any]) -> list[list[str]]:
        """L_1 … L_R of every shard: what its checkpoints are made from."""
        found = list[list[str]]()
        for shard in range(self.assignment.shards):
            text = json.dumps({**settings, "shard": shard}, sort_keys=True)
            at, own = hashlib.sha256(b"expunge/constituent-1\0" + text.encode()).digest(), []
            for place in self.assignment.list_places(shard):
                content = self.state.hash(self.parts[place].data, b"slice")
                at = hashlib.sha256(at + content).digest()
                own.append(at.hex())
            found.append(own)
        return found

    def list_checkpoints(self, settings: Mapping[str, Any]) -> dict[int, list[str]]:
        """The checkpoints that every shard with examples enough must have, by name."""
        counts, lineages = self.count(), self.list_lineages(settings)
        return {
            k: [f"checkpoints/{spell((k, j))}-{lineage[:32]}" for j, lineage in enumerate(own)]
            for k, own in enumerate(lineages)
            if sum(counts[k]) >= FEWEST
        }

    def list_stale(self, settings: Mapping[str, Any]) -> dict[str, None]:
        """The checkpoints that were made from something else, as a change that removes them."""
        valid = set(itertools.chain(*self.list_checkpoints(settings).values()))
        return {name: None for name in self.state.names("checkpoints/") if name not in valid}


def spell(place: Place) -> str:
    return f"{place[0]:03x}-{place[1]:03x}"


@dataclass
class Given:
    """Examples are looked up in the caller's ``data``; of shards that nobody asks for, none is."""

    slices: Slices
    data: Data | None
    index: Index | None = None

    def list_files(self, changed: dict[Place, Slice]) -> dict[str, bytes | None]:
        """The contents of a state for slices that changed."""
        return {f"slices/{spell(place)}": part.data or None for place, part in changed.items()}

    def check(self, shards: Sequence[int]) -> None:
        """Refuse if an example of these shards is not at hand."""
        slices, assignment = self.slices, self.slices.assignment
        if not shards:
            return
        if self.data is None:
            raise InputError(
                "data is missing: examples of the touched shards are trained on again, and this "
                "state keeps none (keep_examples=True does)"
            )
        if self.index is None:
            self.index = index_examples(self.data, assignment, slices.state, set(shards))
        places = [place for shard in shards for place in assignment.list_places(shard)]
        found = {place: self.index.get(place, {}) for place in places}
        missing = sum(r.key not in found[p] for p in places for r in slices.parts[p].rows)
        if missing:
            raise InputError(
                f"data lack {missing} examples that were learned before and have to be trained on "
                "again, or have them with other content; give all of them as they were"
            )

    def read(self, places: Sequence[Place]) -> Data:
        """The examples of these slices, in their one order."""
        assert self.data is not None
        assert self.index is not None
        found = [self.index[p][row.key] for p in places for row in self.slices.parts[p].rows]
        return select_examples(self.data, found)


class Kept(Given):
    """Examples that the state has a copy of: key, order, role, kind and content of each."""

    def _copy(self, found: Found) -> list[Any]:
        assert self.data is not None
        part = self.data.validation if found.row.role == VALIDATION else self.data
        assert part is not None
        if part.kind not in ("columns", "list", "dataset"):
            valid = f"False for examples of the kind {part.kind}: keep them yourself"
            raise InputError.of("keep_examples", True, valid)
        kind = "columns" if part.kind == "columns" else "list"
        return [found.row.key, found.order, found.row.role, kind, read_example(part, found.at)]

    def list_files(self, changed: dict[Place, Slice]) -> dict[str, bytes | None]:
        files = super().list_files(changed)
        for place, part in changed.items():
            found = self._find(place)
            kept = [found[key] for key in sorted(row.key for row in part.rows)]
            files[f"examples/{spell(place)}"] = encode(kept, "an example") if kept else None
        return files

    def check(self, shards: Sequence[int]) -> None:
        collate = self.slices.state.settings["collate"]
        if shards and self.data is None and collate is not None:
            raise InputError("data is missing: this state was learned with a collate function")

    def _find(self, place: Place) -> dict[bytes, list[Any]]:
        name, given = f"examples/{spell(place)}", (self.index or {}).get(place, {})
        state = self.slices.state
        old = decode(state.read(name)) if name in state else []
        kept = {one[0]: one for one in old}
        return kept | {key: self._copy(one) for key, one in given.items() if key not in kept}

    def read(self, places: Sequence[Place]) -> Data:
        each = ((self._find(place), self.slices.parts[place].rows) for place in places)
        found = sorted((f[row.key] for f, rows in each for row in rows), key=lambda one: one[1])
        training, validation = (
            _restore([one for one in found if one[2] == role]) for role in (TRAINING, VALIDATION)
        )
        collate = None if self.data is None else self.data.collate
        beside = None if validation == [] else Data(validation, collate=collate)
        return Data(training, validation=beside, collate=collate)


def _restore(found: list[list[Any]]) -> Any:
    items = [one[4] for one in found]
    return join_rows(items) if items and found[0][3] == "columns" else items
