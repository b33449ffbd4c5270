"""Identifiers of samples: as text, as a commitment that hides them, and two sets kept apart."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, cast

import numpy as np

from expunge.errors import InputError

_ALGORITHM = "sha256-salted-set-1"


@dataclass(frozen=True)
class Commitment:
    """A salted hash of a set of identifiers: binding, and hiding while the salt is secret.

    With H = SHA-256, ``leaf_i = H("expunge/id\\0" ‖ salt ‖ utf8(id_i))`` and
    ``root = H("expunge/ids\\0" ‖ salt ‖ count as 8 bytes ‖ leaves in ascending order)``.
    ``salt`` is None in a certificate: there the set can be neither read nor guessed.
    """

    root: str
    count: int
    salt: str | None
    algorithm: str = _ALGORITHM

    def __post_init__(self) -> None:
        check_digest("root", self.root)
        if self.salt is not None:
            check_digest("salt", self.salt)
        if self.algorithm != _ALGORITHM:
            raise InputError.of("algorithm", self.algorithm, repr(_ALGORITHM))
        check_count("count", self.count)

    def withhold_salt(self) -> Commitment:
        """The same commitment, as it may be published."""
        return replace(self, salt=None)


def commit(ids: Iterable[str | int], salt: str | None = None) -> Commitment:
    """Commit to a set of identifiers; their order does not matter, duplicates are refused.

    >>> commit(["b", "a"], salt="00" * 32) == commit(["a", "b"], salt="00" * 32)
    True
    """
    salt = secrets.token_hex(32) if salt is None else salt
    check_digest("salt", salt)
    prefix, sha256 = b"expunge/id\0" + bytes.fromhex(salt), hashlib.sha256
    names = [given if type(given) is str else _identifier(given) for given in ids]
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InputError.of("ids", twice, "a set: this identifier occurs twice")
    leaves = sorted(
        sha256(prefix + name.encode("utf-8", "surrogatepass")).digest() for name in names
    )
    header = b"expunge/ids\0" + bytes.fromhex(salt) + len(leaves).to_bytes(8, "little")
    root = hashlib.sha256(header + b"".join(leaves)).hexdigest()
    return Commitment(root=root, count=len(leaves), salt=salt)


def opens(commitment: Commitment, ids: Iterable[str | int]) -> bool:
    """Whether ``ids`` is the set that was committed to.

    >>> opens(commit(["a", "b"]), ["b", "a"]), opens(commit(["a"]), ["b"])
    (True, False)
    """
    if commitment.salt is None:
        raise InputError("salt is withheld in this commitment; open the one in the record instead")
    return commit(ids, commitment.salt) == commitment


def _identifier(given: object) -> str:
    match given:
        case str():
            return given
        case Integral() if given is not True and given is not False:
            return str(int(given))
        case _:
            pass
    raise InputError.of("ids", given, "strings or whole numbers")


def commit_disjoint(
    forget_ids: Iterable[str | int] | None, retain_ids: Iterable[str | int] | None
) -> tuple[Commitment | None, Commitment | None]:
    """Commitments to both sets, which must be disjoint; identifiers are compared as text."""
    forget = None if forget_ids is None else _plain(forget_ids)
    retain = None if retain_ids is None else _plain(retain_ids)
    if forget is not None and retain is not None:
        both = {str(i) for i in forget}.intersection(map(str, retain))
        if both:
            raise InputError(
                f"retain_ids holds {min(both)!r}, which is in forget_ids too "
                f"({len(both)} in all); the retained data must not hold what is forgotten"
            )
    return (
        None if forget is None else commit(forget),
        None if retain is None else commit(retain),
    )


def _plain(ids: Iterable[Any]) -> Sequence[str | int]:
    if hasattr(ids, "tolist"):
        return cast(Any, ids).tolist()
    return [str(value) if isinstance(value, np.str_) else value for value in ids]


def read_names(ids: Any) -> tuple[str, ...] | None:
    """Identifiers as text, whatever holds them; None if there are none.

    >>> read_names(np.arange(2)), read_names(np.array(["a"])), read_names(None)
    (('0', '1'), ('a',), None)
    """
    if ids is None:
        return None
    return tuple(map(str, ids.tolist() if hasattr(ids, "tolist") else ids))


def check_digest(name: str, value: object) -> None:
    valid = isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef")
    if not valid:
        raise InputError.of(name, value, "64 lowercase hexadecimal digits")


def check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError.of(name, value, "a whole number >= 0")


def check_real(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise InputError.of(name, value, "a finite number >= 0")
