"""The application: API and pages behind one gate, and the process that serves them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio.to_thread
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles

from expunge import ExpungeError, InputError
from expunge_ledger.ledger import Ledger
from expunge_ledger.server import api, pages, sessions
from expunge_ledger.server.access import Server
from expunge_ledger.server.background import Background
from expunge_ledger.server.gate import RefusedError, describe_problems, pass_gate

THREADS, BODY = 12, 65_536  # each thread may have one connection to the database
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
ABOUT = "Requests of people to be forgotten, and the certified releases that answer them."
KNOWN = {404: "there is no such page", 405: "this is not done so", 413: "the body is too long"}


def make_app(
    ledger: Ledger, *, names: tuple[str, ...] = (), rate: tuple[float, float] = (200, 40),
    pause: float = 5.0,
) -> FastAPI:  # fmt: skip
    """The application; it answers to the names of this machine's loopback and to ``names``, which
    are those of a proxy with TLS: then cookies need TLS. ``rate``: how often a token may ask, at
    once and a second; ``pause``: see :class:`Background`."""
    server = Server(ledger, Background(ledger, pause=pause), rate)

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncGenerator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        server.background.start()
        yield

    app = FastAPI(
        title="expunge ledger", description=ABOUT, version="1", lifespan=live,
        openapi_url="/api/openapi.json", docs_url=None, redoc_url=None,
        swagger_ui_oauth2_redirect_url=None, redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )  # fmt: skip
    app.state.server, app.state.secure = server, bool(names)
    app.include_router(api.router)
    app.include_router(pages.router)
    app.mount("/assets", StaticFiles(directory=sessions.TEMPLATES.with_name("assets")))
    app.add_middleware(
        SessionMiddleware, secret_key=secrets.token_hex(32), same_site="strict",
        session_cookie="__Host-expunge" if names else "expunge", https_only=bool(names),
        max_age=sessions.REST,
    )  # fmt: skip
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=BODY)
    hosts = [*LOOPBACK, *(name.lower() for name in names)]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.add_middleware(BaseHTTPMiddleware, dispatch=pass_gate)
    for kind in (ExpungeError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, explain)
    return app


def explain(request: Request, error: Exception) -> Response:
    """The answer to what went wrong: JSON for programs, a page for people."""
    match error:
        case RequestValidationError():
            found = error.errors()
            status = 404 if any("path" in one["loc"][:1] for one in found) else 422
            refused = RefusedError(status, describe_problems(found))
        case HTTPException() if not isinstance(error, RefusedError):
            refused = RefusedError(error.status_code, KNOWN.get(error.status_code, "refused"))
        case _:
            refused = request.app.state.server.translate(error)
    if request.url.path.startswith("/api"):
        return JSONResponse({"detail": str(refused)}, refused.status_code, refused.headers)
    try:
        visitor = sessions.find_visitor(request)
    except RefusedError:
        return Response(str(refused), refused.status_code, media_type="text/plain")
    return visitor.show("error.html.j2", refused)


def run(
    ledger: Ledger, *, host: str = "127.0.0.1", port: int = 8000, names: tuple[str, ...] = (),
    say: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Serve a ledger until the process is stopped."""
    logging.getLogger("expunge_ledger.server").setLevel(logging.INFO)
    config = uvicorn.Config(
        make_app(ledger, names=names), host, port, log_config=None, access_log=False,
        server_header=False, proxy_headers=False, ws="none", http="h11", limit_concurrency=200,
        timeout_keep_alive=10, h11_max_incomplete_event_size=16_384, timeout_graceful_shutdown=10,
    )  # fmt: skip
    try:
        bound = config.bind_socket()
    except SystemExit:  # uvicorn has logged why; 1 would say that something does not hold
        raise InputError(
            f"port {port} of {host} cannot be served; stop what uses it, or name another"
        ) from None
    bound.listen(128)  # before anybody is sent to it
    shown = f"[{host}]" if ":" in host else host
    say(f"the ledger is served on http://{shown}:{bound.getsockname()[1]}")
    if host not in ("127.0.0.1", "localhost", "::1"):
        say(
            f"  warning: {host} can be reached from other machines, without encryption. Whoever "
            "listens can read tokens. Put a proxy with TLS in front and serve on 127.0.0.1, with "
            "--name for the name that people type"
        )
    uvicorn.Server(config).run(sockets=[bound])
