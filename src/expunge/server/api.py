"""The JSON API under /api, and its OpenAPI document. Programs send ``Authorization: Bearer``.

Cookies mean nothing here, so no other site can make a browser ask for anything.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BeforeValidator

from expunge.ledger.clocks import Pace
from expunge.ledger.requests import MOST_NUMBER
from expunge.ledger.tokens import Token
from expunge.server.access import (
    Choice,
    Kind,
    allow,
    choose,
    file_for,
    find_person,
    find_request,
    find_visible_model,
    list_visible_events,
    list_visible_models,
)
from expunge.server.refusals import RefusedError
from expunge.server.releases import TYPES, File
from expunge.server.schemas import (
    EventShown,
    MeShown,
    ModelShown,
    PersonSent,
    ProgressShown,
    ReasonShown,
    RefusedShown,
    RequestSent,
    RequestShown,
    RequestsShown,
    VerifiedShown,
    WhySent,
    WithdrawalSent,
)
from expunge.server.service import Service

BEARER = HTTPBearer(auto_error=False, description="A token of expunge ledger token.")
CODES = (400, 401, 403, 404, 405, 408, 409, 413, 414, 415, 421, 422, 429, 500, 503)
REFUSED: dict[int | str, dict[str, Any]] = {code: {"model": RefusedShown} for code in CODES}
BYTES: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
SENT = {kind.partition(";")[0]: {} if "json" in kind else BYTES for kind in TYPES.values()}
router = APIRouter(prefix="/api", responses=REFUSED)


def read_number(given: object) -> object:
    """A number as it is written in an address: one way, not "1.0" or "01"."""
    if isinstance(given, str) and not re.fullmatch(r"[1-9][0-9]{0,9}", given):
        raise ValueError("it must be a whole number")
    return given


Number = Annotated[int, BeforeValidator(read_number), Path(ge=1, le=MOST_NUMBER)]
ModelName = Annotated[str, Path(min_length=1, max_length=100)]
PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]
Most = Annotated[int, Query(ge=1, le=200)]
Wanted = Annotated[str | None, Query(min_length=1, max_length=100)]


def find_service(request: Request) -> Service:
    """The service that this application serves."""
    return request.app.state.service


def find_caller(
    request: Request,
    sent: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)],
) -> Token:
    """Whose token was sent."""
    if sent is None:
        raise RefusedError(401, "send a token: Authorization: Bearer expunge_…")
    address = "nobody" if request.client is None else request.client.host
    token = find_service(request).identify(sent.credentials, address)
    request.state.token = token.name
    return token


Serving = Annotated[Service, Depends(find_service)]
Caller = Annotated[Token, Depends(find_caller)]


@router.get("/me")
def show_me(service: Serving, token: Caller) -> MeShown:
    """Who this token is, and the models it may name."""
    found = list_visible_models(service.ledger, token)
    models = [one.name for one in found if one.retired is None]
    return MeShown(name=token.name, role=token.role, model=token.model, models=models)


@router.get("/requests")
def list_requests(
    service: Serving,
    token: Caller,
    state: Kind | None = None,
    pace: Pace | None = None,
    model: Wanted = None,
    page: PageNumber = 1,
    most: Most = 25,
) -> RequestsShown:
    """Requests with their clocks: those that wait by due date, then the others, newest first."""
    found = choose(service.ledger, token, Choice(state, pace, model, page, most))
    shown = [RequestShown.of(one) for one in found.requests]
    return RequestsShown(requests=shown, total=found.total, page=page, waiting=found.waiting)


@router.post("/requests", status_code=201, responses={200: {"model": RequestShown}})
def file_request(
    service: Serving, token: Caller, sent: RequestSent, response: Response
) -> RequestShown:
    """File a request; 200 and the request that is there, if it was filed before."""
    given = {name: getattr(sent, name) for name in ("model", "received", "due", "reason")}
    found = file_for(service.ledger, token, sent.person, **given)
    response.status_code = 201 if found.new else 200
    return RequestShown.of(found)


@router.post("/requests/find")
def find_requests(service: Serving, token: Caller, sent: PersonSent) -> RequestsShown:
    """All requests about a person; the identifier is in the body, never in an address."""
    found = find_person(service.ledger, token, sent.person)
    shown = [RequestShown.of(one) for one in found]
    return RequestsShown(requests=shown, total=len(found), page=1, waiting={})


@router.get("/requests/{number}")
def show_request(service: Serving, token: Caller, number: Number) -> RequestShown:
    """One request, with its clock and what it asks of each model."""
    return RequestShown.of(find_request(service.ledger, token, number))


@router.get("/requests/{number}/events")
def list_events(service: Serving, token: Caller, number: Number) -> list[EventShown]:
    """What happened to a request: links of the ledger's chain."""
    found = list_visible_events(service.ledger, token, number)
    names = EventShown.model_fields
    return [EventShown(**{name: getattr(one, name) for name in names}) for one in found]


