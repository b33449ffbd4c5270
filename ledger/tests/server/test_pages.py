"""The pages: what an officer can do with them, and what they never show."""

import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from ledger.tests.server_run import Browser, Life, read_form_token

PUBLIC = ("/sign-in",)


class Page(HTMLParser):
    """What is wrong with a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.ids: Counter[str] = Counter()
        self.labels: set[str] = set()
        self.fields: list[str] = []
        self.links: list[str] = []
        self.tags: Counter[str] = Counter()
        self.forms: list[tuple[str, bool]] = []
        self.feed(text)
        self.problems += [f"id {name} is there twice" for name, n in self.ids.items() if n > 1]
        self.problems += [f"{name} has no label" for name in self.fields if name not in self.labels]
        self.problems += [f"{act} has no form token" for act, guarded in self.forms if not guarded]
        if self.tags["h1"] != 1 or self.tags["main"] != 1:
            self.problems.append("there must be one h1 and one main")
        if self.tags["table"] != self.tags["caption"]:
            self.problems.append("a table has no caption")
        if re.search(r"https?://|<style|javascript:", text):
            self.problems.append("something is inline, or from elsewhere")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags[tag] += 1
        if "id" in given:
            self.ids[str(given["id"])] += 1
        self.problems += [f"{tag} has {name}" for name in given if name.startswith("on")]
        if "style" in given or (tag == "script" and not given.get("src")):
            self.problems.append(f"{tag} is inline")
        if tag == "label":
            self.labels.add(str(given["for"]))
        if tag in ("input", "select", "textarea") and given.get("type") != "hidden":
            self.fields.append(str(given.get("id")))
        if tag == "form" and given["method"] == "post":
            self.forms.append((str(given["action"]), False))
        if given.get("name") == "form_token":
            self.forms[-1] = (self.forms[-1][0], True)
        if tag == "a":
            self.links.append(str(given["href"]))
        if tag == "th" and "scope" not in given:
            self.problems.append("th has no scope")


def walk(browser: Browser, start: str = "/") -> dict[str, str]:
    """Every page that links lead to."""
    found, left = dict[str, str](), [start]
    while left:
        path = left.pop()
        if path in found or path.startswith("#"):
            continue
        answer = browser.get(path)
        assert answer.status_code == 200, (path, answer.text)
        found[path] = answer.text
        if answer.headers["content-type"].startswith("text/html") and "/releases/" not in path:
            page = Page(answer.text)
            assert not page.problems, (path, page.problems)
            left += [link for link in page.links if link not in found]
    return found


def test_an_officer_files_works_downloads_and_verifies(life: Life) -> None:
    officer = Browser(life, "operator")
    filed = officer.send("/requests/new", "/requests", person="person-3", model="shop", due="",
                         received="", reason="by letter")  # fmt: skip
    assert (filed.status_code, filed.headers["location"]) == (303, "/requests/1?filed=1")
    assert "The request is filed." in officer.get("/requests/1?filed=1").text
    again = officer.send("/requests/new", "/requests", person="person-3", model="shop")
    assert again.headers["location"] == "/requests/1?before=1"
    assert officer.send("/requests/1", "/requests/1/work").status_code == 303
    while "data-live" in (text := officer.get("/requests/1").text):
        assert "<progress" in text or "running" in text, text
    assert "answered: forgotten" in text
    assert officer.get("/models/shop/releases/1/certificate.json").status_code == 200
    verified = officer.send("/requests/1", "/requests/1/verify")
    assert "Verified: what answers this request holds" in verified.text
    chain = officer.send("/models/shop", "/models/shop/verify")
    assert "Verified: the chain of releases holds" in chain.text
    assert "Verified: the whole ledger holds" in officer.send("/models", "/verify").text
    weights = life.ledger.models("shop")[0].releases[0].directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert "It does not hold." in officer.send("/requests/1", "/requests/1/verify").text


def test_refusing_and_the_reason(life: Life) -> None:
    life.ledger.request("person-1", model="shop", reason="because <b>I</b> want")
    officer = Browser(life, "operator")
    assert "because" not in officer.get("/requests/1").text
    shown = officer.send("/requests/1", "/requests/1/reason").text
    assert "because &lt;b&gt;I&lt;/b&gt; want" in shown
    empty = officer.send("/requests/1", "/requests/1/refuse", reason=" ")
    assert (empty.status_code, "why the request is refused" in empty.text) == (422, True)
    assert officer.send("/requests/1", "/requests/1/refuse", reason="unknown").status_code == 303
    assert "unknown" in officer.get("/requests/1").text
    assert "/refuse" not in officer.get("/requests/1").text


@pytest.mark.parametrize("who", ["requester", "operator", "auditor", "auditor-search"])
def test_every_page_that_links_lead_to_is_sound(life: Life, who: str) -> None:
    for place in range(30):
        life.ledger.request(f"person-{place}", model=("shop", "search", None)[place % 3])
    life.file("requester", "person-3", model="shop")
    life.work()
    found = walk(Browser(life, who))
    assert ("/?page=2" in found) == (who in ("operator", "auditor"))
    assert ("/requests/new" in found) == (who in ("operator", "requester"))
    assert ("/models/shop" in found) == (who in ("operator", "auditor"))
    assert not Page(Browser(life).get("/sign-in").text).problems


@pytest.mark.parametrize("who", ["requester", "auditor", "operator-search"])
def test_what_a_role_may_not_do_has_no_button_and_no_page(life: Life, who: str) -> None:
    number = life.file("operator", "person-1")
    life.file("requester", "person-1")
    browser = Browser(life, who)
    text = browser.get(f"/requests/{number}").text
    assert "/refuse" not in text
    token = read_form_token(text)
    before = life.ledger.anchor()
    posts = ["refuse", "withdraw"] + ([] if who == "operator-search" else ["work", "reason"])
    for act in posts:
        answer = browser.post(f"/requests/{number}/{act}", form_token=token, reason="x")
        assert answer.status_code == 403, act
    assert browser.post("/models/shop/work", form_token=token).status_code in (403, 404)
    assert browser.post("/evidence", form_token=token, person="person-1").status_code == 403
    assert life.ledger.anchor() == before


def test_a_form_that_cannot_be_filed_says_why_and_shows_no_identifier(life: Life) -> None:
    officer = Browser(life, "operator")
    secret = "zoe-8842@example.org"
    for fields in (
        {"received": "2999-01-01"}, {"received": "2026-13-01"},
        {"received": "2026-02-02", "due": "2026-01-01"}, {"model": "nothing"},
        {"reason": "x" * 2001}, {"person": secret + "\u200b"}, {"odd": "1"},
    ):  # fmt: skip
        answer = officer.send("/requests/new", "/requests", **{"person": secret} | fields)
        assert answer.status_code in (400, 422), fields
        assert 'role="alert"' in answer.text
        assert secret not in answer.text
    assert not life.ledger.requests()


def test_finding_a_person(life: Life) -> None:
    life.file("operator", "person-1", model="shop")
    auditor = Browser(life, "auditor")
    found = auditor.send("/find", "/find", person="person-1")
    assert "Request 1" in found.text
    assert "person-1" not in found.text
    nobody = auditor.send("/find", "/find", person="person-99")
    assert "Nobody of this identifier" in nobody.text
    assert "person-99" not in nobody.text
    officer = Browser(life, "operator")
    token = read_form_token(officer.get("/find").text)
    zipped = officer.post("/evidence", form_token=token, person="person-1")
    assert zipped.headers["content-type"] == "application/zip"
    assert officer.post("/evidence", form_token=token, person="x").status_code == 404


def test_signing_in_and_out_and_a_token_that_is_revoked(life: Life) -> None:
    stranger = Browser(life)
    for path in ("/", "/requests/1", "/models", "/find", "/requests/new", "/models/shop"):
        answer = stranger.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in")
    wrong = stranger.send("/sign-in", "/sign-in", token="expunge_wrong")
    assert (wrong.status_code, "not known" in wrong.text) == (401, True)
    before = stranger.client.cookies["expunge"]
    stranger.send("/sign-in", "/sign-in", token=life.tokens["auditor"])
    after = stranger.client.cookies["expunge"]
    assert before != after, "a session that was planted before signing in is worth nothing"
    assert stranger.get("/").status_code == 200
    stranger.send("/", "/sign-out")
    assert stranger.get("/").status_code == 303
    officer = Browser(life, "operator")
    assert officer.get("/").status_code == 200
    life.ledger.revoke_token("operator")
    assert officer.get("/").status_code == 303
    assert life.ask("operator", "GET", "/me").status_code == 401


def test_cookie_and_headers(life: Life) -> None:
    client = life.open()
    page = client.get("/sign-in")
    cookie = page.headers["set-cookie"].lower()
    for part in ("httponly", "samesite=strict", "path=/"):
        assert part in cookie
    assert "secure" not in cookie
    for path in ("/sign-in", "/api/me", "/nowhere", "/api/nowhere", "/assets/page.css"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        if "assets" not in path:
            assert headers["cache-control"] == "no-store"
        assert "server" not in headers


def test_outside_of_this_machine_the_cookie_needs_tls(life: Life) -> None:
    from starlette.testclient import TestClient

    from expunge_ledger.server.app import make_app

    app = make_app(life.ledger, names=("ledger.example.org",))
    client = TestClient(app, base_url="https://ledger.example.org")
    cookie = client.get("/sign-in").headers["set-cookie"]
    assert cookie.startswith("__Host-expunge=")
    assert "secure" in cookie.lower()
    token = read_form_token(client.get("/sign-in").text)
    fields = {"form_token": token, "token": life.tokens["auditor"]}
    plain = {"Origin": "http://ledger.example.org"}
    assert client.post("/sign-in", data=fields, headers=plain).status_code == 403
    own = {"Origin": "https://ledger.example.org"}
    assert client.post("/sign-in", data=fields, headers=own).status_code == 200


def test_a_retired_model_is_shown_and_not_asked(life: Life) -> None:
    life.ledger.retire("search", "switched off")
    officer = Browser(life, "operator")
    page = officer.get("/models/search").text
    assert "Retired" in page
    assert "Work on open requests now" not in page
    assert "retired" in officer.get("/models").text
    assert "<option>search" not in officer.get("/requests/new").text
    shown = {one["name"]: one["retired"] for one in life.ask("auditor", "GET", "/models").json()}
    assert shown["shop"] is None
    assert shown["search"] is not None
    assert life.ask("operator", "GET", "/me").json()["models"] == ["shop"]
    assert life.ask("operator", "POST", "/models/search/work").status_code == 409
    sent = {"person": "person-1", "model": "search"}
    assert life.ask("operator", "POST", "/requests", sent).status_code == 422
    assert life.ask("requester-search", "POST", "/requests", {"person": "x"}).status_code == 422
