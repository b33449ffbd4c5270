"""The pages: for a data-protection officer with a browser, and without a network.

Who signs in with a token gets a cookie; every form carries a token of its own and must come from a
page of this server. No page shows an identifier, also not the one that was just typed; what a
person wrote as a reason is shown only to an operator who asks for it.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import ValidationError

from expunge.errors import ExpungeError
from expunge.ledger.clocks import Pace
from expunge.ledger.requests import Request as Asked
from expunge.ledger.tokens import Token, find_token, hash_token
from expunge.server import access
from expunge.server.api import ModelName, Number, PageNumber, Serving, send_file, send_zip
from expunge.server.desk import STEPS, WORDS
from expunge.server.gate import is_loopback, read_host
from expunge.server.refusals import RefusedError, describe_problems, translate
from expunge.server.releases import FILES, File
from expunge.server.schemas import PersonSent, RequestSent, VerifiedShown
from expunge.server.service import Service

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
Asset = Literal["page.css", "page.js", "icon.svg"]
ASSETS: dict[Asset, str] = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
MOST_FIELDS = 20
Sent = TypeVar("Sent", bound=PersonSent)
router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@dataclass(frozen=True)
class Visitor:
    """A browser: its cookie, which may be new, and the token it signed in with."""

    service: Service
    cookie: str
    new: bool
    secure: bool
    token: Token | None

    @property
    def cookie_name(self) -> str:
        """A browser takes a cookie of the first name only over TLS, from this host alone."""
        return "__Host-expunge" if self.secure else "expunge"

    def set_cookie(self, response: Response, cookie: str) -> None:
        """Scripts cannot read it, and no other site can have it sent."""
        response.set_cookie(
            self.cookie_name, cookie, path="/", httponly=True, samesite="strict", secure=self.secure
        )


class SignInNeededError(Exception):
    """The page is for somebody who signed in."""


def find_visitor(request: Request, service: Serving) -> Visitor:
    """Who looks at a page."""
    secure = not is_loopback(read_host(request.headers.get("host", "")))
    name = "__Host-expunge" if secure else "expunge"
    cookie = request.cookies.get(name, "")
    hashed = service.sessions.find(cookie) if 0 < len(cookie) <= 100 else None
    token = None if hashed is None else find_token(service.ledger.engine, hashed)
    if token is not None:
        service.admit(token)
        request.state.token = token.name
    fits = 20 <= len(cookie) <= 100 and cookie.isascii()
    return Visitor(service, cookie if fits else secrets.token_urlsafe(32), not fits, secure, token)


Looking = Annotated[Visitor, Depends(find_visitor)]


def find_member(visitor: Looking) -> Visitor:
    """Who looks, having signed in."""
    if visitor.token is None:
        raise SignInNeededError
    return visitor


async def read_form(request: Request, visitor: Looking) -> dict[str, str]:
    """The fields of a form that one of our pages sent, from this browser."""
    check_origin(request, visitor.secure)
    try:
        text = (await request.body()).decode("utf-8")
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(text), encoding="utf-8",
            errors="strict", max_num_fields=MOST_FIELDS,
        )  # fmt: skip
    except ValueError:
        raise RefusedError(400, "the form cannot be read") from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise RefusedError(400, "a field of the form is there twice")
    if not visitor.service.sessions.fits(visitor.cookie, fields.pop("form_token", "")):
        raise RefusedError(403, "the form is not from this session; load the page again")
    return {name: value.replace("\r\n", "\n").strip() for name, value in fields.items()}


def check_origin(request: Request, secure: bool) -> None:
    """A form comes from a page of this server: the browser says so, and nothing says otherwise.

    With "no-referrer" a browser sends Origin: null even to ourselves; Sec-Fetch-Site is then what
    tells.
    """
    own = f"http{'s' if secure else ''}://{request.headers.get('host', '').lower()}"
    origin = request.headers.get("origin", "null").lower()
    site = request.headers.get("sec-fetch-site", "")
    if origin not in ("null", own) or site not in ("", "same-origin"):
        raise RefusedError(403, "the form was sent by a page of another site")
    if origin == "null" and not site:
        raise RefusedError(403, "the browser does not say which page sent the form")


Member = Annotated[Visitor, Depends(find_member)]
Fields = Annotated[dict[str, str], Depends(read_form)]


def need_token(visitor: Visitor) -> Token:
    """The token of somebody who signed in."""
    if visitor.token is None:
        raise SignInNeededError
    return visitor.token


@router.get("/assets/{name}")
def show_asset(name: Asset) -> Response:
    """Style, script and icon: the only files that pages load."""
    kept = {"Cache-Control": "public, max-age=300"}
    return Response((TEMPLATES / name).read_bytes(), media_type=ASSETS[name], headers=kept)


@router.get("/sign-in")
def show_sign_in(visitor: Looking) -> Response:
    """Where a token is typed."""
    if visitor.token is not None:
        return go("/")
    return show(visitor, "sign_in.html.j2", sentence=None)


@router.post("/sign-in")
def sign_in(request: Request, visitor: Looking, fields: Fields) -> Response:
    """A token for a cookie, which is new."""
    address = "nobody" if request.client is None else request.client.host
    try:
        token = visitor.service.identify(fields.get("token", ""), address)
    except RefusedError as refused:
        return show(visitor, "sign_in.html.j2", refused.status, refused.wait, sentence=str(refused))
    visitor.service.sessions.end(visitor.cookie)
    response = go("/")
    known = hash_token(fields["token"])
    visitor.set_cookie(response, visitor.service.sessions.begin(known))
    request.state.token = token.name
    return response


@router.post("/sign-out")
def sign_out(visitor: Looking, fields: Fields) -> Response:
    """The cookie means nothing any more."""
    visitor.service.sessions.end(visitor.cookie)
    response = go("/sign-in")
    visitor.set_cookie(response, secrets.token_urlsafe(32))
    return response


@router.get("/")
def show_list(
    visitor: Member,
    state: str = "",
    pace: str = "",
    model: str = "",
    page: PageNumber = 1,
) -> Response:
    """The list, with clocks."""
    token = need_token(visitor)
    kind: access.Kind | None = next((one for one in access.KINDS if one == state), None)
    speed: Pace | None = next((one for one in access.PACES if one == pace), None)
    names = [one.name for one in access.list_visible_models(visitor.service.ledger, token)]
    chosen = access.Choice(kind, speed, model if model in names else None, page)
    found = access.choose(visitor.service.ledger, token, chosen)
    pages = max(1, -(-found.total // chosen.most))
    given = {"state": chosen.state, "pace": chosen.pace, "model": chosen.model}
    query = urlencode({name: value for name, value in given.items() if value})
    facts: dict[str, Any] = {
        "chosen": chosen,
        "found": found,
        "pages": pages,
        "query": query,
        "models": names,
    }
    return show(visitor, "list.html.j2", **facts, kinds=access.KINDS, paces=access.PACES)


@router.get("/find")
def show_find(visitor: Member) -> Response:
    """Where an identifier is typed, to find what was asked about a person."""
    access.allow(need_token(visitor), "find")
    return show(visitor, "find.html.j2", found=None, sentence=None)


@router.post("/find")
def find(visitor: Member, fields: Fields) -> Response:
    """All requests about a person, whom the page does not name."""
    token = need_token(visitor)
    access.allow(token, "find")
    try:
        sent = validate(PersonSent, fields, ("person",))
    except RefusedError as refused:
        return show(visitor, "find.html.j2", 422, found=None, sentence=str(refused))
    found = access.find_person(visitor.service.ledger, token, sent.person)
    return show(visitor, "find.html.j2", found=found, sentence=None)


@router.post("/evidence")
def export(visitor: Member, fields: Fields) -> Response:
    """The evidence about a person, for a regulator."""
    try:
        sent = validate(PersonSent, fields, ("person",))
        return send_zip(visitor.service.export(need_token(visitor), sent.person))
    except RefusedError as refused:
        if refused.status not in (404, 422):
            raise
        return show(visitor, "find.html.j2", refused.status, found=None, sentence=str(refused))


@router.get("/requests/new")
def show_form(visitor: Member) -> Response:
    """The form to file a request."""
    access.allow(need_token(visitor), "file")
    return show_filing(visitor, {}, None)


@router.post("/requests")
def file_request(visitor: Member, fields: Fields) -> Response:
    """File a request; its page comes next."""
    token = need_token(visitor)
    access.allow(token, "file")
    names = ("person", "model", "received", "due", "reason")
    try:
        sent = validate(RequestSent, fields, names)
        given = {name: getattr(sent, name) for name in names[1:]}
        found = access.file_for(visitor.service.ledger, token, sent.person, **given)
    except RefusedError as refused:
        return show_filing(visitor, fields, refused)
    except ExpungeError as error:
        return show_filing(visitor, fields, translate(error))
    return go(f"/requests/{found.number}?{'filed' if found.new else 'before'}=1")


@router.get("/requests/{number}")
def show_request(visitor: Member, number: Number, filed: str = "", before: str = "") -> Response:
    """One request: its clock, its answers, its events."""
    said = "The request is filed." if filed else ""
    said = "The same request was filed before; this is it." if before else said
    return show_one(visitor, number, said=said)


@router.get("/requests/{number}/live")
def show_request_live(visitor: Member, number: Number) -> Response:
    """The part of a request's page that changes while it is worked on."""
    token = need_token(visitor)
    asked = access.find_request(visitor.service.ledger, token, number)
    return show(visitor, "request_live.html.j2", **describe_request(visitor, asked))


