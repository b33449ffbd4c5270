"""What notebooks and print show: small, escaped, and no more than the certificate says."""

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from expunge import Certificate, Guarantee, Plan, certify, guarantee, plan
from expunge.display import Sheet, round_up
from handmade import GRADIENT, NONCE, RECIPES, SALT, make_record

ALLOWED = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}
STYLES = "text-align: left", "color: inherit; background: none"
ATTACKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<style>*{display:none}</style>",
    "&lt;script&gt;",
    "</td></table><h1>certified",
    "line\nanother\nand\na\nfourth",
    "\x1b[2Jcleared\x07",
    "\u202edesrever",
]


class Tags(HTMLParser):
    """The elements of a display, their attributes, and the text as a reader sees it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.given: set[tuple[str, str | None]] = set()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.given |= {pair for pair in attrs if pair[0] != "scope"}
        self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


def show(thing: object) -> tuple[str, str]:
    return str(thing), thing._repr_html_()


def check(thing: object) -> None:
    text, html = show(thing)
    assert len(text.splitlines()) <= 10, text
    assert all(c.isprintable() or c == "\n" for c in text)
    found = Tags(html)
    assert found.tags <= ALLOWED, found.tags
    assert found.given == {("style", style) for style in STYLES}


@pytest.fixture(params=sorted(RECIPES))
def certificate(request: pytest.FixtureRequest) -> Certificate:
    return certify(make_record(RECIPES[request.param]), delta=1e-5)


def test_a_certificate_shows_only_what_its_statement_says(certificate: Certificate) -> None:
    check(certificate)
    said = " ".join(certificate.statement().split()).lower()
    text, html = show(certificate)
    rows = [line.strip().split("  ", 1) for line in text.splitlines()[1:]]
    for name, value in rows:
        parts = [value.strip()] if name not in ("signed", "for release") else []
        for part in re.split("; ", " ".join(parts)):
            assert part.lower() in said, part
    for secret in (SALT, NONCE, "b" * 64, "u1"):
        assert secret not in text + html
    assert [value.strip() for _, value in rows] == [
        cell.strip() for cell in Tags(html).cells if cell
    ][2::2]


def test_a_certificate_that_forbids_its_release_says_so() -> None:
    seeded = {"source": "seeded", "generator": "x", "releasable": False, "seed": 7}
    forbidden = certify(make_record(noise=seeded), delta=1e-5)
    assert not forbidden.releasable
    for shown in show(forbidden):
        assert "no. Not for release: the noise came from a seed" in shown
    for shown in show(certify(make_record(), delta=1e-5)):
        assert "Not for release" not in shown


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_in_a_certificate_becomes_markup(attack: str) -> None:
    certificate = certify(make_record(), delta=1e-5)
    data = certificate.data.model_copy(
        update={"forget": certificate.data.forget.model_copy(update={"count": attack})}
    )
    weights = certificate.weights.model_copy(update={"after": attack})
    check(certificate.model_copy(update={"warnings": (attack,), "data": data, "weights": weights}))


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_in_a_guarantee_or_a_plan_becomes_markup(attack: str) -> None:
    found = guarantee(GRADIENT, delta=1e-5)
    check(Guarantee(**{**vars(found), "theorem": attack, "compared_to": attack}))
    planned = plan(epsilon=1.0, delta=1e-5, parameters=1000)
    check(Plan(**{**vars(planned), "advice": attack}))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_guarantee_is_shown_rounded_to_the_safe_side(recipe: object) -> None:
    found = guarantee(recipe, delta=1e-5)
    check(found)
    shown = re.search(r"^  retrained +(\S+) +(\S+)", str(found), flags=re.MULTILINE)
    assert float(shown[1]) >= found.epsilon
    assert float(shown[2]) >= found.delta


def test_a_plan_shows_every_candidate_and_the_advice() -> None:
    found = plan(epsilon=1.0, delta=1e-5, parameters=20_042)
    check(found)
    for shown in show(found):
        assert all(candidate.method in shown for candidate in found.candidates)
        assert found.advice in unescape(shown)


def test_an_infinite_bound_is_shown_as_one() -> None:
    assert round_up(float("inf")) == "Infinity"


def test_the_checks_above_can_fail() -> None:
    fine = Sheet("a", [("b", "c")]).to_html()
    bad = [("x\n" * 11, fine), ("x", "<script>"), ("x", "<td onclick=x>"), ("\x1b", fine)]
    for text, html in bad:
        methods = {"__str__": lambda _, t=text: t, "_repr_html_": lambda _, h=html: h}
        with pytest.raises(AssertionError):
            check(type("Bad", (), methods)())
