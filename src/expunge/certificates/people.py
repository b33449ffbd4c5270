"""Commitments to sets of people: what a certificate may say of who was forgotten."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import Any

from pydantic import model_validator

from expunge.certificates.fields import Count, Digest, Model
from expunge.data.people import read_people
from expunge.errors import InputError


class Commitment(Model):
    """A salted hash of a set of people: binding, and hiding while the salt is secret.

    With H = SHA-256, ``leaf_i = H("expunge/id\\0" ‖ salt ‖ utf8(id_i))`` and
    ``root = H("expunge/ids\\0" ‖ salt ‖ count as 8 bytes ‖ leaves in ascending order)``, over the
    distinct names. ``samples`` counts what carried them. ``salt`` and ``leaves`` are None in a
    certificate: there the set can be neither read nor guessed. With ``leaves`` a record can say
    whether a name is of the set.
    """

    root: Digest
    count: Count
    samples: Count
    salt: Digest | None = None
    leaves: tuple[Digest, ...] | None = None

    @model_validator(mode="after")
    def _check_leaves(self) -> Commitment:
        if self.leaves is not None:
            found = sorted(map(bytes.fromhex, self.leaves))
            root = None if self.salt is None else _combine(found, self.salt)
            if (root, len(found)) != (self.root, self.count):
                raise ValueError("leaves are not those of root, salt and count")
        return self


def commit(
    people: Iterable[Any], samples: int, *, salt: str | None = None, leaves: bool = False
) -> Commitment:
    """Commit to the set of distinct people on so many samples.

    >>> one = commit(["b", "a", "a"], 3, salt="00" * 32)
    >>> one.root == commit(["a", "b"], 2, salt="00" * 32).root, one.count, one.samples
    (True, 2, 3)
    """
    salt = secrets.token_hex(32) if salt is None else salt
    found = sorted(_hash_each(people, salt).values())
    listed = tuple(leaf.hex() for leaf in found) if leaves else None
    return Commitment(
        root=_combine(found, salt), count=len(found), samples=samples, salt=salt, leaves=listed
    )


def opens(commitment: Commitment, people: Iterable[Any]) -> bool:
    """Whether ``people`` is the set that was committed to.

    >>> opens(commit(["a", "b"], 2), ["b", "a"]), opens(commit(["a"], 1), ["b"])
    (True, False)
    """
    if commitment.salt is None:
        raise InputError("salt is withheld in this commitment; open the one in the record instead")
    found = sorted(_hash_each(people, commitment.salt).values())
    return (_combine(found, commitment.salt), len(found)) == (commitment.root, commitment.count)


def find_members(commitment: Commitment, people: Iterable[Any]) -> list[str]:
    """Those of ``people`` who are in the set; the commitment must have its leaves.

    >>> find_members(commit(["a", "b"], 2, leaves=True), ["b", "c"])
    ['b']
    """
    if commitment.leaves is None or commitment.salt is None:
        raise InputError("leaves are not in this commitment; open the one in the record instead")
    leaves, each = set(commitment.leaves), _hash_each(people, commitment.salt)
    return [name for name, leaf in each.items() if leaf.hex() in leaves]


def _hash_each(people: Iterable[Any], salt: str) -> dict[str, bytes]:
    prefix = b"expunge/id\0" + bytes.fromhex(salt)
    return {
        name: hashlib.sha256(prefix + name.encode("utf-8", "surrogatepass")).digest()
        for name in read_people(people)
    }


def _combine(leaves: list[bytes], salt: str) -> str:
    header = b"expunge/ids\0" + bytes.fromhex(salt) + len(leaves).to_bytes(8, "little")
    return hashlib.sha256(header + b"".join(leaves)).hexdigest()
