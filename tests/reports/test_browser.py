"""The page of a real run in a real browser: Debian's chromium, headless."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from expunge.certificates.verification import verify
from expunge.reports.page import write_report
from report_run import launch_chromium, make_real_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("chromium") is None,
        reason="no chromium is installed; .ci/run installs it (apt-get install chromium)",
    ),
]
# What chromium asks for on its own account; the resolver is cut off, so none of it leaves.
OWN_REQUESTS = re.compile(r"https?://([a-z0-9.-]+\.)?(google|googleapis|gvt1)\.com[/:]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = make_real_run(tmp_path_factory.mktemp("run"), epochs=4)
    write_report(path)
    write_report(path, public=True)
    return path


def load(page: Path, scratch: Path) -> tuple[str, list[str], list[str]]:
    """The DOM, what the console said, and what was requested."""
    log = scratch / "net.json"
    done = launch_chromium(
        scratch / "profile", "--enable-logging=stderr", f"--log-net-log={log}", "--dump-dom",
        page.as_uri(),
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    urls = set(re.findall(r'"url":"([^"]+)"', log.read_text(encoding="utf-8")))
    asked = sorted(url for url in urls if url.startswith("http") and not OWN_REQUESTS.match(url))
    return done.stdout, console, asked


def find_text(dom: str, tag: str) -> list[str]:
    found: list[str] = []

    class Reader(HTMLParser):
        inside = False

        def handle_starttag(self, name: str, attrs: object) -> None:
            if name == tag:
                self.inside = True
                found.append("")

        def handle_endtag(self, name: str) -> None:
            self.inside = self.inside and name != tag

        def handle_data(self, data: str) -> None:
            if self.inside:
                found[-1] += data

    Reader().feed(dom)
    return found


@pytest.mark.parametrize("name", ["report.html", "report-public.html"])
def test_it_loads_with_no_error_and_no_request(folder: Path, tmp_path: Path, name: str) -> None:
    dom, console, asked = load(folder / name, tmp_path)
    assert console == []
    assert asked == []
    captions = find_text(dom, "caption")
    assert "Exact values of the certificate" in captions
    assert ("What to look at" in captions) is (name == "report.html")
    certificate = json.loads((folder / "certificate.json").read_text())
    cells = find_text(dom, "td")
    assert repr(certificate["epsilon"]) in cells
    assert dom.count("<svg") == (5 if name == "report.html" else 3)


def test_an_error_or_a_request_would_have_been_seen(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>throw new Error("boom")</script>')
    _, console, asked = load(page, tmp_path)
    assert "boom" in console[0]
    assert asked == ["http://127.0.0.1:9/x.png"]


def test_the_policy_of_the_page_stops_what_it_must(folder: Path, tmp_path: Path) -> None:
    """Even if something got past the escaping: no script runs and nothing is fetched."""
    page = tmp_path / "injected.html"
    bad = '<img src="http://127.0.0.1:9/x.png"><script>document.title = "pwned"</script></main>'
    text = (folder / "report.html").read_text(encoding="utf-8")
    page.write_text(text.replace("</main>", bad), encoding="utf-8")
    dom, console, asked = load(page, tmp_path)
    assert asked == []
    assert len(console) == 2, "the browser reports both as refused"
    assert "<title>pwned" not in dom


@pytest.mark.parametrize("width", [400, 800, 1180])
def test_nothing_sticks_out_at_any_width(folder: Path, tmp_path: Path, width: int) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"""<iframe id="f" src="{(folder / "report.html").as_uri()}" width="{width}"></iframe>
        <p id="out"></p><script>document.getElementById("f").onload = (event) => {{
        const page = event.target.contentDocument.documentElement;
        document.getElementById("out").textContent = page.scrollWidth + "/" + page.clientWidth;
        }};</script>"""
    )
    done = launch_chromium(
        tmp_path / "profile", "--allow-file-access-from-files", "--virtual-time-budget=5000",
        "--dump-dom", frame.as_uri(),
    )  # fmt: skip
    measured = re.search(r"(\d+)/(\d+)</p>", done.stdout)
    assert measured is not None, done.stdout
    assert int(measured[1]) <= int(measured[2]) == width


def test_pictures_light_and_dark(folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    brightness: dict[str, float] = {}
    for scheme, setting in (("dark", "0"), ("light", "1")):
        target = tmp_path / f"{scheme}.png"
        launch_chromium(
            tmp_path / scheme, f"--blink-settings=preferredColorScheme={setting}",
            "--window-size=1180,1500", f"--screenshot={target}",
            (folder / "report.html").as_uri(),
        )  # fmt: skip
        with Image.open(target) as picture:
            assert picture.size == (1180, 1500)
            grey = picture.convert("L")
            assert len(picture.convert("RGB").getcolors(2**24) or []) > 100, "it is not blank"
            histogram = grey.histogram()
        brightness[scheme] = sum(v * n for v, n in enumerate(histogram)) / sum(histogram)
    assert brightness["dark"] < 60
    assert brightness["light"] > 200


def test_it_prints(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.pdf"
    launch_chromium(
        tmp_path / "profile", "--no-pdf-header-footer", f"--print-to-pdf={target}",
        (folder / "report.html").as_uri(),
    )  # fmt: skip
    data = target.read_bytes()
    assert data.startswith(b"%PDF-")
    count = re.search(rb"/Type /Pages\s*/Count (\d+)|/Count (\d+)", data)
    assert count is not None
    assert 4 <= int(count[1] or count[2]) <= 12


def test_the_pictured_run_is_real_and_holds(folder: Path) -> None:
    verify(
        folder / "certificate.json", public_key=folder / "operator.pem",
        record=folder / "record.json",
    )  # fmt: skip
