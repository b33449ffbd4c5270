"""What of a release leaves the server, and whether it holds.

Only these files leave, and all but the certificate are made from it when they are asked for. A
release is found by the ledger, never by a path that somebody sent.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal, get_args

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sqlalchemy import select

from expunge.certificates.certificate import Certificate, parse
from expunge.errors import ExpungeError, VerificationError
from expunge.files import read_limited
from expunge.ledger.database import reading
from expunge.ledger.evidence import check_release
from expunge.ledger.ledger import Ledger
from expunge.ledger.models import Model, Release
from expunge.ledger.requests import open_person
from expunge.ledger.schema import REQUESTS
from expunge.server.refusals import RefusedError

File = Literal["certificate.json", "report-public.html", "model-card.md", "public-key.pem"]
FILES: tuple[File, ...] = get_args(File)
TYPES: dict[File, str] = {
    "certificate.json": "application/json",
    "report-public.html": "text/html; charset=utf-8",
    "model-card.md": "text/markdown; charset=utf-8",
    "public-key.pem": "application/x-pem-file",
}
_MOST = 100_000_000


def find_release(model: Model, number: int) -> Release:
    """A finished release of a model."""
    for release in model.releases:
        if release.number == number:
            return release
    raise RefusedError(404, "there is no such release")


def read_certificate(release: Release) -> tuple[bytes, Certificate]:
    """The certificate's bytes, if they are those that the ledger knows."""
    data = read_limited(release.directory / "certificate.json", _MOST, "certificate")
    if hashlib.sha256(data).hexdigest() != release.certificate:
        raise VerificationError(
            f"the certificate of release {release.number} is not the one that the ledger knows"
        )
    return data, parse(data)


def make_file(release: Release, name: File) -> bytes:
    """The bytes of one of :data:`FILES`."""
    try:
        data, certificate = read_certificate(release)
        match name:
            case "certificate.json":
                return data
            case "report-public.html":
                return _make_report(release, certificate).encode()
            case "model-card.md":
                return (certificate.model_card() + "\n").encode()
            case "public-key.pem":
                return _write_key(certificate)
    except ExpungeError as error:
        raise RefusedError(409, hide_path(release, str(error))) from None


def _make_report(release: Release, certificate: Certificate) -> str:
    from expunge.reports.page import render_report

    path = release.directory / "metrics.json"
    measured = json.loads(read_limited(path, _MOST, "metrics")) if path.is_file() else None
    return render_report(None, certificate, measured, public=True)


def _write_key(certificate: Certificate) -> bytes:
    if certificate.signature is None:
        raise RefusedError(404, "this certificate is not signed")
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(certificate.signature.public_key))
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def inspect_release(ledger: Ledger, model: Model, release: Release) -> list[str]:
    """What differs: certificate, record and weights, the people it names, and its parent."""
    with reading(ledger.engine) as connection:
        people = [
            open_person(row, ledger.key)
            for start in range(0, len(release.requests), 500)
            for row in connection.execute(
                select(REQUESTS).where(REQUESTS.c.number.in_(release.requests[start : start + 500]))
            )
        ]
    last = release == model.releases[-1] and model.retired is None
    found = list[str]()
    try:
        certificate = check_release(release.directory, people, release.certificate, last)
        if certificate.parent != release.parent:
            found.append("its parent is not the one that the ledger knows")
    except ExpungeError as error:
        found.append(hide_path(release, str(error)))
    before = [one for one in model.releases if one.number < release.number]
    if before and before[-1].certificate != release.parent:
        found.append(f"it is not chained to release {before[-1].number}, the one before")
    return found


def hide_path(release: Release, sentence: str) -> str:
    """A sentence about a release, without where it lies."""
    return sentence.replace(f"{release.directory}/", "").replace(str(release.directory), "it")
