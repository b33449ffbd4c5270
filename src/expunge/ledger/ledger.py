"""The ledger as one object: what the commands, the server and programs call."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, insert, select

from expunge.errors import ExpungeError, InputError
from expunge.ledger.chain import (
    START,
    Anchor,
    Event,
    append,
    list_events,
    list_own,
    read_anchor,
)
from expunge.ledger.database import (
    check_version,
    connect,
    find_file,
    read_url,
    reading,
    upgrade,
    writing,
)
from expunge.ledger.known import hash_weights, note_known
from expunge.ledger.models import Model, find_model, identify, list_models, register_model
from expunge.ledger.names import Key, make_key, read_key
from expunge.ledger.requests import Request, end_request, file_request, list_requests
from expunge.ledger.schema import BOOK, MODELS

if TYPE_CHECKING:
    from expunge.ledger.checking import Checked
    from expunge.ledger.fulfilment import Done
    from expunge.ledger.leases import Worker
    from expunge.ledger.verification import Verified


class Ledger:
    """Requests of people, the models that may hold them, and the releases that answer them.

    ``url`` is ``sqlite:///FILE`` or ``postgresql+psycopg://USER@HOST/NAME``; ``key`` is the file of
    the key that identifiers are hashed and sealed with (default: ``FILE.key`` beside SQLite's file,
    else EXPUNGE_LEDGER_KEY). A ledger must be there: :meth:`create` makes one. An object may be
    used by several threads, and several processes may use the same ledger.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Ledger.create(f"sqlite:///{folder}/ledger.db") as ledger:
    ...         first, again = ledger.request("user-42"), ledger.request("user-42")
    ...     first.number, first.state, first.clock.pace, again.number, again.new
    (1, 'open', 'on time', 1, False)
    """

    def __init__(self, url: str, *, key: str | Path | None = None) -> None:
        self.url = read_url(url)
        file = find_file(self.url)
        if file is not None and not file.is_file():
            raise InputError(f"there is no ledger at {file}; make one with expunge ledger init")
        self.key_file = _find_key(file, key)
        engine = connect(self.url)
        try:
            check_version(engine)
            self.key: Key = read_key(self.key_file)
            _check_key(engine, self.key, self.key_file)
        except BaseException:
            engine.dispose()
            raise
        self.engine = engine.execution_options(key=self.key)

    @classmethod
    def create(cls, url: str, *, key: str | Path | None = None) -> Ledger:
        """Make a ledger and its key, or bring one that is there to this version."""
        place = read_url(url)
        file = find_file(place)
        if file is not None and not file.absolute().parent.is_dir():
            raise InputError.of("ledger", url, "in a folder that exists")
        path = _find_key(file, key)
        engine = connect(place)
        fresh = file is not None and not file.exists()
        if file is not None and fresh:
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        try:
            upgrade(engine)
            with reading(engine) as connection:
                there = connection.execute(select(BOOK)).one_or_none()
            made = make_key(path) if there is None else read_key(path)
            with writing(engine.execution_options(key=made)) as connection:
                if connection.execute(select(BOOK)).one_or_none() is None:
                    name = secrets.token_hex(32)
                    check = made.tag("check", name)
                    row = {"id": 1, "ledger": name, "check": check, "events": 0, "head": START}
                    connection.execute(insert(BOOK).values(**row))
                    append(connection, "created", ledger=name)
        except BaseException:
            if file is not None and fresh:
                engine.dispose()
                file.unlink()
            raise
        finally:
            engine.dispose()
        return cls(url, key=key)

    def close(self) -> None:
        """Close the connections to the database."""
        self.engine.dispose()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def register(
        self, name: str, state: str | Path, *, releases: str | Path | None = None
    ) -> Model:
        """Register a state of heads or shards, or the file of a job for ``expunge unlearn``.

        ``releases`` is the folder for its releases; default: ``STATE-releases``. The data of a job
        must hold everybody its weights were trained on: whoever is missing later is still known.
        Registering a job again says so of weights that are new.
        """
        seen = _look_into(Path(state).absolute())
        if (Path(state) / "meta.json").is_file():
            self._check_copy(Path(state).absolute())
        with writing(self.engine) as connection:
            register_model(connection, name, state, releases)
            if seen is not None:
                note_known(connection, find_model(connection, name), *seen)
        self._advance_anchor()
        return self.models(name)[0]

    def _check_copy(self, path: Path) -> None:
        """A state without a key is known by its settings alone: an equal one is a copy if it holds
        whom the other forgot, and that must not bring them back."""
        from expunge.ledger.fulfilment import list_forgotten, read_finished
        from expunge.ledger.holding import find_standing

        with reading(self.engine) as connection:
            same = select(MODELS).where(MODELS.c.identity == identify("state", path))
            for row in connection.execute(same.where(MODELS.c.path != str(path))).all():
                forgotten = list_forgotten(read_finished(connection, self.key, row))
                if forgotten and find_standing("state", path, sorted(forgotten)).held:
                    valid = f"no copy of that of the model {row.name}: it holds whom that forgot"
                    raise InputError.of("state", str(path), valid)

    def request(
        self,
        person: object,
        *,
        model: str | None = None,
        received: date | str | None = None,
        due: date | str | None = None,
        reason: str | None = None,
    ) -> Request:
        """File a request to forget a person in ``model``, or in all; due in a month by default.

        The same request again, before it is answered, is the one that is there (``new`` is False).
        """
        given: dict[str, Any] = {"model": model, "received": received, "due": due}
        with writing(self.engine) as connection:
            number, new = file_request(connection, self.key, person, reason=reason, **given)
            return list_requests(connection, self.key, numbers=[number], new=new)[0]

    def requests(
        self,
        *,
        state: str | None = None,
        model: str | None = None,
        person: object = None,
        after: int = 0,
        most: int | None = None,
    ) -> tuple[Request, ...]:
        """Requests by number, from the one ``after`` a number on, with clocks and answers."""
        hashed = None if person is None else self.key.hash_person(person)
        chosen: dict[str, Any] = {"state": state, "model": model, "after": after, "most": most}
        with reading(self.engine) as connection:
            return list_requests(connection, self.key, person=hashed, **chosen)

    def get(self, number: int) -> Request:
        """One request; :class:`InputError` if there is none of this number."""
        with reading(self.engine) as connection:
            found = list_requests(connection, self.key, numbers=[number])
        if not found:
            raise InputError.of("request", number, "the number of a request of this ledger")
        return found[0]

    def withdraw(self, number: int, reason: str = "") -> Request:
        """The person takes the request back; not while it is being worked on."""
        with writing(self.engine) as connection:
            end_request(connection, self.key, number, "withdrawn", reason)
        return self.get(number)

    def refuse(self, number: int, reason: str) -> Request:
        """Refuse a request, with a reason; not while it is being worked on."""
        with writing(self.engine) as connection:
            end_request(connection, self.key, number, "refused", reason)
        return self.get(number)

    def models(self, name: str | None = None) -> tuple[Model, ...]:
        """The registered models, or the one of this name, with their releases."""
        with reading(self.engine) as connection:
            return list_models(connection, name)

    def events(
        self, *, request: int | None = None, after: int = 0, most: int | None = None
    ) -> tuple[Event, ...]:
        """The chain of events, from the one ``after`` a number on; or those of one request."""
        with reading(self.engine) as connection:
            if request is None:
                return list_events(connection, after=after, most=most)
            return list_own(connection, request, after=after)[:most]

    def anchor(self) -> Anchor:
        """Where the chain ends now."""
        with reading(self.engine) as connection:
            return read_anchor(connection)

    def work(
        self,
        model: str | None = None,
        *,
        most: int | None = None,
        least: int = 1,
        days: int = 7,
        lease: float = 900.0,
        tell: Callable[[str, str], None] = lambda model, stage: None,
    ) -> tuple[Done, ...]:
        """One round on ``model``, or on all: forget who is asked for, release, answer.

        At most ``most`` requests each, once there are ``least`` or one is due within ``days``.
        ``lease`` is how long a worker may be silent before another goes on. ``tell(model, stage)``
        hears "taken", "looking", "forgetting" and "checking".
        """
        from expunge.ledger.fulfilment import Batching, work

        batching = Batching(most, least, days)
        chosen = self.models(model)
        names = [one.name for one in chosen if one.retired is None or model is not None]
        found = tuple(work(self._make_worker(lease), names, batching, tell))
        self._advance_anchor()
        return found

    def retire(self, model: str, withdrawn: str) -> tuple[int, ...]:
        """No request asks a model any more; ``withdrawn`` says why nobody uses it.

        What it released stays, and is verified, but needs no weights. Requests that waited for it
        are answered without it: the numbers of these.
        """
        from expunge.ledger.fulfilment import retire_model

        found = retire_model(self._make_worker(), model, withdrawn)
        self._advance_anchor()
        return found

    def check(self, state: str | Path) -> Checked:
        """Who was forgotten and is held in a state again; the state of a model, or a copy."""
        from expunge.ledger.checking import check_state

        return check_state(self._make_worker(), state)

    def replay(self, model: str, *, lease: float = 900.0) -> Done:
        """Forget again who came back into a model's state, as from a backup."""
        from expunge.ledger.checking import replay

        return replay(self._make_worker(lease), model)

    def readmit(self, number: int, model: str) -> None:
        """The person of this request is back in a model on purpose, and may stay."""
        from expunge.ledger.checking import readmit

        readmit(self._make_worker(), number, model)

    def verify(self, *, certificates: bool = True) -> Verified:
        """The chain, the tables by the chain, the anchors and the certificates; or what differs."""
        from expunge.ledger.verification import verify_ledger

        return verify_ledger(self._make_worker(), self._anchor_file, certificates=certificates)

    def accept(self, reason: str) -> tuple[str, ...]:
        """An older copy of the database was put back knowingly: go on from it."""
        from expunge.ledger.verification import accept

        return accept(self._make_worker(), self._anchor_file, reason)

    def export(self, person: object) -> bytes:
        """A zip of the evidence about a person: requests, events, certificates, reports."""
        from expunge.ledger.exporting import export_person

        return export_person(self._make_worker(), person)

    @property
    def _anchor_file(self) -> Path:
        return self.key_file.with_name(f"{self.key_file.name}.anchor")

    def _advance_anchor(self) -> None:
        """Anchors are for finding what is lost later: where none can be written, work goes on."""
        from expunge.ledger.verification import advance_anchor

        with suppress(OSError, ExpungeError):
            advance_anchor(self._make_worker(), self._anchor_file)

    def _make_worker(self, lease: float = 900.0) -> Worker:
        from expunge.ledger.leases import Worker

        return Worker.make(self.engine, self.key, lease)


def _look_into(path: Path) -> tuple[frozenset[str], str] | None:
    """Who is in the data of a job, and the hash of its weights; None of a state."""
    if not path.is_file():
        return None
    from expunge.ledger.holding import find_standing

    identify("job", path)
    return find_standing("job", path, ()).everybody, hash_weights(path)


def _check_key(engine: Engine, key: Key, path: Path) -> None:
    with reading(engine) as connection:
        book = connection.execute(select(BOOK)).one()
    if not hmac.compare_digest(book.check, key.tag("check", book.ledger)):
        raise InputError(f"the key {path} is not the key of this ledger")


def _find_key(file: Path | None, key: str | Path | None) -> Path:
    """The key's place: as given, by EXPUNGE_LEDGER_KEY, or beside SQLite's file."""
    given = key or os.environ.get("EXPUNGE_LEDGER_KEY")
    if given:
        return Path(given)
    if file is None:
        raise InputError(
            "the key has no place yet: a ledger on PostgreSQL needs --key FILE or "
            "EXPUNGE_LEDGER_KEY"
        )
    return file.with_name(f"{file.name}.key")
