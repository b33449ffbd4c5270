"""A ledger that is served: in this process for the fast tests, in one of its own for the others."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

import expunge
from expunge.ledger.tokens import make_token
from expunge.server.app import make_app
from expunge.server.desk import Desk
from expunge.server.limits import Limits, Rate
from ledger_life import make_state

LOOSE = Limits(address=Rate(1e9, 1e9), token=Rate(1e9, 1e9), failures=Rate(1e9, 1e9))
ROLES = ("requester", "operator", "auditor")


def make_tokens(ledger: expunge.Ledger) -> dict[str, str]:
    """A token of each role, and of each role for the second model alone."""
    tokens = {role: make_token(ledger.engine, role, role) for role in ROLES}
    for role in ROLES:
        name = f"{role}-search"
        tokens[name] = make_token(ledger.engine, name, role, "search")
    return tokens


class Running:
    """A process of ``expunge serve``, and where it listens."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.log = log.open("ab")
        command = [sys.executable, "-m", "expunge", "serve", "--port", "0"]
        command += ["--ledger", f"sqlite:///{folder}/ledger.db", "--key", f"{folder}/ledger.key"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stdout is not None
        told = self.process.stdout.readline()
        found = re.search(r"http://[\d.:]+", told)
        assert found, f"{told!r} {log.read_text()}"
        self.url = found[0]

    def kill(self) -> None:
        """As if the power failed."""
        self.process.kill()
        self._end()

    def stop(self) -> int:
        """As Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._end()

    def _end(self) -> int:
        code = self.process.wait(60)
        self.log.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def running(folder: Path, log: Path) -> Iterator[Running]:
    """A server, for a while."""
    made = Running(folder, log)
    try:
        yield made
    finally:
        made.kill()


def ask(url: str, token: str | None, data: Any = None, method: str | None = None) -> Any:
    """(status, JSON or bytes) of the API over a real connection."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    body = None
    if data is not None:
        body, headers["Content-Type"] = json.dumps(data).encode(), "application/json"
    made = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(made, timeout=60) as answer:
            status, raw, kind = answer.status, answer.read(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            status, raw, kind = error.code, error.read(), error.headers["Content-Type"]
    return status, json.loads(raw) if kind.startswith("application/json") else raw


class Life:
    """A ledger with two models, "shop" and "search", its tokens, and a client of its server."""

    def __init__(
        self, folder: Path, template: Path, limits: Limits = LOOSE, url: str | None = None
    ) -> None:
        self.folder = folder
        place = url or f"sqlite:///{folder}/ledger.db"
        self.ledger = expunge.Ledger.create(place, key=folder / "ledger.key")
        self.ledger.register("shop", shutil.copytree(template, folder / "shop"))
        self.ledger.register("search", make_state(folder / "search"))
        self.tokens = make_tokens(self.ledger)
        self.desk = Desk(self.ledger, pause=0.05)
        self.app = make_app(self.ledger, limits=limits, desk=self.desk)

    def open(self) -> TestClient:
        """A browser, or a program: it keeps its cookies and follows nothing by itself."""
        return TestClient(self.app, base_url="http://127.0.0.1:8000", follow_redirects=False)

    def ask(self, who: str | None, method: str, path: str, data: Any = None, **more: Any) -> Any:
        """An answer of the API to one of the tokens."""
        headers = {} if who is None else {"Authorization": f"Bearer {self.tokens.get(who, who)}"}
        given = {} if data is None else {"json": data}
        return self.client.request(method, f"/api{path}", headers=headers, **given, **more)

    def file(self, who: str, person: str, **given: Any) -> int:
        """The number of a request that is filed."""
        answer = self.ask(who, "POST", "/requests", {"person": person} | given)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()["number"]

    def work(self, model: str = "shop") -> None:
        """What the desk would do, here and now."""
        while self.ledger.work(model):
            pass

    def read_all(self) -> bytes:
        """Every byte of the database and of what lies beside it."""
        names = ("ledger.db", "ledger.db-wal", "ledger.db-shm")
        files = [self.folder / name for name in names]
        return b"".join(path.read_bytes() for path in files if path.exists())

    def __enter__(self) -> Life:
        self.client = self.open().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.client.__exit__(*error)
        self.ledger.close()


class Browser:
    """A signed-in browser without scripts: what a form sends, it sends."""

    def __init__(self, life: Life, who: str | None = None) -> None:
        self.client = life.open()
        if who is not None:
            answer = self.send("/sign-in", "/sign-in", token=life.tokens.get(who, who))
            assert answer.status_code == 303, answer.text

    def get(self, path: str) -> Any:
        """A page."""
        return self.client.get(path)

    def send(self, page: str, action: str, **fields: str) -> Any:
        """Send a form that stands on a page."""
        text = self.get(page).text
        assert f'action="{action}"' in text, text
        return self.post(action, form_token=read_form_token(text), **fields)

    def post(self, action: str, headers: Any = None, **fields: str) -> Any:
        """Send fields, as a page of the server would."""
        own = {"Origin": "http://127.0.0.1:8000"} if headers is None else headers
        return self.client.post(action, data=fields, headers=own)


def read_form_token(text: str) -> str:
    """What the forms of a page carry."""
    found = re.search(r'name="form_token" value="([0-9a-f]{64})"', text)
    assert found, text
    return found[1]
