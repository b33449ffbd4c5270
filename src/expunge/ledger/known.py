"""Whom the data of a job ever held: somebody who is gone from them may still be in its weights.

A state keeps its rows itself. A job reads its data anew every time, and the weights it starts from
may have been trained on more. So the ledger keeps a keyed hash of everybody it ever saw there, and
the hash of the weights: nobody among those is "not held", and nobody is while the weights are
others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from expunge.errors import InputError
from expunge.files import read_limited
from expunge.ledger.chain import append
from expunge.ledger.names import Key
from expunge.ledger.schema import KNOWN

_SIZE = 16


@dataclass(frozen=True)
class Known:
    """Hashes of everybody ever seen in the data of a job, and of the weights trained on them."""

    marks: frozenset[bytes]
    weights: str

    def pack(self) -> bytes:
        """One text of bytes for the same people, in whatever order they came."""
        return b"".join(sorted(self.marks))


def mark_person(key: Key, name: str) -> bytes:
    """The short keyed hash that finds a person among those who were seen.

    >>> mark_person(Key(bytes(32)), "ann").hex()[:12]
    '834c0b318340'
    """
    return bytes.fromhex(key.tag("seen", name))[:_SIZE]


def read_known(connection: Connection, model: int) -> Known | None:
    """What is known of a model's data; None of a state, and of a job that nobody looked into."""
    row = connection.execute(select(KNOWN).where(KNOWN.c.model == model)).one_or_none()
    if row is None:
        return None
    marks = [row.marks[start : start + _SIZE] for start in range(0, len(row.marks), _SIZE)]
    return Known(frozenset(marks), row.weights)


def describe_known(marks: bytes, weights: str) -> tuple[int, str, str]:
    """How many were seen, the hash of their hashes, and the weights: what an event tells."""
    return len(marks) // _SIZE, hashlib.sha256(marks).hexdigest(), weights


def note_known(
    connection: Connection, model: Any, people: Iterable[str], weights: str | None = None
) -> None:
    """Add people to those who were seen; ``weights`` says on which data these were trained."""
    key: Key = connection.get_execution_options()["key"]
    before = read_known(connection, model.id)
    if before is None and weights is None:
        return
    old = Known(frozenset(), "") if before is None else before
    marks = old.marks | {mark_person(key, name) for name in people}
    new = Known(marks, old.weights if weights is None else weights)
    if new != before:
        packed = new.pack()
        count, digest, told = describe_known(packed, new.weights)
        append(connection, "seen", model=model.name, count=count, digest=digest, weights=told)
        connection.execute(delete(KNOWN).where(KNOWN.c.model == model.id))
        values = {"model": model.id, "marks": packed, "weights": new.weights}
        connection.execute(insert(KNOWN).values(**values))


def hash_weights(job: Path) -> str:
    """SHA-256 of the file of a job's weights, or of all files of their folder where
    they are several."""
    from expunge.jobs.jobfile import read_job

    made = read_job(job)
    place = made.locate(made.job.model.weights)
    files = sorted(file for file in place.rglob("*") if file.is_file()) or [place]
    if place.name.endswith(".index.json"):
        told = json.loads(read_limited(place, 100_000_000, "model.weights"))
        files += [place.parent / name for name in sorted(set(told["weight_map"].values()))]
    digest = hashlib.sha256(b"expunge/job-weights\0")
    for file in files:
        try:
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        except OSError as error:
            raise InputError.of(
                "model.weights", str(file), f"readable ({error.strerror})"
            ) from None
    return digest.hexdigest()
