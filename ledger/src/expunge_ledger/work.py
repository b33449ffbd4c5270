"""Work: all open requests of a model together, in one run, and only then are they answered.

    look      who is in the model, who was forgotten before, who is not there
    begin     answers that need no run; the release's number, directory and names    written
    forget    the state changes, the release appears in one rename                   on disk
    complete  the certificate is checked; the requests are answered                  written

A kill between two lines leaves the line before: whoever works next goes on there, with the same
names and the same directory. A worker that was only slow finds that another went on, and completes
the same release or finds it complete; it answers nothing twice, because both write the same rows.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select, update

import expunge
from expunge import ExpungeError, InputError, RunError, UnlearningError, VerificationError
from expunge_ledger import models
from expunge_ledger.database import Database, connected
from expunge_ledger.deeds import ALREADY, FORGOTTEN, LIVE, NOT_HELD, Row
from expunge_ledger.registry import add_seen, mark, need_model, read_release, read_seen
from expunge_ledger.requests import drop_names, read_names
from expunge_ledger.schema import LEASES, RELEASES, WORK
from expunge_ledger.tables import Tables, read_now

ANCHOR, SECONDS = "ledger.json", 60.0
Report = Callable[[str, str], None]
_SILENT = "another worker went on with this model, because this one was silent"
_SIMILAR = (
    "nobody is in the model under this identifier, but somebody is under one that differs only in "
    "case or width; if it is the same person, withdraw the request and file theirs, else refuse it"
)
_OTHER_WEIGHTS = (
    "model.old is not the file that was registered, so nobody can say who is in it; when the data "
    "have everybody it was trained on, register the job again"
)
_GONE = (
    "this person was in the data of the job and is gone from them, but the weights may hold them; "
    "let the data have them until a run forgot them, or refuse the request and say why"
)


class Lease:
    """A worker of this process at one model, alone; ``seconds`` is how long it may be silent.

    Taken by the database's own means: ``FOR UPDATE SKIP LOCKED`` on PostgreSQL, ``BEGIN IMMEDIATE``
    on SQLite. A worker that lives renews it. What ends one too early, a stopped process or a clock
    that was set, costs time and nothing else: whoever goes on writes the same rows and release.
    """

    def __init__(self, db: Database, model: int, seconds: float = SECONDS) -> None:
        if not 0 < seconds < 1e9:
            raise InputError.of("lease", seconds, "a number of seconds > 0")
        self.db, self.seconds, self.model = db, seconds, model
        self._chosen = select(LEASES).where(LEASES.c.model == model)
        self.worker = f"{platform.node()[:40]}/{os.getpid()}/{secrets.token_hex(4)}"

    def take(self) -> bool:
        """Take the model's lease; False if another has it, or is taking it just now."""
        with connected(self.db.engine, writes=True) as connection:
            locked = self._chosen.with_for_update(skip_locked=True)
            row = connection.execute(locked).one_or_none()
            now = time.time()
            if row is None:
                if connection.execute(self._chosen).first() is not None:
                    return False
                connection.execute(insert(LEASES).values(model=self.model, until=0.0))
            elif row.worker not in (None, self.worker):
                longest = now + 2 * max(self.seconds, SECONDS)  # later than any: of a wrong clock
                if now < row.until <= longest:
                    return False
            taken = {"worker": self.worker, "until": now + self.seconds}
            fits = LEASES.c.model == self.model
            connection.execute(update(LEASES).where(fits).values(**taken))
            return True

    def renew(self) -> bool:
        """Go on for longer; False if another took the model meanwhile."""
        return self._change(until=time.time() + self.seconds)

    def give_back(self) -> None:
        """Let others take the model."""
        self._change(worker=None, until=0.0)

    def _change(self, **values: object) -> bool:
        with connected(self.db.engine, writes=True) as connection:
            mine = (LEASES.c.model == self.model) & (LEASES.c.worker == self.worker)
            return bool(connection.execute(update(LEASES).where(mine).values(**values)).rowcount)

    def check(self, tables: Tables) -> None:
        """Refuse to go on when another did."""
        if tables.connection.execute(self._chosen).one().worker != self.worker:
            raise RunError(_SILENT)

    @contextmanager
    def taken(self) -> Generator[bool]:
        """Whether the model is this worker's while the body runs."""
        if not self.take():
            yield False
            return
        over = threading.Event()

        def go_on() -> None:
            going = True
            while going and not over.wait(self.seconds / 3):
                with suppress(ExpungeError):
                    going = self.renew()

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        try:
            yield True
        finally:
            over.set()
            thread.join()
            self.give_back()


