"""What every request passes first and every answer last: headers, rates, bodies, the log.

Hosts, sizes and sessions are Starlette's; rates by address, slow senders, long addresses and
compression are the proxy's. The log has method, route, status, time and the name of the token. A
route is a pattern of ours, such as /requests/{number}: what an address says is not in the log.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from typing import Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

LOG = logging.getLogger("expunge_ledger.server")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Robots-Tag": "noindex",
    "Cache-Control": "no-store",
}
ONCE = ("host", "authorization", "cookie", "content-type", "content-length", "origin")


class RefusedError(HTTPException):
    """A request that is not done; ``wait`` is after how many seconds it may be tried again."""

    def __init__(self, status: int, sentence: str, wait: int = 0) -> None:
        headers = {"Retry-After": str(wait)} if wait else {}
        headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        headers |= {"Location": "/sign-in"} if status == 303 else {}
        super().__init__(status, sentence, headers)

    def __str__(self) -> str:
        return str(self.detail)


class Rate:
    """How often each key may ask: so many at once, and so many a second over time.

    >>> rate = Rate((2, 1e-3))
    >>> [rate.take("a") for _ in range(2)], rate.take("a") > 900, rate.take("b")
    ([0, 0], True, 0)
    """

    def __init__(self, limit: tuple[float, float]) -> None:
        (self.burst, self.rate), self._lock = limit, threading.Lock()
        self._free = dict[str, float]()  # when each key will have asked for nothing

    def take(self, key: str) -> int:
        """0 if it may, else the seconds after which it may."""
        with self._lock:
            now = time.monotonic()
            free = max(now, self._free.get(key, now))
            wait = free - now - (self.burst - 1) / self.rate
            self._free[key] = free if wait > 1e-9 else free + 1 / self.rate
        return math.ceil(wait) if wait > 1e-9 else 0


async def pass_gate(request: Request, call_next: Any) -> Response:
    """Around the whole application."""
    began = time.monotonic()
    try:
        check_headers(request)
        answer: Response = await call_next(request)
    except RefusedError as refused:
        answer = JSONResponse({"detail": str(refused)}, refused.status_code)
    except Exception as error:
        LOG.error("%s while answering", type(error).__name__)  # noqa: TRY400
        answer = JSONResponse({"detail": "something is broken here"}, 500)
    for name, value in HEADERS.items():
        answer.headers.setdefault(name, value)
    route = getattr(request.scope.get("route"), "path_format", "(no route)")
    method = request.method if request.method in ("GET", "POST") else "(other)"
    spent, who = 1000 * (time.monotonic() - began), getattr(request.state, "token", "-")
    LOG.info("%s %s %s %.0f ms %s", method, route, answer.status_code, spent, who)
    return answer


def check_headers(request: Request) -> None:
    """Refuse what a proxy and we might read in two ways."""
    headers = request.headers
    for name in ONCE:
        if len(headers.getlist(name)) > 1:
            raise RefusedError(400, f"the header {name} is there twice")
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers and "content-length" in headers:
        raise RefusedError(400, "Content-Length and Transfer-Encoding are both there")
    if not (length.isascii() and length.isdigit()) or len(length) > 12:
        raise RefusedError(400, "Content-Length must be a number")


def check_type(request: Request, body: bytes, needed: str) -> None:
    """A body has one right kind, and only POST has one."""
    if body and request.method != "POST":
        raise RefusedError(400, "only POST has a body here")
    kind, _, rest = request.headers.get("content-type", "").partition(";")
    charset = rest.strip().lower().replace('"', "")
    if body and (kind.strip().lower() != needed or charset not in ("", "charset=utf-8")):
        raise RefusedError(415, f"the body must be {needed} in UTF-8")


async def check_json(request: Request) -> None:
    """The body of a program is JSON that no two programs read in two ways."""
    body = await request.body()
    check_type(request, body, "application/json")
    try:
        if b"\0" in body:  # as UTF-16 and UTF-32 have
            raise ValueError(body)  # noqa: TRY301
        json.loads(body or b"{}", object_pairs_hook=_read_pairs)
    except (ValueError, RecursionError):
        raise RefusedError(400, "the body must be JSON in UTF-8") from None


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise RefusedError(422, "a field of the body is there twice")
    return dict(pairs)


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