@router.post("/requests/{number}/work")
def work_on_request(visitor: Member, fields: Fields, number: Number) -> Response:
    """Have the models worked on that a request asks."""
    token = need_token(visitor)
    access.allow(token, "work")
    for answer in access.find_request(visitor.service.ledger, token, number).answers:
        if answer.state in ("open", "running"):
            visitor.service.work(token, answer.model)
    return go(f"/requests/{number}")


@router.post("/requests/{number}/refuse")
def refuse(visitor: Member, fields: Fields, number: Number) -> Response:
    """Refuse a request, with a reason."""
    return end(visitor, fields, number, "refused")


@router.post("/requests/{number}/withdraw")
def withdraw(visitor: Member, fields: Fields, number: Number) -> Response:
    """The person takes the request back."""
    return end(visitor, fields, number, "withdrawn")


@router.post("/requests/{number}/reason")
def show_reason(visitor: Member, fields: Fields, number: Number) -> Response:
    """The request with the reason that was sent: only when an operator asks."""
    reason = visitor.service.read_reason(need_token(visitor), number)
    return show_one(visitor, number, reason=reason or "No reason was given.")


@router.post("/requests/{number}/verify")
def verify_request(visitor: Member, fields: Fields, number: Number) -> Response:
    """Verify now what answers a request."""
    verified = visitor.service.verify_request(need_token(visitor), number)
    return show_one(visitor, number, verified=verified)


