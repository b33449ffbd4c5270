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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import expunge
from expunge import ExpungeError, InputError, RunError, UnlearningError, VerificationError
from expunge_ledger import models
from expunge_ledger.database import Database
from expunge_ledger.deeds import ALREADY, FORGOTTEN, NOT_HELD, Row
from expunge_ledger.lease import SILENT, Lease
from expunge_ledger.records import Records, mark
from expunge_ledger.schema import RELEASES, WORK

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


class Worker:
    """A worker of this process at one model; ``replay``: it forgets again who came back into it."""

    def __init__(self, db: Database, name: str, *, replay: bool = False) -> None:
        self.db, self.name, self.replay = db, name, replay
        with db.reading() as tables:
            self.model = tables.need_model(name, used=True)  # its row as it was first read
        self.lease = Lease(db.engine, self.model["id"])
        self._names = dict[int, str]()

    def work(self) -> Done | None:
        """One round; None if there is nothing to do, or another works on the model."""
        try:
            with self.db.reading() as tables:
                if not (self.replay or self.model["begun"] or tables.live(self.model)):
                    return None
            with self.lease.taken() as mine:
                return self._work() if mine else None
        except VerificationError as error:
            return Done(self.name, failed=str(error))

    def _work(self) -> Done:
        try:
            with self.db.reading() as tables:
                model = self.model = tables.need_model(self.name)
                waits = not (model["begun"] or self.replay)
                numbers = [part["request"] for part in tables.live(model)] if waits else []
                people = self._names = tables.read_names(numbers)
            self.open()
            return self.finish(Done(self.name) if model["begun"] else self._look(people))
        except (ExpungeError, OSError) as error:
            said = str(error)
            for number, name in self._names.items():
                said = said.replace(repr(name), f"the person of {number}")
            return Done(self.name, failed=said)

    def open(self) -> None:
        """Open the model that was registered, and no other at its place."""
        model = self.model
        self.found = models.Model(model["path"])
        if (self.found.kind, self.found.identity) != (model["kind"], model["identity"]):
            raise UnlearningError(
                f"{model['path']} is not the {model['kind']} that was registered as {self.name}: "
                "its key or its settings are others"
            )

    def _look(self, people: dict[int, str]) -> Done:
        """Answer who needs no run, and begin the release that the others need."""
        found, said, asked = self.found, dict[int, str](), set(people.values())
        there, job = found.find(asked), found.kind == "job"
        if job:
            seen = mark(self.db.key, found.everybody)
            with self.db.writing() as tables:
                tables.add_seen(self.name, seen)
        returned = self.find_returned(asked)
        outcomes, batch, absent = dict[int, Any](), list[int](), dict[int, str]()
        # The data of a job keep whom its releases forgot; who is in a state is to be forgotten.
        rest = {n: name for n, name in people.items() if job or name not in there}
        history = self._find_history(rest)
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
        said |= self._find_reasons(absent)
        outcomes |= {number: [NOT_HELD, None] for number in absent if number not in said}
        earlier = list[int]()
        if job and batch and self.model["finished"]:
            # Each release of a job also names whom earlier ones forgot and its data still have, for
            # else it would bring them back.
            others = found.everybody - {people[number] for number in batch}
            forgotten = list_forgotten(self.db, self.model)
            earlier = [numbers[-1] for name, numbers in forgotten.items() if name in others]
        with self.db.writing() as tables:
            self.lease.check(tables)
            now = tables.need_model(self.name)
            if now["begun"] is not None or now["retired"] is not None:
                raise RunError(SILENT)
            still = {part["request"] for part in tables.live(now)}  # nobody withdrew meanwhile
            outcomes = {number: one for number, one in outcomes.items() if number in still}
            if outcomes:
                named = {str(number): one for number, one in outcomes.items()}
                tables.record("settled", model=self.name, outcomes=named)
                tables.drop_names(outcomes)
            if batch := [number for number in batch if number in still] + returned:
                self.begin(tables, now, batch + earlier, replay=bool(returned))
        count, why = sum(one[0] == ALREADY for one in outcomes.values()), sorted(said.items())
        return Done(
            self.name, tuple(sorted(outcomes)), already=count, not_held=len(outcomes) - count,
            said=tuple(f"request {number} stays open: {reason}" for number, reason in why),
        )  # fmt: skip

    def _find_history(self, people: Mapping[int, str]) -> dict[int, int]:
        """{request: the last release that forgot its person and still proves it, 0 if none does}"""
        found = dict[int, int]()
        with self.db.reading() as tables:
            hashes = {number: tables.key.tag("person", name) for number, name in people.items()}
            tables.prove(set(hashes.values()))  # all their rows are read now
            for number, hashed in hashes.items():
                for before in tables.people[hashed]:
                    part = tables.get(WORK, before, self.model["id"])
                    if part is None or part["release"] is None or part["readmitted"] is not None:
                        continue
                    release = tables.read_release(self.model, part["release"])
                    found.setdefault(number, 0)
                    with suppress(ExpungeError, OSError):
                        check_finished(tables, self.model, release)
                        found[number] = max(found[number], part["release"])
        return found

    def _find_reasons(self, absent: dict[int, str]) -> dict[int, str]:
        """Why somebody who was not found may be there all the same: spelled otherwise, or in the
        weights of a job whose data do not have them any more."""
        if not absent:
            return {}
        similar = self.found.find_similar(set(absent.values()))
        reasons = {number: _SIMILAR for number, name in absent.items() if name in similar}
        if self.found.kind == "state":
            return reasons
        with self.db.reading() as tables:
            marks, weights = tables.read_seen(tables.need_model(self.name))
        if weights != self.found.hash_weights():
            return dict.fromkeys(absent, _OTHER_WEIGHTS) | reasons
        gone = {n: _GONE for n, name in absent.items() if mark(self.db.key, [name]) <= marks}
        return gone | reasons

    def find_returned(self, asked: set[str]) -> list[int]:
        """The requests of those who were forgotten and are in the state again, but for those whom
        the next release is ``asked`` to forget: nothing is released from such a state, unless that
        is a replay. A state that nobody changed since its last release holds nobody again."""
        model, found = self.model, self.found
        if not model["finished"] or found.kind == "job" or found.generation == model["generation"]:
            return []
        forgotten = list_forgotten(self.db, model)
        returned = [forgotten[name] for name in found.find(forgotten) if name not in asked]
        if returned and not self.replay:
            last = sorted(numbers[-1] for numbers in returned)
            raise UnlearningError(
                f"{model['path']} holds {len(last)} people again who were forgotten (requests "
                f"{', '.join(map(str, last[:10]))}), as after a backup was restored; "
                f"expunge-ledger work --model {self.name} --replay forgets them again, "
                f"expunge-ledger register {self.name} --readmit REQUEST lets somebody stay"
            )
        return [number for numbers in returned for number in numbers]

    def begin(
        self, tables: Records, model: Row, requests: list[int], *, replay: bool = False
    ) -> None:
        """Write whom the next release names, before anything of them is destroyed."""
        number, folder = model["begun"], Path(model["folder"])
        if number is None:
            number = model["finished"] + 1
            while models.is_touched(folder / f"{number:04d}"):  # one that an older ledger lacks
                number += 1
        tables.record(
            "begun", model=self.name, release=number, directory=str(folder / f"{number:04d}"),
            replay=int(replay), requests=sorted(requests),
        )  # fmt: skip

    def finish(self, done: Done) -> Done:
        """Write the release that has begun, if it is not there, check it, and answer its
        requests."""
        found, parent = self.found, None
        with self.db.reading() as tables:
            model = self.model = tables.need_model(self.name)
            if model["begun"] is None:
                return done
            begun = tables.read_release(model, model["begun"])
            names = self._names = tables.read_names(json.loads(begun["requests"]))
            people, directory = set(names.values()), Path(begun["directory"])
            live = tables.live(model)
            if found.kind == "job" and model["finished"]:
                last = tables.read_release(model, model["finished"])
                parent = Path(last["directory"])
                models.read_certificate(parent, last["certificate"])
        if not self.lease.renew():
            raise RunError(SILENT)
        if not models.is_written(directory):
            if returned := self.find_returned(people):
                with self.db.writing() as tables:
                    self.lease.check(tables)
                    self.begin(tables, tables.need_model(self.name), returned, replay=True)
                return self.finish(done)
        elif found.kind == "state" and found.find(people):
            self._drop()
            raise UnlearningError(
                f"{model['path']} holds people again whom {directory} forgot, as after a backup "
                "was restored; their requests are open again"
            )

        def sign(sha256: str) -> str:
            return self.db.key.tag("release", f"{model['id']} {begun['number']} {sha256}")

        try:
            sha256 = found.forget(sorted(people), directory, parent, sign)
        except (InputError, UnlearningError):
            with suppress(ExpungeError, OSError):  # give it up, if nobody was forgotten for it yet
                fresh = models.Model(found.path)
                whole = fresh.kind == "job" or set(fresh.find(people)) == people
                if whole and not models.is_touched(directory):
                    self._drop()
            raise
        certificate = models.check_release(directory, people, sha256)
        fresh = models.Model(found.path)
        if fresh.kind == "state" and fresh.find(people):
            raise VerificationError(f"{found.path} still holds people whom {directory} forgot")
        self.complete(begun, certificate, fresh.generation)
        running = {part["request"] for part in live if part["state"] == "running"}
        new = set(names) if begun["replay"] else running
        return replace(
            done, requests=tuple(sorted(new.union(done.requests))), forgotten=len(new),
            release=begun["number"], directory=directory, certificate=certificate.sha256,
        )  # fmt: skip

    def complete(self, begun: Row, made: expunge.Certificate, generation: str | None) -> None:
        """The release is there and holds: it is finished, and its requests are answered. Once."""
        directory, numbers = Path(begun["directory"]), json.loads(begun["requests"])
        with self.db.writing() as tables:
            row = tables.get(RELEASES, begun["model"], begun["number"]) or {}
            if any(row.get(name) != begun[name] for name in ("begun", "directory")):
                raise RunError(f"{directory} was given up by another worker; it answers nothing")
            if row["state"] == "begun":
                if row["requests"] != begun["requests"]:
                    raise RunError(f"{directory} names others meanwhile; it answers nothing")
                tables.live(tables.need_model(self.name))  # proved, and read at once
                tables.record(
                    "released", model=self.name, release=begun["number"], requests=numbers,
                    certificate=made.sha256, parent=made.parent, generation=generation,
                )  # fmt: skip
                tables.drop_names(numbers)

    def _drop(self) -> None:
        with self.db.writing() as tables:
            self.lease.check(tables)
            tables.record("dropped", model=self.name, release=self.model["begun"])


def check_finished(tables: Records, model: Row, release: Row) -> None:
    """Refuse a finished release of which anything does not hold any more."""
    names = tables.read_names(json.loads(release["requests"]))
    last = release["number"] == model["finished"] and model["retired"] is None
    place = Path(release["directory"])
    found = models.check_release(place, names.values(), release["certificate"], last)
    if found.parent != release["parent"]:
        raise VerificationError("its parent is not the one that the ledger knows")


def list_forgotten(db: Database, model: Row) -> dict[str, list[int]]:
    """{identifier: requests, the last of them last} of everybody whom a model's releases forgot,
    but for those who are back on purpose; proved to be all."""
    found = dict[str, list[int]]()
    with db.reading() as tables:
        tables.prove()
        parts = tables.find(WORK, WORK.c.model == model["id"], WORK.c.outcome == FORGOTTEN)
        names = tables.read_names([part["request"] for part in parts])
        for part in sorted(parts, key=lambda one: (one["release"], one["request"])):
            name = names[part["request"]]
            if part["readmitted"] is None:
                found.setdefault(name, []).append(part["request"])
            else:
                found.pop(name, None)
    return found
