"""Work: all open requests of a model together, in one run, and only then are they answered.

    take      requests become running, the model is held by this worker        written
    sort      who is held, who was forgotten before, who is not there           written
    begin     the release gets its number, its directory and its names          written
    forget    the state changes, the release appears in one rename              on disk
    complete  the certificate is checked; the requests are answered             written

A kill between two lines leaves the line before: whoever works next goes on there, with the same
names and the same directory. A worker that was only slow finds that another went on, and completes
the same release or finds it complete; it answers nothing twice, because both write the same rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from expunge.certificates.certificate import Certificate
from expunge.errors import (
    ExpungeError,
    InputError,
    RunError,
    UnlearningError,
    VerificationError,
    describe_error,
)
from expunge.ledger.chain import append, read_anchor
from expunge.ledger.clocks import read_now
from expunge.ledger.database import reading, writing
from expunge.ledger.evidence import check_release, hash_file, is_written, write_anchor
from expunge.ledger.holding import Standing, find_similar, find_standing
from expunge.ledger.known import Known, hash_weights, mark_person, note_known, read_known
from expunge.ledger.leases import Worker, check_mine, hold, is_held, let_go, renew, renewing
from expunge.ledger.models import find_model, identify
from expunge.ledger.names import Key
from expunge.ledger.requests import ALREADY, FORGOTTEN, NOT_HELD, WITHDRAWN, conclude, open_person
from expunge.ledger.running import Finished, release_again, run_again
from expunge.ledger.schema import MODELS, NAMED, RELEASES, REQUESTS, WORK
from expunge.ledger.telling import check_tables


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
    one is due within ``days``."""

    most: int | None = None
    least: int = 1
    days: int = 7

    def __post_init__(self) -> None:
        for name in ("most", "least"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InputError.of(name, value, "a whole number >= 1")
        if type(self.days) is not int or not 0 <= self.days <= 36_500:
            raise InputError.of("days", self.days, "a whole number from 0 to 36,500")


def work(
    worker: Worker,
    names: Sequence[str],
    batching: Batching,
    tell: Callable[[str, str], None] = lambda model, stage: None,
) -> list[Done]:
    """One round on every model that is named and has something to do.

    A model that fails stops no other, and leaves its requests open or its release begun.
    """
    found = list[Done]()
    for name in names:
        try:
            taken = _take(worker, name, batching)
        except VerificationError as error:  # nothing is written about tables that were bent
            found.append(Done(name, failed=str(error)))
            continue
        if taken:
            tell(name, "taken")
            with renewing(worker, name):
                try:
                    found.append(_finish(worker, name, lambda stage, n=name: tell(n, stage)))
                except Exception as error:  # whatever it was, other models go on
                    found.append(_put_back(worker, name, error))
                finally:
                    let_go(worker, name)
    return found


def _take(worker: Worker, name: str, batching: Batching) -> bool:
    """Hold the model and make its requests running; False if there is nothing to do."""
    with reading(worker.engine) as connection:
        model = find_model(connection, name)
        if model.retired is not None:
            raise InputError.of("model", name, f"another: it was retired on {model.retired[:10]}")
        owed = select(WORK.c.request).where(WORK.c.model == model.id)
        owed = owed.where(WORK.c.state.in_(("open", "running")))
        if not connection.execute(owed).first() and not _find_begun(connection, model.id):
            return False
        check_tables(connection, worker.key, worker.book)
    with writing(worker.engine) as connection:
        model = find_model(connection, name)
        if is_held(worker, model):
            return False
        begun = _find_begun(connection, model.id)
        running = select(func.count()).select_from(WORK)
        running = running.where(WORK.c.model == model.id, WORK.c.state == "running")
        left = connection.execute(running).scalar_one()
        chosen = (
            select(WORK.c.request, REQUESTS.c.due)
            .join(REQUESTS, REQUESTS.c.number == WORK.c.request)
            .where(WORK.c.model == model.id, WORK.c.state == "open")
            .order_by(REQUESTS.c.due, WORK.c.request)
        )
        waiting = connection.execute(chosen).all()
        if begun is None and not left:
            soon = (read_now() + timedelta(days=batching.days)).date().isoformat()
            urgent = any(row.due <= soon for row in waiting)
            if not waiting or (len(waiting) < batching.least and not urgent):
                return False
            taken = sorted(row.request for row in waiting[: batching.most])
            check_tables(connection, worker.key, worker.book, taken)
            for start in range(0, len(taken), 500):
                part = taken[start : start + 500]
                connection.execute(
                    update(WORK)
                    .where(WORK.c.model == model.id, WORK.c.request.in_(part))
                    .values(state="running")
                )
                connection.execute(
                    update(REQUESTS).where(REQUESTS.c.number.in_(part)).values(state="running")
                )
            append(connection, "taken", model=name, requests=taken, worker=worker.name)
        else:
            append(connection, "adopted", model=name, worker=worker.name)
        hold(connection, worker, model.id)
    return True


def finish_begun(worker: Worker, model: Any) -> Done | None:
    """Complete the release that has begun, if there is one."""
    with reading(worker.engine) as connection:
        check_tables(connection, worker.key, worker.book)
        begun = _find_begun(connection, model.id)
        finished = read_finished(connection, worker.key, model)
    if begun is None:
        return None
    return _forget(worker, model, begun, finished, Done(model.name), lambda stage: None)


def _find_begun(connection: Connection, model: int) -> Any:
    chosen = select(RELEASES).where(RELEASES.c.model == model, RELEASES.c.state == "begun")
    return connection.execute(chosen).one_or_none()


def _finish(worker: Worker, name: str, tell: Callable[[str], None]) -> Done:
    """From requests that are running to answers; all that these rely on is read at once, and is
    what the events tell."""
    with reading(worker.engine) as connection:
        check_tables(connection, worker.key, worker.book)
        model = find_model(connection, name)
        begun = _find_begun(connection, model.id)
        people = _read_running(connection, worker.key, model)
        finished = read_finished(connection, worker.key, model)
        known = read_known(connection, model.id)
    if begun is not None:
        return _forget(worker, model, begun, finished, Done(name), tell)
    _check_identity(model)
    tell("looking")
    standing = find_standing(model.kind, Path(model.path), sorted(set(people.values())))
    if model.kind == "job":
        with writing(worker.engine) as connection:
            note_known(connection, model, standing.everybody)
    check_returned(model, finished, set(people.values()))
    already, batch, absent, unproven = _sort(model, people, standing, finished)
    doubted = _doubt(
        worker.key, model, standing, {number: people[number] for number in absent}, known
    )
    unproven |= doubted
    absent = [number for number in absent if number not in doubted]
    with writing(worker.engine) as connection:
        check_mine(connection, worker, model.id)
        check_tables(connection, worker.key, worker.book, people)
        if already or absent:
            told = {str(n): [ALREADY, release.number] for n, release in already.items()}
            told |= {str(n): [NOT_HELD, None] for n in absent}
            append(connection, "settled", model=model.name, outcomes=told)
        for number, release in already.items():
            _settle(connection, model.id, [number], ALREADY, release.id)
        _settle(connection, model.id, absent, NOT_HELD, None)
        begun = begin(connection, model, batch) if batch else None
        if unproven:
            _open_again(connection, model, sorted(unproven), "VerificationError")
        answer_complete(connection, [*already, *absent])
    said = tuple(f"request {number} stays open: {why}" for number, why in unproven.items())
    numbers = tuple(number for number in sorted(people) if number not in unproven)
    done = Done(model.name, numbers, 0, len(already), len(absent), said=said)
    if begun is None:
        return done
    return _forget(worker, model, begun, finished, done, tell)


def _check_identity(model: Any) -> None:
    if identify(model.kind, Path(model.path)) != model.identity:
        raise UnlearningError(
            f"{model.path} is not the state that was registered as {model.name}: its key or its "
            "settings are others"
        )


def _read_running(connection: Connection, key: Key, model: Any) -> dict[int, str]:
    """{request: identifier} of all that are running on a model."""
    rows = connection.execute(
        select(REQUESTS)
        .join(WORK, WORK.c.request == REQUESTS.c.number)
        .where(WORK.c.model == model.id, WORK.c.state == "running")
    )
    return {row.number: open_person(row, key) for row in rows}


def read_named(connection: Connection, key: Key, release: int) -> dict[int, str]:
    """{request: identifier} of all whom a release names."""
    chosen = select(REQUESTS).join(NAMED, NAMED.c.request == REQUESTS.c.number)
    rows = connection.execute(chosen.where(NAMED.c.release == release))
    return {row.number: open_person(row, key) for row in rows}


def read_finished(connection: Connection, key: Key, model: Any) -> list[Finished]:
    """The finished releases of a model, oldest first, with whom they name."""
    chosen = select(RELEASES).where(RELEASES.c.model == model.id, RELEASES.c.state == "finished")
    back = select(WORK.c.request).where(WORK.c.model == model.id, WORK.c.readmitted.is_not(None))
    readmitted = frozenset(connection.execute(back).scalars())
    return [
        Finished(
            row.id, row.number, Path(row.directory), row.certificate,
            read_named(connection, key, row.id), readmitted,
        )
        for row in connection.execute(chosen.order_by(RELEASES.c.number)).all()
    ]  # fmt: skip


def list_forgotten(finished: Sequence[Finished]) -> dict[str, list[tuple[Finished, int]]]:
    """{identifier: (release, request), …} of everybody a release ever named, the last of them last;
    but for those who are back on purpose."""
    found = dict[str, list[tuple[Finished, int]]]()
    for release in finished:
        for number, name in sorted(release.people.items()):
            if number not in release.readmitted:
                found.setdefault(name, []).append((release, number))
            else:
                found.pop(name, None)
    return found


def check_returned(model: Any, finished: Sequence[Finished], asked: set[str]) -> None:
    """Nothing is released from a state that holds again whom the ledger knows as forgotten, but
    for those whom this release is ``asked`` to forget."""
    forgotten = list_forgotten(finished)
    if model.kind == "job" or not forgotten:
        return
    back = find_standing(model.kind, Path(model.path), sorted(forgotten)).held
    numbers = sorted(forgotten[name][-1][1] for name in back if name not in asked)
    if numbers:
        raise UnlearningError(
            f"{model.path} holds {len(numbers)} people again who were forgotten (requests "
            f"{', '.join(map(str, numbers[:10]))}), as after a backup was put back; expunge ledger "
            f"replay {model.name} forgets them again, expunge ledger readmit lets somebody stay"
        )


def _still_proves(release: Finished) -> bool:
    try:
        check_release(release.directory, release.people.values(), release.certificate, last=False)
    except ExpungeError:
        return False
    return True


def _sort(
    model: Any, people: dict[int, str], standing: Standing, finished: Sequence[Finished]
) -> tuple[dict[int, Finished], list[int], list[int], dict[int, str]]:
    """Who is gone by a release that still proves it, who is to be forgotten, who is not there, and
    of whom it cannot be said."""
    forgotten, proves = list_forgotten(finished), functools.cache(_still_proves)
    already, unproven = dict[int, Finished](), dict[int, str]()
    batch, absent = list[int](), list[int]()
    for number, name in sorted(people.items()):
        gone = name not in standing.held or model.kind == "job"
        earlier = [one for one, _ in reversed(forgotten.get(name, [])) if gone and proves(one)]
        if earlier:
            already[number] = earlier[0]
        elif model.kind == "job" and name in standing.forgotten:
            unproven[number] = (
                "data.forgotten names this person, and no release of this ledger does"
            )
        elif name in standing.held or name in standing.forgotten:
            batch.append(number)
        elif name in forgotten:
            unproven[number] = "the release that forgot this person does not hold any more"
        else:
            absent.append(number)
    return already, batch, absent, unproven


def _doubt(
    key: Key, model: Any, standing: Standing, absent: dict[int, str], known: Known | None
) -> dict[int, str]:
    """Why somebody who was not found may be held all the same: spelled otherwise, or in the
    weights of a job whose data do not have them any more."""
    if not absent:
        return {}
    similar = find_similar(model.kind, Path(model.path), standing, sorted(set(absent.values())))
    doubted = {number: _SIMILAR for number, name in absent.items() if name in similar}
    if model.kind == "state":
        return doubted
    if known is None or known.weights != hash_weights(Path(model.path)):
        again = f"expunge ledger register {model.name} {model.path}"
        return dict.fromkeys(absent, f"{_OTHER_WEIGHTS}: {again}") | doubted
    gone = {n for n, name in absent.items() if mark_person(key, name) in known.marks}
    return dict.fromkeys(gone, _GONE) | doubted


_SIMILAR = (
    "nobody is held under this identifier, but somebody is under one that differs only in case or "
    "width; if it is the same person, withdraw the request and file theirs, else refuse it"
)
_OTHER_WEIGHTS = (
    "model.weights is not the file that was registered, so nobody can say who is in it; when "
    "data.load gives everybody it was trained on, register the job again"
)
_GONE = (
    "this person was in the data of the job and is gone from them, but model.weights may hold "
    "them; let data.load give them until a run forgot them, or refuse the request and say why"
)


def _settle(
    connection: Connection, model: int, numbers: Sequence[int], outcome: str, release: int | None
) -> None:
    for start in range(0, len(numbers), 500):
        part = numbers[start : start + 500]
        connection.execute(
            update(WORK)
            .where(WORK.c.model == model, WORK.c.request.in_(part), WORK.c.state == "running")
            .values(state="done", outcome=outcome, release=release)
        )


def begin(connection: Connection, model: Any, requests: list[int], replay: bool = False) -> Any:
    """Write whom the next release names, before anything of them is destroyed."""
    folder = Path(model.releases)
    last = connection.execute(
        select(func.max(RELEASES.c.number)).where(RELEASES.c.model == model.id)
    ).scalar_one()
    number = (last or 0) + 1
    while (folder / f"{number:04d}").exists():  # a release that an older ledger does not know
        number += 1
    key = (connection.execute(select(func.max(RELEASES.c.id))).scalar_one() or 0) + 1
    values = {"id": key, "model": model.id, "number": number, "state": "begun"}
    values |= {"directory": str(folder / f"{number:04d}"), "replay": int(replay)}
    told = {"release": number, "directory": values["directory"], "replay": replay}
    event = append(connection, "begun", model=model.name, requests=requests, **told)
    connection.execute(insert(RELEASES).values(**values, begun=event.at))
    rows = [{"release": key, "request": request} for request in requests]
    connection.execute(insert(NAMED), rows)
    return connection.execute(select(RELEASES).where(RELEASES.c.id == key)).one()


def begin_replay(connection: Connection, model: Any, requests: list[int]) -> None:
    """Name people who came back in the release that has begun, or begin one."""
    begun = _find_begun(connection, model.id)
    if begun is None:
        begin(connection, model, requests, replay=True)
    elif not is_written(Path(begun.directory)):
        named = select(NAMED.c.request).where(NAMED.c.release == begun.id)
        new = sorted(set(requests).difference(connection.execute(named).scalars()))
        if new:
            rows = [{"release": begun.id, "request": request} for request in new]
            connection.execute(insert(NAMED), rows)
            append(connection, "joined", model=model.name, release=begun.number, requests=new)


def _forget(
    worker: Worker,
    model: Any,
    begun: Any,
    finished: Sequence[Finished],
    done: Done,
    tell: Callable[[str], None],
) -> Done:
    """Write the release, if it is not there, check it, and answer its requests."""
    with reading(worker.engine) as connection:
        check_tables(connection, worker.key, worker.book, ())
        people = read_named(connection, worker.key, begun.id)
    names, directory = sorted(set(people.values())), Path(begun.directory)
    if not renew(worker, model.name):
        raise RunError("another worker went on with this model, because this one was silent")
    tell("forgetting")
    _check_identity(model)
    if not is_written(directory):
        check_returned(model, finished, set(names))
    try:
        if model.kind == "job":
            said = run_again(Path(model.path), directory, names, finished)
        else:
            said = release_again(Path(model.path), directory, names)
    except (InputError, UnlearningError):
        _drop_if_untouched(worker, model, begun, names)
        raise
    tell("checking")
    certificate = check_release(directory, names)
    if model.kind == "state" and find_standing("state", Path(model.path), names).held:
        raise VerificationError(f"{model.path} still holds people whom {directory} forgot")
    sha256 = complete(worker, model, begun, sorted(people), certificate)
    return Done(
        model.name, tuple(sorted({*done.requests, *people})), len(people), done.already,
        done.not_held, begun.number, directory, sha256, (*done.said, *said),
    )  # fmt: skip


def complete(
    worker: Worker, model: Any, begun: Any, requests: list[int], certificate: Certificate
) -> str:
    """The release is there and holds: it is finished, and its requests are answered. Once."""
    directory = Path(begun.directory)
    sha256 = hash_file(directory / "certificate.json")
    with writing(worker.engine) as connection:
        row = connection.execute(select(RELEASES).where(RELEASES.c.id == begun.id)).one_or_none()
        if row is None or row.begun != begun.begun or row.directory != begun.directory:
            raise RunError(f"{directory} was given up by another worker; it answers nothing")
        if row.state == "begun":
            known = check_tables(connection, worker.key, worker.book, requests)
            if known.releases[model.name, begun.number]["requests"] != requests:
                raise RunError(f"{directory} names others meanwhile; it answers nothing")
            told = {"certificate": sha256, "parent": certificate.parent}
            event = append(
                connection, "released",
                model=model.name, release=begun.number, requests=requests, **told,
            )  # fmt: skip
            connection.execute(
                update(RELEASES)
                .where(RELEASES.c.id == begun.id)
                .values(state="finished", finished=event.at, **told)
            )
            _settle(connection, model.id, requests, FORGOTTEN, begun.id)
            answer_complete(connection, requests)
        anchor = read_anchor(connection)
    write_anchor(directory, anchor)
    return sha256


def retire_model(worker: Worker, name: str, reason: str) -> tuple[int, ...]:
    """No request asks the model any more, because its operator says that nobody uses it; the
    requests that waited for it, which this settles."""
    if not 0 < len(reason.strip()) <= 10_000:
        raise InputError.of("withdrawn", f"{reason[:20]}…", "why nobody uses the model any more")
    with reading(worker.engine) as connection:
        check_tables(connection, worker.key, worker.book)
    with writing(worker.engine) as connection:
        model = find_model(connection, name)
        owed = select(WORK.c.request, WORK.c.state).where(WORK.c.model == model.id)
        rows = connection.execute(owed.where(WORK.c.state.in_(("open", "running")))).all()
        numbers = sorted(row.request for row in rows)
        check_tables(connection, worker.key, worker.book, numbers)
        if model.retired is not None:
            raise InputError.of("model", name, f"another: it was retired on {model.retired[:10]}")
        if _find_begun(connection, model.id) or any(row.state == "running" for row in rows):
            raise InputError(f"{name} has work that began; finish it with expunge ledger work")
        told = {"withdrawn": worker.key.tag("withdrawn", reason), "requests": numbers}
        event = append(connection, "retired", model=name, **told)
        connection.execute(update(MODELS).where(MODELS.c.id == model.id).values(retired=event.at))
        connection.execute(
            update(WORK)
            .where(WORK.c.model == model.id, WORK.c.state == "open")
            .values(state="done", outcome=WITHDRAWN)
        )
        answer_complete(connection, numbers)
    return tuple(numbers)


def answer_complete(connection: Connection, requests: Sequence[int]) -> None:
    """Answer those of the requests that no model owes anything any more."""
    for number in requests:
        found = connection.execute(select(REQUESTS).where(REQUESTS.c.number == number)).one()
        if found.state not in ("open", "running"):
            continue
        chosen = select(WORK.c.state, WORK.c.outcome).where(WORK.c.request == number)
        rows = connection.execute(chosen).all()
        if any(row.state != "done" for row in rows):
            if all(row.state != "running" for row in rows):
                connection.execute(
                    update(REQUESTS).where(REQUESTS.c.number == number).values(state="open")
                )
            continue
        answer = conclude([row.outcome for row in rows], found.scope == 0)
        values: dict[str, Any] = {"answer": answer}
        event = append(connection, "answered", request=number, **values)
        values |= {"state": "answered", "ended": event.at}
        if (
            answer != FORGOTTEN
        ):  # nothing of them will have to be forgotten again: the name is not needed
            values["sealed"] = None
        connection.execute(update(REQUESTS).where(REQUESTS.c.number == number).values(**values))


def _drop_if_untouched(worker: Worker, model: Any, begun: Any, names: list[str]) -> None:
    """Give up a release that cannot be written, if nobody was forgotten for it yet."""
    from expunge.files import hold_lock
    from expunge.jobs.directory import workspace_of

    directory, path = Path(begun.directory), Path(model.path)
    if is_written(directory) or workspace_of(directory).exists():
        return
    try:
        if model.kind == "state":
            with hold_lock(path / "working", "taken"):
                if find_standing("state", path, names).held != frozenset(names):
                    return
                _drop(worker, model, begun)
        else:
            _drop(worker, model, begun)
    except (ExpungeError, OSError):
        return


def _drop(worker: Worker, model: Any, begun: Any) -> None:
    with writing(worker.engine) as connection:
        check_mine(connection, worker, model.id)
        connection.execute(delete(NAMED).where(NAMED.c.release == begun.id))
        connection.execute(delete(RELEASES).where(RELEASES.c.id == begun.id))
        append(connection, "dropped", model=model.name, release=begun.number)


def _put_back(worker: Worker, name: str, error: Exception) -> Done:
    """Requests of a round that failed are open again, unless their release has begun."""
    with writing(worker.engine) as connection:
        model = find_model(connection, name)
        running = select(WORK.c.request).where(WORK.c.model == model.id, WORK.c.state == "running")
        numbers = sorted(connection.execute(running).scalars())
        mine = model.worker == worker.name
        begun = _find_begun(connection, model.id)
        kind = type(error).__name__
        if mine and begun is None and numbers:
            _open_again(connection, model, numbers, kind)
        elif mine:
            append(connection, "failed", model=name, error=kind)
        rows = connection.execute(select(REQUESTS).where(REQUESTS.c.number.in_(numbers[:1000])))
        told = str(error) if isinstance(error, ExpungeError) else describe_error(error)
        for row in rows:
            with suppress(ExpungeError):
                name_of = open_person(row, worker.key)
                told = told.replace(repr(name_of), f"the person of {row.number}")
    return Done(name, tuple(numbers), failed=told)


def _open_again(connection: Connection, model: Any, numbers: list[int], error: str) -> None:
    for start in range(0, len(numbers), 500):
        part = numbers[start : start + 500]
        connection.execute(
            update(WORK)
            .where(WORK.c.model == model.id, WORK.c.request.in_(part))
            .values(state="open")
        )
    append(connection, "put back", model=model.name, requests=numbers, error=error)
    answer_complete(connection, numbers)
