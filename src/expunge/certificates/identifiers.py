"""Identifiers of people or samples: as text, as a commitment that hides them, two sets kept apart.

An identifier is text in Unicode's normal form C; a whole number is its decimal digits. One
identifier may stand on many samples: sets are of distinct identifiers, samples are counted beside.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import unicodedata
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, cast

from expunge.errors import InputError

# Default_Ignorable_Code_Point of Unicode: what a reader is shown nothing for.
_IGNORABLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
ALGORITHM = "sha256-salted-set-2"
_WITHOUT_NFC = "sha256-salted-set-1"


@dataclass(frozen=True)
class Commitment:
    """A salted hash of a set of identifiers: binding, and hiding while the salt is secret.

    With H = SHA-256, ``leaf_i = H("expunge/id\\0" ‖ salt ‖ utf8(id_i))`` and
    ``root = H("expunge/ids\\0" ‖ salt ‖ count as 8 bytes ‖ leaves in ascending order)``, over the
    distinct identifiers. ``samples`` counts what carried them (None in commitments of version 1,
    whose identifiers were not normalised either). ``salt`` is None in a certificate: there the set
    can be neither read nor guessed.
    """

    root: str
    count: int
    salt: str | None
    algorithm: str = ALGORITHM
    samples: int | None = None

    def __post_init__(self) -> None:
        check_digest("root", self.root)
        if self.salt is not None:
            check_digest("salt", self.salt)
        if self.algorithm not in (ALGORITHM, _WITHOUT_NFC):
            raise InputError.of("algorithm", self.algorithm, repr(ALGORITHM))
        check_count("count", self.count)
        if self.samples is not None:
            check_count("samples", self.samples)


def commit(
    ids: Iterable[Any], salt: str | None = None, *, samples: int | None = None
) -> Commitment:
    """Commit to the set of distinct identifiers; neither order nor repetition matters to it.

    ``samples`` is how many samples carry them; without it, each identifier given stands for one.

    >>> one, two = commit(["b", "a", "a"], "00" * 32), commit(["a", "b"], "00" * 32)
    >>> one.root == two.root, one.count, one.samples, two.samples
    (True, 2, 3, 2)
    """
    salt = secrets.token_hex(32) if salt is None else salt
    check_digest("salt", salt)
    names = read_ids(ids)
    counted = len(names) if samples is None else samples
    root, count = _hash_set(set(names), salt)
    return Commitment(root=root, count=count, salt=salt, samples=counted)


def opens(commitment: Commitment, ids: Iterable[Any]) -> bool:
    """Whether ``ids`` is the set that was committed to.

    >>> opens(commit(["a", "b"]), ["b", "a"]), opens(commit(["a"]), ["b"])
    (True, False)
    """
    if commitment.salt is None:
        raise InputError("salt is withheld in this commitment; open the one in the record instead")
    old = commitment.algorithm == _WITHOUT_NFC
    names = set(map(_read_text, _list(ids)) if old else read_ids(ids))
    return _hash_set(names, commitment.salt) == (commitment.root, commitment.count)


def commit_disjoint(
    forget_ids: Iterable[Any] | None, retain_ids: Iterable[Any] | None
) -> tuple[Commitment | None, Commitment | None]:
    """Commitments to both sets, which must be disjoint; a request must name someone."""
    forget, retain = read_names(forget_ids), read_names(retain_ids)
    if forget is not None and not forget:
        raise InputError.of("forget_ids", [], "one identifier or more")
    both = set(forget or ()).intersection(retain or ())
    if both:
        raise InputError(
            f"retain_ids holds {min(both)!r}, which is in forget_ids too "
            f"({len(both)} in all); the retained data must not hold what is forgotten"
        )
    asked = None if forget is None else commit_request(forget, retain)
    return asked, None if retain is None else commit(retain)


def commit_request(forget: Sequence[str], retain: Sequence[str] | None) -> Commitment:
    """The commitment to a request, with its people and, where that is known, their samples.

    A list that repeats an identifier has one for each sample, and so has one of distinct names
    where no retained identifier repeats either. Otherwise each person was named once, and nobody
    counted.

    >>> [commit_request(ids, ["c", "c"]).samples for ids in (["a", "a", "b"], ["a", "b"])]
    [3, None]
    >>> commit_request(["a", "b"], ["c", "d"]).samples
    2
    """
    by_sample = retain is not None and len(set(retain)) == len(retain)
    counted = len(set(forget)) < len(forget) or by_sample
    return commit(forget) if counted else replace(commit(forget), samples=None)


def find_lookalikes(forget: Iterable[str], retain: Iterable[str]) -> list[tuple[str, str]]:
    """(forgotten, retained) identifiers that a reader may take for one person: they differ in case,
    in inner spaces or in compatible forms of letters alone.

    >>> find_lookalikes(["Ann Lee", "bob"], ["ann  lee", "bob2"])
    [('Ann Lee', 'ann  lee')]
    """
    gone = {_fold(name): name for name in forget}
    kept = {name: gone.get(_fold(name)) for name in dict.fromkeys(retain)}
    return [(found, name) for name, found in kept.items() if found not in (None, name)]


def _fold(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def read_ids(ids: Iterable[Any], *, ordered: bool = False) -> tuple[str, ...]:
    """Identifiers as text, whatever holds them: a list, an array, a tensor, a column.

    What a person cannot see must not keep two identifiers apart: spaces at the ends, control,
    format and ignorable characters are refused, and so is the empty text. ``ordered``: one stands
    for each sample, so that sets are refused.

    >>> read_ids([7, "e\\u0301"]) == ("7", "\\u00e9")
    True
    >>> read_ids(["p1\\r"])
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: ids is 'p1\\r'; it must be visible text without spaces at its ends
    """
    if ordered:
        check_ordered(ids)
    names = tuple(unicodedata.normalize("NFC", _read_text(given)) for given in _list(ids))
    for name in names:
        seen = name.isprintable() and name.strip() == name and not _IGNORABLE.search(name)
        if not name or not seen:
            raise InputError.of("ids", name, "visible text without spaces at its ends")
    return names


def read_names(ids: Iterable[Any] | None, *, ordered: bool = False) -> tuple[str, ...] | None:
    """:func:`read_ids`, and None for None."""
    return None if ids is None else read_ids(ids, ordered=ordered)


def check_ordered(ids: object) -> None:
    """Refuse sets and mappings where one identifier stands for each sample.

    >>> check_ordered({"ann"})
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: ids is a set; it must be a list in the order of the samples
    """
    if isinstance(ids, Set | Mapping):
        kind = type(cast(object, ids)).__name__
        raise InputError(f"ids is a {kind}; it must be a list in the order of the samples")


def _list(ids: Any) -> Iterable[object]:
    if isinstance(ids, str | bytes):
        raise InputError.of("ids", ids, "a list of identifiers, not one text")
    try:
        return iter(ids.tolist() if hasattr(ids, "tolist") else ids)
    except TypeError:
        raise InputError.of("ids", ids, "a list of identifiers") from None


def _read_text(given: object) -> str:
    match given:
        case str():
            return str(given)
        case Integral() if given is not True and given is not False and abs(int(given)) < 2**63:
            return str(int(given))
        case _:
            raise InputError.of("ids", given, "strings or whole numbers below 2**63")


def _hash_set(names: set[str], salt: str) -> tuple[str, int]:
    prefix, sha256 = b"expunge/id\0" + bytes.fromhex(salt), hashlib.sha256
    leaves = sorted(
        sha256(prefix + name.encode("utf-8", "surrogatepass")).digest() for name in names
    )
    header = b"expunge/ids\0" + bytes.fromhex(salt) + len(leaves).to_bytes(8, "little")
    return sha256(header + b"".join(leaves)).hexdigest(), len(leaves)


def check_digest(name: str, value: object) -> None:
    valid = isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef")
    if not valid:
        raise InputError.of(name, value, "64 lowercase hexadecimal digits")


def check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError.of(name, value, "a whole number >= 0")
