"""What API and pages share: who may do what, who sees which request, and what is done. The methods
are the operations of the API; pages call the same.

                 requester          operator    auditor
    file         yes                yes         no
    see          what it filed      all         all
    find, verify no                 yes         yes
    work, refuse, withdraw,
    read reasons, export  no        yes         no

A token for one model sees and touches only that model: of a request its own part, as if no other
model were asked. It ends only requests that ask this model alone. What a token may not see is not
there for it: the answer is the same 404 as for a number that was never given.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from typing import Annotated, Any, Literal, get_args

from fastapi import Depends, Path, Query, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from sqlalchemy import case, func, select

import expunge
from expunge import ExpungeError, InputError, RunError, VerificationError
from expunge_ledger import records
from expunge_ledger.chain import Event
from expunge_ledger.evidence import Verified, inspect_model
from expunge_ledger.keys import read_person
from expunge_ledger.ledger import Ledger
from expunge_ledger.models import read_certificate
from expunge_ledger.records import (
    MOST_NUMBER,
    PACES,
    STATES,
    Model,
    Pace,
    Records,
    Role,
    State,
    Token,
    hash_token,
    is_about,
)
from expunge_ledger.schema import FILINGS, REQUESTS, WORK
from expunge_ledger.server.desk import Desk, Progress
from expunge_ledger.server.gate import Rate, RefusedError

Act = Literal["file", "find", "models", "verify", "work", "end", "reason", "export"]
MAY: dict[Role, frozenset[Act]] = {
    "requester": frozenset[Act](("file",)),
    "operator": frozenset[Act](get_args(Act)),
    "auditor": frozenset[Act](("find", "models", "verify")),
}
Kind = State | Literal["waiting"]
KINDS: tuple[Kind, ...] = ("waiting", *STATES)
File = Literal["certificate.json", "statement.txt"]
TYPES: dict[File, str] = {
    "certificate.json": "application/json",
    "statement.txt": "text/plain; charset=utf-8",
}
MOST_TOKEN, PAGE = 200, 25
BEARER = HTTPBearer(auto_error=False, description="A token of expunge-ledger token.")


def find_caller(
    request: Request, sent: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]
) -> Token:
    """Whose token was sent."""
    if sent is None:
        raise RefusedError(401, "send a token: Authorization: Bearer expunge_…")
    return request.app.state.service.identify(sent.credentials, request)


def written(pattern: str, sentence: str) -> BeforeValidator:
    """What is written in one way alone: no "1.0" or "01", no seconds since 1970 for a day."""

    def check(given: object) -> object:
        if not isinstance(given, str) or not re.fullmatch(pattern, given):
            raise ValueError(sentence)
        return given

    return BeforeValidator(check)


Caller = Annotated[Token, Depends(find_caller)]
WHOLE = written(r"[1-9][0-9]{0,9}", "it must be a whole number")
Number = Annotated[int, WHOLE, Path(ge=1, le=MOST_NUMBER)]
ModelName = Annotated[str, Path(min_length=1, max_length=100)]
PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=2_000)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=100)]
DATE = written(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", "it must be a date such as 2026-01-31")
Day = Annotated[date, DATE]


class PersonSent(BaseModel):
    """A person, by the identifier that the models know."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
    person: Annotated[str, StringConstraints(min_length=1, max_length=1_024)]


class RequestSent(PersonSent):
    """A request to forget a person in one model, or in all."""

    model: Name | None = None
    received: Day | None = Field(None, description="Default: today.")
    due: Day | None = Field(None, description="Default: one month after it was received.")
    reason: Text | None = Field(None, description="Kept sealed; only operators can read it.")


class WhySent(BaseModel):
    """Why a request is refused or withdrawn; whoever may see the request reads it."""

    model_config = PersonSent.model_config
    reason: Text | None = None


class Me(BaseModel):
    """Who this token is, and the models it may name."""

    name: str
    role: Role
    model: str | None
    models: list[str]


class Requests(BaseModel):
    """A page of requests, how many there are in all, and how many wait at which pace."""

    requests: list[records.Request]
    total: int
    page: int = 1
    waiting: dict[Pace, int] = {}


class Refused(BaseModel):
    """Why nothing was done."""

    detail: str


