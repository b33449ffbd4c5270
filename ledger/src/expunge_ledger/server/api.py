"""The JSON API under /api; pages call the same functions.

Programs send Authorization: Bearer. Cookies mean nothing here, so no other site can make a browser
ask for anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import case, func, select

import expunge
from expunge import ExpungeError, InputError, VerificationError
from expunge_ledger import records
from expunge_ledger.chain import Event
from expunge_ledger.evidence import Verified, inspect_model
from expunge_ledger.keys import read_person
from expunge_ledger.models import read_certificate
from expunge_ledger.records import MOST_NUMBER, PACES, Model, Pace, State, Token, is_about
from expunge_ledger.schema import REQUESTS
from expunge_ledger.server.access import Asking, Caller
from expunge_ledger.server.background import Working
from expunge_ledger.server.gate import RefusedError, check_json

Kind = State | Literal["waiting"]
File = Literal["certificate.json", "statement.txt"]
PAGE = 25
Number = Annotated[int, Path(ge=1, le=MOST_NUMBER)]
ModelName = Annotated[str, Path(min_length=1, max_length=100)]
PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=2_000)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Day = Annotated[str, StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]


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


class Me(Token, frozen=True):
    """Who this token is, and the models it may name."""

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


CODES = (400, 401, 403, 404, 405, 409, 413, 415, 422, 429, 500, 503)
REFUSED: dict[int | str, Any] = {code: {"model": Refused} for code in CODES}
router = APIRouter(prefix="/api", responses=REFUSED, dependencies=[Depends(check_json)])


def describe_file(*kinds: str) -> dict[str, Any]:
    """How a route says that it answers with a file, of one of these types."""
    content = {"schema": {"type": "string", "format": "binary"}}
    files = {kind: {} if "json" in kind else content for kind in kinds}
    return {"response_class": Response, "responses": {200: {"content": files}}}


@router.get("/me")
def show_me(caller: Asking) -> Me:
    """Who this token is, and the models it may name."""
    names = [one.name for one in caller.models() if one.retired is None]
    return Me(**caller.token.model_dump(), models=names)


@router.get("/requests")
def list_requests(
    caller: Asking, state: Kind | None = None, pace: Pace | None = None,
    model: Annotated[str | None, Query(min_length=1, max_length=100)] = None,
    page: PageNumber = 1, most: Annotated[int, Query(ge=1, le=200)] = PAGE,
) -> Requests:  # fmt: skip
    """Requests with their clocks: those that wait by due date, then others, newest first."""
    with caller.ledger.reading() as tables:
        seen, run = caller.look_up(tables, model=model).c, tables.connection.execute
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
        found = caller.show(tables, shown)
    waiting: dict[Pace, int] = {one: counts.get(one, 0) for one in PACES}
    return Requests(requests=found, total=total, page=page, waiting=waiting)


@router.post("/requests", status_code=201, responses={200: {"model": records.Request}})
def file_request(caller: Asking, sent: RequestSent, response: Response) -> records.Request:
    """File a request; 200 and the request that is there, if it was filed before."""
    caller.need("file")
    try:
        read_person(sent.person)
    except InputError:
        said = "person must be an identifier of 1 to 1,024 characters that can be seen"
        raise RefusedError(422, said) from None
    model = sent.model or caller.token.model
    if model is not None:
        caller.need_model(model)
        if model not in show_me(caller).models:
            said = "model must be the name of a registered model, not a retired one"
            raise RefusedError(422, said)
    given = sent.model_dump(exclude={"person"}) | {"model": model}
    found = caller.ledger.request(sent.person, **given)
    response.status_code = 201 if found.new else 200
    return show_request(caller, found.number).model_copy(update={"new": found.new})


@router.post("/requests/find")
def find_requests(caller: Asking, sent: PersonSent) -> Requests:
    """All requests about a person; the identifier is in the body, never in an address."""
    caller.need("find")
    try:
        found = caller.requests(is_about(caller.ledger.key.hash_person(sent.person)))
    except InputError:
        found = []
    return Requests(requests=found, total=len(found))


@router.get("/requests/{number:int}")
def show_request(caller: Asking, number: Number) -> records.Request:
    """One request, with its clock and what it asks of each model."""
    for found in caller.requests(REQUESTS.c.number == number):
        return found
    raise RefusedError(404, "there is no such request")


@router.get("/requests/{number:int}/events")
def list_events(caller: Asking, number: Number) -> list[Event]:
    """What happened to a request: links of the ledger's chain; of their bodies what names no
    others and no places."""
    show_request(caller, number)
    own = caller.token.model
    return [
        replace(one, body=one.shown)
        for one in caller.ledger.events(request=number)
        if own is None or one.body.get("model") in (None, own)
    ]


@router.get("/requests/{number:int}/reason")
def show_reason(caller: Asking, number: Number) -> dict[str, str | None]:
    """The reason that was sent with a request: free text, for operators."""
    caller.need("reason")
    show_request(caller, number)
    return {"reason": caller.ledger.read_reason(number)}


@router.post("/requests/{number:int}/refuse")
def refuse_request(caller: Asking, number: Number, sent: WhySent) -> records.Request:
    """Refuse a request, with a reason that whoever filed it can read."""
    need_end(caller, number)
    caller.ledger.refuse(number, sent.reason or "")
    return show_request(caller, number)


@router.post("/requests/{number:int}/withdraw")
def withdraw_request(caller: Asking, number: Number, sent: WhySent) -> records.Request:
    """The person takes the request back."""
    need_end(caller, number)
    caller.ledger.withdraw(number, sent.reason or "")
    return show_request(caller, number)


@router.post("/requests/{number:int}/verify")
def verify_request(caller: Asking, number: Number) -> Verified:
    """Verify every release that answers a request, and the chain of events."""
    caller.need("verify")
    done = [one for one in show_request(caller, number).answers if one.release is not None]
    whole = Verified() if caller.token.model is not None else verify_all(caller, quick=True)
    said = list[str]()
    for one in done:
        found = verify_model(caller, one.model, one.release)
        said += [f"{one.model}: {difference}" for difference in found.differences]
    said += whole.differences
    facts = {"holds": not said, "differences": said, "releases": len(done)}
    return whole.model_copy(update=facts)


@router.get("/models")
def list_models(caller: Asking) -> list[Model]:
    """The models, each with its chain of releases."""
    caller.need("models")
    return caller.models()


@router.get("/models/{model}")
def show_model(caller: Asking, model: ModelName) -> Model:
    """One model, with its chain of releases."""
    caller.need("models")
    return caller.model(model)


@router.post("/models/{model}/work", status_code=202)
def work_on_model(caller: Asking, model: ModelName) -> Working:
    """Forget all who asked, in the background; /api/work says whether that is over."""
    caller.need("work")
    if caller.model(model).retired is not None:
        raise RefusedError(409, "this model is retired: no request asks it")
    return caller.server.background.ask(model, caller.token.name)


@router.post("/models/{model}/verify")
def verify_model(caller: Asking, model: ModelName, only: int | None = None) -> Verified:
    """Verify all releases of a model, as a chain, or one: certificate, record, weights, the
    people it names, its parent."""
    caller.need("verify")
    count = len(caller.model(model).releases)
    with caller.server.verifying(), caller.ledger.reading() as tables:
        found = inspect_model(tables, tables.need_model(model), only)
    said = [f"release {number}: {caller.server.hide(one)}" for number, one in found]
    return Verified(holds=not said, differences=said, releases=1 if only else count)


@router.get("/work")
def show_work(caller: Asking) -> list[Working]:
    """The work on each model that somebody asked for."""
    caller.need("models")
    return list_work(caller)


@router.get(
    "/models/{model}/releases/{number:int}/{file}",
    **describe_file("application/json", "text/plain"),
)
def download(caller: Asking, model: ModelName, number: Number, file: File) -> Response:
    """The certificate of a release, or what it says in words."""
    found = [one for one in caller.model(model).releases if one.number == number]
    if not found or (caller.token.role == "requester" and not is_own(caller, model, number)):
        raise RefusedError(404, "there is no such release")
    try:
        data = read_certificate(found[0].directory, found[0].certificate)
        certificate = expunge.Certificate.from_bytes(data)
    except ExpungeError as error:
        raise RefusedError(409, caller.server.hide(str(error))) from None
    if file == "certificate.json":
        return send_file(data, f"{model}-{number}-{file}", "application/json")
    statement = f"{certificate.statement()}\n".encode()
    return send_file(statement, f"{model}-{number}-{file}", "text/plain; charset=utf-8")


@router.post("/verify")
def verify_ledger(caller: Asking) -> Verified:
    """Verify the whole ledger: events, tables, anchors and all certificates."""
    caller.need("verify")
    caller.need_model(None)
    return verify_all(caller)


@router.post("/evidence", **describe_file("application/zip"))
def export(caller: Asking, sent: PersonSent) -> Response:
    """The evidence about a person, as a zip for a regulator."""
    caller.need("export")
    caller.need_model(None)
    try:
        data = caller.ledger.export(sent.person)
    except InputError:
        raise RefusedError(404, "nobody of this identifier has a request here") from None
    return send_file(data, "evidence.zip", "application/zip")


def may_end(caller: Caller, number: int) -> bool:
    """Whether a caller may refuse or withdraw a request that it sees."""
    own = caller.token.model
    return caller.may("end") and (own is None or caller.ledger.get(number).model == own)


def need_end(caller: Caller, number: int) -> None:
    """Refuse whoever may not refuse or withdraw a request."""
    caller.need("end")
    show_request(caller, number)
    if not may_end(caller, number):
        raise RefusedError(403, "this request asks other models too")


def list_work(caller: Caller) -> list[Working]:
    """The work on each model that a caller may know of; what there is to say is for operators."""
    asked, says = caller.server.background.asked, caller.may("work")
    return [
        asked[one.name].model_copy(
            update={"said": caller.server.hide(asked[one.name].said) if says else ""}
        )
        for one in caller.models()
        if one.name in asked
    ]


def verify_all(caller: Caller, *, quick: bool = False) -> Verified:
    """The whole ledger; ``quick`` leaves out the certificates."""
    with caller.server.verifying():
        try:
            return caller.ledger.verify(certificates=not quick)
        except VerificationError as error:
            return Verified(holds=False, differences=[caller.server.hide(str(error))])


def is_own(caller: Caller, model: str, release: int) -> bool:
    """Whether a release answers what a caller filed."""
    answers = (part for one in caller.requests() for part in one.answers)
    return any((part.model, part.release) == (model, release) for part in answers)


def send_file(data: bytes, name: str, kind: str) -> Response:
    """A download; a browser keeps it and does not open it here."""
    shown = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type=kind, headers=shown)
