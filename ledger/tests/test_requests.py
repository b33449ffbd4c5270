"""Requests: one is one, clocks are computed, and an end is an end."""

from datetime import date, timedelta

import pytest

import expunge
from expunge_ledger import Ledger, records, tables
from expunge_ledger.records import add_month, read_now, read_pace
from ledger.tests.life import check_fails, check_refused, file, work_with


def test_the_same_request_twice_is_one(ledger: Ledger) -> None:
    first = ledger.request("person-1", reason="by letter")
    again = ledger.request("person-1", due="2999-01-01")
    assert (first.number, first.new, first.state) == (1, True, "open")
    assert (again.number, again.new, again.due) == (1, False, first.due)
    assert ledger.request("person-1", model="shop").number == 2
    assert ledger.request("person-2").number == 3
    assert [event.kind for event in ledger.events()][2:] == ["requested"] * 3
    assert ledger.read_reason(1) == "by letter"


def test_what_looks_the_same_is_the_same_person(ledger: Ledger) -> None:
    assert ledger.request("Zoe\u0308").number == ledger.request("Zo\u00eb").number
    assert ledger.request(42).number == ledger.request("42").number
    assert [r.number for r in ledger.requests(person="Zo\u00eb")] == [1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"person": name}, "visible text")  # which would make a second person
          for name in ("", " ann", "ann ", "ann\n", "ann\u200b", "an\u00adn")),
        ({"person": None}, "a string or a whole number"),
        ({"person": "x" * 1025}, "at most 1024 characters"),
        ({"person": "ann", "model": "none"}, r"model is 'none'; it must be one of \['shop'\]"),
        ({"person": "ann", "received": "2999-01-01"}, "received is '2999-01-01'"),
        ({"person": "ann", "received": "soon"}, "a date such as 2026-01-31"),
        ({"person": "ann", "received": "2026-01-31", "due": "2026-01-30"}, "due is '2026-01-30'"),
        ({"person": "ann", "reason": ""}, "reason is"),
    ],
)  # fmt: skip
def test_bad_requests_change_nothing(small: Ledger, given: dict, said: str) -> None:
    before = small.anchor()
    check_refused(said, small.request, given.pop("person"), **given)
    assert small.anchor() == before


def test_the_pace_comes_from_the_days() -> None:
    due = date(2026, 2, 28)
    paces = {n: read_pace(due, None, due - timedelta(days=n))[0] for n in (8, 7, 0, -1)}
    assert paces == {8: "on time", 7: "due soon", 0: "due soon", -1: "overdue"}
    assert read_pace(due, due, date(2030, 1, 1)) == ("on time", 0)
    assert read_pace(due, due + timedelta(days=2), date(2030, 1, 1)) == ("overdue", -2)


def test_clocks_go_on_without_anybody_writing(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = read_now()
    filed = ledger.request("person-1", received=day.date())
    assert (filed.due, filed.pace) == (add_month(day.date()), "on time")
    before = ledger.anchor()
    for days, pace in ((24, "due soon"), (40, "overdue")):
        monkeypatch.setattr(records, "read_now", lambda days=days: day + timedelta(days=days))
        assert ledger.get(1).pace == pace
    assert ledger.anchor() == before


def test_a_wrong_clock_writes_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of work in 2040 spoiled the ledger for everybody after it."""
    ledger.request("person-1")
    now, before = read_now(), ledger.anchor()
    for days in (14 * 365, -2):
        monkeypatch.setattr(tables, "read_now", lambda days=days: now + timedelta(days=days))
        check_fails(ledger, "the clock says")
        with pytest.raises(expunge.RunError, match="the clock says"):
            ledger.request("person-2")
    assert ledger.anchor() == before
    done = work_with(ledger, tables, "read_now", lambda: now - timedelta(hours=3))
    assert done.forgotten == 1
    ledger.verify()
    monkeypatch.setattr(tables, "read_now", lambda: now + timedelta(days=400))
    ledger.accept("nobody asked for a year")
    assert ledger.request("person-2").number == 2
    monkeypatch.undo()
    ledger.accept("that clock was wrong")
    ledger.verify()
    ledger.request("person-3")


def test_withdrawn_and_refused(ledger: Ledger) -> None:
    file(ledger, "person-1", "person-2", "person-3")
    assert ledger.withdraw(1, "changed their mind").state == "withdrawn"
    refused = ledger.refuse(2, "cannot show who they are")
    assert (refused.state, refused.why) == ("refused", "cannot show who they are")
    check_refused("request 1 is withdrawn; only an open one", ledger.refuse, 1, "again")
    check_refused("why the request is refused", ledger.refuse, 3, "  ")
    for number in (9, 0, -1, 2**31, 10**22):
        check_refused("request is ", ledger.withdraw, number)
        check_refused("request is ", ledger.get, number)
    assert ledger.request("person-1").number == 4
    assert ledger.work()[0].requests == (3, 4)
    ledger.verify()


def test_lists_are_chosen(ledger: Ledger) -> None:
    for i in range(5):
        ledger.request(f"person-{i}")
    ledger.withdraw(2)
    assert [r.number for r in ledger.requests(state="open")] == [1, 3, 4, 5]
    assert [r.number for r in ledger.requests(after=1, most=2)] == [2, 3]
    assert [r.number for r in ledger.requests(model="shop", state="withdrawn")] == [2]
    assert ledger.requests(state="running") == ()
    check_refused("state is 'closed'", ledger.requests, state="closed")
