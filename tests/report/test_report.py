"""The page about a release: what it shows, what the public one leaves out, and that it is safe."""

import json
import shutil
from html.parser import HTMLParser

import pytest

from expunge.certificates.signing import generate_key_pair
from expunge.errors import CertificateError, InputError, VerificationError
from expunge.report.charts import draw_hundred, draw_lines
from expunge.report.page import write_report
from tests.helpers.sample_releases import NOISY, edit_json, load, save_release

METRICS = {
    "task": "own.py:load",
    "stages": [
        {"stage": "before", "retain": 0.98, "forget": 0.9712, "test": 0.95},
        {"stage": "after training", "retain": 0.97, "forget": 0.4321, "test": 0.94},
    ],
    "cost": {"seconds": 3.25},
}


class Balanced(HTMLParser):
    """Every element that is opened is closed, in order."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset")]
        self.fetched += [tag] if tag in ("script", "link", "iframe", "object") else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        pass

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("kind", ["retraining", "linear-model", "shards", *NOISY])
def test_a_page_of_every_kind(kind, public, tmp_path) -> None:
    release = save_release(tmp_path / "run", kind)
    path = write_report(tmp_path / "run", public=public)
    text = path.read_text("utf-8")
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert parser.fetched == [], "it needs no network and no script"
    assert path.name == ("report-public.html" if public else "report.html")
    assert (path.stat().st_mode & 0o077 == 0) is (not public)
    for expected in (
        release.certificate.weights.after, release.certificate.digest, "2 people on 5 samples",
        "is the operator", "scalers, vocabularies", "Not looked at", "What can survive",
    ):  # fmt: skip
        assert expected in text
    filled = text.count('class="on"')
    assert filled >= 100 * release.certificate.survival_bound > filled - 1
    assert ("Epsilon against delta" in text) == (kind in NOISY)
    assert path.read_bytes() == write_report(tmp_path / "run", public=public).read_bytes()


def test_the_public_page_shows_nothing_that_no_noise_covers(tmp_path) -> None:
    run = tmp_path / "run"
    release = save_release(run, "gradient-clipping")
    (run / "metrics.json").write_text(json.dumps(METRICS))
    private, public = (
        write_report(run, public=which).read_text("utf-8") for which in (False, True)
    )
    for secret in ("97.12 %", "43.21 %", "98.00 %", "3.25", "confidential"):
        assert secret in private
        assert secret not in public
    for shown in ("97.00 %", "94.00 %", "Public version"):
        assert shown in public
    assert release.record.weights.old not in public
    (run / "record.json").unlink()
    write_report(run, public=True)
    with pytest.raises(CertificateError, match="only --public is possible"):
        write_report(run)


def test_no_page_is_made_of_what_does_not_hold(tmp_path) -> None:
    save_release(tmp_path / "run", "gradient-clipping")
    edit_json(tmp_path / "run" / "certificate.json", lambda c: c.update(survival_bound=0.01))
    with pytest.raises(VerificationError, match="survival_bound"):
        write_report(tmp_path / "run", public=True)
    assert not (tmp_path / "run" / "report-public.html").exists()
    with pytest.raises(InputError, match="the folder of a release"):
        write_report(tmp_path / "none")


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ("{", "Invalid JSON"), ("[1]", "Input should be an object"),
        ('{"stages": 3}', "stages Input"),
        ('{"stages": [{"stage": "after", "test": 1' + "0" * 400 + "}]}", r"stages\.0\.test "),
        ('{"stages": [{"stage": "after", "retain": true}]}', r"stages\.0\.retain Input"),
    ],
)  # fmt: skip
def test_unusable_metrics_are_named(metrics, sentence, tmp_path) -> None:
    save_release(tmp_path / "run")
    (tmp_path / "run" / "metrics.json").write_text(metrics)
    with pytest.raises(CertificateError, match=rf"metrics\.json is not usable: {sentence}"):
        write_report(tmp_path / "run")


def test_words_of_others_are_escaped(tmp_path) -> None:
    run = tmp_path / "run"
    release = save_release(run)
    evil = "<script>alert(1)</script>"
    shutil.rmtree(run)
    release.apply(lambda model: None, evil).save(run)
    metrics = METRICS | {
        "stages": [{"stage": f"after {evil}\x1b[2J", "test": 0.5}],
        "cost": {evil: evil},
    }
    (run / "metrics.json").write_text(json.dumps(metrics))
    for public in (False, True):
        text = write_report(run, public=public).read_text("utf-8")
        assert "<script" not in text
        assert "\x1b" not in text
        assert "&lt;script&gt;" in text


def test_a_signed_release_says_so(tmp_path) -> None:
    save_release(tmp_path / "run")
    load(tmp_path / "run").sign(generate_key_pair()[0]).save(tmp_path / "run" / "certificate.json")
    text = write_report(tmp_path / "run").read_text("utf-8")
    assert "✓ Signed" in text
    assert "sha256:" in text


def test_a_warning_is_the_first_thing_on_the_page(tmp_path) -> None:
    save_release(tmp_path / "run", "gradient-clipping", grid=0.0)
    text = write_report(tmp_path / "run").read_text("utf-8")
    assert text.index("✕ Not for release") < text.index("not on a grid") < text.index("Epsilon")


def test_pictures() -> None:
    assert draw_hundred(0.0, "").count('class="on"') == 0
    assert draw_hundred(100.0, "").count('class="on"') == 100
    drawn = draw_lines({"a": [(0.0, -1.0), (2.0, 0.0)], "b": [(0.0, -2.0)]}, 'say "<so>"', "x", "y")
    assert 'aria-label="say &quot;&lt;so&gt;&quot;"' in drawn
    assert drawn.count("<polyline") == 2


@pytest.mark.slow
def test_one_screen_in_a_browser(tmp_path) -> None:
    """Numbers, promise and picture are on the first screen, and nothing is wider than it."""
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("chromium is not installed")
    save_release(tmp_path / "run", "gradient-clipping")
    page_path = write_report(tmp_path / "run")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for width, height in ((1280, 900), (390, 844)):
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(page_path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            if width == 1280:
                box = page.locator("figure.small svg").bounding_box()
                assert box["y"] + box["height"] < height
        browser.close()
