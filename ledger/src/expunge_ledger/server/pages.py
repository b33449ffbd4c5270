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
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, ValidationError

from expunge import ExpungeError
from expunge_ledger.records import PACES, Pace, Token, hash_token
from expunge_ledger.server import service as api
from expunge_ledger.server.gate import RefusedError, check_type
from expunge_ledger.server.service import KINDS, MAY, PAGE, Kind, Service, allow

TEMPLATES = Path(__file__).with_name("templates")
ENVIRONMENT = Environment(  # whatever a template prints is escaped
    loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
IDLE, MOST_FIELDS = 1_800.0, 20
Form = TypeVar("Form", bound=BaseModel)
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
    token = service.find_token(session["token"], request) if "token" in session else None
    if token is not None and now - session["seen"] > 60:
        session["seen"] = now
    return Visitor(service, session, token)


Looking = Annotated[Visitor, Depends(find_visitor)]


async def read_form(request: Request, visitor: Looking) -> dict[str, str]:
    """The fields of a form that one of our pages sent, from this browser; a link has none."""
    if request.method == "GET":
        return {}
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
        raise RefusedError(422, describe_problems(error.errors())) from None


def describe_problems(problems: Any) -> str:
    """What a validation found, without the values: they may name a person."""
    said = list[str]()
    for problem in problems[:5]:
        place = [str(part) for part in problem["loc"] if part not in ("body", "query", "path")]
        name = ".".join(place) if all(part.isidentifier() for part in place) else "a field"
        unknown = problem["type"] == "extra_forbidden"
        what = "it is not known here" if unknown else problem["msg"]
        said.append(f"{name or 'the body'}: {what}")
    return "; ".join(said)


def go(place: str) -> RedirectResponse:
    """To another page of ours, by GET."""
    return RedirectResponse(place, 303)


@router.get("/sign-in")
@router.post("/sign-in")
def sign_in(request: Request, visitor: Looking, fields: Fields) -> Response:
    """A token for a session, which is new."""
    if request.method == "GET":
        return go("/") if visitor.signed_in else visitor.show("sign_in.html.j2")
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
    visitor: Looking, state: str = "", pace: str = "", model: str = "", page: api.PageNumber = 1
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
@router.post("/find")
@router.post("/evidence")
def find(request: Request, visitor: Looking, fields: Fields) -> Response:
    """All requests about a person, whom the page does not name; or the evidence."""
    token, service, found = visitor.token, visitor.service, None
    export = request.url.path == "/evidence"
    allow(token, "export" if export else "find")
    try:
        if export:
            return service.export(token, validate(api.PersonSent, fields))
        if request.method == "POST":
            found = service.find_requests(token, validate(api.PersonSent, fields)).requests
    except RefusedError as refused:
        if refused.status_code not in (400, 404, 422):
            raise
        return visitor.show("find.html.j2", refused, found=None)
    return visitor.show("find.html.j2", found=found)


@router.get("/requests/new")
@router.post("/requests")
def file_request(request: Request, visitor: Looking, fields: Fields) -> Response:
    """The form, with what was typed before except the identifier and the reason."""
    token, service, refused = visitor.token, visitor.service, None
    allow(token, "file")
    if request.method == "POST":
        try:
            found = service.file_request(token, validate(api.RequestSent, fields), Response())
            return go(f"/requests/{found.number}?{'filed' if found.new else 'before'}=1")
        except (ExpungeError, RefusedError) as error:
            refused = service.translate(error)
    kept = {name: fields.get(name, "")[:100] for name in ("model", "received", "due")}
    return visitor.show("form.html.j2", refused, models=service.show_me(token).models, kept=kept)


@router.get("/requests/{number}")
@router.post("/requests/{number}/{act}")
def show_request(
    request: Request, visitor: Looking, fields: Fields, number: api.Number
) -> Response:
    """A request: its clock, its answers, its events, how far the work on it is. Have it worked on,
    end it, read its reason, or verify what answers it."""
    token, service, refused = visitor.token, visitor.service, None
    told = {"filed": "The request is filed.", "before": "The same request was filed before."}
    said = "".join(text for name, text in told.items() if name in request.query_params)
    shown: dict[str, Any] = {"said": said, "reason": None, "verified": None}
    try:
        match request.path_params.get("act"):
            case "work":
                allow(token, "work")
                for one in service.show_request(token, number).answers:
                    if one.state in ("open", "running"):
                        service.work_on_model(token, one.model)
                return go(f"/requests/{number}")
            case "reason":
                shown |= service.show_reason(token, number)
                shown["reason"] = shown["reason"] or "No reason was given."
            case "verify":
                shown["verified"] = service.verify_request(token, number)
            case "refuse" | "withdraw" as act:
                allow(token, "end")
                end = service.refuse_request if act == "refuse" else service.withdraw_request
                end(token, number, validate(api.WhySent, fields))
                return go(f"/requests/{number}")
            case act if act is not None:
                raise RefusedError(404, "there is no such page")  # noqa: TRY301
            case _:
                pass
    except (ExpungeError, RefusedError) as error:
        refused = service.translate(error)
        if refused.status_code != 422:
            raise
    asked = service.show_request(token, number)
    models, waits = {one.model for one in asked.answers}, asked.state in ("open", "running")
    progress = [one for one in service.list_progress(token) if waits and one.model in models]
    return visitor.show(
        "request.html.j2", refused, **shown, asked=asked, progress=progress,
        events=service.list_events(token, number), may_end=service.may_end(token, number),
        live=asked.state == "running" or any(not one.over for one in progress),
    )  # fmt: skip


@router.get("/models")
@router.post("/verify")
def show_models(request: Request, visitor: Looking, fields: Fields) -> Response:
    service, verified = visitor.service, None
    if request.method == "POST":
        verified = service.verify_ledger(visitor.token)
    found = service.list_models(visitor.token)
    return visitor.show("models.html.j2", found=found, verified=verified)


@router.get("/models/{model}")
@router.post("/models/{model}/{act}")
def show_model(
    request: Request, visitor: Looking, fields: Fields, model: api.ModelName
) -> Response:
    """A model and its chain of releases. Have it worked on, or verify the chain."""
    token, service, verified = visitor.token, visitor.service, None
    match request.path_params.get("act"):
        case "work":
            service.work_on_model(token, model)
            return go(f"/models/{model}")
        case "verify":
            verified = service.verify_model(token, model)
        case act if act is not None:
            raise RefusedError(404, "there is no such page")
        case _:
            pass
    found = service.show_model(token, model)
    progress = [one for one in service.list_progress(token) if one.model == model]
    live = found.running > 0 or any(not one.over for one in progress)
    return visitor.show(
        "model.html.j2", model=found, progress=progress, live=live, verified=verified
    )


@router.get("/models/{model}/releases/{number}/{file}")
def download(
    visitor: Looking, model: api.ModelName, number: api.Number, file: api.File
) -> Response:
    return visitor.service.download(visitor.token, model, number, file)