@router.get("/models")
def show_models(visitor: Member) -> Response:
    """All models, and the button that verifies everything."""
    return show_all_models(visitor)


@router.post("/verify")
def verify_ledger(visitor: Member, fields: Fields) -> Response:
    """Verify the whole ledger now."""
    return show_all_models(visitor, visitor.service.verify_ledger(need_token(visitor)))


@router.get("/models/{model}")
def show_model(visitor: Member, model: ModelName) -> Response:
    """A model and its chain of releases."""
    return show_chain(visitor, model)


@router.get("/models/{model}/live")
def show_model_live(visitor: Member, model: ModelName) -> Response:
    """The part of a model's page that changes while it is worked on."""
    return show_chain(visitor, model, template="model_live.html.j2")


@router.post("/models/{model}/work")
def work(visitor: Member, fields: Fields, model: ModelName) -> Response:
    """Have a model worked on."""
    visitor.service.work(need_token(visitor), model)
    return go(f"/models/{model}")


@router.post("/models/{model}/verify")
def verify_model(visitor: Member, fields: Fields, model: ModelName) -> Response:
    """Verify the chain of a model now."""
    verified = visitor.service.verify_model(need_token(visitor), model)
    return show_chain(visitor, model, verified=verified)


@router.get("/models/{model}/releases/{number}/{file}")
def download(visitor: Member, model: ModelName, number: Number, file: File) -> Response:
    """A file of a release that may leave."""
    data = visitor.service.download(need_token(visitor), model, number, file)
    return send_file(data, f"{model}-{number}-{file}", file)