class Service:
    """One server on one ledger."""

    def __init__(self, ledger: Ledger, desk: Desk, rate: tuple[float, float]) -> None:
        self.ledger, self.desk = ledger, desk
        self.ended = OrderedDict[str, None]()  # sessions that signed out
        self._rates, self._verifying = Rate(rate), threading.Lock()

    def identify(self, secret: str, request: Request) -> Token:
        """The token that was sent."""
        token = self.find_token(hash_token(secret), request) if len(secret) <= MOST_TOKEN else None
        if token is None:
            raise RefusedError(401, "the token is not known here")
        return token

    def find_token(self, hashed: str, request: Request) -> Token | None:
        """The token of this hash, if it did not ask too often."""
        token = self.ledger.find_token(hashed)
        if token is not None:
            request.state.token = token.name
            if wait := self._rates.take(token.name):
                raise RefusedError(429, "too many requests with this token", wait)
        return token

    def show_me(self, token: Caller) -> Me:
        """Who this token is, and the models it may name."""
        names = [one.name for one in self.find_models(token) if one.retired is None]
        return Me(name=token.name, role=token.role, model=token.model, models=names)

    def list_requests(
        self, token: Caller, state: Kind | None = None, pace: Pace | None = None,
        model: Annotated[str | None, Query(min_length=1, max_length=100)] = None,
        page: PageNumber = 1, most: Annotated[int, Query(ge=1, le=200)] = PAGE,
    ) -> Requests:  # fmt: skip
        """Requests with their clocks: those that wait by due date, then others, newest first."""
        with self.ledger.reading() as tables:
            seen, run = self._look_up(tables, token, model=model).c, tables.connection.execute
            chosen = select(seen.number)
            if state is not None:
                chosen = chosen.where(seen.waits if state == "waiting" else seen.state == state)
            if pace is not None:
                chosen = chosen.where(seen.pace == pace)
            total = run(select(func.count()).select_from(chosen.subquery())).scalar_one()
            order = (~seen.waits, case((seen.waits, seen.due)), seen.number.desc())
            shown = chosen.order_by(*order).offset((page - 1) * most).limit(most)
            grouped = select(seen.pace, func.count()).where(seen.waits).group_by(seen.pace)
            counts: dict[str, int] = {row[0]: row[1] for row in run(grouped)}
            found = self._show(tables, token, shown)
        waiting: dict[Pace, int] = {one: counts.get(one, 0) for one in PACES}
        return Requests(requests=found, total=total, page=page, waiting=waiting)

    def file_request(self, token: Caller, sent: RequestSent, response: Response) -> records.Request:
        """File a request; 200 and the request that is there, if it was filed before."""
        allow(token, "file")
        try:
            read_person(sent.person)
        except InputError:
            said = "person must be an identifier of 1 to 1,024 characters that can be seen"
            raise RefusedError(422, said) from None
        if sent.model is not None:
            _need_model(token, sent.model)
        asked = sent.model or token.model
        if asked is not None and asked not in self.show_me(token).models:
            said = "model must be the name of a registered model, not a retired one"
            raise RefusedError(422, said)
        given = sent.model_dump() | {"model": asked}
        found = self.ledger.acting(token.name).request(given.pop("person"), **given)
        response.status_code = 201 if found.new else 200
        return self.show_request(token, found.number).model_copy(update={"new": found.new})

    def find_requests(self, token: Caller, sent: PersonSent) -> Requests:
        """All requests about a person; the identifier is in the body, never in an address."""
        allow(token, "find")
        try:
            about = is_about(self.ledger.key.hash_person(sent.person))
        except InputError:
            return Requests(requests=[], total=0)
        found = self._find(token, about)
        return Requests(requests=found, total=len(found))

    def show_request(self, token: Caller, number: Number) -> records.Request:
        """One request, with its clock and what it asks of each model."""
        for found in self._find(token, REQUESTS.c.number == number):
            return found
        raise RefusedError(404, "there is no such request")

    def list_events(self, token: Caller, number: Number) -> list[Event]:
        """What happened to a request: links of the ledger's chain; of their bodies what names no
        others and no places."""
        self.show_request(token, number)
        found, own = self.ledger.events(request=number), (None, token.model)
        return [replace(one, body=one.shown) for one in found
                if token.model is None or one.body.get("model") in own]  # fmt: skip

    def show_reason(self, token: Caller, number: Number) -> dict[str, str | None]:
        """The reason that was sent with a request: free text, for operators."""
        allow(token, "reason")
        self.show_request(token, number)
        return {"reason": self.ledger.read_reason(number)}

    def refuse_request(self, token: Caller, number: Number, sent: WhySent) -> records.Request:
        """Refuse a request, with a reason that whoever filed it can read."""
        if not (sent.reason or "").strip():
            allow(token, "end")
            raise RefusedError(422, "reason: say why the request is refused")
        return self._end(token, number, sent, self.ledger.acting(token.name).refuse)

    def withdraw_request(self, token: Caller, number: Number, sent: WhySent) -> records.Request:
        """The person takes the request back."""
        return self._end(token, number, sent, self.ledger.acting(token.name).withdraw)

    def _end(self, token: Token, number: int, sent: WhySent, end: Any) -> records.Request:
        allow(token, "end")
        self.show_request(token, number)
        if not self.may_end(token, number):
            raise RefusedError(403, "this request asks other models too")
        end(number, sent.reason or "")
        return self.show_request(token, number)

    def may_end(self, token: Token, number: int) -> bool:
        """Whether a token may refuse or withdraw a request that it sees."""
        own = token.model is None or self.ledger.get(number).model == token.model
        return own and "end" in MAY[token.role]

    def list_models(self, token: Caller) -> list[Model]:
        """The models, each with its chain of releases."""
        allow(token, "models")
        return self.find_models(token)

    def show_model(self, token: Caller, model: ModelName) -> Model:
        """One model, with its chain of releases."""
        allow(token, "models")
        return self._find_model(token, model)

    def work_on_model(self, token: Caller, model: ModelName) -> Progress:
        """Forget all who asked, in the background; /api/work says how far it is."""
        allow(token, "work")
        if self._find_model(token, model).retired is not None:
            raise RefusedError(409, "this model is retired: no request asks it")
        return self.desk.ask(model, token.name)

    def show_work(self, token: Caller) -> list[Progress]:
        """How far the work on each model is that somebody asked for."""
        allow(token, "models")
        return self.list_progress(token)

    def list_progress(self, token: Token) -> list[Progress]:
        """The same, for who sees no models and waits for an answer."""
        found, says = self.desk.progress, "work" in MAY[token.role]
        shown = [found[one.name] for one in self.find_models(token) if one.name in found]
        said = {one.model: self.hide(one.said) if says else "" for one in shown}
        return [one.model_copy(update={"said": said[one.model]}) for one in shown]

    def download(self, token: Caller, model: ModelName, number: Number, file: File) -> Response:
        """The certificate of a release, or what it says in words."""
        found = [one for one in self._find_model(token, model).releases if one.number == number]
        if not found or (token.role == "requester" and not self._is_own(token, model, number)):
            raise RefusedError(404, "there is no such release")
        try:
            data = read_certificate(found[0].directory, found[0].certificate)
            certificate = expunge.Certificate.from_bytes(data)
        except ExpungeError as error:
            raise RefusedError(409, self.hide(str(error))) from None
        if file == "statement.txt":
            data = f"{certificate.statement()}\n".encode()
        return _send(data, f"{model}-{number}-{file}", TYPES[file])

    def verify_model(self, token: Caller, model: ModelName, only: int | None = None) -> Verified:
        """Verify all releases of a model, as a chain, or one: certificate, record, weights, the
        people it names, its parent."""
        allow(token, "verify")
        count = len(self._find_model(token, model).releases)
        with self._one_at_a_time(), self.ledger.reading() as tables:
            found = inspect_model(tables, tables.need_model(model), only)
        said = [f"release {number}: {self.hide(one)}" for number, one in found]
        return Verified(holds=not said, differences=said, releases=1 if only else count)

    def verify_request(self, token: Caller, number: Number) -> Verified:
        """Verify every release that answers a request, and the chain of events."""
        allow(token, "verify")
        done = [one for one in self.show_request(token, number).answers if one.release is not None]
        whole = Verified() if token.model is not None else self._verify(certificates=False)
        said = list[str]()
        for one in done:
            found = self.verify_model(token, one.model, one.release)
            said += [f"{one.model}: {difference}" for difference in found.differences]
        said += whole.differences
        facts = {"holds": not said, "differences": said, "releases": len(done)}
        return whole.model_copy(update=facts)

    def verify_ledger(self, token: Caller) -> Verified:
        """Verify the whole ledger: events, tables, anchors and all certificates."""
        allow(token, "verify")
        _need_model(token)
        return self._verify(certificates=True)

    def _verify(self, certificates: bool) -> Verified:
        with self._one_at_a_time():
            try:
                return self.ledger.verify(certificates=certificates)
            except VerificationError as error:
                return Verified(holds=False, differences=[self.hide(str(error))])

    def export(self, token: Caller, sent: PersonSent) -> Response:
        """The evidence about a person, as a zip for a regulator."""
        allow(token, "export")
        _need_model(token)
        try:
            data = self.ledger.export(sent.person)
        except InputError:
            raise RefusedError(404, "nobody of this identifier has a request here") from None
        return _send(data, "evidence.zip", "application/zip")

    def hide(self, sentence: str) -> str:
        """A sentence without where anything lies."""
        places = {self.ledger.key_file.absolute().parent}
        for model in self.ledger.models() if "/" in sentence else ():
            places |= {model.path.parent, model.folder.parent}
        for place in sorted(map(str, places), key=len, reverse=True):
            sentence = sentence.replace(f"{place}/", "")
        return re.sub(r"(?:/[^\s/:;,'\"]+)+/", "", sentence)

    def translate(self, error: Exception) -> RefusedError:
        """The status of an error of the library: bad input, not possible now, or try again."""
        if isinstance(error, RefusedError):
            return error
        if isinstance(error, RunError):
            return RefusedError(503, "the ledger does not answer; try again later", 5)
        return RefusedError(422 if isinstance(error, InputError) else 409, self.hide(str(error)))

    def find_models(self, token: Token) -> list[Model]:
        """The models that a token may know of."""
        return [one for one in self.ledger.models() if token.model in (None, one.name)]

    def _find_model(self, token: Token, name: str) -> Model:
        for one in self.find_models(token):
            if one.name == name:
                return one
        raise RefusedError(404, "there is no such model")

    def _is_own(self, token: Token, model: str, release: int) -> bool:
        """Whether a release answers what a token filed."""
        with self.ledger.reading() as tables:
            fits = (WORK.c.model == tables.need_model(model)["id"], WORK.c.release == release)
            answered = REQUESTS.c.number.in_(select(WORK.c.request).where(*fits))
        return bool(self._find(token, answered))

    def _find(self, token: Token, *where: Any) -> list[records.Request]:
        with self.ledger.reading() as tables:
            return self._show(tables, token, select(self._look_up(tables, token, *where).c.number))

    def _look_up(self, tables: Records, token: Token, *where: Any, model: str | None = None) -> Any:
        if token.role == "requester":
            mine = select(FILINGS.c.request).where(FILINGS.c.token == token.name)
            where += (REQUESTS.c.number.in_(mine),)
        return tables.look_up(*where, own=token.model, model=model)

    def _show(self, tables: Records, token: Token, chosen: Any) -> list[records.Request]:
        """Requests in the order of the numbers ``chosen``; who filed them is proved by its row."""
        numbers: list[int] = list(tables.connection.execute(chosen).scalars())
        if token.role == "requester":
            numbers = [n for n in numbers if tables.get(FILINGS, token.name, n) is not None]
        return tables.show_requests(numbers, token.model)

    @contextmanager
    def _one_at_a_time(self) -> Generator[None]:
        if not self._verifying.acquire(timeout=2):
            raise RefusedError(503, "another verification is running; try again later", 10)
        try:
            yield
        finally:
            self._verifying.release()


def allow(token: Token, act: Act) -> None:
    """Refuse what a role may not do."""
    if act not in MAY[token.role]:
        raise RefusedError(403, f"a token of the role {token.role} may not do this")


def _need_model(token: Token, model: str | None = None) -> None:
    """Refuse every model but a token's own; None is all models."""
    if token.model not in (None, model):
        raise RefusedError(403, f"this token is for the model {token.model} alone")


def _send(data: bytes, name: str, kind: str) -> Response:
    """A download; a browser keeps it and does not open it here."""
    shown = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type=kind, headers=shown)