@router.get("/requests/{number}/reason")
def show_reason(service: Serving, token: Caller, number: Number) -> ReasonShown:
    """The reason that was sent with a request: free text, for operators."""
    return ReasonShown(reason=service.read_reason(token, number))


@router.post("/requests/{number}/refuse")
def refuse_request(service: Serving, token: Caller, number: Number, sent: WhySent) -> RequestShown:
    """Refuse a request, with a reason that whoever filed it can read."""
    return RequestShown.of(service.end(token, number, "refused", sent.reason))


@router.post("/requests/{number}/withdraw")
def withdraw_request(
    service: Serving, token: Caller, number: Number, sent: WithdrawalSent
) -> RequestShown:
    """The person takes the request back."""
    return RequestShown.of(service.end(token, number, "withdrawn", sent.reason or ""))


@router.post("/requests/{number}/verify")
def verify_request(service: Serving, token: Caller, number: Number) -> VerifiedShown:
    """Verify every release that answers a request, and the chain of events."""
    return service.verify_request(token, number)


@router.get("/models")
def list_models(service: Serving, token: Caller) -> list[ModelShown]:
    """The models, each with its chain of releases."""
    allow(token, "models")
    return [ModelShown.of(one) for one in list_visible_models(service.ledger, token)]


@router.get("/models/{model}")
def show_model(service: Serving, token: Caller, model: ModelName) -> ModelShown:
    """One model, with its chain of releases."""
    allow(token, "models", model)
    return ModelShown.of(find_visible_model(service.ledger, token, model))


@router.post("/models/{model}/work", status_code=202)
def work_on_model(service: Serving, token: Caller, model: ModelName) -> ProgressShown:
    """Forget all who asked, in the background; /api/work says how far it is."""
    return ProgressShown.of(service.work(token, model))


@router.post("/models/{model}/verify")
def verify_model(service: Serving, token: Caller, model: ModelName) -> VerifiedShown:
    """Verify all releases of a model, as a chain."""
    return service.verify_model(token, model)


@router.get("/work")
def show_work(service: Serving, token: Caller) -> list[ProgressShown]:
    """How far the work on each model is that somebody asked for."""
    allow(token, "models")
    return [ProgressShown.of(one) for one in service.show_progress(token)]


@router.get(
    "/models/{model}/releases/{number}/{file}",
    response_class=Response,
    responses={200: {"content": SENT}},
)
def download(
    service: Serving, token: Caller, model: ModelName, number: Number, file: File
) -> Response:
    """The certificate of a release, its public report, model card, or the signer's public key."""
    return send_file(service.download(token, model, number, file), f"{model}-{number}-{file}", file)


@router.post("/models/{model}/releases/{number}/verify")
def verify_release(
    service: Serving, token: Caller, model: ModelName, number: Number
) -> VerifiedShown:
    """Verify one release: certificate, record, weights, the people it names, its parent."""
    return service.verify_release(token, model, number)


@router.post("/verify")
def verify_ledger(service: Serving, token: Caller) -> VerifiedShown:
    """Verify the whole ledger: events, tables, anchors and all certificates."""
    return service.verify_ledger(token)


@router.post(
    "/evidence", response_class=Response, responses={200: {"content": {"application/zip": BYTES}}}
)
def export(service: Serving, token: Caller, sent: PersonSent) -> Response:
    """The evidence about a person, as a zip for a regulator."""
    return send_zip(service.export(token, sent.person))


def send_file(data: bytes, name: str, file: File) -> Response:
    """A download; a browser keeps it and does not open it here."""
    shown = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type=TYPES[file], headers=shown)


def send_zip(data: bytes) -> Response:
    """The evidence as a download."""
    shown = {"Content-Disposition": 'attachment; filename="evidence.zip"'}
    return Response(data, media_type="application/zip", headers=shown)
