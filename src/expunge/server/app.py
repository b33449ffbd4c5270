"""The application: API and pages behind one gate, and the process that serves them."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio.to_thread
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from expunge.errors import ExpungeError, InputError
from expunge.ledger.ledger import Ledger
from expunge.server import api, pages
from expunge.server.desk import Desk
from expunge.server.gate import LOOPBACK, Gate, is_loopback
from expunge.server.limits import Limits
from expunge.server.refusals import RefusedError, describe_problems, translate
from expunge.server.service import Service

THREADS = 12  # of which each may hold one connection to the database
ABOUT = "Requests of people to be forgotten, and the certified releases that answer them."


def make_app(
    ledger: Ledger,
    *,
    names: tuple[str, ...] = (),
    limits: Limits | None = None,
    desk: Desk | None = None,
) -> FastAPI:
    """The application; it answers to the names of this machine's loopback and to ``names``."""
    service = Service(ledger, desk or Desk(ledger), limits or Limits())

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncGenerator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        service.desk.start()
        yield
        service.desk.stop()

    app = FastAPI(
        title="expunge ledger", description=ABOUT, version="1", lifespan=live,
        openapi_url="/api/openapi.json", docs_url=None, redoc_url=None,
        swagger_ui_oauth2_redirect_url=None, redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )  # fmt: skip
    app.state.service = service
    app.include_router(api.router)
    app.include_router(pages.router)
    app.add_middleware(Gate, hosts=(*LOOPBACK, *names), limits=service.limits)
    kinds: list[type[Exception]] = [
        RefusedError, ExpungeError, RequestValidationError, HTTPException, pages.SignInNeededError
    ]  # fmt: skip
    for kind in kinds:
        app.add_exception_handler(kind, explain)
    return app


def explain(request: Request, error: Exception) -> Response:
    """The answer to what went wrong: JSON for programs, a page for people."""
    if isinstance(error, pages.SignInNeededError):
        return pages.go("/sign-in")
    refused = _read(error)
    if request.url.path.startswith("/api"):
        headers = {"Retry-After": str(refused.wait)} if refused.wait else {}
        if refused.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse({"detail": refused.sentence}, refused.status, headers)
    try:
        visitor = pages.find_visitor(request, request.app.state.service)
    except RefusedError:
        return Response(refused.sentence, refused.status, media_type="text/plain")
    return pages.show_error(visitor, refused)


def _read(error: Exception) -> RefusedError:
    match error:
        case RefusedError():
            return error
        case ExpungeError():
            return translate(error)
        case RequestValidationError():
            status = 404 if any("path" in one["loc"][:1] for one in error.errors()) else 422
            return RefusedError(status, describe_problems(error.errors()))
        case HTTPException():
            known: dict[int, str] = {404: "there is no such page", 405: "this is not done so"}
            return RefusedError(error.status_code, known.get(error.status_code, "refused"))
        case _:
            raise error


def serve(
    ledger: Ledger,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    names: tuple[str, ...] = (),
    tell: Callable[[str], None] = print,
) -> None:
    """Serve a ledger until the process is stopped."""
    logging.getLogger("expunge.server").setLevel(logging.INFO)
    bound = _bind(host, port)
    place = bound.getsockname()[1]
    own = () if host in ("0.0.0.0", "::") else (host.lower(),)
    shown = f"[{host}]" if ":" in host else host
    tell(f"the ledger is served on http://{shown}:{place}")
    if not is_loopback(host):
        tell(
            f"  warning: {host} can be reached from other machines, without encryption. Whoever "
            "listens can read tokens; browsers sign in only over TLS. Put a proxy with TLS in "
            "front and serve on 127.0.0.1, with --name for the name that people type"
        )
    config = uvicorn.Config(
        make_app(ledger, names=(*own, *(name.lower() for name in names))),
        log_config=None, access_log=False, server_header=False, date_header=True,
        proxy_headers=False, ws="none", http="h11", workers=1, limit_concurrency=200,
        timeout_keep_alive=10, h11_max_incomplete_event_size=16_384, timeout_graceful_shutdown=10,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[bound])


def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens before anybody is told of it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{host} port {port} cannot be listened on: {reason}") from None
    made.listen(128)
    return made
