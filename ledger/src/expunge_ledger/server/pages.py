"""The pages: for a data-protection officer with a browser, and without a network.

Who signs in with a token gets a session; every form carries a token of its own and must come from a
page of this server. No page shows an identifier, also not the one that was just typed; what a
person wrote as a reason is shown only to an operator who asks for it.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import ValidationError

from expunge import ExpungeError
from expunge_ledger.clocks import Pace
from expunge_ledger.registry import Token, hash_token
from expunge_ledger.server import schemas
from expunge_ledger.server.gate import check_type
from expunge_ledger.server.schemas import RefusedError
from expunge_ledger.server.service import (
    KINDS,
    MAY,
    PACES,
    PAGE,
    File,
    Kind,
    ModelName,
    Number,
    PageNumber,
    Service,
    allow,
)

TEMPLATES = Path(__file__).with_name("templates")
ENVIRONMENT = Environment(  # whatever a template prints is escaped
    loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
IDLE, MOST_FIELDS = 1_800.0, 20
Form = TypeVar("Form", bound=schemas.Sent)
router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class SignInNeededError(Exception):
    """The page is for somebody who signed in."""


@dataclass(frozen=True)
class Visitor:
    """A browser: its session, and the token it signed in with."""

    service: Service
    session: dict[str, Any]
    signed_in: Token | None

    @property
    def token(self) -> Token:
        """The token; a page that needs one is for somebody who signed in."""
        if self.signed_in is None:
            raise SignInNeededError
        return self.signed_in

    def show(self, template: str, refused: RefusedError | None = None, **values: Any) -> Response:
        """A page from its template."""
        may = frozenset[str]() if self.signed_in is None else MAY[self.signed_in.role]
        text = ENVIRONMENT.get_template(template).render(
            **values, token=self.signed_in, may=may, form_token=self.session["form"],
            sentence=refused,
        )  # fmt: skip
        headers = None if refused is None else refused.headers
        return HTMLResponse(text, 200 if refused is None else refused.status_code, headers)

    def end_session(self) -> None:
        """What the session's cookie said is not so any more, wherever it is."""
        ended = self.service.ended
        ended[self.session.get("id", "")] = None
        while len(ended) > 10_000:
            ended.popitem(last=False)
        self.session.clear()


def find_visitor(request: Request) -> Visitor:
    """Who looks at a page; a session ends after half an hour of rest."""
    service: Service = request.app.state.service
    session, now = request.session, time.time()
    if session.get("id", "-") in service.ended or now - session.get("seen", now) > IDLE:
        session.clear()
    if "form" not in session:
        session["form"] = secrets.token_hex(32)
    token = service.find_token(session["token"]) if "token" in session else None
    if token is not None:
        request.state.token = token.name
        if now - session["seen"] > 60:
            session["seen"] = now
    return Visitor(service, session, token)


Looking = Annotated[Visitor, Depends(find_visitor)]


async def read_form(request: Request, visitor: Looking) -> dict[str, str]:
    """The fields of a form that one of our pages sent, from this browser."""
    check_origin(request)
    body = await request.body()
    check_type(request, body, "application/x-www-form-urlencoded")
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, strict_parsing=bool(body), encoding="utf-8",
            errors="strict", max_num_fields=MOST_FIELDS,
        )  # fmt: skip
    except ValueError:
        raise RefusedError(400, "the form cannot be read") from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise RefusedError(400, "a field of the form is there twice")
    given = fields.pop("form_token", "").encode("utf-8", "replace")
    if not hmac.compare_digest(given, visitor.session["form"].encode()):
        raise RefusedError(403, "the form is not from this session; load the page again")
    return {name: value.replace("\r\n", "\n").strip() for name, value in fields.items()}


def check_origin(request: Request) -> None:
    """A form comes from a page of this server: the browser says so, and nothing says otherwise.

    With "no-referrer" a browser sends Origin: null even to ourselves; Sec-Fetch-Site is then what
    counts. Behind a proxy with TLS our own scheme is https.
    """
    scheme = "https" if request.app.state.secure else "http"
    own = f"{scheme}://{request.headers.get('host', '').lower()}"
    origin = request.headers.get("origin", "null").lower()
    site = request.headers.get("sec-fetch-site", "")
    if origin not in ("null", own) or site not in ("", "same-origin"):
        raise RefusedError(403, "the form was sent by a page of another site")
    if origin == "null" and not site:
        raise RefusedError(403, "the browser does not say which page sent the form")


