"""The pages: for a data-protection officer with a browser, and without a network.

No page shows an identifier, also not the one that was just typed; what a person wrote as a reason
is shown only to an operator who asks for it.
"""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from expunge import ExpungeError
from expunge_ledger.deeds import LIVE
from expunge_ledger.evidence import Verified
from expunge_ledger.records import PACES, STATES, Pace
from expunge_ledger.server import api
from expunge_ledger.server.gate import RefusedError
from expunge_ledger.server.sessions import Looking, Visitor, read_form

KINDS: tuple[api.Kind, ...] = ("waiting", *STATES)
router = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(read_form)]
)  # fmt: skip


def go(place: str) -> RedirectResponse:
    """To another page of ours, by GET."""
    return RedirectResponse(place, 303)


@router.get("/sign-in")
@router.post("/sign-in")
def sign_in(request: Request, visitor: Looking) -> Response:
    """A token for a session, which is new."""
    if request.method == "GET":
        return go("/") if visitor.signed_in else visitor.show("sign_in.html.j2")
    try:
        visitor.server.identify(visitor.fields.get("token", ""), request)
    except RefusedError as refused:
        return visitor.show("sign_in.html.j2", refused)
    visitor.begin_session(visitor.fields["token"])
    return go("/")


@router.post("/sign-out")
def sign_out(visitor: Looking) -> Response:
    visitor.end_session()
    return go("/sign-in")


@router.get("/")
def show_list(
    visitor: Looking, state: str = "", pace: str = "", model: str = "", page: api.PageNumber = 1
) -> Response:
    kind: api.Kind | None = next((one for one in KINDS if one == state), None)
    speed: Pace | None = next((one for one in PACES if one == pace), None)
    names = [one.name for one in visitor.caller.models()]
    chosen = {"state": kind, "pace": speed, "model": model if model in names else None}
    found = api.list_requests(visitor.caller, kind, speed, chosen["model"], page)
    return visitor.show(
        "list.html.j2", chosen=chosen, found=found, models=names, kinds=KINDS, paces=PACES,
        pages=max(1, -(-found.total // api.PAGE)),
        query=urlencode({name: value for name, value in chosen.items() if value}),
    )  # fmt: skip


@router.get("/find")
@router.post("/find")
def find(request: Request, visitor: Looking) -> Response:
    """All requests about a person, whom the page does not name."""
    visitor.caller.need("find")
    if request.method == "GET":
        return visitor.show("find.html.j2", found=None)
    try:
        found = api.find_requests(visitor.caller, visitor.read(api.PersonSent))
    except RefusedError as refused:
        return visitor.show("find.html.j2", refused, found=None)
    return visitor.show("find.html.j2", found=found.requests)


@router.post("/evidence")
def export(visitor: Looking) -> Response:
    visitor.caller.need("export")
    try:
        return api.export(visitor.caller, visitor.read(api.PersonSent))
    except RefusedError as refused:
        return visitor.show("find.html.j2", refused, found=None)


@router.get("/requests/new")
@router.post("/requests")
def file_request(request: Request, visitor: Looking) -> Response:
    """The form, with what was typed before except the identifier and the reason."""
    caller, refused = visitor.caller, None
    caller.need("file")
    if request.method == "POST":
        try:
            found = api.file_request(caller, visitor.read(api.RequestSent), Response())
            return go(f"/requests/{found.number}?{'filed' if found.new else 'before'}=1")
        except (ExpungeError, RefusedError) as error:
            refused = visitor.server.translate(error)
    kept = {name: visitor.fields.get(name, "")[:100] for name in ("model", "received", "due")}
    return visitor.show("form.html.j2", refused, models=api.show_me(caller).models, kept=kept)


@router.get("/requests/{number:int}")
def show_request(
    visitor: Looking, number: api.Number, filed: str = "", before: str = ""
) -> Response:
    """A request: its clock, its answers, its events, and whether it is being worked on."""
    told = "The same request was filed before." if before else ""
    return render_request(visitor, number, told="The request is filed." if filed else told)


def render_request(
    visitor: Visitor, number: int, refused: RefusedError | None = None, *, told: str = "",
    reason: str | None = None, verified: Verified | None = None,
) -> Response:  # fmt: skip
    caller = visitor.caller
    asked = api.show_request(caller, number)
    waits = {one.model for one in asked.answers if one.state in LIVE and asked.state in LIVE}
    work = [one for one in api.list_work(caller) if one.model in waits]
    return visitor.show(
        "request.html.j2", refused, told=told, reason=reason, verified=verified, asked=asked,
        work=work, live=asked.state == "running" or any(not one.over for one in work),
        events=api.list_events(caller, number), may_end=api.may_end(caller, number),
    )  # fmt: skip


@router.post("/requests/{number:int}/work")
def work_on_request(visitor: Looking, number: api.Number) -> Response:
    visitor.caller.need("work")
    for one in api.show_request(visitor.caller, number).answers:
        if one.state in LIVE:
            api.work_on_model(visitor.caller, one.model)
    return go(f"/requests/{number}")


@router.post("/requests/{number:int}/reason")
def show_reason(visitor: Looking, number: api.Number) -> Response:
    reason = api.show_reason(visitor.caller, number)["reason"]
    return render_request(visitor, number, reason=reason or "No reason was given.")


@router.post("/requests/{number:int}/verify")
def verify_request(visitor: Looking, number: api.Number) -> Response:
    verified = api.verify_request(visitor.caller, number)
    return render_request(visitor, number, verified=verified)


@router.post("/requests/{number:int}/refuse")
@router.post("/requests/{number:int}/withdraw")
def end_request(request: Request, visitor: Looking, number: api.Number) -> Response:
    refuses = request.url.path.endswith("refuse")
    visitor.caller.need("end")
    try:
        sent = visitor.read(api.WhySent)
        (api.refuse_request if refuses else api.withdraw_request)(visitor.caller, number, sent)
    except (ExpungeError, RefusedError) as error:
        refused = visitor.server.translate(error)
        if refused.status_code != 422:
            raise
        return render_request(visitor, number, refused)
    return go(f"/requests/{number}")


@router.get("/models")
@router.post("/verify")
def show_models(request: Request, visitor: Looking) -> Response:
    verified = api.verify_ledger(visitor.caller) if request.method == "POST" else None
    return visitor.show("models.html.j2", found=api.list_models(visitor.caller), verified=verified)


@router.get("/models/{model}")
@router.post("/models/{model}/verify")
def show_model(request: Request, visitor: Looking, model: api.ModelName) -> Response:
    """A model and its chain of releases, verified if that was asked for."""
    verified = api.verify_model(visitor.caller, model) if request.method == "POST" else None
    found = api.show_model(visitor.caller, model)
    work = [one for one in api.list_work(visitor.caller) if one.model == model]
    live = found.running > 0 or any(not one.over for one in work)
    return visitor.show("model.html.j2", model=found, work=work, live=live, verified=verified)


@router.post("/models/{model}/work")
def work_on_model(visitor: Looking, model: api.ModelName) -> Response:
    api.work_on_model(visitor.caller, model)
    return go(f"/models/{model}")


@router.get("/models/{model}/releases/{number:int}/{file}")
def download(
    visitor: Looking, model: api.ModelName, number: api.Number, file: api.File
) -> Response:
    return api.download(visitor.caller, model, number, file)
