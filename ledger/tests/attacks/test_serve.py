"""Attempts to get past the server: refused, nothing changed, nothing said."""

import asyncio
import base64
import contextlib
import html
import json
import logging
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from fastapi.routing import APIRoute

from expunge_ledger import Ledger
from ledger.tests.server_run import Browser, Life, Running, ask, read_form_token
from ledger.tests.stand_in import learn_again

OWN = {"Origin": "http://127.0.0.1:8000"}


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    with Life(tmp_path) as made:
        made.file("operator", "person-1", model="shop")
        yield made


def list_routes(life: Life) -> list[tuple[str, str]]:
    """(method, path) of everything that is served, with names filled in."""
    document = life.client.get("/api/openapi.json").json()["paths"]
    found = [(method.upper(), path) for path, methods in document.items() for method in methods]
    from expunge_ledger.server.pages import router

    for route in router.routes:
        assert isinstance(route, APIRoute)
        found += [(method, route.path) for method in route.methods]
    given = {"number": "1", "model": "shop", "file": "certificate.json", "name": "page.css"}
    return [
        (m, re.sub(r"\{(\w+)(?::int)?\}", lambda part: given[part[1]], path)) for m, path in found
    ]


def send_raw(
    life: Life,
    method: str,
    path: str,
    headers: list[tuple[str, str]],
    parts: list[bytes] | None = None,
    *,
    pause: float = 0.0,
) -> tuple[int, bytes]:
    """A request as the server's own HTTP code would hand it over, with nothing made tidy."""
    raw, _, query = path.partition("?")
    given = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "path": raw, "raw_path": raw.encode(), "query_string": query.encode(), "root_path": "",
        "scheme": "http", "headers": given, "client": ("10.0.0.9", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    left, sent = list(parts or [b""]), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause)
        if not left:
            return {"type": "http.disconnect"}
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(life.app(scope, receive, send))
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:])


def test_without_a_token_nothing_opens(life: Life) -> None:
    open_to_all = {("GET", "/sign-in"), ("POST", "/sign-in"), ("GET", "/assets/page.css")}
    open_to_all |= {("POST", "/sign-out")}
    before = life.ledger.anchor()
    routes = list_routes(life)
    assert len(routes) > 38
    for method, path in routes:
        if (method, path) in open_to_all:
            continue
        sent = ("Bearer ", "Bearer expunge_x", f"Basic {life.tokens['operator']}",
                life.tokens["operator"], "Bearer " + "é" * 50, "Bearer " + "x" * 9000)  # fmt: skip
        others = ({}, {"X-Forwarded-User": "operator"}, {"Cookie": "expunge=operator"})
        for headers in (*others, *({"Authorization": one} for one in sent)):
            client = life.open()
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = client.request(method, path, headers=encoded)
            expected = (401, 422) if path.startswith("/api") else (303, 403)
            assert answer.status_code in expected, (method, path, answer.text)
            if answer.status_code == 303:
                assert answer.headers["location"] == "/sign-in"
    assert life.ledger.anchor() == before


def test_a_token_opens_no_page_and_a_cookie_opens_no_api(life: Life) -> None:
    officer = Browser(life, "operator")
    assert officer.get("/api/me").status_code == 401
    assert life.open().get("/", headers=life.bearer("operator")).status_code == 303


