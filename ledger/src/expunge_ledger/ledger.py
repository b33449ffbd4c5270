"""The ledger as one object: what the commands, the server and programs call."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, get_args

from sqlalchemy import insert, select

from expunge import InputError, RunError
from expunge_ledger import evidence, models, records, work
from expunge_ledger.chain import Anchor, Event
from expunge_ledger.database import Database
from expunge_ledger.deeds import WITHDRAWN
from expunge_ledger.records import Model, Request, Role, Token, check_name, check_reason
from expunge_ledger.schema import LEASES, WORK
from expunge_ledger.work import Done, Worker


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

    def register(
        self, name: str, state: str | Path, *, releases: str | Path | None = None
    ) -> Model:
        """Register a state, or the file of a job, whose data have everybody its old weights were
        trained on; ``releases`` is the folder for its releases. Requests that are open and ask all
        models ask it too."""
        check_name(name)
        path = Path(state).absolute()
        if not path.exists():
            raise InputError.of("state", str(state), "a folder of learn or save, or a job's file")
        found = models.Model(path)
        given = path.with_name(f"{path.name}-releases") if releases is None else Path(releases)
        facts = {"name": name, "path": str(path), "folder": str(given.absolute())}
        with self.writing() as tables:
            rows = tables.models()
            if any(facts.items() <= row.items() for row in rows):
                tables.need_model(name, used=True)
            else:
                _check_places(found, facts, rows)
                tables.record(
                    "registered", model=name, kind=found.kind, path=facts["path"],
                    folder=facts["folder"], identity=found.identity, requests=tables.waiting(),
                )  # fmt: skip
                row = {"model": len(rows) + 1, "until": 0.0}
                tables.connection.execute(insert(LEASES).values(**row))
        if found.kind == "job":
            seen, weights = records.mark(self.key, found.everybody), found.hash_weights()
            with self.writing() as tables:
                tables.add_seen(name, seen, weights)
        self.advance_anchor()
        return self.models(name)[0]

    def request(self, person: object, **given: Any) -> Request:
        """File a request to forget a person in ``model=``, or in all; ``received=`` today, ``due=``
        a month later by default, ``reason=``. The same again is the one that is there."""
        with self.writing() as tables:
            number, new = tables.file_request(person, **given)
            (found,) = tables.show_requests([number])
        return found.model_copy(update={"new": new})

    def requests(
        self, *, person: object = None, state: str | None = None, model: str | None = None,
        after: int = 0, most: int | None = None,
    ) -> tuple[Request, ...]:  # fmt: skip
        """Requests by number, ``after`` a number, at ``most`` so many."""
        if state is not None and state not in records.STATES:
            raise InputError.of("state", state, "one of " + ", ".join(records.STATES))
        about = [] if person is None else [records.is_about(self.key.hash_person(person))]
        with self.reading() as tables:
            seen = tables.look_up(*about, model=model)
            chosen = select(seen.c.number).where(seen.c.number > after)
            chosen = chosen if state is None else chosen.where(seen.c.state == state)
            numbers = tables.connection.execute(chosen.order_by(seen.c.number).limit(most))
            return tuple(tables.show_requests(numbers.scalars().all()))

    def get(self, number: int) -> Request:
        """One request; :class:`InputError` if there is none of this number."""
        with self.reading() as tables:
            for found in tables.show_requests([number] * (0 < number <= records.MOST_NUMBER)):
                return found
        raise InputError.of("request", number, "the number of a request of this ledger")

    def read_reason(self, number: int) -> str | None:
        """What was sent with a request."""
        with self.reading() as tables:
            return tables.read_secrets("reason", [number]).get(number)

    def withdraw(self, number: int, reason: str = "") -> Request:
        """The person takes the request back; not while it is being worked on."""
        with self.writing() as tables:
            tables.end_request(number, "withdrawn", reason)
        return self.get(number)

    def refuse(self, number: int, reason: str) -> Request:
        """Refuse a request, with a reason; not while it is being worked on."""
        with self.writing() as tables:
            tables.end_request(number, "refused", reason)
        return self.get(number)

    def models(self, name: str | None = None) -> tuple[Model, ...]:
        """The registered models, or the one of this name, with their releases."""
        with self.reading() as tables:
            return tables.list_models(name)

    def events(self, *, request: int | None = None) -> tuple[Event, ...]:
        """The chain of events; or those of one request."""
        with self.reading() as tables:
            return tuple(tables.events() if request is None else tables.find_events(request))

    def anchor(self) -> Anchor:
        """Where the chain ends now."""
        with self.reading() as tables:
            return tables.anchor()

    def work(self, model: str | None = None) -> tuple[Done, ...]:
        """One round on ``model``, or on all: forget who is asked for, release, answer."""
        with self.reading() as tables:
            names = [row["name"] for row in tables.models() if row["retired"] is None]
        return self._work(*(Worker(self, name) for name in (names if model is None else [model])))

    def replay(self, model: str) -> Done:
        """Forget again who came back into a model's state, as from a backup."""
        for done in self._work(Worker(self, model, replay=True)):
            return done
        raise RunError(f"another worker is at work on {model}; try again when it is done")

    def _work(self, *workers: Worker) -> tuple[Done, ...]:
        done = tuple(one for one in (worker.work() for worker in workers) if one is not None)
        if done:
            self.advance_anchor()
        return done

    def retire(self, model: str, withdrawn: str) -> tuple[int, ...]:
        """No request asks a model any more; ``withdrawn`` says why nobody uses it. The numbers of
        the requests that waited for it, which are answered without it."""
        check_reason(withdrawn, "why nobody uses the model any more")
        with self.writing() as tables:
            row = tables.need_model(model, used=True)
            if row["begun"] is not None:
                raise InputError(f"{model} has work that began; finish it with expunge-ledger work")
            numbers = sorted(part["request"] for part in tables.live(row))
            tag = self.key.tag(WITHDRAWN, withdrawn)
            tables.record("retired", model=model, withdrawn=tag, requests=numbers)
            tables.drop_names(numbers)
        self.advance_anchor()
        return tuple(numbers)

    def readmit(self, number: int, model: str) -> None:
        """The person of this request is back in a model on purpose, and may stay. Only of somebody
        who is back: else a backup could bring them back later, and nobody would ask."""
        with self.reading() as tables:
            row = tables.need_model(model)
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
        """A new token for the server, for ``model`` alone or for all: 256 random bits, so there is
        nothing to guess; only a keyed hash is kept."""
        check_name(name)
        if role not in get_args(Role):
            raise InputError.of("role", role, "one of " + ", ".join(get_args(Role)))
        secret = "expunge_" + secrets.token_urlsafe(32)
        hashed = self.key.tag("token", records.hash_token(secret))
        with self.writing() as tables:
            if any(one.name == name for one in tables.list_tokens()):
                raise InputError.of("name", name, "new: there is a token of this name")
            if model is not None:
                tables.need_model(model)
            tables.record("token", did="made", name=name, role=role, model=model, hash=hashed)
        return secret

    def revoke_token(self, name: str) -> None:
        """From now on the token opens nothing; what was filed with it stays."""
        with self.writing() as tables:
            names = [one.name for one in tables.list_tokens()]
            if name not in names:
                raise InputError.of("name", name, f"one of {names}")
            tables.record("token", did="revoked", name=name)

    def tokens(self) -> tuple[Token, ...]:
        """All tokens that open something, by name."""
        with self.reading() as tables:
            return tables.list_tokens()

    def find_token(self, hashed: str) -> Token | None:
        """The token of which this is :func:`hash_token`, if it opens something."""
        with self.reading() as tables:
            return next(iter(tables.list_tokens(hashed)), None)

    def verify(self, *, certificates: bool = True) -> evidence.Verified:
        """The chain, the tables by the chain, the anchors and the certificates; or what differs."""
        return evidence.verify_ledger(self, certificates=certificates)

    def accept(self, reason: str) -> tuple[str, ...]:
        """An older copy of the database was restored knowingly, or the clock is right: go on."""
        check_reason(reason, "why the ledger is to go on from here")
        outside = evidence.read_outside(self)
        with self.writing() as tables:
            lost = list(evidence.find_unknown(tables, tables.events(), outside))
            tables.record("accepted", lost=lost, reason=self.key.tag("accepted", reason))
        return tuple(lost)

    def export(self, person: object) -> bytes:
        """A zip of the evidence about a person: requests, events, certificates."""
        found = evidence.export_person(self, person)
        self.advance_anchor()
        return found


def _check_places(found: models.Model, facts: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """A model's name, state and folder are no other's."""
    folder = Path(facts["folder"]).resolve()
    states = [Path(row["path"]) for row in rows if row["kind"] == "state"]
    for state in [found.path] * (found.kind == "state") + states:
        if folder.is_relative_to(state.resolve()):
            raise InputError.of("releases", facts["folder"], f"outside of the state {state}")
    for row in rows:
        other = f"another: the model {row['name']} has it"
        for field, given in facts.items():
            if row[field] == given:
                raise InputError.of(field, given, other)
        if Path(row["folder"]).resolve() == folder:
            raise InputError.of("releases", facts["folder"], other)
        if found.kind == "state" and row["identity"] == found.identity:
            valid = f"no copy of that of the model {row['name']}: a copy may hold whom it forgot"
            raise InputError.of("state", facts["path"], f"{valid}; restore it at {row['path']}")
