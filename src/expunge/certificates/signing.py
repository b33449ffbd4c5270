"""Ed25519 signatures over a certificate's bytes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from pydantic import Field

from expunge.certificates.fields import Digest, Model
from expunge.errors import InputError
from expunge.files import read_limited, write_atomic

MAX_KEY_BYTES = 100_000
_P = 2**255 - 19
# y of the points whose order divides 8: under such a key one signature fits many messages.
_SMALL_ORDER = frozenset(
    int.from_bytes(bytes.fromhex(y), "little")
    for y in (
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    )
) | {0, 1, _P - 1}


class Signature(Model):
    """Ed25519 over the canonical bytes of the certificate without this field."""

    algorithm: Literal["Ed25519"]
    public_key: Digest
    value: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]

    def matches(self, message: bytes) -> bool:
        """Whether the key signed this message, and is one under which that means something."""
        raw = bytes.fromhex(self.public_key)
        y = int.from_bytes(raw, "little") % 2**255  # without the sign of x
        if y >= _P or y in _SMALL_ORDER:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(raw).verify(bytes.fromhex(self.value), message)
        except (InvalidSignature, ValueError):
            return False
        return True


def generate_key_pair() -> tuple[bytes, bytes]:
    """A fresh Ed25519 key pair as PEM: (private, public).

    >>> private, public = generate_key_pair()
    >>> signature = sign_bytes(b"message", private)
    >>> signature.matches(b"message"), read_public_key(public) == signature.public_key
    (True, True)
    """
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return private, public


def write_key_pair(path: str | Path) -> tuple[Path, Path]:
    """A fresh private key in a file that only its owner may read, its public key in PATH.pub.

    Nothing is ever overwritten.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     private, public = write_key_pair(Path(folder) / "key.pem")
    ...     oct(private.stat().st_mode)[-3:], public.name, len(read_public_key(public))
    ('600', 'key.pem.pub', 64)
    """
    files = (Path(path), Path(f"{path}.pub"))
    for file in files:
        if os.path.lexists(file):
            raise InputError(f"{file} is there already; a key is never overwritten: name another")
    try:
        for file, data, private in zip(files, generate_key_pair(), (True, False), strict=True):
            write_atomic(file, data, private=private)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
    return files


def fingerprint(public_key: str) -> str:
    """The SHA-256 of a raw key in hexadecimal: short enough to be read out, and nobody else's.

    >>> fingerprint("00" * 32)[:23]
    'sha256:66687aadf862bd77'
    """
    return "sha256:" + hashlib.sha256(bytes.fromhex(public_key)).hexdigest()


def sign_bytes(message: bytes, private_key: bytes | str | Path) -> Signature:
    """The signature of this message."""
    key: Ed25519PrivateKey = _load("private key", private_key, Ed25519PrivateKey)
    public = key.public_key().public_bytes_raw().hex()
    return Signature(algorithm="Ed25519", public_key=public, value=key.sign(message).hex())


def read_public_key(public_key: bytes | str | Path) -> str:
    """The raw Ed25519 key in hexadecimal, from PEM bytes or the path of a PEM file."""
    return _load("public key", public_key, Ed25519PublicKey).public_bytes_raw().hex()


def _load(what: str, given: bytes | str | Path, kind: type) -> Any:
    """The key of this kind, from PEM bytes or a PEM file."""
    pem = given if isinstance(given, bytes) else read_limited(given, MAX_KEY_BYTES, what)
    private = kind is Ed25519PrivateKey
    try:
        key = load_pem_private_key(pem, None) if private else load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        key = str(error).split("\n")[0].split(". See ")[0].rstrip(".")
    if not isinstance(key, kind):
        name = "" if isinstance(given, bytes) else f"{given} "
        reason = key if isinstance(key, str) else type(key).__name__
        raise InputError(
            f"{what} {name}cannot be used ({reason}); it must be an Ed25519 key in PEM format, as "
            "expunge keygen writes it"
        )
    return key
