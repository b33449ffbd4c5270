"""Events in a chain: each carries the hash of the one before, so none can be changed or left out.

    digest_n = HMAC(salt_n, canonical JSON of body_n),   salt_n = tag("body", n)
    hash_n   = SHA-256("expunge/event\\0" ‖ hash_{n-1} ‖ JSON of (number, at, kind, digest))
    mac_n    = tag("event", row n)

Anybody can check the hashes, also of events whose bodies name others and are not handed out; only
who has the key can write one. The end of the chain stands in ``book``, beside the key and in every
export: whoever cuts it off, or restores an old copy of the database, is found by those.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rfc8785

from expunge import CertificateError
from expunge_ledger.keys import hash_bytes

START = "0" * 64
# What of a body may be shown to whoever may see its request; the rest names others, or places.
SHOWN = ("model", "release", "certificate", "parent", "received", "due", "by")


@dataclass(frozen=True)
class Event:
    """A link of the chain of changes; its body is plain data without identifiers."""

    number: int
    at: str
    kind: str
    body: dict[str, Any]
    hash: str

    @property
    def subjects(self) -> list[int]:
        """The requests it is about."""
        body = self.body
        own = [body["request"]] if "request" in body else []
        return [*own, *body.get("requests", ()), *map(int, body.get("outcomes", ()))]

    @property
    def shown(self) -> dict[str, Any]:
        """What of the body may be shown."""
        return {name: self.body[name] for name in SHOWN if self.body.get(name) is not None}


@dataclass(frozen=True)
class Anchor:
    """The end of a chain at some moment: how many events there were, and the hash of the last."""

    ledger: str
    events: int
    head: str

    def dump(self) -> bytes:
        """As it is exported."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    def write(self, path: Path) -> None:
        """Leave it outside of the database."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(self.dump())
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Anchor | None:
        """The anchor in a file, if there is one."""
        try:
            return cls(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            raise CertificateError(f"{path} is damaged") from None


def digest_body(salt: str, body: dict[str, Any]) -> str:
    """The digest of a body; the salt hides it from whoever sees the digest alone."""
    return hmac.digest(bytes.fromhex(salt), rfc8785.dumps(body), "sha256").hex()


def hash_event(previous: str, number: int, at: str, kind: str, digest: str) -> str:
    """The hash of an event, by the one before.

    >>> hash_event(START, 1, "2026-01-31T12:00:00+00:00", "created", "ab")[:12]
    '281dee1ea9d1'
    """
    said = rfc8785.dumps({"number": number, "at": at, "kind": kind, "digest": digest})
    return hash_bytes(b"expunge/event\0" + bytes.fromhex(previous) + said)