def test_every_form_needs_its_token_and_its_origin(life: Life) -> None:
    officer, other = Browser(life, "operator"), Browser(life, "operator")
    foreign = read_form_token(other.get("/").text)
    own = read_form_token(officer.get("/").text)
    before = life.ledger.anchor()
    posts = [path for method, path in list_routes(life) if method == "POST" and path[:5] != "/api/"]
    assert len(posts) >= 12
    fields = {"person": "person-2", "reason": "x", "token": life.tokens["operator"]}
    for path in posts:
        for token in (None, "", "0" * 64, foreign, own[:-1], own + "é"):
            given = fields | ({} if token is None else {"form_token": token})
            assert officer.post(path, **given).status_code == 403, (path, token)
        for headers in (
            {}, {"Origin": "null"}, {"Origin": "http://evil.example"},
            {"Origin": "http://127.0.0.1:9000"}, {"Origin": "https://127.0.0.1:8000"},
            {"Origin": "null", "Sec-Fetch-Site": "cross-site"},
            {"Origin": "null", "Sec-Fetch-Site": "none"},
            OWN | {"Sec-Fetch-Site": "same-site"},
            {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
        ):  # fmt: skip
            answer = officer.post(path, headers, form_token=own, **fields)
            assert answer.status_code == 403, (path, headers)
        url = f"{path}?{urlencode(fields | {'form_token': own})}"
        assert officer.client.post(url, headers=OWN).status_code == 403
        assert officer.get(url).status_code in (200, 303, 404, 405), "a link does nothing"
    assert life.ledger.anchor() == before
    browsers = {"Origin": "null", "Sec-Fetch-Site": "same-origin"}
    filed = officer.post("/requests", browsers, form_token=own, person="person-2")
    assert filed.status_code == 303


@pytest.mark.parametrize("prefix", ["/api", ""])
def test_only_two_files_leave_and_no_path_does(life: Life, prefix: str) -> None:
    life.work()
    (life.folder / "secret.txt").write_text("secret")
    officer = Browser(life, "operator")
    cookie = f"expunge={officer.client.cookies['expunge']}"
    headers = [("Host", "127.0.0.1:8000"), ("Cookie", cookie)]
    headers += [("Authorization", f"Bearer {life.tokens['operator']}")]
    good, _ = send_raw(life, "GET", f"{prefix}/models/shop/releases/1/certificate.json", headers)
    assert good == 200
    names = ["record.json", "report.html", "model-card.md", "public-key.pem", "model.safetensors",
             "ledger.json", "metrics.json",
             "certificate.json\0", "certificate.json/..", "CERTIFICATE.JSON", ".", "..",
             "../0001/record.json", "..%2frecord.json", "%2e%2e%2frecord.json", "..\\record.json",
             str(life.folder / "secret.txt"), "certificate.json%00.html", ""]  # fmt: skip
    places = [f"/models/shop/releases/1/{name}" for name in names]
    places += [f"/models/shop/releases/{n}/certificate.json" for n in
               ("0", "-1", "2", "01x", "1.0", "..", "9" * 30, "１", "1%2f..")]  # fmt: skip
    places += [f"/models/{n}/releases/1/certificate.json" for n in
               ("..", "nothing", "shop%00", "shop ", "SHOP", "x" * 500, "../shop", "shop/../shop",
                "'; drop table models; --")]  # fmt: skip
    places += [
        f"/assets/{n}" for n in ("../pages.py", "..%2fpages.py", "base.html.j2", "page.css/..")
    ]
    for place in places:
        status, body = send_raw(life, "GET", prefix + place, headers)
        assert status in (404, 405, 422), (place, status)
        assert b"secret" not in body
        assert b"root" not in body


def test_a_release_that_was_exchanged_does_not_leave(life: Life) -> None:
    life.work()
    directory = life.ledger.models("shop")[0].releases[0].directory
    private = (directory / "record.json").read_bytes()
    (directory / "certificate.json").unlink()
    (directory / "certificate.json").symlink_to(directory / "record.json")
    for file in ("certificate.json", "statement.txt"):
        answer = life.ask("operator", "GET", f"/models/shop/releases/1/{file}")
        assert answer.status_code == 409
        assert answer.content not in private


def generate_bodies(count: int, seed: int) -> Iterator[bytes]:
    """Bodies that no route takes: cut, changed, of wrong types, nested, repeated, not text."""
    draw = random.Random(seed)
    good = {"person": "person-2", "model": "shop", "received": "2026-01-05", "reason": "by letter"}
    odd: list[Any] = [
        None, True, 0, -1, 1e308, "", [], {}, ["person-2"], {"a": 1}, "x" * 3000, "\ud800", "\x00",
        "a\u200b", "9999-99-99", "2026-02-30", "\u202e", 10**400, "../..", "' or 1=1 --",
    ]  # fmt: skip
    for _ in range(count):
        match draw.randrange(7):
            case 0:
                yield draw.randbytes(draw.randrange(1, 400))
            case 1:
                text = json.dumps(good).encode()
                yield text[: draw.randrange(1, len(text))]
            case 2:
                field = draw.choice(["person", "received", "model"])
                value = draw.choice([one for one in odd if one is not None or field == "person"])
                yield json.dumps(good | {field: value}).encode()
            case 3:
                yield json.dumps(
                    good | {draw.choice(["state", "__class__", "", "token"]): 1}
                ).encode()
            case 4:
                depth = draw.randrange(1, 20_000)
                yield b"[" * depth + b"]" * draw.randrange(depth)
            case 5:
                yield json.dumps(draw.choice([one for one in odd if one != {}])).encode()
            case _:
                text = bytearray(json.dumps(good).encode())
                text[draw.randrange(len(text))] = draw.randrange(128, 256)
                yield bytes(text)


def test_500_malformed_bodies_change_nothing(life: Life) -> None:
    posts = ["", "/find", "/1/refuse", "/1/withdraw"]
    posts = [*(f"/requests{end}" for end in posts), "/evidence"]
    before, seen = life.ledger.anchor(), set[int]()
    headers = life.bearer("operator") | {"Content-Type": "application/json"}
    for place, body in enumerate(generate_bodies(500, seed=19)):
        path = posts[place % len(posts)]
        answer = life.client.post(f"/api{path}", content=body, headers=headers)
        seen.add(answer.status_code)
        assert answer.status_code in (400, 413, 422), (path, body, answer.text)
        assert "person-2" not in answer.text
        assert set(answer.json()) == {"detail"}
    assert life.ledger.anchor() == before
    assert 422 in seen


def test_500_malformed_forms_change_nothing(life: Life) -> None:
    officer, draw = Browser(life, "operator"), random.Random(20)
    token = read_form_token(officer.get("/").text)
    headers = OWN | {"Content-Type": "application/x-www-form-urlencoded"}
    before = life.ledger.anchor()
    good = f"form_token={token}&person=person-2&model=shop"
    for place in range(500):
        match place % 5:
            case 0:
                body = draw.randbytes(draw.randrange(1, 300))
            case 1:
                body = f"{good}&{draw.choice(['person', 'form_token'])}=person-3".encode()
            case 2:
                body = good.encode() + b"&reason=%" + draw.choice([b"ff", b"C3%28", b"ED%A0%80"])
            case 3:
                body = (good + "&x=1" * draw.randrange(20, 200)).encode()
            case _:
                field = draw.choice(["received", "due"])
                body = (
                    f"{good}&{field}={quote(draw.choice(['x', '1', '2026-99-99', '٢٠٢٦-01-01']))}"
                )
                body = body.encode()
        answer = officer.client.post("/requests", content=body, headers=headers)
        assert answer.status_code in (400, 403, 422), (body, answer.status_code)
        assert "person-2" not in answer.text
    assert life.ledger.anchor() == before


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/xml", "multipart/form-data; boundary=x",
             "application/json; charset=utf-16", "application/jsonp",
             "application/x-www-form-urlencoded, application/json"],
)  # fmt: skip
def test_only_one_content_type_is_read(life: Life, kind: str) -> None:
    before = life.ledger.anchor()
    headers = {"Authorization": f"Bearer {life.tokens['operator']}", "Content-Type": kind}
    body = json.dumps({"person": "person-2"}).encode()
    assert life.client.post("/api/requests", content=body, headers=headers).status_code == 415
    officer = Browser(life, "operator")
    token = read_form_token(officer.get("/").text)
    form = urlencode({"form_token": token, "person": "person-2"}).encode()
    answer = officer.client.post("/requests", content=form, headers=OWN | {"Content-Type": kind})
    assert answer.status_code == 415
    assert life.ledger.anchor() == before


