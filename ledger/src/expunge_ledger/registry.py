"""What is registered: models with their releases and whom their data had, and tokens."""

from __future__ import annotations

import hmac
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field
from sqlalchemy import delete, func, insert, select

from expunge import InputError
from expunge_ledger.database import Database
from expunge_ledger.deeds import Row, broken
from expunge_ledger.keys import Key, hash_bytes
from expunge_ledger.schema import RELEASES, SEEN, WORK
from expunge_ledger.tables import Tables

Role = Literal["requester", "operator", "auditor"]
_MARK = 16


class Release(BaseModel, frozen=True):
    """A release: its certificate's SHA-256, the one it is chained to, and the requests it names;
    replay: it forgot people who had come back."""

    number: int
    certificate: str
    parent: str | None
    finished: datetime
    requests: tuple[int, ...]
    replay: bool
    directory: Path = Field(exclude=True)


class Model(BaseModel, frozen=True):
    """A registered model, and its chain of releases; retired is when its operator said that
    nobody uses it any more."""

    name: str
    kind: str
    registered: datetime
    open: int
    running: int
    retired: datetime | None
    releases: tuple[Release, ...]
    path: Path = Field(exclude=True)
    folder: Path = Field(exclude=True)


@dataclass(frozen=True)
class Token:
    """Who asks the server: ``model`` is the only one this token is for, None for all."""

    name: str
    role: Role
    model: str | None


def check_name(name: str) -> None:
    """A name that is safe in paths, addresses and logs."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InputError.of("name", name, "letters, digits, '.', '_' and '-', at most 100")


def need_model(tables: Tables, name: str, used: bool = False) -> Row:
    """The row of a model, by its name; one that is still used."""
    names = {row["name"]: row for row in tables.models()}
    if name not in names:
        valid = f"one of {sorted(names)}" if names else "registered first"
        raise InputError.of("model", name, valid)
    if used and (day := names[name]["retired"]) is not None:
        raise InputError.of("model", name, f"another: it was retired on {day[:10]}")
    return names[name]


def list_models(tables: Tables, name: str | None = None) -> tuple[Model, ...]:
    """Models in the order of their registration, each with its releases, oldest first."""
    rows = tables.models() if name is None else [need_model(tables, name)]
    grouped = select(WORK.c.model, WORK.c.state, func.count()).group_by(WORK.c.model, WORK.c.state)
    counts = Counter({(model, state): n for model, state, n in tables.connection.execute(grouped)})
    found = list[Model]()
    for row in rows:
        made = [one | {"requests": json.loads(one["requests"])}
                for one in tables.find(RELEASES, RELEASES.c.model == row["id"])
                if one["state"] == "finished"]  # fmt: skip
        facts = {state: counts[row["id"], state] for state in ("open", "running")}
        found.append(Model.model_validate(row | facts | {"releases": made}))
    return tuple(found)


def read_release(tables: Tables, model: Row, number: int) -> Row:
    """A release of a model, in the state that the model's row says."""
    found = tables.get(RELEASES, model["id"], number)
    state = "begun" if number == model["begun"] else "finished"
    if found is None or found["state"] != state:
        raise broken(f"releases: {model['name']} {number} is gone, or an old one")
    return found


def mark(key: Key, name: str) -> bytes:
    """The short keyed hash that finds a person among those who were seen."""
    return bytes.fromhex(key.tag("seen", name))[:_MARK]


def read_seen(tables: Tables, model: Row) -> tuple[frozenset[bytes], str]:
    """The marks of everybody whom the data of a job ever had, and the hash of its old weights.

    A state keeps its rows itself. A job reads its data anew every time, and the weights it starts
    from may have been trained on more: nobody among these is "not held", and nobody is while the
    weights are others.
    """
    row = tables.connection.execute(select(SEEN).where(SEEN.c.model == model["id"])).one_or_none()
    if row is None and model["seen"] is None:
        return frozenset(), ""
    if row is None or _digest(tables.key, model["id"], row.weights, row.marks) != model["seen"]:
        raise broken(f"seen: {model['name']} is not what was written")
    marks = (row.marks[at : at + _MARK] for at in range(0, len(row.marks), _MARK))
    return frozenset(marks), row.weights


def add_seen(db: Database, name: str, people: Iterable[str], weights: str | None = None) -> None:
    """Add people to those who were seen; ``weights`` says on which data these were trained."""
    new = {mark(db.key, person) for person in people}
    with db.reading() as tables:
        before, old = read_seen(tables, need_model(tables, name))
    if new <= before and weights in (None, old):
        return
    with db.writing() as tables:
        model = need_model(tables, name)
        before, old = read_seen(tables, model)
        marks, kept = b"".join(sorted(before | new)), old if weights is None else weights
        digest = _digest(tables.key, model["id"], kept, marks)
        tables.record("seen", model=name, count=len(marks) // _MARK, digest=digest)
        tables.connection.execute(delete(SEEN).where(SEEN.c.model == model["id"]))
        values = {"model": model["id"], "marks": marks, "weights": kept}
        tables.connection.execute(insert(SEEN).values(**values))


def _digest(key: Key, model: int, weights: str, marks: bytes) -> str:
    return key.tag("seen/row", f"{model} {weights} {marks.hex()}")


def list_tokens(tables: Tables, hashed: str | None = None) -> tuple[Token, ...]:
    """All tokens that open something, or the one of this hash; all are compared, each in the same
    time."""
    made = None if hashed is None else tables.key.tag("token", hashed)
    fits = [made is None or hmac.compare_digest(row["hash"], made) for row in tables.tokens()]
    return tuple(
        Token(row["name"], row["role"], row["model"])
        for row, one in zip(tables.tokens(), fits, strict=True)
        if one and row["revoked"] is None
    )


def hash_token(secret: str) -> str:
    """What a session keeps of a token."""
    return hash_bytes(secret.encode("utf-8", "surrogatepass"))
