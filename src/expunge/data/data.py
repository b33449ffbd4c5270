"""``Data``: examples, and whose they are. Here the forgotten rows leave."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from expunge.data import examples as kinds
from expunge.data.people import Names, check_request, read_ids
from expunge.errors import InputError

Person = str | Callable[[Any], Any]


def check_data(data: object) -> None:
    """Refuse what is no :class:`Data`."""
    if not isinstance(data, Data):
        kind = type(data).__name__
        raise InputError(f"data is a {kind}; it must be an expunge.Data(examples, ids=...)")


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
        self.ids: tuple[Names, ...] | None = None
        self._counts: Counter[Names] | None = None  # of a stream: examples that have these names
        if not self.stream:
            length = kinds.count(examples, self.kind)
            self.ids = self._read_ids(length) if ids is None else read_ids(ids)
            if len(self.ids) != length:
                valid = f"{length}, as many as examples"
                raise InputError.of("number of ids", len(self.ids), valid)
        elif ids is not None:
            raise InputError("ids is given for a stream; say person= instead")

    @property
    def stream(self) -> bool:
        """Whether examples can only be iterated over."""
        return self.kind == "stream"

    @property
    def people(self) -> Names:
        """Everybody who has an example, in order; a stream is read through once for this."""
        return tuple(sorted({name for owners in self._count() for name in owners}))

    def __len__(self) -> int:
        return sum(self._count().values()) if self.ids is None else len(self.ids)

    def __repr__(self) -> str:
        if self.ids is None and self._counts is None:
            return "Data(a stream)"
        return f"Data({len(self)} examples of {len(self.people)} people)"

    def count(self, people: Iterable[str]) -> int:
        """How many examples have one of these names on them."""
        names = set(people)
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
        made, chosen = copy.copy(self), list(places)
        made.examples = kinds.select(self.examples, self.kind, chosen)
        made.ids, made._counts = tuple(self.ids[place] for place in chosen), None
        made.validation = made.test = None
        return made

    def _select(self, names: set[str], keep: bool) -> Data:
        if self.ids is not None:
            stays = (keep != names.isdisjoint(owners) for owners in self.ids)
            made = self.take(place for place, chosen in enumerate(stays) if chosen)
        else:
            made = copy.copy(self)
            if self.person is not None:
                made.examples = self._filter(names, keep)
            if self._counts is not None:  # what was counted once is not read again
                kept = (owners for owners in self._counts if keep != names.isdisjoint(owners))
                made._counts = Counter({owners: self._counts[owners] for owners in kept})
        made.validation, made.test = (
            None if part is None else part._select(names, keep)
            for part in (self.validation, self.test)
        )
        return made

    def _filter(self, names: set[str], keep: bool) -> Any:
        from expunge.data.streams import FilteredStream

        made = FilteredStream(self.examples, self._own, names, keep=keep)
        # A Hugging Face stream stays one; a method of an object can be handed to workers.
        return self.examples.filter(made.stays) if hasattr(self.examples, "column_names") else made

    def _read_ids(self, length: int) -> tuple[Names, ...]:
        if self.person is None:
            return ((),) * length
        if isinstance(self.person, str) and self.kind in ("columns", "frame", "table"):
            return read_ids(self._find_owner(self.examples), "person")
        each = (kinds.read_one(self.examples, self.kind, place) for place in range(length))
        return read_ids(map(self._find_owner, each), "person")

    def _find_owner(self, example: Any) -> Any:
        """What ``person`` says of one example; a column, of examples that have columns."""
        if callable(self.person):
            return self.person(example)
        try:
            return example[self.person]
        except (KeyError, IndexError, TypeError):
            raise InputError.of("person", self.person, "a column of the examples") from None

    def _own(self, example: Any) -> Names:
        """The names on one example of a stream."""
        return () if self.person is None else read_ids([self._find_owner(example)], "person")[0]

    def _count(self) -> Counter[Names]:
        """How many examples have these names; a stream is read through for it, once."""
        if self._counts is None:
            self._counts = Counter(map(self._own, self.examples) if self.ids is None else self.ids)
        return self._counts
