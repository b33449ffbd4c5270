"""The key: persons by keyed hashes, texts sealed, rows and events authenticated.

With K the 32 bytes of the key file, which lies beside the ledger and never in it:

    tag(purpose, text) = HMAC-SHA-256(K, "expunge/" ‖ purpose ‖ 0 ‖ text)
    person             = tag("person", identifier)                         finds a person again
    sealed             = nonce ‖ AES-256-GCM(tag("seal", ""), nonce, text)   what forgetting needs
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

import expunge
from expunge import InputError, VerificationError

_NONCE, MOST_TEXT = 12, 1024


def read_person(identifier: object) -> str:
    """One identifier as ``expunge.Data`` reads it, and short enough to be one.

    >>> read_person("e\\u0301") == "\\u00e9", read_person(7)
    (True, '7')
    """
    if not isinstance(identifier, str | int):
        raise InputError.of("person", identifier, "a string or a whole number")
    try:
        (name,) = expunge.Data([0], ids=[identifier]).people
    except InputError as error:
        raise InputError(f"person{str(error).removeprefix('ids')}") from None
    if len(name) > MOST_TEXT:
        raise InputError.of("person", f"{name[:20]}…", f"at most {MOST_TEXT} characters")
    return name


@dataclass(frozen=True)
class Key:
    """What turns identifiers into hashes, seals texts and authenticates rows.

    >>> key = Key(bytes(32))
    >>> key.hash_person("ann")[:12], key.open(key.seal(b"ann", "1"), "1")
    ('fa6e2752e20b', b'ann')
    """

    secret: bytes = field(repr=False)

    def hash_person(self, identifier: object) -> str:
        """The keyed hash that stands for a person."""
        return self.tag("person", read_person(identifier))

    def tag(self, purpose: str, text: str) -> str:
        """HMAC of a text for one purpose."""
        data = f"expunge/{purpose}\0{text}".encode("utf-8", "surrogatepass")
        return hmac.digest(self.secret, data, "sha256").hex()

    def seal(self, data: bytes, bound: str) -> bytes:
        """Bytes that only this key opens, and only where they were ``bound`` to."""
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._make_cipher().encrypt(nonce, data, bound.encode())

    def open(self, sealed: bytes, bound: str) -> bytes:
        """What was sealed; a seal that was changed or moved is a :class:`VerificationError`."""
        try:
            return self._make_cipher().decrypt(sealed[:_NONCE], sealed[_NONCE:], bound.encode())
        except (InvalidTag, ValueError):
            raise VerificationError("a sealed text of the ledger was changed or moved") from None

    def _make_cipher(self) -> AESGCM:
        return AESGCM(bytes.fromhex(self.tag("seal", "")))


def make_key(path: Path) -> Key:
    """A new key file, for its owner alone; one that is there is used."""
    if not path.exists():
        try:
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secrets.token_hex(32).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            raise InputError.of("key", str(path), "a file in a folder that exists") from None
    return read_key(path)


def read_key(path: Path) -> Key:
    """The key of a file that others cannot read."""
    if not path.is_file():
        raise InputError(
            f"the key {path} is not there, and without it nobody in the ledger can be found; "
            "restore it from where it was kept, or name its place with --key or EXPUNGE_LEDGER_KEY"
        )
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise InputError(f"the key {path} can be read by others; chmod 600 it")
    try:
        secret = bytes.fromhex(path.read_text("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise InputError(f"the key {path} is not one: it must have 64 hexadecimal digits")
    return Key(secret)


def hash_bytes(data: bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