def test_bodies_that_are_large_slow_or_lie(life: Life) -> None:
    host, kind = ("Host", "127.0.0.1"), ("Content-Type", "application/json")
    who = ("Authorization", f"Bearer {life.tokens['operator']}")
    before = life.ledger.anchor()
    large = json.dumps({"person": "p" * 70_000}).encode()
    for length in (str(len(large)), "5", None):
        told = [host, kind, who] + ([] if length is None else [("Content-Length", length)])
        pieces = [large[i : i + 1000] for i in range(0, len(large), 1000)]
        assert send_raw(life, "POST", "/api/requests", told, pieces)[0] == 413
    for length in ("-1", "1e3", "０", "1_000", "9" * 40, "x"):
        told = [host, kind, who, ("Content-Length", length.encode().decode("latin-1"))]
        assert send_raw(life, "POST", "/api/requests", told, [b"{}"])[0] in (400, 413)
    whole = b'{"person": "person-2"}'
    assert send_raw(life, "GET", "/api/me", [host, kind, who], [whole])[0] == 400
    twice = [("Content-Length", "22"), ("Transfer-Encoding", "chunked")]
    assert send_raw(life, "POST", "/api/requests", [host, kind, who, *twice], [whole])[0] == 400
    assert life.ledger.anchor() == before


