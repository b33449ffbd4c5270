"""More attempts by somebody with the network or the database, and no key."""

import platform
from pathlib import Path

import pytest

import expunge
from expunge_ledger import Ledger
from expunge_ledger.server.app import make_app
from ledger.tests.life import check_differs, file, put, read, write
from ledger.tests.server_run import Browser, Life, read_form_token


def restore(ledger: Ledger, table: str, rows: list) -> None:
    write(ledger, f"DELETE FROM {table}")
    put(ledger, table, *rows)


ALL = ("requests", "work", "models", "releases", "tokens", "filings", "secrets")
SETS = {
    "what is about people": ("requests", "work", "filings", "secrets"),
    "with the models": ("requests", "work", "filings", "secrets", "models", "releases"),
    "all but book and events": ALL,
    "the book alone": ("book",),
    "the models alone": ("models", "releases"),
}


@pytest.mark.parametrize("name", SETS)
def test_tables_of_yesterday_are_not_those_of_today(small: Ledger, name: str) -> None:
    """Whole tables restored together, each row with its MAC: the next step says so."""
    small.request("person-1")
    old = {table: read(small, f"SELECT * FROM {table}") for table in SETS[name]}
    small.work()
    small.request("person-2")
    for table, rows in old.items():
        restore(small, table, rows)
    with pytest.raises(expunge.ExpungeError):
        small.verify()
    with pytest.raises((expunge.VerificationError, expunge.RunError)):
        small.request("person-1")
    try:
        for done in small.work():
            assert done.failed
    except expunge.ExpungeError:
        pass


def test_a_number_is_not_given_twice(small: Ledger) -> None:
    """The last request is deleted: its number is not free."""
    file(small, "person-1", "person-2")
    for table, column in (("requests", "number"), ("work", "request"), ("secrets", "request")):
        write(small, f"DELETE FROM {table} WHERE {column} = 2")
    assert small.request("person-3").number == 3
    with pytest.raises(expunge.VerificationError):
        small.verify()


@pytest.mark.parametrize("table", ["leases", "subjects"])
def test_what_has_no_mac_is_worth_nothing(small: Ledger, table: str) -> None:
    """Whoever changes leases or the index of events makes others wait, or sees less; no lie."""
    small.request("person-1")
    write(small, f"DELETE FROM {table}")
    (done,) = small.work()
    assert done.forgotten == 1
    small.verify()
    small.export("person-1")


def test_rows_of_another_ledger_with_the_same_key(small: Ledger, tmp_path: Path) -> None:
    """Two ledgers, one key file: a token of one opens nothing in the other."""
    with Ledger.create(f"sqlite:///{tmp_path}/other.db", key=tmp_path / "ledger.key") as other:
        other.make_token("evil", "operator")
        small.make_token("desk", "requester")
        restore(small, "tokens", read(other, "SELECT * FROM tokens"))
        check_differs("tokens: evil", small.tokens)


def test_a_token_for_one_model_learns_nothing_of_another(life: Life) -> None:
    """person-1 is in "shop" alone: "answered: forgotten" said so to a token of "search"."""
    from ledger.tests.stand_in import StandIn

    StandIn(life.folder / "search").forget(["person-1"]).save(life.folder / "before")
    for person in ("person-99", "person-1"):
        life.file("operator", person)
    life.ledger.work("shop")
    life.ledger.work("search")
    seen = [life.ask("auditor-search", "GET", f"/requests/{number}").json() for number in (1, 2)]
    assert [one["answer"] for one in seen] == ["not held", "forgotten"]
    assert [one["model"] for one in seen] == ["search", "search"]
    assert [len(one["answers"]) for one in seen] == [1, 1]
    life.file("operator", "person-5", model="shop")
    events = life.ask("auditor-search", "GET", "/requests/2/events").text
    assert "shop" not in events


QUERIES = [f"state={one}" for one in ("waiting", "open", "running", "answered")]
QUERIES += ["pace=overdue", "most=5"]


