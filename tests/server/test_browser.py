"""The pages in a real browser: file, watch, download, verify; nothing is fetched from elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

import expunge
from server_run import running
from server_tour import (
    CHROMIUM,
    PATIENCE,
    SECRET,
    browsing,
    download,
    file_request,
    make_ledger,
    sign_in,
    watch,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM.exists(),
        reason="no chromium is installed; .ci/run installs it (apt-get install chromium)",
    ),
]


def test_an_officer_files_watches_downloads_and_verifies(tmp_path: Path) -> None:
    tokens, log = make_ledger(tmp_path), tmp_path / "log"
    size = {"width": 1080, "height": 780}
    with running(tmp_path, log) as server, browsing(viewport=size) as (_, page):
        asked, said = list[str](), list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        sign_in(page, server.url, tokens["operator"])
        expect(page.locator(".cards .value").first).to_have_text("2")
        number = file_request(page, SECRET, "shop")
        stages = watch(page)
        assert set(stages) & {"taken", "looking", "forgetting", "checking"}, stages
        certificate = download(page, "Certificate", tmp_path)
        report = download(page, "Public report", tmp_path)
        assert b"<h1>" in report.read_bytes()
        page.get_by_role("button", name="Verify now").click()
        expect(page.get_by_role("status")).to_contain_text("Verified", timeout=PATIENCE)
        assert SECRET not in page.content()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        assert page.url.endswith("#main")
        page.set_viewport_size({"width": 360, "height": 740})
        for path in ("/", f"/requests/{number}", "/requests/new", "/models/shop", "/find"):
            page.goto(server.url + path)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 360, (path, width)
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in", timeout=PATIENCE)
        page.goto(f"{server.url}/requests/{number}")
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in", timeout=PATIENCE)
        assert all(url.startswith(server.url) for url in asked), asked
        assert [line for line in said if not line.startswith("[DOM]")] == []
    ledger = expunge.Ledger(f"sqlite:///{tmp_path}/ledger.db", key=tmp_path / "ledger.key")
    weights = ledger.models("shop")[0].releases[-1].directory / "model.safetensors"
    assert expunge.verify(certificate, weights).epsilon == 0
    command = [sys.executable, "-m", "expunge", "verify", str(certificate)]
    subprocess.run([*command, "--weights", str(weights)], check=True, capture_output=True)
    assert ledger.verify().releases == 2
    text = log.read_text()
    assert "POST /requests/{number}/work 303" in text
    for secret in (SECRET, tokens["operator"], "telephone"):
        assert secret not in text
        for url in asked:
            assert secret not in url
    ledger.close()