def test_header_tricks(life: Life) -> None:
    who = ("Authorization", f"Bearer {life.tokens['operator']}")
    host = ("Host", "127.0.0.1:8000")
    assert send_raw(life, "GET", "/api/me", [host, who])[0] == 200
    for name in ("evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "", "[::1",
                 "localhost:80:80", "127.0.0.1:8000#", "evil.example:8000", "LOCALHOST.", "0.0.0.0",
                 "127.0.0.1,evil.example", "127.0.0.1 evil.example"):  # fmt: skip
        assert send_raw(life, "GET", "/api/me", [("Host", name), who])[0] == 400, name
    assert send_raw(life, "GET", "/api/me", [who])[0] == 400
    for twice in (host, who, ("Origin", "http://a"), ("Cookie", "expunge=x")):
        assert send_raw(life, "GET", "/api/me", [host, who, twice, twice])[0] == 400
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "CONNECT", "get", "X" * 100):
        assert send_raw(life, method, "/api/me", [host, who])[0] == 405
    override = [host, who, ("X-HTTP-Method-Override", "POST"), ("X-Forwarded-Host", "evil.example")]
    status, body = send_raw(life, "GET", "/api/requests/1", override)
    assert status == 200
    assert b"evil" not in body
    for name in ("localhost", "[::1]:8000", "LOCALHOST:1"):
        assert send_raw(life, "GET", "/api/me", [("Host", name), who])[0] == 200


def test_websockets_are_closed(life: Life) -> None:
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), life.client.websocket_connect("/"):
        pass


def test_rates_are_limited_by_token(tmp_path: Path) -> None:
    with Life(tmp_path, (5.0, 1e-6)) as life:
        before = life.ledger.anchor()
        codes = [life.ask("auditor", "GET", "/me").status_code for _ in range(7)]
        assert codes == [200] * 5 + [429] * 2
        assert life.ask("operator", "GET", "/me").status_code == 200, "others are not slowed"
        slowed = Browser(life).send("/sign-in", "/sign-in", token=life.tokens["auditor"])
        assert (slowed.status_code, int(slowed.headers["retry-after"]) > 0) == (429, True)
        icons = [life.client.get("/assets/icon.svg").status_code for _ in range(213)]
        assert set(icons) == {200}
        assert life.ask("operator", "GET", "/me").status_code == 200, "nobody is locked out"
        assert life.ledger.anchor() == before


