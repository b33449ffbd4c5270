"""A data-protection officer's tour through the pages in a real browser, and its pictures.

``python tests/helpers/server_tour.py docs/images`` takes the pictures of the documents.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

import expunge
from expunge.ledger.tokens import make_token
from ledger_life import make_state
from server_run import make_tokens, running

CHROMIUM = Path("/usr/bin/chromium")
SECRET = "person-7"
PATIENCE = 120_000.0


def make_ledger(folder: Path) -> dict[str, str]:
    """Two models and requests at every pace; one of them is answered. The tokens."""
    ledger = expunge.Ledger.create(f"sqlite:///{folder}/ledger.db", key=folder / "ledger.key")
    for name, seed in (("shop", 0), ("search", 1)):
        ledger.register(name, make_state(folder / name, seed=seed))
    ledger.request("person-25", model="shop", reason="by letter")
    ledger.work()
    today = date.today()
    ages = [(38, None), (33, -2), (28, 3), (25, None), (20, None), (12, None), (5, None), (1, None)]
    for place, (age, left) in enumerate(ages):
        due = None if left is None else today + timedelta(days=left)
        received = today - timedelta(days=age)
        model = ("search", None, "search")[place % 3]
        ledger.request(f"person-{10 + place}", model=model, received=received, due=due)
    ledger.refuse(ledger.request("person-19", model="search").number, "the identifier is unknown")
    tokens = make_tokens(ledger)
    tokens["officer"] = make_token(ledger.engine, "privacy-office", "operator")
    ledger.close()
    return tokens


@contextmanager
def browsing(**context: Any) -> Iterator[tuple[Browser, Page]]:
    """Debian's chromium, headless."""
    with sync_playwright() as tools:
        flags = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(**context)
        page.set_default_timeout(PATIENCE)
        yield browser, page
        browser.close()


def sign_in(page: Page, url: str, token: str) -> None:
    page.goto(url)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Requests", timeout=PATIENCE)


def file_request(page: Page, person: str, model: str) -> int:
    page.get_by_role("link", name="File a request").first.click()
    page.get_by_label("Identifier of the person").fill(person)
    page.get_by_label("Model").select_option(model)
    page.get_by_label("Reason").fill("asked by telephone")
    page.get_by_role("button", name="File the request").click()
    expect(page.get_by_role("status").first).to_contain_text("filed", timeout=PATIENCE)
    return int(page.get_by_role("heading", level=1).inner_text().removeprefix("Request "))


def watch(page: Page) -> list[str]:
    """Press the button; the stages that the page showed until the request was answered."""
    page.get_by_role("button", name="Work on it now").click()
    expect(page.locator("#live .work")).to_be_visible(timeout=PATIENCE)
    page.evaluate(
        """() => { window.seen = [];
        const look = () => { const s = document.querySelector(".steps .now");
          if (s && seen.at(-1) !== s.innerText) seen.push(s.innerText); };
        look();
        new MutationObserver(look).observe(document.body, {childList: true, subtree: true}); }"""
    )
    expect(page.locator("#state")).to_have_text("answered: forgotten", timeout=PATIENCE)
    return page.evaluate("() => window.seen")


def download(page: Page, name: str, folder: Path) -> Path:
    with page.expect_download() as waiting:
        page.get_by_role("link", name=name).first.click()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


def take_pictures(folder: Path) -> None:
    """serve-list, serve-request, serve-dark, serve-phone and serve-work."""
    with tempfile.TemporaryDirectory() as place:
        tokens = make_ledger(Path(place))
        size = {"viewport": {"width": 1080, "height": 780}, "device_scale_factor": 1.5}
        with (
            running(Path(place), Path(place) / "log") as server,
            browsing(**size) as (browser, page),
        ):
            sign_in(page, server.url, tokens["officer"])
            page.screenshot(path=folder / "serve-list.png")
            file_request(page, SECRET, "shop")
            page.get_by_role("button", name="Work on it now").click()
            expect(page.locator("#live .work")).to_be_visible(timeout=PATIENCE)
            expect(page.locator(".steps .now")).not_to_have_text("waiting", timeout=PATIENCE)
            page.screenshot(path=folder / "serve-work.png")
            expect(page.locator("#state")).to_have_text("answered: forgotten", timeout=PATIENCE)
            page.get_by_role("button", name="Verify now").click()
            expect(page.get_by_role("status")).to_contain_text("Verified", timeout=PATIENCE)
            page.screenshot(path=folder / "serve-request.png", full_page=True)
            for name, options in {
                "dark": size | {"color_scheme": "dark"},
                "phone": {"viewport": {"width": 390, "height": 780}, "device_scale_factor": 2},
            }.items():
                other = browser.new_page(**options)
                other.set_default_timeout(PATIENCE)
                sign_in(other, server.url, tokens["officer"])
                if name == "dark":
                    other.goto(f"{server.url}/models/shop")
                other.screenshot(path=folder / f"serve-{name}.png")


if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]))