@dataclass(frozen=True)
class Done:
    """What one round on a model came to; ``failed`` is why it could not be finished, if so."""

    model: str
    requests: tuple[int, ...] = ()
    forgotten: int = 0
    already: int = 0
    not_held: int = 0
    release: int | None = None
    directory: Path | None = None
    certificate: str | None = None
    said: tuple[str, ...] = ()
    failed: str | None = None


@dataclass(frozen=True)
class Batching:
    """When to begin and how much to take: at most ``most`` requests, once there are ``least`` or
    one is due within ``days``; ``lease`` is how long a worker may be silent, in seconds."""

    most: int | None = None
    least: int = 1
    days: int = 7
    lease: float = SECONDS

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise InputError.of("most", self.most, "a whole number >= 1")

    def choose(self, live: Sequence[Row]) -> list[int]:
        """The requests of the next round, those that are due first."""
        waiting = sorted(live, key=lambda part: (part["due"], part["request"]))
        soon = (read_now() + timedelta(days=self.days)).date().isoformat()
        if not waiting or (len(waiting) < self.least and waiting[0]["due"] > soon):
            return []
        return sorted(part["request"] for part in waiting[: self.most])


def work_on(db: Database, name: str, batching: Batching, report: Report) -> Done | None:
    """One round on a model; None if there is nothing to do, or another works on it."""
    try:
        with db.reading() as tables:
            model = need_model(tables, name, used=True)
            if model["begun"] is None and not batching.choose(tables.live(model)):
                return None
        lease = Lease(db, model["id"], batching.lease)
        with lease.taken() as mine:
            return _work(lease, name, batching, report) if mine else None
    except VerificationError as error:
        return Done(name, failed=str(error))


def _work(lease: Lease, name: str, batching: Batching, report: Report) -> Done:
    try:
        with lease.db.reading() as tables:
            model = need_model(tables, name)
            numbers = [] if model["begun"] else batching.choose(tables.live(model))
            people = read_names(tables, numbers)
        report(name, "taken")
        found, done = open_model(model), Done(name)
        if model["begun"] is None:
            report(name, "looking")
            done = _look(lease, model, found, people)
        return finish(lease, name, found, done, report)
    except (ExpungeError, OSError) as error:
        return Done(name, failed=_hide_names(lease.db, name, str(error)))


def replay(db: Database, name: str, seconds: float) -> Done:
    """Forget again who came back into a model's state."""
    with db.reading() as tables:
        model, done = need_model(tables, name, used=True), Done(name)
    lease = Lease(db, model["id"], seconds)
    with lease.taken() as taken:
        if not taken:
            raise RunError(f"another worker is at work on {name}; try again when it is done")
        for _ in range(2):  # a release that is on disk already names nobody more: the next does
            found = open_model(model)
            if returned := find_returned(db, model, found):
                with db.writing() as tables:
                    now = need_model(tables, name)
                    place = Path(now["folder"]) / f"{now['begun'] or 0:04d}"
                    if not models.is_written(place):
                        begin(tables, now, [n for one in returned.values() for n in one], replay=1)
            done = finish(lease, name, found, done, lambda name, stage: None)
    return done


def open_model(model: Row) -> models.Model:
    """The model that was registered, and no other at its place."""
    found = models.Model(model["path"])
    if (found.kind, found.identity) != (model["kind"], model["identity"]):
        raise UnlearningError(
            f"{model['path']} is not the {model['kind']} that was registered as {model['name']}: "
            "its key or its settings are others"
        )
    return found


def _look(lease: Lease, model: Row, found: models.Model, people: dict[int, str]) -> Done:
    """Answer who needs no run, and begin the release that the others need."""
    db, there, said = lease.db, found.find(set(people.values())), dict[int, str]()
    if found.kind == "job":
        add_seen(db, model["name"], found.everybody)
    check_returned(db, model, found, set(people.values()))
    outcomes, batch, absent = dict[int, Any](), list[int](), dict[int, str]()
    # The data of a job keep whom its releases forgot; who is in a state is to be forgotten.
    rest = {n: name for n, name in people.items() if found.kind == "job" or name not in there}
    history = _find_history(db, model, rest)
    marked = found.find_forgotten(set(rest.values()))
    for number, name in people.items():
        if history.get(number):
            outcomes[number] = [ALREADY, history[number]]
        elif name in there or name in marked:
            batch.append(number)
        elif number in history:
            said[number] = "the release that forgot this person does not hold any more"
        else:
            absent[number] = name
    said |= _find_reasons(db, model, found, absent)
    outcomes |= {number: [NOT_HELD, None] for number in absent if number not in said}
    earlier = _list_earlier(db, model, found, {people[number] for number in batch})
    with db.writing() as tables:
        lease.check(tables)
        now = need_model(tables, model["name"])
        if now["begun"] is not None or now["retired"] is not None:
            raise RunError(_SILENT)
        still = {part["request"] for part in tables.live(now)}  # nobody withdrew meanwhile
        outcomes = {number: one for number, one in outcomes.items() if number in still}
        tables.load([*outcomes, *batch])
        if outcomes:
            named = {str(number): one for number, one in outcomes.items()}
            tables.record("settled", model=model["name"], outcomes=named)
            drop_names(tables, outcomes)
        if batch := [number for number in batch if number in still]:
            begin(tables, now, batch + earlier)
    count = sum(one[0] == ALREADY for one in outcomes.values())
    return Done(
        model["name"], tuple(sorted(outcomes)), already=count, not_held=len(outcomes) - count,
        said=tuple(f"request {number} stays open: {why}" for number, why in sorted(said.items())),
    )  # fmt: skip


