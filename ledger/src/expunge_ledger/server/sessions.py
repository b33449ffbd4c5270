"""A browser: who signed in with a token gets a session, and the forms that it sends are its own.

Every form carries a token of its session and must come from a page of this server. A session is a
cookie that Starlette signs: over after eight hours, and after half an hour of rest, because it is
signed anew while it is used.
"""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

from fastapi import Depends, Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, ValidationError

from expunge_ledger.records import hash_token
from expunge_ledger.server.access import MAY, Caller, Server
from expunge_ledger.server.gate import RefusedError, check_type, describe_problems

TEMPLATES = Path(__file__).with_name("templates")
ENVIRONMENT = Environment(  # whatever a template prints is escaped
    loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
REST, LONGEST, MOST_FIELDS = 1_800, 28_800, 20  # seconds of a session; fields of a form
Form = TypeVar("Form", bound=BaseModel)


@dataclass(frozen=True)
class Visitor:
    """A browser: its session, who signed in, and the fields of the form that it sent."""

    server: Server
    session: dict[str, Any]
    signed_in: Caller | None
    fields: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def caller(self) -> Caller:
        """Whoever signed in; a page that needs one is for nobody else."""
        if self.signed_in is None:
            raise RefusedError(303, "the page is for somebody who signed in")
        return self.signed_in

    def show(self, template: str, refused: RefusedError | None = None, **values: Any) -> Response:
        """A page from its template."""
        token = self.signed_in and self.signed_in.token
        text = ENVIRONMENT.get_template(template).render(
            **values, token=token, may=MAY[token.role] if token else (), sentence=refused,
            form_token=self.session["form"],
        )  # fmt: skip
        headers = None if refused is None else refused.headers
        return HTMLResponse(text, 200 if refused is None else refused.status_code, headers)

    def read(self, kind: type[Form]) -> Form:
        """The fields of a form as a program would have sent them; an empty one was not sent."""
        if unknown := set(self.fields) - set(kind.model_fields):
            raise RefusedError(400, f"the form has {len(unknown)} fields that are not known here")
        try:
            return kind.model_validate({name: one for name, one in self.fields.items() if one})
        except ValidationError as error:
            raise RefusedError(422, describe_problems(error.errors())) from None

    def begin_session(self, token: str) -> None:
        """A new session of whoever has this token."""
        self.end_session()
        now = time.time()
        self.session.update(
            id=secrets.token_hex(16), token=hash_token(token), began=now, seen=now,
            form=secrets.token_hex(32),
        )  # fmt: skip

    def end_session(self) -> None:
        """What the session's cookie said is not so any more, wherever it is."""
        ended = self.server.ended
        ended[self.session.get("id", "")] = None
        while len(ended) > 10_000:
            ended.popitem(last=False)
        self.session.clear()


def find_visitor(request: Request) -> Visitor:
    """Who looks at a page."""
    server: Server = request.app.state.server
    session, now = request.session, time.time()
    if session.get("id", "-") in server.ended or now - session.get("began", now) > LONGEST:
        session.clear()
    if "form" not in session:
        session["form"] = secrets.token_hex(32)
    caller = server.find(session["token"], request) if "token" in session else None
    if caller is not None and now - session["seen"] > 60:
        session["seen"] = now
    return Visitor(server, session, caller)


Looking = Annotated[Visitor, Depends(find_visitor)]


async def read_form(request: Request, visitor: Looking) -> None:
    """The fields of a form that one of our pages sent, from this browser; a link has none."""
    if request.method == "GET":
        return
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
    for name, value in fields.items():
        visitor.fields[name] = value.replace("\r\n", "\n").strip()


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