Fields = Annotated[dict[str, str], Depends(read_form)]


def validate(kind: type[Form], fields: Mapping[str, str]) -> Form:
    """The fields of a form as a program would have sent them; an empty one was not sent."""
    if unknown := set(fields) - set(kind.model_fields):
        raise RefusedError(400, f"the form has {len(unknown)} fields that are not known here")
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value})
    except ValidationError as error:
        raise RefusedError(422, schemas.describe_problems(error.errors())) from None


def go(place: str) -> RedirectResponse:
    """To another page of ours, by GET."""
    return RedirectResponse(place, 303)


@router.get("/sign-in")
def show_sign_in(visitor: Looking) -> Response:
    return go("/") if visitor.signed_in else visitor.show("sign_in.html.j2")


@router.post("/sign-in")
def sign_in(request: Request, visitor: Looking, fields: Fields) -> Response:
    """A token for a session, which is new."""
    try:
        visitor.service.identify(fields.get("token", ""), request)
    except RefusedError as refused:
        return visitor.show("sign_in.html.j2", refused)
    visitor.end_session()
    visitor.session.update(
        id=secrets.token_hex(16), token=hash_token(fields["token"]), seen=time.time(),
        form=secrets.token_hex(32),
    )  # fmt: skip
    return go("/")


@router.post("/sign-out")
def sign_out(visitor: Looking, fields: Fields) -> Response:
    visitor.end_session()
    return go("/sign-in")


