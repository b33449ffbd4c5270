"""The pages in a real browser: file, find, work, verify, download, export; light, dark, phone.

LEDGER_PICTURES=FOLDER keeps the pictures.
"""

import os
from datetime import date, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

import expunge
from expunge_ledger import Ledger
from ledger.tests.server_run import Running, make_tokens
from ledger.tests.stand_in import make_state

CHROMIUM, SECRET, PATIENCE = Path("/usr/bin/chromium"), "person-7", 120_000.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="apt-get install chromium"),
]


def make_ledger(folder: Path) -> dict[str, str]:
    """Two models and requests at every pace; one of them is answered. The tokens."""
    with Ledger.create(f"sqlite:///{folder}/ledger.db", key=folder / "ledger.key") as ledger:
        for name in ("shop", "search"):
            ledger.register(name, make_state(folder / name))
        ledger.request("person-25", model="shop", reason="by letter")
        ledger.work()
        today = date.today()
        for place, (age, left) in enumerate([(38, None), (33, -2), (28, 3), (25, None), (5, None)]):
            due = None if left is None else today + timedelta(days=left)
            received, model = today - timedelta(days=age), ("search", None, "search")[place % 3]
            ledger.request(f"person-{10 + place}", model=model, received=received, due=due)
        ledger.refuse(ledger.request("person-19", model="search").number, "they are unknown")
        return make_tokens(ledger)


def sign_in(page: Page, url: str, token: str) -> None:
    page.goto(url)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Requests", timeout=PATIENCE)


def keep(page: Page, name: str) -> None:
    if folder := os.environ.get("LEDGER_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def download(page: Page, press: str, folder: Path, role: str = "link") -> Path:
    with page.expect_download() as waiting:
        page.get_by_role(role, name=press).first.click()  # type: ignore[arg-type]
    waiting.value.save_as(folder / waiting.value.suggested_filename)
    return folder / waiting.value.suggested_filename


def test_a_persons_walk(tmp_path: Path) -> None:
    tokens, log, asked, said = make_ledger(tmp_path), tmp_path / "log", list[str](), list[str]()
    flags = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    with Running(tmp_path, log) as server, sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(viewport={"width": 1080, "height": 780})
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        sign_in(page, server.url, tokens["operator"])
        expect(page.locator(".cards .value").first).to_have_text("2")
        keep(page, "serve-list")
        page.get_by_role("link", name="File a request").first.click()
        page.get_by_label("Identifier of the person").fill(SECRET)
        page.get_by_label("Model").select_option("shop")
        page.get_by_label("Reason").fill("asked by telephone")
        page.get_by_role("button", name="File the request").click()
        expect(page.get_by_role("status").first).to_contain_text("filed", timeout=PATIENCE)
        number = int(page.get_by_role("heading", level=1).inner_text().removeprefix("Request "))
        page.get_by_role("button", name="Work on it now").click()
        expect(page.locator("#state")).to_have_text("answered: forgotten", timeout=PATIENCE)
        certificate = download(page, "Certificate", tmp_path)
        assert b"CERTIFICATE OF UNLEARNING" in download(page, "In words", tmp_path).read_bytes()
        page.get_by_role("button", name="Verify now").click()
        expect(page.get_by_role("status")).to_contain_text("Verified", timeout=PATIENCE)
        keep(page, "serve-request")
        assert SECRET not in page.content()
        page.get_by_role("link", name="Find a person").click()
        page.get_by_label("Identifier").fill(SECRET)
        page.get_by_role("button", name="Show requests").click()
        expect(page.get_by_role("link", name=f"Request {number}")).to_be_visible(timeout=PATIENCE)
        page.get_by_label("Identifier").fill(SECRET)
        evidence = download(page, "Download the evidence", tmp_path, "button")
        assert evidence.read_bytes()[:2] == b"PK"
        page.keyboard.press("Tab")
        page.goto(f"{server.url}/models")
        page.get_by_role("button", name="Verify the whole ledger").click()
        expect(page.get_by_role("status")).to_contain_text("Verified", timeout=PATIENCE)
        for scheme, size in (("dark", {"width": 1080, "height": 780}),
                             ("light", {"width": 360, "height": 740})):  # fmt: skip
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.set_viewport_size(size)  # type: ignore[arg-type]
            for path in ("/", f"/requests/{number}", "/requests/new", "/models/shop", "/find"):
                page.goto(server.url + path)
                width = page.evaluate("document.documentElement.scrollWidth")
                assert width <= size["width"], (path, width)
                keep(page, f"serve-{scheme}{path.replace('/', '-')}")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in", timeout=PATIENCE)
        page.goto(f"{server.url}/requests/{number}")
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in", timeout=PATIENCE)
        browser.close()
    assert all(url.startswith(server.url) for url in asked), asked
    assert [line for line in said if not line.startswith("[DOM]")] == []
    with Ledger(f"sqlite:///{tmp_path}/ledger.db", key=tmp_path / "ledger.key") as ledger:
        weights = ledger.models("shop")[0].releases[-1].directory / "model.safetensors"
        assert expunge.verify(certificate, weights).certificate.epsilon == 0
        assert ledger.verify().releases == 2
        assert {event.body.get("by") for event in ledger.events() if event.kind == "released"} == {
            None, "operator"
        }  # fmt: skip
    text = log.read_text()
    assert "POST /requests/{number}/work 303" in text
    for secret in (SECRET, tokens["operator"], "telephone"):
        assert secret not in text
        assert not [url for url in asked if secret in url]
