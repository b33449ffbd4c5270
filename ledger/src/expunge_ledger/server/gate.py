"""What every request passes first and every answer last: headers, times, rates, the log.

Hosts, sizes, sessions and compression are Starlette's; rates by address and slow headers are the
proxy's. The log has method, route, status, time and the name of the token. A route is a pattern of
ours, such as /requests/{number}: whatever was written into an address is not in the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expunge_ledger.server.schemas import RefusedError

LOG = logging.getLogger("expunge_ledger.server")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "X-Robots-Tag": "noindex",
    "Cache-Control": "no-store",
}
ONCE = ("host", "authorization", "cookie", "content-type", "content-length", "origin")
METHODS = ("GET", "HEAD", "POST")


@dataclass(frozen=True)
class Limits:
    """Sizes, times, and rates as (at most at once, so many a second over time)."""

    body_bytes: int = 65_536
    body_seconds: float = 10.0
    url_bytes: int = 2_000
    token: tuple[float, float] = (200, 40)
    failures: tuple[float, float] = (10, 0.2)


class Buckets:
    """A bucket of drops for each key; a request takes one.

    >>> buckets = Buckets((2, 1e-3))
    >>> [buckets.take("a") for _ in range(2)], buckets.take("a") > 900, buckets.take("b")
    ([0, 0], True, 0)
    """

    def __init__(self, rate: tuple[float, float]) -> None:
        self.rate, self._lock = rate, threading.Lock()
        self._left = OrderedDict[str, tuple[float, float]]()

    def take(self, key: str) -> int:
        """0 if there was a drop, else the seconds after which there is one."""
        (burst, rate), now = self.rate, time.monotonic()
        with self._lock:
            left, then = self._left.pop(key, (burst, now))
            left = min(burst, left + (now - then) * rate)
            missing = max(0.0, 1 - left)
            self._left[key] = (left if missing else left - 1, now)
            if len(self._left) > 10_000:
                self._left.popitem(last=False)
        return math.ceil(missing / rate)


class Gate:
    """Around the whole application."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status, whole = time.monotonic(), 0, False
        until = asyncio.get_running_loop().time() + self.limits.body_seconds

        async def receive_soon() -> Message:
            nonlocal whole
            try:
                async with asyncio.timeout_at(None if whole else until):
                    message = await receive()
            except TimeoutError:
                raise RefusedError(408, "the body came too slowly") from None
            whole = not message.get("more_body", False)
            return message

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        scope.setdefault("state", {})
        try:
            self._check(scope)
            await self.app(scope, receive_soon, send_on)
        except RefusedError as refused:
            close = {"Connection": "close"} if refused.status_code == 408 else {}
            answer = JSONResponse({"detail": str(refused)}, refused.status_code, close)
            await answer(scope, receive, send_on)
        except Exception as error:
            LOG.error("%s while answering", type(error).__name__)  # noqa: TRY400
            if not status:
                answer = JSONResponse({"detail": "something is broken here"}, 500)
                await answer(scope, receive, send_on)
        finally:
            route = getattr(scope.get("route"), "path", "(no route)")
            method = scope["method"] if scope["method"] in METHODS else "(other)"
            spent, who = 1000 * (time.monotonic() - began), scope["state"].get("token", "-")
            LOG.info("%s %s %s %.0f ms %s", method, route, status, spent, who)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        for name in ONCE:
            if len(headers.getlist(name)) > 1:
                raise RefusedError(400, f"the header {name} is there twice")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers and "content-length" in headers:
            raise RefusedError(400, "Content-Length and Transfer-Encoding are both there")
        if not (length.isascii() and length.isdigit()) or len(length) > 12:
            raise RefusedError(400, "Content-Length must be a number")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > self.limits.url_bytes:
            raise RefusedError(414, f"the address is longer than {self.limits.url_bytes:,} bytes")
        if scope["method"] not in METHODS:
            raise RefusedError(405, "only GET and POST are known here")


def check_type(request: Request, body: bytes, needed: str) -> None:
    """A body has one right kind, and only POST has one."""
    if body and request.method != "POST":
        raise RefusedError(400, "only POST has a body here")
    kind, _, rest = request.headers.get("content-type", "").partition(";")
    charset = rest.strip().lower().replace('"', "")
    if body and (kind.strip().lower() != needed or charset not in ("", "charset=utf-8")):
        raise RefusedError(415, f"the body must be {needed} in UTF-8")


class StrictRoute(APIRoute):
    """A route of the API: its body is JSON that no two programs read in two ways."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the checks of the body."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            body = await request.body()
            check_type(request, body, "application/json")
            try:
                if b"\0" in body:
                    raise ValueError(body)  # noqa: TRY301
                text = body.decode("utf-8-sig")
                json.loads(text or "{}", object_pairs_hook=_read_pairs)
            except (ValueError, RecursionError):
                raise RefusedError(400, "the body must be JSON in UTF-8") from None
            request._body = text.encode()  # pyright: ignore[reportPrivateUsage]
            return await handle(request)

        return handle_strictly


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise RefusedError(422, "a field of the body is there twice")
    return dict(pairs)