def end(
    visitor: Visitor, fields: Mapping[str, str], number: int, how: Literal["refused", "withdrawn"]
) -> Response:
    """End a request, or show it with the sentence that says why not."""
    token = need_token(visitor)
    reason = fields.get("reason", "")
    try:
        visitor.service.end(token, number, how, reason)
    except ExpungeError as error:
        return show_one(visitor, number, problem=str(translate(error)))
    except RefusedError as refused:
        if refused.status != 422:
            raise
        return show_one(visitor, number, problem=str(refused))
    return go(f"/requests/{number}")


def show_one(
    visitor: Visitor,
    number: int,
    *,
    said: str = "",
    problem: str = "",
    reason: str | None = None,
    verified: VerifiedShown | None = None,
) -> Response:
    """The page of a request."""
    token, ledger = need_token(visitor), visitor.service.ledger
    asked = access.find_request(ledger, token, number)
    events = access.list_visible_events(ledger, token, number)
    return show(
        visitor, "request.html.j2", 422 if problem else 200, **describe_request(visitor, asked),
        events=events, said=said, problem=problem, reason=reason, verified=verified,
        has_reason=asked.reason is not None,
        may_end="end" in access.MAY[token.role] and token.model in (None, asked.model),
    )  # fmt: skip


def describe_request(visitor: Visitor, asked: Asked) -> dict[str, Any]:
    """A request, and how far the work on it is."""
    found = visitor.service.desk.show()
    progress = [found[one.model] for one in asked.answers if one.model in found]
    at_work = asked.ended is None and any(not one.over for one in progress)
    live = at_work or asked.state == "running"
    return {"asked": asked, "progress": progress if asked.ended is None else [], "live": live}


def show_all_models(visitor: Visitor, verified: VerifiedShown | None = None) -> Response:
    """The page of all models."""
    token = need_token(visitor)
    access.allow(token, "models")
    found = access.list_visible_models(visitor.service.ledger, token)
    return show(visitor, "models.html.j2", found=found, verified=verified)


def show_chain(
    visitor: Visitor,
    model: str,
    *,
    verified: VerifiedShown | None = None,
    template: str = "model.html.j2",
) -> Response:
    """The page of a model."""
    token = need_token(visitor)
    access.allow(token, "models", model)
    found = access.find_visible_model(visitor.service.ledger, token, model)
    progress = visitor.service.desk.show().get(model)
    live = found.running > 0 or (progress is not None and not progress.over)
    return show(visitor, template, model=found, progress=progress, live=live, verified=verified)


def show_filing(
    visitor: Visitor, fields: Mapping[str, str], refused: RefusedError | None
) -> Response:
    """The form, with what was typed before except the identifier and the reason."""
    models = access.list_visible_models(visitor.service.ledger, need_token(visitor))
    kept = {name: fields.get(name, "")[:100] for name in ("model", "received", "due")}
    status = 200 if refused is None else refused.status
    facts: dict[str, Any] = {
        "models": [one.name for one in models if one.retired is None],
        "kept": kept,
        "sentence": refused,
    }
    return show(visitor, "form.html.j2", status, **facts)


def validate(kind: type[Sent], fields: Mapping[str, str], names: Any) -> Sent:
    """The fields of a form as a program would have sent them; an empty one was not sent."""
    if unknown := set(fields) - set(names):
        raise RefusedError(400, f"the form has {len(unknown)} fields that are not known here")
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value})
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise RefusedError(422, describe_problems(problems)) from None


def show_error(visitor: Visitor, refused: RefusedError) -> Response:
    """The page that says why nothing was done."""
    return show(visitor, "error.html.j2", refused.status, refused.wait, sentence=refused.sentence)


def show(
    visitor: Visitor, template: str, status: int = 200, wait: int = 0, **values: Any
) -> Response:
    """A page from its template."""
    token = visitor.token
    text = (
        make_environment()
        .get_template(template)
        .render(
            **values,
            token=token,
            may=frozenset[str]() if token is None else access.MAY[token.role],
            form_token=visitor.service.sessions.make_form_token(visitor.cookie),
            words=WORDS,
            steps=STEPS,
            files=FILES,
        )
    )
    response = HTMLResponse(text, status)
    if visitor.new:
        visitor.set_cookie(response, visitor.cookie)
    if wait:
        response.headers["Retry-After"] = str(wait)
    return response


def go(place: str) -> RedirectResponse:
    """To another page of ours, by GET."""
    return RedirectResponse(place, 303)


@functools.cache
def make_environment() -> Environment:
    """One for all pages; whatever a template prints is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
