"""Evidence about one person, for a regulator: a zip that needs no ledger and no key to be read."""

from __future__ import annotations

import io
import json
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import expunge
from expunge import InputError
from expunge_ledger import models
from expunge_ledger.chain import START, Event, digest_body, salt_of
from expunge_ledger.database import Database
from expunge_ledger.keys import Key
from expunge_ledger.registry import need_model, read_release
from expunge_ledger.requests import Request, choose_numbers, list_requests
from expunge_ledger.schema import RELEASES
from expunge_ledger.verification import check_tables
from expunge_ledger.work import check_finished

_WHEN = (1980, 1, 1, 0, 0, 0)


def export_person(db: Database, person: object) -> bytes:
    """All requests of a person: facts, events, certificates, how to verify."""
    with db.reading() as tables:
        numbers = choose_numbers(tables, person=db.key.hash_person(person))
        if not numbers:
            raise InputError("person has no request in this ledger; check how it is written")
        events = check_tables(tables)
        requests = list_requests(tables, numbers)
        files = {
            "requests.json": _dump([request.model_dump(mode="json") for request in requests]),
            "events.json": _dump(_choose(db.key, events, set(numbers))),
            "anchor.json": tables.anchor().dump() + b"\n",
        }
        finished = tables.find(RELEASES, RELEASES.c.state == "finished")
        places = {row["certificate"]: Path(row["directory"]) for row in finished}
        for answer in (one for request in requests for one in request.answers):
            if answer.release is None:
                continue
            model = need_model(tables, answer.model)
            row = read_release(tables, model, answer.release)
            check_finished(tables, model, row)
            folder = f"{answer.model}/{answer.release:04d}"
            files |= _collect(folder, row["certificate"], places)
    files["README.txt"] = _explain(requests, sorted(files)).encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _WHEN), data, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def _choose(key: Key, events: list[Event], numbers: set[int]) -> list[dict[str, Any]]:
    """The events about these requests, with what is needed to check each: the hash before it, and
    the body with its salt, unless that names the requests of others."""
    found, previous = list[dict[str, Any]](), START
    for event in events:
        if numbers.intersection(event.subjects):
            salt = salt_of(key, event.number)
            row = {"number": event.number, "at": event.at, "kind": event.kind, "hash": event.hash}
            row |= {"previous": previous, "digest": digest_body(salt, event.body)}
            if numbers.issuperset(event.subjects) and "directory" not in event.body:
                row |= {"body": dict(event.body), "salt": salt}
            found.append(row | {"shown": event.show()})
        previous = event.hash
    return found


def _collect(folder: str, sha256: str, places: dict[str, Path]) -> dict[str, bytes]:
    """The certificate of a release, and those it is chained to."""
    files, name = dict[str, bytes](), f"{folder}/certificate.json"
    parent: str | None = sha256
    while parent in places and name not in files:
        files[name] = models.read_certificate(places[parent], parent)
        parent = expunge.Certificate.from_bytes(files[name]).parent
        name = f"{folder}/chain/{str(parent)[:16]}.json"
    return files


def _explain(requests: tuple[Request, ...], names: list[str]) -> str:
    lines = ["Evidence about requests to be forgotten", ""]
    for one in requests:
        ended = "" if one.ended is None else f" on {one.ended.date()}"
        answer = "" if one.answer is None else f" ({one.answer})"
        lines.append(
            f"Request {one.number}: received {one.received}, due {one.due}, {one.state}{answer}"
            f"{ended}, {one.pace}"
        )
        for part in one.answers:
            place = "" if part.release is None else f", release {part.release:04d}"
            lines.append(f"  {part.model}: {part.outcome or part.state}{place}")
    how = Path(__file__).with_name("evidence.txt").read_text().format(version=version("expunge"))
    return "\n".join([*lines, "", "Files", "", *(f"  {name}" for name in names), "", how])


def _dump(data: Any) -> bytes:
    return (json.dumps(data, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()