def test_what_a_person_types_is_never_markup(life: Life) -> None:
    officer = Browser(life, "operator")
    bad = "<script>alert(1)</script>\"'><img src=x onerror=1>{{ 7*7 }}"
    officer.send("/requests/1", "/requests/1/refuse", reason=bad)
    text = officer.get("/requests/1").text
    assert "<script>alert" not in text
    assert "<img" not in text
    assert html.escape(bad, quote=False)[:20] in text
    for query in (f"state={quote(bad)}", f"model={quote(bad)}", f"pace={quote(bad)}"):
        assert "alert(1)" not in officer.get(f"/?{query}").text


def test_no_identifier_is_in_database_log_or_answer(
    life: Life, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A person with a name that can be searched for, through everything that the server does."""
    caplog.set_level(logging.DEBUG)
    name = "zoë.o'brien+wx8842@example.org"
    learn_again(life.folder / "shop", name)
    answers = list[bytes]()
    officer, desk = Browser(life, "operator"), Browser(life, "requester")
    for browser in (officer, desk):
        kept = browser.client.send

        def send(*given: Any, kept: Any = kept, **more: Any) -> Any:
            answer = kept(*given, **more)
            answers.append(answer.content + repr(answer.headers).encode())
            return answer

        browser.client.send = send  # type: ignore[method-assign]
    desk.send("/requests/new", "/requests", person=name, model="shop", reason="a letter")
    desk.send("/requests/new", "/requests", person=name, received="2999-01-01")
    officer.send("/find", "/find", person=name)
    for data in ({"model": name}, {"received": name}, {name: 1}, {"person": [name]},
                 {"due": "2000-01-01"}):  # fmt: skip
        answer = life.ask("requester", "POST", "/requests", {"person": name} | data)
        assert answer.status_code == 422
        answers.append(answer.content)
    for path in (f"/requests/{name}", f"/requests?state={name}", f"/models/{name}", f"/{name}"):
        answers.append(life.ask("operator", "GET", path).content)
        officer.get(path)
    (done,) = life.ledger.work("shop")
    assert done.forgotten == 2
    for path in ("/", "/requests/2", "/models", "/models/shop", "/find"):
        officer.get(path)
        desk.get(path)
    for path in ("/requests", "/requests/2", "/requests/2/events", "/models/shop", "/work"):
        answers.append(life.ask("operator", "GET", path).content)
    for file in ("certificate.json", "statement.txt"):
        answers.append(life.ask("requester", "GET", f"/models/shop/releases/1/{file}").content)
    for path in ("/requests/2/verify", "/models/shop/verify", "/verify"):
        answers.append(life.ask("auditor", "POST", path).content)
    logged = "".join(record.getMessage() + repr(record.args) for record in caplog.records
                     if not record.name.startswith(("httpx", "asyncio")))  # fmt: skip
    assert "/api/requests/{number}" in logged
    printed = "".join(capfd.readouterr())
    everything = [life.read_all(), logged.encode(), printed.encode(), *answers]
    raw = name.encode()
    forms = [raw, html.escape(name).encode(), quote(name).encode(), json.dumps(name)[1:-1].encode(),
             base64.b64encode(raw)[:20], raw.hex().encode(), name.encode("utf-16-le"),
             b"wx8842", b"brien"]  # fmt: skip
    for place, data in enumerate(everything):
        for form in forms:
            assert form not in data, (place, form)
    assert life.ledger.verify().requests == 2
    exported = life.ask("operator", "POST", "/evidence", {"person": name})
    assert exported.status_code == 200


def test_a_defect_tells_nothing(life: Life, monkeypatch: pytest.MonkeyPatch,
                                caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("person-2 broke it")

    monkeypatch.setattr(Ledger, "models", fail)
    caplog.set_level(logging.DEBUG)
    answer = life.ask("operator", "GET", "/me")
    assert (answer.status_code, answer.json()) == (500, {"detail": "something is broken here"})
    assert "RuntimeError" in caplog.text
    assert "person-2" not in caplog.text


@pytest.mark.slow
def test_bytes_that_are_no_request_over_a_real_connection(life: Life, tmp_path: Path) -> None:
    """Requests within requests, headers without end, bodies that never come: the server lives."""
    before = life.ledger.anchor()
    who = f"Authorization: Bearer {life.tokens['operator']}\r\n"
    head = (
        f"POST /api/requests HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{who}"
    )
    body = '{"person": "person-2"}'
    inner = f"POST /api/requests HTTP/1.1\r\nHost: 127.0.0.1\r\n{who}\r\n"
    sent = [
        f"{head}Content-Length: {len(body)}\r\nContent-Length: 5\r\n\r\n{body}",
        f"{head}Content-Length: {len(body)}\r\nTransfer-Encoding: identity\r\n\r\n{body}",
        f"{head}Content-Length: {len(body)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{body}",
        f"{head}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{body}",
        f"{head}Transfer-Encoding: chunked\r\n\r\nZZ\r\n{body}",
        f"{head}Content-Length: +{len(body)}\r\n\r\n{body}",
        f"{head}Content-Length : {len(body)}\r\n\r\n{body}",
        f"{head}X: {'x' * 100_000}\r\n\r\n",
        f"{head}Content-Length: 500\r\n\r\n{body}",
        f"GET /api/me HTTP/1.1\r\nHost: evil.example\r\n{who}\r\n",
        f"GET /api/me HTTP/1.1\nHost: 127.0.0.1\nHost: evil.example\n{who}\n",
        "GET http://evil.example/api/me HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        f"GET /\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n{inner}",
        "\x16\x03\x01\x02\x00\x01\x00", "\r\n" * 1000, "GET", "",
    ]  # fmt: skip
    with Running(life.folder, tmp_path / "log") as server:
        host, port = server.url.removeprefix("http://").split(":")
        for text in sent:
            with socket.create_connection((host, int(port)), 60) as connection:
                connection.sendall(text.encode("latin-1"))
                connection.shutdown(socket.SHUT_WR)
                answer = b""
                with contextlib.suppress(ConnectionError):
                    while part := connection.recv(65536):
                        answer += part
            assert not re.search(rb"^HTTP/1.1 2", answer, flags=re.MULTILINE), (text, answer)
        assert ask(f"{server.url}/api/me", life.tokens["operator"])[0] == 200
        assert life.ledger.anchor() == before
    assert "person-2" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "given", [0, 1769817600, 1769817600.0, "1769817600", "2026-01-31T00:00:00+14:00", "20260131",
              "2026-W05-1", "2026-01-31 ", True, "2026-02-30"],
)  # fmt: skip
def test_a_day_is_written_in_one_way(life: Life, given: object) -> None:
    """Seconds since 1970 were a day of UTC, whatever day it was where the letter came."""
    before = len(life.ledger.requests())
    for name in ("received", "due"):
        answer = life.ask("operator", "POST", "/requests", {"person": "person-1", name: given})
        assert answer.status_code == 422, answer.text
    assert len(life.ledger.requests()) == before


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"person": "person-1", "person": "person-2"}', 422),
        (b'\xef\xbb\xbf{"person": "person-1", "person": "person-2"}', 422),
        (b'{"person": "person-1", "\\u0070erson": "person-2"}', 422),
        ('{"person": "person-1"}'.encode("utf-16"), 400),
        ('{"person": "person-1"}'.encode("utf-32-le"), 400),
        (b'{"person": "\xff"}', 400),
        (b"[" * 20_000, 400),
    ],
)
def test_a_body_that_can_be_read_in_two_ways(life: Life, body: bytes, status: int) -> None:
    """Of two people in one body the first was lost, with the answer that all is well."""
    before = len(life.ledger.requests())
    headers = life.bearer("operator") | {"Content-Type": "application/json"}
    for path in ("/api/requests", "/api/verify"):  # which takes a body, and which does not
        answer = life.client.post(path, content=body, headers=headers)
        assert answer.status_code == status, (path, answer.text)
    assert len(life.ledger.requests()) == before
