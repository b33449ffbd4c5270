"""A ledger that is served: in this process for the fast tests, in one of its own for the others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from expunge_ledger import Ledger
from expunge_ledger.server.app import make_app
from ledger.tests.stand_in import make_state

ROLES = ("requester", "operator", "auditor")
COMMAND = (
    "from ledger.tests import stand_in; stand_in.install(); "
    "from expunge_ledger.command import main; main()"
)
ROOT = Path(__file__).parents[2]


def make_tokens(ledger: Ledger) -> dict[str, str]:
    """A token of each role, and of each role for the second model alone."""
    tokens = {role: ledger.make_token(role, role) for role in ROLES}
    return tokens | {
        f"{role}-search": ledger.make_token(f"{role}-search", role, "search") for role in ROLES
    }


class Running:
    """A process of ``expunge-ledger serve``, and where it listens."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.log = log.open("ab")
        command = [sys.executable, "-c", COMMAND, "serve", "--port", "0"]
        command += ["--ledger", f"sqlite:///{folder}/ledger.db", "--key", f"{folder}/ledger.key"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.search(r"http://[\d.:]+", said)
        assert found, f"{said!r} {log.read_text()}"
        self.url = found[0]

    def kill(self) -> None:
        """As if the power failed."""
        self.process.kill()
        self.process.wait(60)
        self.log.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


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
        self, folder: Path, rate: tuple[float, float] = (1e9, 1e9), url: str | None = None
    ) -> None:
        self.folder = folder
        place = url or f"sqlite:///{folder}/ledger.db"
        self.ledger = Ledger.create(place, key=folder / "ledger.key")
        for name in ("shop", "search"):
            self.ledger.register(name, make_state(folder / name))
        self.tokens = make_tokens(self.ledger)
        self.app = make_app(self.ledger, rate=rate, pause=0.05)

    def open(self) -> TestClient:
        """A browser, or a program: it keeps its cookies and goes nowhere by itself."""
        return TestClient(self.app, base_url="http://127.0.0.1:8000", follow_redirects=False)

    def ask(self, who: str | None, method: str, path: str, data: Any = None, **more: Any) -> Any:
        """An answer of the API to one of the tokens."""
        headers = {} if who is None else self.bearer(who)
        given = {} if data is None else {"json": data}
        return self.client.request(method, f"/api{path}", headers=headers, **given, **more)

    def bearer(self, who: str) -> dict[str, str]:
        """The header that one of the tokens is sent in."""
        return {"Authorization": f"Bearer {self.tokens.get(who, who)}"}

    def let_work(self, model: str) -> Any:
        """Press the button; what is said at the end."""
        self.ask("operator", "POST", f"/models/{model}/work")
        until = time.monotonic() + 120
        while not (now := self.ask("operator", "GET", "/work").json()[0])["over"]:
            assert time.monotonic() < until
            time.sleep(0.02)
        return now

    def file(self, who: str, person: str, **given: Any) -> int:
        """The number of a request that is filed."""
        answer = self.ask(who, "POST", "/requests", {"person": person} | given)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()["number"]

    def work(self, model: str = "shop") -> None:
        """What the server would do in the background, here and now."""
        while self.ledger.work(model):
            pass

    def read_all(self) -> bytes:
        """Every byte of the database and of what lies beside it."""
        files = [self.folder / f"ledger.db{end}" for end in ("", "-wal", "-shm")]
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
        """Send a form that is on a page."""
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
