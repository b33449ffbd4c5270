"""Who a request is about, without saying so: keyed hashes, and identifiers sealed by the same key.

With K the 32 bytes of the key file, which lies beside the ledger and never in it:

    person = HMAC-SHA-256(K, "expunge/person\\0" ‖ utf8(identifier))        finds a person again
    sealed = nonce ‖ AES-256-GCM(HMAC(K, "expunge/seal\\0"), nonce, text)   what forgetting needs

States know people by hashes under keys of their own, and a certificate commits to identifiers: so
the identifier itself must come back when the work is done, and no hash gives it back.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from expunge.certificates.identifiers import read_ids
from expunge.errors import InputError, VerificationError
from expunge.files import read_limited, write_atomic

_NONCE = 12
MOST_TEXT = 1024
_TEXT = ("utf-8", "surrogatepass")


def read_person(identifier: object) -> str:
    """One identifier as certificates read it, and short enough to be one.

    >>> read_person("e\\u0301") == "\\u00e9"
    True
    """
    try:
        (name,) = read_ids([identifier])
    except InputError as error:
        raise InputError(f"person{str(error).removeprefix('ids')}") from None
    if len(name) > MOST_TEXT:
        raise InputError.of("person", f"{name[:20]}…", f"at most {MOST_TEXT} characters")
    return name


@dataclass(frozen=True)
class Key:
    """What turns identifiers into hashes, and seals and opens them.

    >>> key = Key(bytes(32))
    >>> key.hash_person("ann")[:12], key.open(key.seal("ann", "1"), "1")
    ('fa6e2752e20b', 'ann')
    """

    secret: bytes = field(repr=False)

    def hash_person(self, identifier: object) -> str:
        """The keyed hash that stands for a person."""
        return self.tag("person", read_person(identifier))

    def tag(self, purpose: str, text: str) -> str:
        """HMAC of a text for one purpose."""
        data = f"expunge/{purpose}\0{text}".encode(*_TEXT)
        return hmac.new(self.secret, data, hashlib.sha256).hexdigest()

    def seal(self, text: str, bound: str) -> bytes:
        """A text that only this key opens, and only where it was ``bound`` to."""
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._cipher().encrypt(nonce, text.encode(*_TEXT), bound.encode())

    def open(self, sealed: bytes, bound: str) -> str:
        """What was sealed; a seal that was changed or moved is a :class:`VerificationError`."""
        try:
            text = self._cipher().decrypt(sealed[:_NONCE], sealed[_NONCE:], bound.encode())
        except (InvalidTag, ValueError):
            raise VerificationError("a sealed text of the ledger was changed or moved") from None
        return text.decode(*_TEXT)

    def _cipher(self) -> AESGCM:
        return AESGCM(hmac.new(self.secret, b"expunge/seal\0", hashlib.sha256).digest())


def make_key(path: Path) -> Key:
    """A new key file, for its owner alone; one that is there is used."""
    if path.exists():
        return read_key(path)
    if not path.parent.is_dir():
        raise InputError.of("key", str(path), "inside a folder that exists")
    write_atomic(path, secrets.token_hex(32).encode() + b"\n", private=True)
    return read_key(path)


def read_key(path: Path) -> Key:
    """The key of a file that others cannot read."""
    if not path.exists():
        raise InputError(
            f"the key {path} is not there, and without it nobody in the ledger can be found; put "
            "it back from where it was kept, or name its place with --key or EXPUNGE_LEDGER_KEY"
        )
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise InputError(f"the key {path} can be read by others; chmod 600 it")
    raw = read_limited(path, 1000, "key").strip()
    try:
        secret = bytes.fromhex(raw.decode())
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise InputError(f"the key {path} is not one: it must hold 64 hexadecimal digits")
    return Key(secret)
