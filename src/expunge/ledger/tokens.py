"""Tokens: who may ask the server for what. Each is shown once; the ledger keeps its hash.

    token = "expunge_" ‖ 32 random bytes in base64
    hash = HMAC(key, "expunge/token\\0" ‖ JSON of (name, role, model, SHA-256(token)))

A token has 256 random bits, so a plain hash hides it: there is nothing to guess. The key is for
another reason: whoever can write the database can make no token, nor give one another role.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, cast, get_args

from sqlalchemy import Connection, Engine, delete, insert, select

from expunge.errors import InputError
from expunge.ledger.chain import append
from expunge.ledger.database import reading, writing
from expunge.ledger.models import find_model
from expunge.ledger.names import Key
from expunge.ledger.schema import TOKENS

Role = Literal["requester", "operator", "auditor"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Token:
    """Who asks: ``model`` is the only one this token is for, None for all."""

    name: str
    role: Role
    model: str | None
    created: datetime


def make_token(engine: Engine, name: str, role: str, model: str | None = None) -> str:
    """A new token; nobody can read it from the ledger later."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InputError.of("name", name, "letters, digits, '.', '_' and '-', at most 100")
    if role not in ROLES:
        raise InputError.of("role", role, "one of " + ", ".join(ROLES))
    secret = "expunge_" + secrets.token_urlsafe(32)
    facts: dict[str, Any] = {"name": name, "role": role, "model": model}
    with writing(engine) as connection:
        facts["hash"] = _seal(connection, name, role, model, hash_token(secret))
        if connection.execute(select(TOKENS).where(TOKENS.c.name == name)).first():
            raise InputError.of("name", name, "new: there is a token of this name")
        if model is not None:
            find_model(connection, model)
        event = append(connection, "token", did="made", **facts)
        connection.execute(insert(TOKENS).values(**facts, created=event.at))
    return secret


def revoke_token(engine: Engine, name: str) -> None:
    """From now on the token opens nothing; what was filed with it stays."""
    with writing(engine) as connection:
        if not connection.execute(delete(TOKENS).where(TOKENS.c.name == name)).rowcount:
            known = sorted(connection.execute(select(TOKENS.c.name)).scalars())
            raise InputError.of("name", name, f"one of {known}")
        append(connection, "token", did="revoked", name=name)


def list_tokens(engine: Engine) -> tuple[Token, ...]:
    """All tokens, by name."""
    with reading(engine) as connection:
        rows = connection.execute(select(TOKENS).order_by(TOKENS.c.name)).all()
    return tuple(map(_make, rows))


def find_token(engine: Engine, hashed: str) -> Token | None:
    """The token of this SHA-256; all are compared, each in the same time."""
    with reading(engine) as connection:
        rows = connection.execute(select(TOKENS).order_by(TOKENS.c.name)).all()
        made = [_seal(connection, row.name, row.role, row.model, hashed) for row in rows]
    same = [r for r, seal in zip(rows, made, strict=True) if hmac.compare_digest(r.hash, seal)]
    return _make(same[0]) if same else None


def _make(row: Any) -> Token:
    return Token(
        row.name, cast(Role, row.role), row.model, datetime.fromisoformat(row.created)
    )  # fmt: skip


def _seal(connection: Connection, name: str, role: str, model: str | None, hashed: str) -> str:
    key: Key = connection.get_execution_options()["key"]
    return key.tag("token", json.dumps([name, role, model, hashed]))


def hash_token(secret: str) -> str:
    """What a session keeps of a token, and the ledger seals.

    >>> hash_token("expunge_x")[:12]
    '6e280f823054'
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