def _list_earlier(db: Database, model: Row, found: models.Model, names: set[str]) -> list[int]:
    """The requests of whom earlier releases of a job forgot and its data still have: each of its
    releases names them too, for else it would bring them back."""
    if found.kind == "state" or not names or not model["finished"]:
        return []
    there = found.everybody - names
    return [numbers[-1] for name, numbers in list_forgotten(db, model).items() if name in there]


def _find_history(db: Database, model: Row, people: Mapping[int, str]) -> dict[int, int]:
    """{request: the last release that forgot its person and still proves it, or 0 if none does}."""
    found = dict[int, int]()
    with db.reading() as tables:
        hashes = {number: db.key.tag("person", name) for number, name in people.items()}
        tables.prove(set(hashes.values()))  # all their rows are read now
        for number, hashed in hashes.items():
            for before in tables.people[hashed]:
                part = tables.get(WORK, before, model["id"])
                if part is None or part["release"] is None or part["readmitted"] is not None:
                    continue
                release = read_release(tables, model, part["release"])
                found.setdefault(number, 0)
                with suppress(ExpungeError, OSError):
                    check_finished(tables, model, release)
                    found[number] = max(found[number], part["release"])
    return found


def check_finished(tables: Tables, model: Row, release: Row) -> None:
    """Refuse a finished release of which anything does not hold any more."""
    names = read_names(tables, json.loads(release["requests"]))
    last = release["number"] == model["finished"] and model["retired"] is None
    place = Path(release["directory"])
    found = models.check_release(place, names.values(), release["certificate"], last)
    if found.parent != release["parent"]:
        raise VerificationError("its parent is not the one that the ledger knows")


def _find_reasons(
    db: Database, model: Row, found: models.Model, absent: dict[int, str]
) -> dict[int, str]:
    """Why somebody who was not found may be there all the same: spelled otherwise, or in the
    weights of a job whose data do not have them any more."""
    similar = found.find_similar(set(absent.values())) if absent else frozenset[str]()
    reasons = {number: _SIMILAR for number, name in absent.items() if name in similar}
    if found.kind == "state" or not absent:
        return reasons
    with db.reading() as tables:
        marks, weights = read_seen(tables, need_model(tables, model["name"]))
    if weights != found.hash_weights():
        return dict.fromkeys(absent, _OTHER_WEIGHTS) | reasons
    return {n: _GONE for n, name in absent.items() if mark(db.key, name) in marks} | reasons


def list_forgotten(db: Database, model: Row) -> dict[str, list[int]]:
    """{identifier: requests, the last of them last} of everybody whom a model's releases forgot,
    but for those who are back on purpose; proved to be all."""
    found = dict[str, list[int]]()
    with db.reading() as tables:
        tables.prove()
        parts = tables.find(WORK, WORK.c.model == model["id"], WORK.c.outcome == FORGOTTEN)
        names = read_names(tables, [part["request"] for part in parts])
        for part in sorted(parts, key=lambda one: (one["release"], one["request"])):
            name = names[part["request"]]
            if part["readmitted"] is None:
                found.setdefault(name, []).append(part["request"])
            else:
                found.pop(name, None)
    return found


def find_returned(db: Database, model: Row, found: models.Model) -> dict[str, list[int]]:
    """The same, of those who are in a state again."""
    forgotten = list_forgotten(db, model)
    return {name: forgotten[name] for name in found.find(forgotten)}


def check_returned(db: Database, model: Row, found: models.Model, asked: set[str]) -> None:
    """Nothing is released from a state that holds again whom the ledger knows as forgotten, but
    for those whom this release is ``asked`` to forget. A state that nobody changed since its last
    release holds nobody again."""
    if not model["finished"] or found.kind == "job" or found.generation == model["generation"]:
        return
    returned = find_returned(db, model, found)
    if numbers := sorted(one[-1] for name, one in returned.items() if name not in asked):
        raise UnlearningError(
            f"{model['path']} holds {len(numbers)} people again who were forgotten (requests "
            f"{', '.join(map(str, numbers[:10]))}), as after a backup was restored; expunge-ledger "
            f"work --model {model['name']} --replay forgets them again, expunge-ledger register "
            f"{model['name']} --readmit REQUEST lets somebody stay"
        )


