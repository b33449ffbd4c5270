"""The API: who may do what, what they see, and what comes back."""

import json
import time
from datetime import UTC, datetime, timedelta

from expunge_ledger import models
from expunge_ledger.records import read_pace
from expunge_ledger.server.background import Background
from ledger.tests.life import die_at, let_lease_end
from ledger.tests.server_run import Life

EVERY = (
    "requester", "auditor", "requester-search", "auditor-search", "operator-search", "operator",
)  # fmt: skip


def test_what_each_role_may_do(life: Life) -> None:
    number = life.file("operator", "person-1", model="search")
    life.file("operator", "person-2", model="search", reason="secret reason")
    calls = {
        ("GET", "/me"): EVERY,
        ("GET", "/requests"): EVERY,
        ("POST", "/requests"): [n for n in EVERY if "auditor" not in n],
        ("POST", "/requests/find"): [n for n in EVERY if "requester" not in n],
        ("GET", f"/requests/{number}"): [n for n in EVERY if "requester" not in n],
        ("GET", f"/requests/{number}/events"): [n for n in EVERY if "requester" not in n],
        ("GET", f"/requests/{number}/reason"): ["operator", "operator-search"],
        ("POST", f"/requests/{number}/verify"): [n for n in EVERY if "requester" not in n],
        ("GET", "/models"): [n for n in EVERY if "requester" not in n],
        ("GET", "/models/search"): [n for n in EVERY if "requester" not in n],
        ("GET", "/models/shop"): ["operator", "auditor"],
        ("POST", "/models/search/verify"): [n for n in EVERY if "requester" not in n],
        ("POST", "/models/shop/verify"): ["operator", "auditor"],
        ("GET", "/work"): [n for n in EVERY if "requester" not in n],
        ("POST", "/verify"): ["operator", "auditor"],
        ("POST", "/evidence"): ["operator"],
        ("POST", f"/requests/{number}/refuse"): ["operator-search"],
        ("POST", "/models/shop/work"): ["operator"],
    }
    bodies = {"find": {"person": "person-1"}, "evidence": {"person": "person-1"}}
    bodies |= {"refuse": {"reason": "no"}, "requests": {"person": "person-9"}}
    for (method, path), allowed in calls.items():
        for who in EVERY:
            body = bodies.get(path.rpartition("/")[2]) if method == "POST" else None
            before = life.ledger.anchor()
            answer = life.ask(who, method, path, body)
            if who in allowed:
                assert answer.status_code < 300, (who, path, answer.text)
            elif path.endswith("refuse") and who == "operator":
                assert answer.status_code == 422, "it was refused already"
            else:
                assert answer.status_code in (403, 404), (who, path, answer.text)
                assert life.ledger.anchor() == before, (who, path)


def test_a_requester_sees_what_it_filed_and_nothing_else(both: Life) -> None:
    mine = both.file("requester", "person-1", model="shop")
    other = both.file("operator", "person-2", model="shop")
    assert [r["number"] for r in both.ask("requester", "GET", "/requests").json()["requests"]] == [
        mine
    ]
    missing = both.ask("requester", "GET", "/requests/999")
    hidden = both.ask("requester", "GET", f"/requests/{other}")
    assert (hidden.status_code, hidden.text) == (404, missing.text)
    events = both.ask("requester", "GET", f"/requests/{mine}/events").json()
    assert [event["kind"] for event in events] == ["requested", "filed"]
    assert events[0]["body"]["model"] == "shop"
    both.work()
    release = both.ask("requester", "GET", "/models/shop/releases/1/certificate.json")
    assert release.status_code == 200
    both.file("operator", "person-5", model="shop")
    both.work()
    for file in ("certificate.json", "statement.txt"):
        other_release = both.ask("requester", "GET", f"/models/shop/releases/2/{file}")
        assert other_release.status_code == 404


def test_who_files_the_same_sees_the_request_that_is_there(both: Life) -> None:
    number = both.file("operator", "person-1", model="shop")
    assert both.file("requester", "person-1", model="shop") == number
    assert both.ask("requester", "GET", f"/requests/{number}").status_code == 200
    before = both.ledger.anchor()
    assert both.file("requester", "person-1", model="shop") == number
    assert both.ledger.anchor() == before


def test_a_token_for_one_model_knows_no_other(both: Life) -> None:
    everywhere = both.file("operator", "person-1")
    shop = both.file("operator", "person-2", model="shop")
    who = "operator-search"
    listed = both.ask(who, "GET", "/requests").json()
    assert [one["number"] for one in listed["requests"]] == [everywhere]
    assert [one["model"] for one in listed["requests"][0]["answers"]] == ["search"]
    assert both.ask(who, "GET", f"/requests/{shop}").status_code == 404
    found = both.ask(who, "POST", "/requests/find", {"person": "person-2"}).json()
    assert found["total"] == 0
    assert (
        both.ask(who, "POST", f"/requests/{everywhere}/refuse", {"reason": "no"}).status_code == 403
    )
    own = both.ask(who, "POST", "/requests", {"person": "person-5"}).json()
    assert own["model"] == "search"
    other = both.ask(who, "POST", "/requests", {"person": "person-5", "model": "shop"})
    assert other.status_code == 403
    assert [one["name"] for one in both.ask(who, "GET", "/models").json()] == ["search"]
    events = both.ask(who, "GET", f"/requests/{everywhere}/events").json()
    assert all("shop" not in json.dumps(event["body"]) for event in events)
    totals = [both.ask(who, "GET", f"/requests?model={one}").json()["total"]
              for one in ("search", "shop", "none")]  # fmt: skip
    assert totals == [2, 0, 0], "chosen by another model, the list says nothing"
    both.work("shop")
    assert both.ask(who, "GET", "/models/shop/releases/1/certificate.json").status_code == 404