def test_a_token_for_one_model_does_not_see_when_another_ends(both: Life) -> None:
    """Open, answered, late: whether and when "shop" did its part was in state, clock and list."""
    who = "auditor-search"
    both.file("operator", "person-1", received="2026-01-01", due="2026-02-01")
    both.ledger.work("search")
    shown = [both.ask(who, "GET", "/requests/1").json()]
    lists = [[both.ask(who, "GET", f"/requests?{query}").json() for query in QUERIES]]
    both.ledger.work("shop")
    shown.append(both.ask(who, "GET", "/requests/1").json())
    lists.append([both.ask(who, "GET", f"/requests?{query}").json() for query in QUERIES])
    assert shown[0] == shown[1]
    assert lists[0] == lists[1]
    assert (shown[0]["state"], shown[0]["pace"]) == ("answered", "overdue")
    assert [one["total"] for one in lists[0]] == [0, 0, 0, 1, 0, 1]
    assert both.ask("auditor", "GET", "/requests/1").json()["state"] == "answered"


def test_no_place_and_no_host_in_any_answer(life: Life) -> None:
    number = life.file("operator", "person-1")
    life.work("shop")
    (life.folder / "search" / "stand-in.json").write_text("{}")
    life.let_work("search")
    release = life.ledger.models("shop")[0].releases[0].directory
    (release / "record.json").unlink()
    asked = [("GET", "/work"), ("GET", f"/requests/{number}"), ("GET", "/models"),
             ("GET", f"/requests/{number}/events"), ("POST", f"/requests/{number}/verify"),
             ("POST", "/models/shop/verify"), ("POST", "/verify")]  # fmt: skip
    for method, path in asked:
        text = life.ask("operator", method, path).text
        for secret in (str(life.folder), "/tmp/", platform.node(), "ledger.db"):
            assert secret not in text, (path, secret, text)
    (release / "certificate.json").write_text("{}")
    said = life.ask("operator", "POST", "/evidence", {"person": "person-1"})
    assert (said.status_code, "/" in said.json()["detail"]) == (409, False)


def test_what_a_token_did_names_it(life: Life) -> None:
    life.file("requester", "person-1", model="shop")
    life.file("operator", "person-2", model="shop")
    life.ask("operator", "POST", "/requests/2/refuse", {"reason": "no"})
    life.let_work("shop")
    by = [(e.kind, e.body.get("by")) for e in life.ledger.events() if e.kind not in ("token",)]
    assert ("requested", "requester") in by
    assert {("refused", "operator"), ("begun", "operator"), ("released", "operator")} <= set(by)


def test_sessions_are_signed_by_this_process_alone(life: Life) -> None:
    officer = Browser(life, "operator")
    cookie = officer.client.cookies["expunge"]
    other = make_app(life.ledger)
    from starlette.testclient import TestClient

    restarted = TestClient(other, base_url="http://127.0.0.1:8000", follow_redirects=False)
    for forged in (cookie, cookie[:-1], f"{cookie}x", "x." + cookie.partition(".")[2], ""):
        restarted.cookies.set("expunge", forged)
        assert restarted.get("/").status_code == 303


def test_a_session_rests_for_half_an_hour(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    officer, now = Browser(life, "operator"), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1_700)
    assert officer.get("/").status_code == 200
    monkeypatch.setattr(time, "time", lambda: now + 1_700 + 1_900)
    assert officer.get("/").status_code == 303
    other = Browser(life, "operator")
    for used in range(1_700, 28_800, 1_700):  # and after eight hours, however much it is used
        monkeypatch.setattr(time, "time", lambda used=used: now + 3_600 + used)
        assert other.get("/").status_code == 200
    monkeypatch.setattr(time, "time", lambda: now + 3_600 + 28_900)
    assert other.get("/").status_code == 303


def test_signing_out_ends_copies_of_the_cookie(life: Life) -> None:
    officer, thief = Browser(life, "operator"), Browser(life)
    thief.client.cookies.set("expunge", officer.client.cookies["expunge"])
    assert thief.get("/").status_code == 200
    form = read_form_token(officer.get("/").text)
    assert officer.post("/sign-out", form_token=form).status_code == 303
    assert thief.get("/").status_code == 303


def test_compressed_answers_hide_no_secret_of_others(life: Life) -> None:
    """What is compressed has no secret beside what an asker chose: forms carry a token of the
    session, and pages repeat nothing that was typed into an address."""
    officer = Browser(life, "operator")
    form = read_form_token(officer.get("/").text)
    page = officer.client.get(f"/?state={form[:20]}&model={form[:20]}")
    assert page.text.count(form[:20]) == page.text.count(form)
