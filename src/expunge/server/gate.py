"""What every request passes first and every answer last: hosts, sizes, rates, headers, the log.

The log has method, route, status, time and the name of the token. A route is a pattern of ours,
such as /requests/{number}: whatever was written into an address is not in the log.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from expunge.server.limits import Buckets, Limits
from expunge.server.refusals import RefusedError

LOG = logging.getLogger("expunge.server")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
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
}
ONCE = (b"host", b"authorization", b"cookie", b"content-type", b"content-length", b"origin")
JSON, FORM = "application/json", "application/x-www-form-urlencoded"


class Gate:
    """Around the whole application; ``hosts`` are the names it answers to."""

    def __init__(self, app: App, hosts: tuple[str, ...], limits: Limits) -> None:
        self.app, self.hosts, self.limits = app, hosts, limits
        self.addresses = Buckets(limits.address)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 0

        async def send_on(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _add_headers(message.get("headers", []))
            await send(message)

        scope.setdefault("state", {})
        try:
            headers = read_headers(scope)
            self._check(scope, headers)
            body = await self._read_body(scope, headers, receive)
            await self.app(scope, _repeat(body, receive), send_on)
        except RefusedError as refused:
            await _refuse(refused, send_on)
        except Exception as error:
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            where = "" if place is None else f"{place.tb_frame.f_code.co_name}:{place.tb_lineno}"
            LOG.error("%s in %s", type(error).__name__, where)  # noqa: TRY400
            if not status:
                await _refuse(RefusedError(500, "something is broken here"), send_on)
        finally:
            route = getattr(scope.get("route"), "path", "(no route)")
            spent = 1000 * (time.monotonic() - began)
            who = scope["state"].get("token", "-")
            LOG.info("%s %s %s %.0f ms %s", _name_method(scope), route, status, spent, who)

    def _check(self, scope: Scope, headers: dict[bytes, str]) -> None:
        address = (scope.get("client") or ("nobody", 0))[0]
        if wait := self.addresses.take(address):
            raise RefusedError(429, "too many requests from this address", wait)
        if read_host(headers.get(b"host", "")) not in self.hosts:
            raise RefusedError(421, "this server does not answer to this host name")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > self.limits.url_bytes:
            raise RefusedError(414, f"the address is longer than {self.limits.url_bytes:,} bytes")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise RefusedError(405, "only GET and POST are known here")

    async def _read_body(self, scope: Scope, headers: dict[bytes, str], receive: Receive) -> bytes:
        """The whole body, if it is small enough, soon enough, and of the one right kind."""
        most = self.limits.body_bytes
        told = headers.get(b"content-length", "0")
        if not (told.isascii() and told.isdigit()) or len(told) > 12:
            raise RefusedError(400, "Content-Length must be a number")
        if int(told) > most:
            raise RefusedError(413, f"the body is longer than {most:,} bytes")
        parts = list[bytes]()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusedError(400, "the body ended early")
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    if sum(map(len, parts)) > most:
                        raise RefusedError(413, f"the body is longer than {most:,} bytes")
        except TimeoutError:
            raise RefusedError(408, "the body came too slowly") from None
        body = b"".join(parts)
        if body and scope["method"] != "POST":
            raise RefusedError(400, "only POST has a body here")
        needed = JSON if scope["path"].startswith("/api/") else FORM
        kind, _, rest = headers.get(b"content-type", "").partition(";")
        charset = rest.strip().lower().replace('"', "")
        if body and (kind.strip().lower() != needed or charset not in ("", "charset=utf-8")):
            raise RefusedError(415, f"the body must be {needed} in UTF-8")
        if body and needed == JSON:
            check_json(body)
        return body


def check_json(body: bytes) -> None:
    """Refuse what two programs could read in two ways: another encoding, a name that is there
    twice. What is no JSON at all is found later."""

    def check(pairs: list[tuple[str, object]]) -> None:
        if len({name for name, _ in pairs}) != len(pairs):
            raise RefusedError(422, "a field of the body is there twice")

    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise RefusedError(400, f"the body must be {JSON} in UTF-8")
    try:
        json.loads(text, object_pairs_hook=check)
    except (ValueError, RecursionError):
        return


def read_headers(scope: Scope) -> dict[bytes, str]:
    """Headers by name; those that must not be there twice are not."""
    found = dict[bytes, str]()
    for name, value in scope["headers"]:
        if name in ONCE and name in found:
            raise RefusedError(400, f"the header {name.decode()} is there twice")
        found[name] = value.decode("latin-1")
    return found


def read_host(given: str) -> str:
    """The name in a Host header, without its port; nothing if it is not one.

    >>> [read_host(one) for one in ("Localhost:8000", "[::1]:80", "a.org", "a.org:x", "a@b", "")]
    ['localhost', '::1', 'a.org', '', '', '']
    """
    name, bracket, port = given.strip().lower().rpartition("]")
    if bracket:
        name = name.removeprefix("[")
        port = port.removeprefix(":") if port.startswith(":") or not port else "x"
    else:
        name, _, port = given.strip().lower().partition(":")
    fits = all(c.isascii() and (c.isalnum() or c in ".-_:") for c in name)
    return name if fits and (not port or (port.isascii() and port.isdigit())) else ""


def is_loopback(host: str) -> bool:
    """Whether a name can only mean this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _add_headers(given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    there = {name.lower() for name, _ in given}
    ours = {"Cache-Control": "no-store", **HEADERS}
    made = [(name.lower().encode(), value.encode()) for name, value in ours.items()]
    return [*given, *(pair for pair in made if pair[0] not in there)]


def _repeat(body: bytes, receive: Receive) -> Receive:
    """What was read, told once more."""
    told = False

    async def receive_again() -> MutableMapping[str, Any]:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def _refuse(refused: RefusedError, send: Send) -> None:
    body = json.dumps({"detail": refused.sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if refused.wait:
        headers.append((b"retry-after", b"%d" % refused.wait))
    if refused.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _name_method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "(other)"