def begin(tables: Tables, model: Row, requests: list[int], replay: int = 0) -> None:
    """Write whom the next release names, before anything of them is destroyed."""
    number, folder = model["begun"], Path(model["folder"])
    if number is None:
        number = model["finished"] + 1
        while models.is_touched(folder / f"{number:04d}"):  # one that an older ledger lacks
            number += 1
    tables.record(
        "begun", model=model["name"], release=number, directory=str(folder / f"{number:04d}"),
        replay=replay, requests=sorted(requests),
    )  # fmt: skip


def finish(lease: Lease, name: str, found: models.Model, done: Done, report: Report) -> Done:
    """Write the release that has begun, if it is not there, check it, and answer its requests."""
    db, parent = lease.db, None
    with db.reading() as tables:
        model = need_model(tables, name)
        if model["begun"] is None:
            return done
        begun = read_release(tables, model, model["begun"])
        names = read_names(tables, json.loads(begun["requests"]))
        people, directory = set(names.values()), Path(begun["directory"])
        tables.load(names)
        parts = {number: tables.get(WORK, number, model["id"]) or {} for number in names}
        if found.kind == "job" and model["finished"]:
            last = read_release(tables, model, model["finished"])
            parent = Path(last["directory"])
            models.read_certificate(parent, last["certificate"])
    if not lease.renew():
        raise RunError(_SILENT)
    report(name, "forgetting")
    if not models.is_written(directory):
        check_returned(db, model, found, people)
    elif found.kind == "state" and found.find(people):
        _drop(lease, model)
        raise UnlearningError(
            f"{model['path']} holds people again whom {directory} forgot, as after a backup was "
            "restored; their requests are open again"
        )

    def sign(sha256: str) -> str:
        return db.key.tag("release", f"{model['id']} {begun['number']} {sha256}")

    try:
        sha256 = found.forget(sorted(people), directory, parent, sign)
    except (InputError, UnlearningError):
        with suppress(ExpungeError, OSError):  # give it up, if nobody was forgotten for it yet
            fresh = models.Model(found.path)
            whole = fresh.kind == "job" or set(fresh.find(people)) == people
            if whole and not models.is_touched(directory):
                _drop(lease, model)
        raise
    report(name, "checking")
    certificate = models.check_release(directory, people, sha256)
    fresh = models.Model(found.path)
    if fresh.kind == "state" and fresh.find(people):
        raise VerificationError(f"{found.path} still holds people whom {directory} forgot")
    complete(db, model, begun, certificate, fresh.generation)
    new = {n for n, part in parts.items() if begun["replay"] or part["state"] == "running"}
    return replace(
        done, requests=tuple(sorted(new.union(done.requests))), forgotten=len(new),
        release=begun["number"], directory=directory, certificate=certificate.sha256,
    )  # fmt: skip


def complete(
    db: Database, model: Row, begun: Row, certificate: expunge.Certificate, generation: str | None
) -> None:
    """The release is there and holds: it is finished, and its requests are answered. Once."""
    directory, numbers = Path(begun["directory"]), json.loads(begun["requests"])
    with db.writing() as tables:
        row = tables.get(RELEASES, model["id"], begun["number"])
        if row is None or (row["begun"], row["directory"]) != (begun["begun"], begun["directory"]):
            raise RunError(f"{directory} was given up by another worker; it answers nothing")
        if row["state"] == "begun":
            if row["requests"] != begun["requests"]:
                raise RunError(f"{directory} names others meanwhile; it answers nothing")
            tables.load(numbers)
            tables.record(
                "released", model=model["name"], release=begun["number"], requests=numbers,
                certificate=certificate.sha256, parent=certificate.parent, generation=generation,
            )  # fmt: skip
            drop_names(tables, numbers)
        anchor = tables.anchor()
    anchor.write(directory / ANCHOR)


def _drop(lease: Lease, model: Row) -> None:
    with lease.db.writing() as tables:
        lease.check(tables)
        tables.record("dropped", model=model["name"], release=model["begun"])


def _hide_names(db: Database, name: str, sentence: str) -> str:
    """What failed, without the identifiers of those it failed for."""
    with suppress(ExpungeError), db.reading() as tables:
        chosen = select(WORK.c.request).where(WORK.c.model == need_model(tables, name)["id"])
        numbers = tables.connection.execute(chosen.where(WORK.c.state.in_(LIVE)).limit(1000))
        for number, known in read_names(tables, numbers.scalars().all()).items():
            sentence = sentence.replace(repr(known), f"the person of {number}")
    return sentence
