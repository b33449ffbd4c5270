"""``Data``: examples, and whose they are. Here the forgotten rows leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from expunge.data import examples as kinds
from expunge.data.people import Names, check_request, read_ids
from expunge.errors import InputError

Person = str | Callable[[Any], Any]


class Data:
    """Examples, and whose they are.

    ``examples`` are tensors or arrays whose rows belong together (alone, in tuples or mappings), a
    DataFrame, a list, any map-style Dataset, a Hugging Face ``datasets.Dataset``, or a stream. Each
    has the name of a person in ``ids``, in the same order: a tuple of names where it is of several
    people (it goes when one of them goes), None where it is nobody's. ``person`` is a column, or a
    function of one example, instead. Without either the examples are anonymous: they can be
    learned, and nobody can be forgotten.

    ``validation`` and ``test`` are Data of their own: people who go leave them too. ``collate``
    makes a batch of a list of examples. ``exact_names``: names that differ in case or spaces alone
    are different people.

    >>> data = Data(([1.0, 2.0, 3.0], [0, 1, 0]), ids=["ann", "bob", "ann"])
    >>> len(data), data.people, data.without(["ann"]).examples
    (3, ('ann', 'bob'), ([2.0], [1]))
    """

    def __init__(
        self,
        examples: Any,
        ids: Iterable[Any] | None = None,
        *,
        person: Person | None = None,
        validation: Data | None = None,
        test: Data | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        exact_names: bool = False,
    ) -> None:
        if isinstance(examples, Data):
            raise InputError("examples is a Data already; use it as it is")
        if ids is not None and person is not None:
            raise InputError("ids and person are both given; one of them says whose examples are")
        self.examples, self.person, self.collate = examples, person, collate
        self.source: Callable[[], Any] | None = None  # a job's load(), whose code is named by hash
        self.exact_names = exact_names
        self.kind: kinds.Kind = kinds.find_kind(examples)
        self.validation, self.test = (
            part if part is None or isinstance(part, Data) else Data(part, collate=collate)  # pyright: ignore[reportUnnecessaryIsInstance]
            for part in (validation, test)
        )
        self._counts: Counter[Names] | None = (
            None  # of a stream, how many examples have these names
        )
        self._length: int | None = None
        self.ids: tuple[Names, ...] | None = None
        if self.stream:
            if ids is not None:
                raise InputError("ids is given for a stream; say person= instead")
            return
        self._length = kinds.count(examples, self.kind)
        self.ids = self._read_ids(ids)
        if len(self.ids) != self._length:
            raise InputError.of(
                "number of ids", len(self.ids), f"{self._length}, as many as examples"
            )

    @property
    def stream(self) -> bool:
        """Whether examples can only be iterated over."""
        return self.kind == "stream"

    @property
    def people(self) -> Names:
        """Everybody who has an example, in order; a stream is read through once for this."""
        owners = self._count() if self.ids is None else set(self.ids)
        return tuple(sorted({name for names in owners for name in names}))

    def __len__(self) -> int:
        return sum(self._count().values()) if self._length is None else self._length

    def __repr__(self) -> str:
        size = "a stream" if self._length is None else f"{self._length} examples"
        whose = "" if self._counts is None and self.stream else f" of {len(self.people)} people"
        return f"Data({size}{whose})"

    def count(self, people: Iterable[str] | None = None) -> int:
        """How many examples have one of these names on them; of everybody, all."""
        if people is None:
            return len(self)
        names = set(people)
        if self.ids is not None:
            return sum(not names.isdisjoint(owners) for owners in self.ids)
        return sum(n for owners, n in self._count().items() if not names.isdisjoint(owners))

    def everybody(self) -> frozenset[str]:
        """All people of examples, validation and test."""
        parts = (self, self.validation, self.test)
        return frozenset(name for part in parts if part is not None for name in part.people)

    def without(self, people: Iterable[Any]) -> Data:
        """Everything but the examples of these people, in validation and test alike."""
        return self.drop(check_request(people, self.everybody(), exact_names=self.exact_names))

    def only(self, people: Iterable[Any]) -> Data:
        """The examples of these people alone."""
        names = check_request(people, self.everybody(), exact_names=True)
        return self._select(set(names), keep=True)

    def drop(self, people: Collection[str]) -> Data:
        """:meth:`without`, for names that need not be there."""
        return self._select(set(people), keep=False)

    def take(self, places: Iterable[int]) -> Data:
        """The examples at these places, in this order; not of a stream."""
        assert self.ids is not None
        chosen = list(places)
        picked = kinds.select(self.examples, self.kind, chosen)
        return self._with(picked, [self.ids[place] for place in chosen])

    def _select(self, names: set[str], keep: bool) -> Data:
        validation, test = (
            None if part is None else part._select(names, keep)
            for part in (self.validation, self.test)
        )
        if self.ids is None:
            picked = self if self.person is None else self._with(self._filter(names, keep), None)
        else:
            wanted = (keep != names.isdisjoint(owners) for owners in self.ids)
            picked = self.take(place for place, chosen in enumerate(wanted) if chosen)
        found = picked._with(picked.examples, picked.ids, validation, test)
        if self._counts is not None:  # what was counted once is not read again
            kept = ((own, n) for own, n in self._counts.items() if keep != names.isdisjoint(own))
            found._counts = Counter(dict(kept))
        return found

    def _with(
        self,
        examples: Any,
        ids: Iterable[Names] | None,
        validation: Data | None = None,
        test: Data | None = None,
    ) -> Data:
        return Data(
            examples,
            ids,
            person=self.person if ids is None else None,
            validation=validation,
            test=test,
            collate=self.collate,
            exact_names=self.exact_names,
        )

    def _filter(self, names: set[str], keep: bool) -> Any:
        from expunge.data.streams import FilteredStream

        made = FilteredStream(self.examples, self._own, names, keep=keep)
        # A Hugging Face stream stays one; a method of an object can be handed to workers.
        return self.examples.filter(made.stays) if hasattr(self.examples, "column_names") else made

    def _own(self, example: Any) -> Names:
        """The names on one example of a stream."""
        match self.person:
            case None:
                return ()
            case str():
                try:
                    return read_ids([example[self.person]], "person")[0]
                except (KeyError, IndexError, TypeError):
                    raise InputError.of("person", self.person, "a column of the examples") from None
            case _:
                return read_ids([self.person(example)], "person()")[0]

    def _read_ids(self, ids: Iterable[Any] | None) -> tuple[Names, ...]:
        assert self._length is not None
        if ids is not None:
            return read_ids(ids)
        match self.person:
            case None:
                return ((),) * self._length
            case str():
                return read_ids(kinds.read_column(self.examples, self.kind, self.person), "person")
            case _:
                return read_ids(map(self.person, self._each()), "person()")

    def _each(self) -> Iterator[Any]:
        if self.kind in ("list", "table", "dataset"):
            return (self.examples[place] for place in range(len(self.examples)))
        rows = range(kinds.count(self.examples, self.kind))
        if self.kind == "frame":
            return (self.examples.iloc[row] for row in rows)
        columns = getattr(self.examples, "tensors", self.examples)
        return (kinds.map_columns(columns, lambda c, r=row: c[r]) for row in rows)

    def _count(self) -> Counter[Names]:
        if self._counts is None:
            self._counts = Counter(map(self._own, self.examples))
        return self._counts
