"""The ledger as one object: what the commands, the server and programs call."""

from __future__ import annotations

import copy
import hmac
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select

from expunge import ExpungeError, InputError, RunError
from expunge_ledger import database, models, registry, requests, work
from expunge_ledger.chain import Anchor, Event
from expunge_ledger.database import Database, connected
from expunge_ledger.deeds import WITHDRAWN
from expunge_ledger.exporting import export_person
from expunge_ledger.keys import make_key, read_key
from expunge_ledger.leases import SECONDS, Lease
from expunge_ledger.registry import Model, Token, need_model
from expunge_ledger.requests import Request, check_reason, list_requests
from expunge_ledger.schema import BOOK, WORK
from expunge_ledger.tables import begin_book
from expunge_ledger.verification import Verified, accept, verify_ledger
from expunge_ledger.work import Batching, Done, Report


@dataclass(frozen=True)
class Checked:
    """``forgotten`` people were ever forgotten in a model; ``returned`` are the requests of those
    who are in the state at ``path`` again."""

    model: str
    path: Path
    forgotten: int
    returned: tuple[int, ...]


class Ledger(Database):
    """Requests of people, the models that may hold them, and the releases that answer them.

    ``url`` is ``sqlite:///FILE`` or ``postgresql+psycopg://USER@HOST/NAME``; ``key`` is the file of
    the key that identifiers are hashed and sealed with (default: EXPUNGE_LEDGER_KEY, else
    ``FILE.key`` beside SQLite's file). A ledger must be there: :meth:`create` makes one. Several
    threads and processes may use one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Ledger.create(f"sqlite:///{folder}/ledger.db") as ledger:
    ...         first, again = ledger.request("user-42"), ledger.request("user-42")
    ...     first.number, first.state, first.pace, again.number, again.new
    (1, 'open', 'on time', 1, False)
    """

    def __init__(self, url: str, *, key: str | Path | None = None) -> None:
        self.url = database.read_url(url)
        file = database.find_file(self.url)
        if file is not None and not file.is_file():
            raise InputError(f"there is no ledger at {file}; make one with expunge-ledger init")
        self.key_file, engine = _find_key(file, key), database.connect(self.url)
        try:
            database.check_version(engine)
            super().__init__(engine, read_key(self.key_file))
            with connected(engine) as connection:
                book = connection.execute(select(BOOK.c.ledger, BOOK.c.check)).one()
            if not hmac.compare_digest(book.check, self.key.tag("check", book.ledger)):
                raise InputError(f"the key {self.key_file} is not the key of this ledger")  # noqa: TRY301
        except BaseException:
            engine.dispose()
            raise

    @classmethod
    def create(cls, url: str, *, key: str | Path | None = None) -> Ledger:
        """Make a ledger and its key; one that is there is opened."""
        place = database.read_url(url)
        file, fresh, engine = database.find_file(place), False, database.connect(place)
        path = _find_key(file, key)
        try:
            if file is not None and not file.exists():
                with suppress(OSError):
                    os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
                    fresh = True
                if not fresh:
                    raise InputError.of("ledger", url, "in a folder that exists")  # noqa: TRY301
            database.upgrade(engine)
            with connected(engine, writes=True) as connection:
                if connection.execute(select(BOOK.c.id)).first() is None:
                    begin_book(connection, make_key(path))
        except BaseException:
            engine.dispose()
            if file is not None and fresh:
                file.unlink()
            raise
        engine.dispose()
        return cls(url, key=key)

    def acting(self, by: str) -> Ledger:
        """The same ledger, on behalf of a token, which its events then name."""
        made = copy.copy(self)
        made.by = by
        return made

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
        """Register a state, or the file of a job, whose data have everybody its old weights were
        trained on; ``releases`` is the folder for its releases."""
        path = Path(state).absolute()
        if not path.exists():
            raise InputError.of("state", str(state), "a folder of learn or save, or a job's file")
        found = models.Model(path)
        folder = path.with_name(f"{path.name}-releases") if releases is None else Path(releases)
        with self.writing() as tables:
            registry.register_model(tables, name, found, folder.absolute())
        if found.kind == "job":
            registry.add_seen(self, name, found.everybody, found.hash_weights())
        self._advance_anchor()
        return self.models(name)[0]

    def request(self, person: object, **given: Any) -> Request:
        """File a request to forget a person in ``model=``, or in all; ``received=`` today, ``due=``
        a month later by default, ``reason=``. The same again is the one that is there."""
        with self.writing() as tables:
            number, new = requests.file_request(tables, person, **given)
            (found,) = list_requests(tables, [number])
        return found.model_copy(update={"new": new})

    def requests(self, *, person: object = None, **given: Any) -> tuple[Request, ...]:
        """Requests by number: ``state=``, ``model=``, ``after=`` a number, at ``most=`` so many."""
        hashed = None if person is None else self.key.hash_person(person)
        with self.reading() as tables:
            numbers = requests.choose_numbers(tables, person=hashed, **given)
            return list_requests(tables, numbers)

    def get(self, number: int) -> Request:
        """One request; :class:`InputError` if there is none of this number."""
        with self.reading() as tables:
            for found in list_requests(tables, [number] * (0 < number <= requests.MOST_NUMBER)):
                return found
        raise InputError.of("request", number, "the number of a request of this ledger")

    def read_reason(self, number: int) -> str | None:
        """What was sent with a request."""
        with self.reading() as tables:
            return requests.read_secrets(tables, "reason", [number]).get(number)

    def withdraw(self, number: int, reason: str = "") -> Request:
        """The person takes the request back; not while it is being worked on."""
        with self.writing() as tables:
            requests.end_request(tables, number, "withdrawn", reason)
        return self.get(number)

    def refuse(self, number: int, reason: str) -> Request:
        """Refuse a request, with a reason; not while it is being worked on."""
        with self.writing() as tables:
            requests.end_request(tables, number, "refused", reason)
        return self.get(number)

    def models(self, name: str | None = None) -> tuple[Model, ...]:
        """The registered models, or the one of this name, with their releases."""
        with self.reading() as tables:
            return registry.list_models(tables, name)

    def events(self, *, request: int | None = None) -> tuple[Event, ...]:
        """The chain of events; or those of one request."""
        with self.reading() as tables:
            return tuple(tables.events(request))

    def anchor(self) -> Anchor:
        """Where the chain ends now."""
        with self.reading() as tables:
            return tables.anchor()

    def work(
        self, model: str | None = None, *, report: Report = lambda model, stage: None, **given: Any
    ) -> tuple[Done, ...]:
        """One round on ``model``, or on all: forget who is asked for, release, answer; at ``most=``
        so many requests each, once there are ``least=`` or one is due within ``days=``. ``lease=``
        is how many seconds a worker may be silent before another goes on."""
        batching = Batching(**given)
        with self.reading() as tables:
            names = [row["name"] for row in tables.models() if row["retired"] is None]
        chosen = names if model is None else [model]
        found = [work.work_on(self, name, batching, report) for name in chosen]
        done = tuple(one for one in found if one is not None)
        if done:
            self._advance_anchor()
        return done

    def retire(self, model: str, withdrawn: str) -> tuple[int, ...]:
        """No request asks a model any more; ``withdrawn`` says why nobody uses it. The numbers of
        the requests that waited for it, which are answered without it."""
        check_reason(withdrawn, "why nobody uses the model any more")
        with self.writing() as tables:
            row = need_model(tables, model, used=True)
            if row["begun"] is not None:
                raise InputError(f"{model} has work that began; finish it with expunge-ledger work")
            numbers = sorted(part["request"] for part in tables.live(row))
            tables.load(numbers)
            tag = self.key.tag(WITHDRAWN, withdrawn)
            tables.record("retired", model=model, withdrawn=tag, requests=numbers)
            requests.drop_names(tables, numbers)
        self._advance_anchor()
        return tuple(numbers)

    def check(self, state: str | Path) -> Checked:
        """Who was forgotten and is in a state again; the state of a model, or a copy of it."""
        with self.reading() as tables:
            rows = {row["name"]: row for row in tables.models()}
        path = Path(state).absolute()
        if str(state) in rows and not path.exists():
            path = Path(rows[str(state)]["path"])
        same = [row for row in rows.values() if row["path"] == str(path)]
        if not same and path.exists():
            identity = models.Model(path).identity
            same = [row for row in rows.values() if row["identity"] == identity]
        if not same:
            raise InputError.of("state", str(state), "of a registered model, or a copy of one")
        if same[0]["kind"] == "job":
            raise InputError.of("state", str(state), "a state: a job keeps the forgotten out")
        forgotten = work.list_forgotten(self, same[0])
        back = models.Model(path).find(forgotten)
        numbers = sorted({number for name in back for number in forgotten[name]})
        return Checked(same[0]["name"], path, len(forgotten), tuple(numbers))

    def replay(self, model: str, *, lease: float = SECONDS) -> Done:
        """Forget again who came back into a model's state, as from a backup."""
        done = Done(model)
        with self.reading() as tables:
            row = need_model(tables, model, used=True)
        mine = Lease(self, row["id"], lease)
        with mine.taken() as taken:
            if not taken:
                raise RunError(f"another worker is at work on {model}; try again when it is done")
            for _ in range(2):  # a release that is on disk already names nobody more: the next does
                found = work.open_model(row)
                if returned := self.check(row["path"]).returned:
                    with self.writing() as tables:
                        now = need_model(tables, model)
                        place = Path(now["folder"]) / f"{now['begun'] or 0:04d}"
                        if not models.is_written(place):
                            work.begin(tables, now, list(returned), replay=1)
                done = work.finish(mine, model, found, done, lambda name, stage: None)
        return done

    def readmit(self, number: int, model: str) -> None:
        """The person of this request is back in a model on purpose, and may stay. Only of somebody
        who is back: else a backup could bring them back later, and nobody would ask."""
        with self.reading() as tables:
            row = need_model(tables, model)
        forgotten = work.list_forgotten(self, row)
        names = [name for name, numbers in forgotten.items() if numbers[-1] == number]
        if row["kind"] == "job" or not names:
            raise InputError.of("request", number, f"the last one by which {model} forgot somebody")
        if not models.Model(row["path"]).find(names):
            raise InputError.of("request", number, f"of somebody who is in {model} again")
        with self.writing() as tables:
            if (tables.get(WORK, number, row["id"]) or {})["readmitted"] is None:
                tables.record("readmitted", request=number, model=model)

    def make_token(self, name: str, role: str, model: str | None = None) -> str:
        """A new token for the server, for ``model`` alone or for all; it is not kept."""
        with self.writing() as tables:
            return registry.make_token(tables, name, role, model)

    def revoke_token(self, name: str) -> None:
        """From now on the token opens nothing; what was filed with it stays."""
        with self.writing() as tables:
            registry.revoke_token(tables, name)

    def tokens(self) -> tuple[Token, ...]:
        """All tokens that open something, by name."""
        with self.reading() as tables:
            return registry.list_tokens(tables)

    def verify(self, *, certificates: bool = True) -> Verified:
        """The chain, the tables by the chain, the anchors and the certificates; or what differs."""
        return verify_ledger(self, self._anchor_file, certificates=certificates)

    def accept(self, reason: str) -> tuple[str, ...]:
        """An older copy of the database was restored knowingly, or the clock is right: go on."""
        check_reason(reason, "why the ledger is to go on from here")
        return accept(self, self._anchor_file, reason)

    def export(self, person: object) -> bytes:
        """A zip of the evidence about a person: requests, events, certificates."""
        found = export_person(self, person)
        self._advance_anchor()
        return found

    @property
    def _anchor_file(self) -> Path:
        return self.key_file.with_name(f"{self.key_file.name}.anchor")

    def _advance_anchor(self) -> None:
        """Leave the end of the chain beside the key, unless this chain does not go through what is
        there: that stays, for ``verify`` to find. Where none can be written, work goes on."""
        with suppress(OSError, ExpungeError), self.reading() as tables:
            own = Anchor.load(self._anchor_file)
            if own is None or tables.goes_through(own):
                work.write_anchor(self._anchor_file, tables.anchor())


def _find_key(file: Path | None, key: str | Path | None) -> Path:
    given = key or os.environ.get("EXPUNGE_LEDGER_KEY")
    if not given and file is None:
        raise InputError("a ledger on PostgreSQL needs --key FILE or EXPUNGE_LEDGER_KEY")
    return Path(given or f"{file}.key")