def test_refused_withdrawn_and_why(life: Life) -> None:
    number = life.file("requester", "person-1", model="shop", reason="I am person-1")
    assert life.ask("operator", "GET", f"/requests/{number}/reason").json() == {
        "reason": "I am person-1"
    }
    assert "reason" not in life.ask("operator", "GET", f"/requests/{number}").json()
    for body in ({}, {"reason": ""}, {"reason": " "}, {"reason": "x" * 2001}):
        assert life.ask("operator", "POST", f"/requests/{number}/refuse", body).status_code == 422
    done = life.ask("operator", "POST", f"/requests/{number}/refuse", {"reason": "unknown"})
    assert done.json()["state"] == "refused"
    assert life.ask("requester", "GET", f"/requests/{number}").json()["why"] == "unknown"
    again = life.ask("operator", "POST", f"/requests/{number}/withdraw", {})
    assert again.status_code == 422
    other = life.file("requester", "person-2", model="shop")
    done = life.ask("operator", "POST", f"/requests/{other}/withdraw", {})
    assert done.json()["state"] == "withdrawn"


def test_the_list_pages_and_chooses_as_the_clocks_say(both: Life) -> None:
    today = datetime.now(UTC).date()
    for place, left in enumerate((-3, -1, 0, 1, 7, 8, 20)):
        due = today + timedelta(days=left)
        received = today - timedelta(days=30)
        both.ledger.request(f"person-{place}", model="shop", received=received, due=due)
    for number in (2, 7):
        both.ledger.refuse(number, "no")
    everything = both.ask("auditor", "GET", "/requests").json()
    assert [one["number"] for one in everything["requests"]] == [1, 3, 4, 5, 6, 7, 2]
    assert everything["waiting"] == {"overdue": 1, "due soon": 3, "on time": 1}
    for pace in ("on time", "due soon", "overdue"):
        listed = both.ask("auditor", "GET", f"/requests?pace={pace}").json()
        expected = {
            one.number
            for one in both.ledger.requests()
            if read_pace(one.due, one.ended and one.ended.date(), today)[0] == pace
        }
        assert {one["number"] for one in listed["requests"]} == expected
        assert all(one["pace"] == pace for one in listed["requests"])
    pages = [both.ask("auditor", "GET", f"/requests?most=3&page={page}") for page in (1, 2, 3, 4)]
    numbers = [[one["number"] for one in page.json()["requests"]] for page in pages]
    assert numbers == [[1, 3, 4], [5, 6, 7], [2], []]
    assert {page.json()["total"] for page in pages} == {7}
    waiting = both.ask("auditor", "GET", "/requests?state=waiting&model=shop").json()
    assert waiting["total"] == 5
    assert both.ask("auditor", "GET", "/requests?model=search").json()["total"] == 0
    for query in ("state=odd", "pace=fast", "page=0", "most=1000", "page=x"):
        assert both.ask("auditor", "GET", f"/requests?{query}").status_code == 422


def test_verification_names_what_differs(life: Life) -> None:
    for person in ("person-1", "person-2"):
        life.file("operator", person, model="shop")
        life.work()
    assert life.ask("auditor", "POST", "/models/shop/verify").json() == {
        "holds": True, "differences": [], "releases": 2, "events": None, "head": None
    }  # fmt: skip
    first, second = life.ledger.models("shop")[0].releases
    weights = second.directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    said = life.ask("auditor", "POST", "/models/shop/verify").json()
    assert not said["holds"]
    assert str(life.folder) not in json.dumps(said)
    path = first.directory / "certificate.json"
    path.write_bytes(path.read_bytes().replace(b'"epsilon":0', b'"epsilon":1'))
    said = life.ask("auditor", "POST", "/models/shop/verify").json()
    assert [one.partition(":")[0] for one in said["differences"]] == ["release 1", "release 2"]
    assert not life.ask("auditor", "POST", "/verify").json()["holds"]
    refused = life.ask("auditor", "GET", "/models/shop/releases/1/certificate.json")
    assert refused.status_code == 409
    assert str(life.folder) not in refused.text


def test_a_model_that_fails_says_so_and_its_requests_stay_open(life: Life) -> None:
    number = life.file("operator", "person-1", model="shop")
    (life.folder / "shop" / "stand-in.json").write_text("{}")
    now = life.let_work("shop")
    assert now["said"]
    assert life.ask("auditor", "GET", "/work").json()[0]["said"] == ""
    assert life.ledger.get(number).state == "open"


def test_work_that_a_dead_worker_left_is_taken_up_when_a_server_starts(life: Life) -> None:
    number = life.file("operator", "person-1", model="search")
    die_at(models.Model, "forget", life.ledger.work, "search")
    let_lease_end(life.ledger)
    Background(life.ledger, pause=0.05).start()
    until = time.monotonic() + 60
    while life.ledger.get(number).state != "answered":
        assert time.monotonic() < until
        time.sleep(0.02)
