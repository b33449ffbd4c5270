"""A server that is killed at random moments while clients file and work runs loses nothing."""

import http.client
import random
import threading
import time
import urllib.error
from pathlib import Path

import pytest

import expunge
from ledger_life import check_answers, let_lease_end, make_state
from server_run import Running, ask, make_tokens

KILLS, CLIENTS = 10, 4
pytestmark = pytest.mark.slow


def test_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    ledger = expunge.Ledger.create(f"sqlite:///{tmp_path}/ledger.db", key=tmp_path / "ledger.key")
    for name in ("shop", "search"):
        ledger.register(name, make_state(tmp_path / name, people=400, rows=1))
    tokens, draw = make_tokens(ledger), random.Random(7)
    told: dict[str, int] = {}
    left = [f"person-{i}" for i in range(400)]
    lock = threading.Lock()

    def file(url: str, over: threading.Event) -> None:
        while not over.is_set():
            with lock:
                person = left.pop()
            try:
                data = {"person": person, "model": "shop"}
                status, found = ask(f"{url}/api/requests", tokens["requester"], data)
            except (OSError, http.client.HTTPException, urllib.error.URLError):
                with lock:
                    left.append(person)
                return
            assert status in (200, 201), found
            with lock:
                assert person not in told
                told[person] = found["number"]

    acknowledged = list[int]()
    for _ in range(KILLS):
        server, over = Running(tmp_path, tmp_path / "log"), threading.Event()
        ask(f"{server.url}/api/models/shop/work", tokens["operator"], method="POST")
        threads = [threading.Thread(target=file, args=(server.url, over)) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        time.sleep(draw.uniform(0.1, 1.0))
        server.kill()
        over.set()
        for thread in threads:
            thread.join()
        acknowledged.append(len(told))
        let_lease_end(ledger)
    assert len(told) > KILLS, acknowledged
    assert acknowledged[0] < acknowledged[-1]
    assert len(set(told.values())) == len(told)
    for person, number in told.items():
        assert ledger.get(number).person == ledger.key.hash_person(person)
    mine = {one.number for one in ledger.requests()}
    assert set(told.values()) <= mine
    with_token = Running(tmp_path, tmp_path / "log")
    page = ask(f"{with_token.url}/api/requests?most=1", tokens["requester"])[1]
    assert page["total"] == len(mine), "whoever filed sees all of it"
    assert with_token.stop() in (0, -15)
    let_lease_end(ledger)
    while ledger.work():
        pass
    assert {one.state for one in ledger.requests()} == {"answered"}
    check_answers(ledger)
    assert "Traceback" not in (tmp_path / "log").read_text()
    ledger.close()