@router.get("/")
def show_list(
    visitor: Looking, state: str = "", pace: str = "", model: str = "", page: PageNumber = 1
) -> Response:
    kind: Kind | None = next((one for one in KINDS if one == state), None)
    speed: Pace | None = next((one for one in PACES if one == pace), None)
    names = [one.name for one in visitor.service.find_models(visitor.token)]
    chosen = {"state": kind, "pace": speed, "model": model if model in names else None}
    found = visitor.service.list_requests(visitor.token, kind, speed, chosen["model"], page)
    return visitor.show(
        "list.html.j2", chosen=chosen, found=found, models=names, kinds=KINDS, paces=PACES,
        pages=max(1, -(-found.total // PAGE)),
        query=urlencode({name: value for name, value in chosen.items() if value}),
    )  # fmt: skip


@router.get("/find")
def show_find(visitor: Looking) -> Response:
    allow(visitor.token, "find")
    return visitor.show("find.html.j2", found=None)


@router.post("/find")
@router.post("/evidence")
def find(request: Request, visitor: Looking, fields: Fields) -> Response:
    """All requests about a person, whom the page does not name; or the evidence."""
    export = request.url.path == "/evidence"
    allow(visitor.token, "export" if export else "find")
    try:
        sent = validate(schemas.PersonSent, fields)
        if export:
            return visitor.service.export(visitor.token, sent)
    except RefusedError as refused:
        if refused.status_code not in (400, 404, 422):
            raise
        return visitor.show("find.html.j2", refused, found=None)
    found = visitor.service.find_requests(visitor.token, sent).requests
    return visitor.show("find.html.j2", found=found)


@router.get("/requests/new")
def show_form(visitor: Looking) -> Response:
    return show_filing(visitor, {})


@router.post("/requests")
def file_request(visitor: Looking, fields: Fields) -> Response:
    try:
        sent = validate(schemas.RequestSent, fields)
        found = visitor.service.file_request(visitor.token, sent, Response())
    except (ExpungeError, RefusedError) as error:
        return show_filing(visitor, fields, visitor.service.translate(error))
    return go(f"/requests/{found.number}?{'filed' if found.new else 'before'}=1")


def show_filing(
    visitor: Visitor, fields: Mapping[str, str], refused: RefusedError | None = None
) -> Response:
    """The form, with what was typed before except the identifier and the reason."""
    allow(visitor.token, "file")
    kept = {name: fields.get(name, "")[:100] for name in ("model", "received", "due")}
    models = visitor.service.show_me(visitor.token).models
    return visitor.show("form.html.j2", refused, models=models, kept=kept)


@router.get("/requests/{number}")
def show_request(visitor: Looking, number: Number, filed: str = "", before: str = "") -> Response:
    said = "The request is filed." if filed else ""
    said = "The same request was filed before; this is it." if before else said
    return show_one(visitor, number, said=said)


@router.post("/requests/{number}/{act}")
def act_on_request(
    visitor: Looking, fields: Fields, number: Number,
    act: Literal["work", "refuse", "withdraw", "reason", "verify"],
) -> Response:  # fmt: skip
    """Have it worked on, end it, read its reason, or verify what answers it."""
    token, service = visitor.token, visitor.service
    try:
        match act:
            case "work":
                allow(token, "work")
                for one in service.show_request(token, number).answers:
                    if one.state in ("open", "running"):
                        service.work_on_model(token, one.model)
            case "reason":
                reason = service.show_reason(token, number).reason
                return show_one(visitor, number, reason=reason or "No reason was given.")
            case "verify":
                return show_one(visitor, number, verified=service.verify_request(token, number))
            case "refuse" | "withdraw":
                allow(token, "end")
                end = service.refuse_request if act == "refuse" else service.withdraw_request
                end(token, number, validate(schemas.WhySent, fields))
    except (ExpungeError, RefusedError) as error:
        refused = service.translate(error)
        if refused.status_code != 422:
            raise
        return show_one(visitor, number, refused)
    return go(f"/requests/{number}")


def show_one(
    visitor: Visitor, number: int, refused: RefusedError | None = None, **more: Any
) -> Response:
    """The page of a request: its clock, its answers, its events, how far the work on it is."""
    token, service = visitor.token, visitor.service
    asked = service.show_request(token, number)
    models, waits = {one.model for one in asked.answers}, asked.state in ("open", "running")
    progress = [one for one in service.list_progress(token) if waits and one.model in models]
    return visitor.show(
        "request.html.j2", refused, **{"said": "", "reason": None, "verified": None} | more,
        asked=asked, events=service.list_events(token, number), progress=progress,
        live=asked.state == "running" or any(not one.over for one in progress),
        may_end=service.may_end(token, number),
    )  # fmt: skip


@router.get("/models")
def show_models(visitor: Looking) -> Response:
    found = visitor.service.list_models(visitor.token)
    return visitor.show("models.html.j2", found=found, verified=None)


@router.post("/verify")
def verify_ledger(visitor: Looking, fields: Fields) -> Response:
    verified = visitor.service.verify_ledger(visitor.token)
    found = visitor.service.list_models(visitor.token)
    return visitor.show("models.html.j2", found=found, verified=verified)


@router.get("/models/{model}")
def show_model(visitor: Looking, model: ModelName) -> Response:
    return show_chain(visitor, model)


@router.post("/models/{model}/{act}")
def act_on_model(
    visitor: Looking, fields: Fields, model: ModelName, act: Literal["work", "verify"]
) -> Response:
    """Have a model worked on, or verify the chain of its releases."""
    if act == "work":
        visitor.service.work_on_model(visitor.token, model)
        return go(f"/models/{model}")
    return show_chain(visitor, model, visitor.service.verify_model(visitor.token, model))


def show_chain(visitor: Visitor, model: str, verified: Any = None) -> Response:
    """The page of a model and its chain of releases."""
    found = visitor.service.show_model(visitor.token, model)
    progress = [one for one in visitor.service.list_progress(visitor.token) if one.model == model]
    live = found.running > 0 or any(not one.over for one in progress)
    return visitor.show(
        "model.html.j2", model=found, progress=progress, live=live, verified=verified
    )


@router.get("/models/{model}/releases/{number}/{file}")
def download(visitor: Looking, model: ModelName, number: Number, file: File) -> Response:
    return visitor.service.download(visitor.token, model, number, file)
