"""The reference: every public name once, from its docstring, on a site that fetches nothing."""

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import expunge

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
SHOWN = re.compile(r"^::: expunge\.(\w+)$", flags=re.MULTILINE)


class Fetched(HTMLParser):
    """What a browser would load for a page, and the anchors the page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: Counter[str] = Counter()
        self.quotes = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids[given.get("id", "")] += 1
        self.quotes += tag == "blockquote"
        if tag in ("script", "link", "img", "iframe", "source"):
            self.addresses += [given[name] for name in ("src", "href", "srcset") if name in given]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder


def test_every_public_name_is_there_exactly_once() -> None:
    shown = Counter(name for page in PAGES for name in SHOWN.findall(page.read_text()))
    assert shown == Counter(expunge.__all__)


def test_every_name_has_its_place_on_the_site_and_its_examples_are_code(site: Path) -> None:
    pages = [Fetched(path.read_text()) for path in (site / "reference").glob("*.html")]
    found = sum((page.ids for page in pages), Counter())
    for name in expunge.__all__:
        home = next(home for home, names in expunge._HOMES.items() if name in names)
        assert found[f"expunge.{name}"] + found[f"expunge.{home}.{name}"] >= 1, name
    assert not any(page.quotes for page in pages)


def test_the_site_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for path in pages:
        for address in Fetched(path.read_text()).addresses:
            assert not re.match(r"(https?:)?//", address), (path, address)
    assert "calibrate" in (site / "search" / "search_index.js").read_text()


def test_the_check_above_would_see_a_font() -> None:
    found = Fetched('<link href="https://fonts.example/roboto.css"><blockquote>')
    assert found.addresses == ["https://fonts.example/roboto.css"]
    assert found.quotes == 1
