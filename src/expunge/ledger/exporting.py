"""Evidence about one person, for a regulator: a zip that needs no ledger and no key to be read."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import zipfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import select

from expunge.certificates.certificate import Certificate
from expunge.certificates.verification import find_differences
from expunge.errors import InputError
from expunge.files import to_plain
from expunge.ledger.chain import START, Event, list_events, read_anchor
from expunge.ledger.database import reading
from expunge.ledger.evidence import check_hash
from expunge.ledger.leases import Worker
from expunge.ledger.requests import Request, list_requests
from expunge.ledger.schema import RELEASES
from expunge.ledger.telling import check_tables

_WHEN = (1980, 1, 1, 0, 0, 0)


def export_person(worker: Worker, person: object) -> bytes:
    """All requests of a person: facts, events, certificates, public reports, how to verify."""
    hashed = worker.key.hash_person(person)
    with reading(worker.engine) as connection:
        requests = list_requests(connection, worker.key, person=hashed)
        if not requests:
            raise InputError("person has no request in this ledger; check how it is written")
        check_tables(connection, worker.key, worker.book)
        events, anchor = list_events(connection), read_anchor(connection)
        rows = connection.execute(select(RELEASES)).all()
    numbers = {request.number for request in requests}
    files = {
        "requests.json": _dump([_describe(request) for request in requests]),
        "events.json": _dump(_choose(events, numbers)),
        "anchor.json": _dump(asdict(anchor)),
    }
    known = {row.certificate: Path(row.directory) for row in rows if row.certificate is not None}
    for request in requests:
        for answer in request.answers:
            if answer.certificate is None or answer.release is None:
                continue
            folder = f"{answer.model}/{answer.release:04d}"
            if f"{folder}/certificate.json" not in files:
                files |= _collect(folder, answer.certificate, known)
    files["README.txt"] = _explain(requests, sorted(files)).encode()
    return _pack(files)


def _describe(request: Request) -> dict[str, Any]:
    told = asdict(request)
    told |= {name: str(told[name]) for name in ("received", "due", "filed")}
    told["ended"] = None if request.ended is None else request.ended.isoformat()
    told.pop("new")
    for answer in told["answers"]:
        answer.pop("directory")
    return to_plain(told)


def _choose(events: tuple[Event, ...], numbers: set[int]) -> list[dict[str, Any]]:
    """The events about these requests, each with the hash of the one before it."""
    found, previous = list[dict[str, Any]](), START
    for event in events:
        if any(event.concerns(number) for number in numbers):
            found.append(asdict(event) | {"previous": previous})
        previous = event.hash
    return found


def _collect(folder: str, certificate: str, known: dict[str, Path]) -> dict[str, bytes]:
    """What may be shown of a release, and the certificates it is chained to."""
    from expunge.reports.page import write_report

    directory = known[certificate]
    path = directory / "certificate.json"
    check_hash(path, certificate)
    if differences := find_differences(path):
        raise InputError(f"{path} does not hold: " + "; ".join(differences))
    files = {f"{folder}/certificate.json": path.read_bytes()}
    with tempfile.TemporaryDirectory(prefix="expunge-export-") as place:
        for name in ("certificate.json", "metrics.json"):
            if (directory / name).exists():
                shutil.copyfile(directory / name, Path(place) / name)
        report = write_report(place, public=True)
        files[f"{folder}/{report.name}"] = report.read_bytes()
    parent = Certificate.load(path).parent
    while parent is not None and parent in known:
        above = known[parent] / "certificate.json"
        if not above.is_file():
            break
        check_hash(above, parent)
        files[f"{folder}/chain/{known[parent].name}.json"] = above.read_bytes()
        parent = Certificate.load(above).parent
    return files


def _explain(requests: tuple[Request, ...], names: list[str]) -> str:
    lines = ["Evidence about requests to be forgotten", ""]
    for request in requests:
        lines.append(
            f"Request {request.number}: received {request.received}, due {request.due}, "
            f"{request.state}{'' if request.answer is None else f' ({request.answer})'}"
            f"{'' if request.ended is None else f' on {request.ended.date()}'}, "
            f"{request.clock.pace}"
        )
        for answer in request.answers:
            place = "" if answer.release is None else f", release {answer.release:04d}"
            lines.append(f"  {answer.model}: {answer.outcome or answer.state}{place}")
    how = _HOW.format(version=version("expunge"))
    lines += ["", "Files", "", *(f"  {name}" for name in names), "", how]
    return "\n".join(lines)


_HOW = """How to verify, offline

Install expunge {version} from the source that the operator names, not from a name alone. Then

  expunge verify MODEL/NNNN/certificate.json --weights model.safetensors

recomputes every number of the certificate; model.safetensors are the weights that the operator
released, whose hash the certificate names. expunge show says the same in plain language. A
certificate that names a parent is chained to the file in chain/ whose SHA-256 it names.

Every event carries a hash: SHA-256 of "expunge/event", a zero byte, the 32 bytes of the hash before
(given as "previous") and the canonical JSON (RFC 8785) of number, at, kind and body. anchor.json is
the end of the operator's chain when this was written: keep it. Later the operator must be able to
show a chain that goes through it.

A person is named by a keyed hash; the operator has the key. The certificate commits to the set of
the forgotten by a salted hash, whose salt is in the operator's private record: ask the operator to
open it (expunge.opens) for the names of that release.
"""


def _dump(data: Any) -> bytes:
    return (json.dumps(data, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def _pack(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _WHEN), data, zipfile.ZIP_DEFLATED)
    return made.getvalue()
