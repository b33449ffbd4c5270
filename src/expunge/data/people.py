"""Names of people: as text, and as a request that names the right ones.

A name is text in Unicode's normal form C; a whole number is its decimal digits. One name may stand
on many examples, and one example may have several names.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral
from typing import Any, cast

from expunge.display import is_visible
from expunge.errors import InputError

Names = tuple[str, ...]


def read_name(given: object, field: str = "ids") -> str:
    """One name as text. What nobody can see must not keep two names different.

    >>> read_name(7), read_name("e\\u0301") == "\\u00e9"
    ('7', True)
    >>> read_name("p1\\r")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: ids is 'p1\\r'; it must be visible text without spaces at its ends
    """
    match given:
        case str():
            name = unicodedata.normalize("NFC", given)
        case Integral() if given is not True and given is not False and abs(int(given)) < 2**63:
            return str(int(given))
        case _:
            raise InputError.of(field, given, "strings or whole numbers below 2**63")
    if name.isascii() and name.isalnum():
        return name
    if not (name and is_visible(name) and name.strip() == name):
        raise InputError.of(field, name, "visible text without spaces at its ends")
    return name


def read_people(people: Iterable[Any], field: str = "ids") -> Names:
    """A list of names, whatever it is: a list, a set, an array, a tensor, a column.

    >>> read_people(["ann", 7])
    ('ann', '7')
    """
    return tuple(read_name(given, field) for given in _list(people, field))


def read_ids(ids: Iterable[Any], field: str = "ids") -> tuple[Names, ...]:
    """Whose each example is, in the order of the examples: a name, several, or None for nobody's.

    >>> read_ids(["ann", ("ann", "bob"), None])
    (('ann',), ('ann', 'bob'), ())
    """
    if isinstance(ids, Set | Mapping):
        kind = type(cast(object, ids)).__name__
        raise InputError(f"{field} is a {kind}; it must be a list in the order of the examples")
    seen: dict[object, Names] = {}
    return tuple(_read_owners(given, field, seen) for given in _list(ids, field))


def _read_owners(given: object, field: str, seen: dict[object, Names]) -> Names:
    if given is None:
        return ()
    if isinstance(given, str | int):
        if given not in seen:
            seen[given] = (read_name(given, field),)
        return seen[given]
    if isinstance(given, Sequence | Set) and not isinstance(given, bytes):
        return tuple(dict.fromkeys(read_name(one, field) for one in cast(Sequence[Any], given)))
    if hasattr(given, "tolist"):
        return _read_owners(cast(Any, given).tolist(), field, seen)
    return (read_name(given, field),)


def _list(given: Any, field: str) -> Iterable[object]:
    if isinstance(given, str | bytes):
        raise InputError.of(field, given, "a list of names, not one text")
    try:
        return iter(given.tolist() if hasattr(given, "tolist") else given)
    except TypeError:
        raise InputError.of(field, given, "a list of names") from None


def check_request(
    forget: Iterable[Any],
    people: Collection[str],
    *,
    gone: Collection[str] = (),
    exact_names: bool = False,
) -> Names:
    """The people of a request, each of whom is there, or ``gone`` by an earlier request.

    Empty, doubled and unknown names are refused, and so is a name that somebody else's, who would
    stay, looks like: they may be one person. Whoever is ``gone`` may not be among those who stay.
    All slips are named at once, one line each.

    >>> check_request(["bob"], ["ann", "bob"])
    ('bob',)
    >>> check_request(["Ann"], ["ann", "bob"])
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: forget names 'Ann', who is not in the data; did you mean 'ann'?
    """
    wanted, there = read_people(forget, "forget"), set(people)
    if slips := "\n".join(_find_slips(wanted, there, gone, exact_names)):
        raise InputError(slips)
    return wanted


def _find_slips(
    wanted: Names, there: set[str], gone: Collection[str], exact_names: bool
) -> Iterator[str]:
    if not wanted:
        yield "forget is empty; it must name at least one person"
    if twice := [name for name, number in Counter(wanted).items() if number > 1]:
        yield f"forget names {twice[0]!r} twice; each person may stand in it once"
    if unknown := [name for name in wanted if name not in there and name not in gone]:
        more = f" ({len(unknown)} such names in all)" if len(unknown) > 1 else ""
        hint = _suggest(unknown[0], sorted(there))
        yield f"forget names {unknown[0]!r}, who is not in the data{more}; {hint}"
    named, stay = set(wanted).difference(unknown), there.difference(wanted)
    for name, like in [] if exact_names else find_lookalikes(named, stay)[:1]:
        yield (
            f"forget names {name!r}, and the data also have {like!r}, who would stay; name both, "
            "or say Data(..., exact_names=True) where such names are different people"
        )
    for name in sorted(stay.intersection(gone))[:1]:
        yield (
            f"the data have {name!r}, whom the parent release forgot; remove their examples, or "
            "name them in forget again"
        )


def _suggest(name: str, people: Sequence[str]) -> str:
    alike = [like for _, like in find_lookalikes([name], people)]
    alike += [like for like in people if name.isdigit() and like.lstrip("0") == name]  # 7 of 007
    alike += difflib.get_close_matches(name, people if len(people) <= 10_000 else [], 1)
    return f"did you mean {alike[0]!r}?" if alike else "is this the right list?"


def find_lookalikes(forget: Iterable[str], stay: Iterable[str]) -> list[tuple[str, str]]:
    """(forgotten, staying) names that differ in case, spaces or compatible letters alone.

    >>> find_lookalikes(["Ann Lee", "bob"], ["ann  lee", "bob2"])
    [('Ann Lee', 'ann  lee')]
    """
    gone = {_fold(name): name for name in forget}
    pairs = ((gone.get(_fold(name)), name) for name in stay)
    return sorted((found, name) for found, name in pairs if found not in (None, name))


def _fold(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())
