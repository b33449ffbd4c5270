"""Whether a release is what answers a request: its certificate holds, and it names this person.

A certificate commits to the set of the forgotten by a salted hash; the private record beside it
holds the salt. So who knows all names of a release can say whether one is among them, and nobody
else can.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from expunge.certificates.certificate import Certificate
from expunge.certificates.identifiers import opens
from expunge.certificates.record import RunRecord
from expunge.certificates.verification import find_differences, verify
from expunge.errors import CertificateError, VerificationError
from expunge.files import read_limited, write_atomic
from expunge.ledger.chain import Anchor

ANCHOR = "ledger.json"


def is_written(directory: Path) -> bool:
    """Whether a release is there; it appears as a whole or not at all."""
    return (directory / "certificate.json").is_file()


def check_release(
    directory: Path, people: Iterable[str], certificate: str | None = None, last: bool = True
) -> Certificate:
    """The certificate, if everything holds: by the weights, by the record, for just these people.

    ``certificate`` is the SHA-256 that its file must have. Only the ``last`` release of a model
    must still have its weights.
    """
    path, record = directory / "certificate.json", directory / "record.json"
    if last:
        found = verify(path, record=record)
    else:
        if differences := find_differences(path, record):
            raise VerificationError(f"{path} does not hold: " + "; ".join(differences))
        found = Certificate.load(path)
    if certificate is not None:
        check_hash(path, certificate)
    forget = RunRecord.load(record).forget
    if forget is None or not opens(forget, set(people)):
        raise VerificationError(f"{path} holds, but does not name the people of these requests")
    if not found.releasable:
        raise VerificationError(f"{path} is not for release: " + "; ".join(found.warnings))
    return found


def hash_file(path: Path) -> str:
    """SHA-256 of a certificate's file, as its child names it."""
    return hashlib.sha256(read_limited(path, 100_000_000, "certificate")).hexdigest()


def check_hash(path: Path, certificate: str) -> None:
    """Refuse a certificate that is not the one of this SHA-256."""
    if hash_file(path) != certificate:
        raise VerificationError(f"{path} is not the certificate that the ledger knows")


def write_anchor(directory: Path, anchor: Anchor) -> None:
    """Leave the end of the chain beside a release, outside of the database."""
    write_atomic(directory / ANCHOR, json.dumps(asdict(anchor), sort_keys=True).encode())


def read_anchor(path: Path) -> Anchor | None:
    """The anchor in a file, if there is one."""
    if not path.is_file():
        return None
    try:
        return Anchor(**json.loads(read_limited(path, 10_000, "anchor")))
    except (ValueError, TypeError):
        raise CertificateError(f"{path} is damaged") from None
