"""Models: a state of heads or shards, or a job for anything else; and their releases."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, func, insert, select

from expunge.errors import CertificateError, InputError
from expunge.files import read_limited
from expunge.ledger.chain import append
from expunge.ledger.clocks import read_now
from expunge.ledger.schema import MODELS, NAMED, RELEASES, REQUESTS, WORK

Kind = Literal["state", "job"]


@dataclass(frozen=True)
class Release:
    """A release that answers requests; ``replay`` if it forgot people who had come back."""

    model: str
    number: int
    directory: Path
    certificate: str
    parent: str | None
    finished: datetime
    requests: tuple[int, ...]
    replay: bool = False


@dataclass(frozen=True)
class Model:
    """A registered model; ``worker`` is whoever is at work on it, None for nobody; ``retired`` is
    when its operator said that nobody uses it any more."""

    name: str
    kind: Kind
    path: Path
    folder: Path
    registered: datetime
    open: int
    running: int
    worker: str | None
    retired: datetime | None
    releases: tuple[Release, ...]


def register_model(
    connection: Connection, name: str, place: str | Path, releases: str | Path | None = None
) -> None:
    """Register a state or a job; requests that are open and ask all models ask it too."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InputError.of("name", name, "letters, digits, '.', '_' and '-', at most 100")
    path = Path(place).absolute()
    kind: Kind = "job" if path.is_file() else "state"
    identity = identify(kind, path)
    folder = path.with_name(f"{path.name}-releases") if releases is None else Path(releases)
    folder = folder.absolute()
    others = connection.execute(select(MODELS.c.path).where(MODELS.c.kind == "state")).scalars()
    for state in [path] * (kind == "state") + [Path(other) for other in others]:
        if folder.resolve().is_relative_to(state.resolve()):
            raise InputError.of("releases", str(folder), f"outside of the state {state}")
    for row in connection.execute(select(MODELS)):
        if (row.name, row.path, row.releases) == (name, str(path), str(folder)):
            if row.retired is not None:
                raise InputError.of("name", name, f"another: it was retired on {row.retired[:10]}")
            return
        for field, given in (("name", name), ("path", str(path)), ("releases", str(folder))):
            if getattr(row, field) == given:
                raise InputError.of(field, given, f"another: the model {row.name} has it")
        if Path(row.releases).resolve() == folder.resolve():
            raise InputError.of("releases", str(folder), f"another: the model {row.name} has it")
        if row.identity == identity and (path / "key").exists():
            valid = f"no copy of that of the model {row.name}: a copy may hold whom it forgot"
            raise InputError.of("state", str(path), f"{valid}; put it back at {row.path}")
    number = (connection.execute(select(func.max(MODELS.c.id))).scalar_one() or 0) + 1
    waiting = select(REQUESTS.c.number).where(
        REQUESTS.c.scope == 0, REQUESTS.c.state.in_(("open", "running"))
    )
    asked = sorted(connection.execute(waiting).scalars())
    event = append(
        connection, "registered",
        model=name, kind=kind, path=str(path), releases=str(folder), identity=identity,
        requests=asked,
    )  # fmt: skip
    values = {"id": number, "name": name, "kind": kind, "path": str(path), "registered": event.at}
    connection.execute(insert(MODELS).values(**values, releases=str(folder), identity=identity))
    for request in asked:
        connection.execute(insert(WORK).values(request=request, model=number, state="open"))


def identify(kind: Kind, path: Path) -> str:
    """What a model is known by: a state keeps its key and settings, through every backup.

    >>> identify("state", Path("/nowhere"))
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: state is '/nowhere'; it must be a folder that learn or save wrote,...
    """
    digest = hashlib.sha256(b"expunge/model\0" + kind.encode())
    if kind == "job":
        from expunge.jobs.jobfile import read_job

        read_job(path)
        return digest.hexdigest()
    meta = path / "meta.json"
    if not meta.is_file():
        valid = "a folder that learn or save wrote, or the file of a job for expunge unlearn"
        raise InputError.of("state", str(path), valid)
    try:
        told = json.loads(read_limited(meta, 100_000_000, "state"))
        digest.update(str(told["format"]).encode() + b"\0")
        digest.update(json.dumps(told["settings"], sort_keys=True).encode())
    except (ValueError, TypeError, KeyError) as error:
        raise CertificateError(f"state {path} is damaged: {error}") from None
    key = path / "key"
    if key.exists():
        digest.update(b"\0" + read_limited(key, 1000, "state"))
    return digest.hexdigest()


def find_model(connection: Connection, name: str) -> Any:
    """The row of a model, by its name."""
    row = connection.execute(select(MODELS).where(MODELS.c.name == name)).one_or_none()
    if row is None:
        known = sorted(connection.execute(select(MODELS.c.name)).scalars())
        raise InputError.of("model", name, f"one of {known}" if known else "registered first")
    return row


def list_models(connection: Connection, name: str | None = None) -> tuple[Model, ...]:
    """Models in the order of their registration, each with its releases, oldest first."""
    chosen = select(MODELS).order_by(MODELS.c.id)
    if name is not None:
        find_model(connection, name)
        chosen = chosen.where(MODELS.c.name == name)
    counts = defaultdict[tuple[int, str], int](int)
    grouped = select(WORK.c.model, WORK.c.state, func.count()).group_by(WORK.c.model, WORK.c.state)
    for model, state, count in connection.execute(grouped):
        counts[model, state] = count
    now = read_now().isoformat()
    return tuple(
        Model(
            name=row.name,
            kind=row.kind,
            path=Path(row.path),
            folder=Path(row.releases),
            registered=datetime.fromisoformat(row.registered),
            open=counts[row.id, "open"],
            running=counts[row.id, "running"],
            worker=row.worker if row.until is not None and row.until > now else None,
            retired=None if row.retired is None else datetime.fromisoformat(row.retired),
            releases=list_releases(connection, row),
        )
        for row in connection.execute(chosen).all()
    )


def list_releases(connection: Connection, model: Any) -> tuple[Release, ...]:
    """The finished releases of a model's row, oldest first."""
    named = defaultdict[int, list[int]](list)
    pairs = select(NAMED).join(RELEASES, RELEASES.c.id == NAMED.c.release)
    for row in connection.execute(
        pairs.where(RELEASES.c.model == model.id).order_by(NAMED.c.request)
    ):
        named[row.release].append(row.request)
    chosen = select(RELEASES).where(RELEASES.c.model == model.id, RELEASES.c.state == "finished")
    return tuple(
        Release(
            model=model.name,
            number=row.number,
            directory=Path(row.directory),
            certificate=row.certificate,
            parent=row.parent,
            finished=datetime.fromisoformat(row.finished),
            requests=tuple(named[row.id]),
            replay=bool(row.replay),
        )
        for row in connection.execute(chosen.order_by(RELEASES.c.number))
    )
