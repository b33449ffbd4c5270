"""Many at once, and many deaths: nobody is lost, nobody is answered twice."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expunge_ledger import Ledger
from ledger.tests.life import check_answers, let_lease_end
from ledger.tests.server_run import ROOT, Running, ask, make_tokens
from ledger.tests.stand_in import StandIn, make_state

pytestmark = pytest.mark.slow
REQUESTS, CLIENTS, KILLS = int(os.environ.get("LEDGER_LOAD", "1000")), 8, 10


def start(*words: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ledger.tests.client", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_many_requests_by_eight_clients_with_a_worker_killed_ten_times(
    url: str, tmp_path: Path
) -> None:
    state, key = make_state(tmp_path / "state", people=REQUESTS + 100), tmp_path / "ledger.key"
    draw, part = random.Random(7), REQUESTS // CLIENTS
    with Ledger.create(url, key=key) as ledger:
        ledger.register("shop", state)
        clients = [start("client", url, key, part * i, part * (i + 1)) for i in range(CLIENTS)]
        for _ in range(KILLS):
            worker = start("worker", url, key)
            time.sleep(draw.uniform(2.0, 5.0))
            worker.kill()
            worker.wait()
        assert [client.wait() for client in clients] == [0] * CLIENTS
        ledger.verify()
        let_lease_end(ledger)
        while ledger.work():
            pass
        found = ledger.requests()
        assert {(one.state, one.answer) for one in found} == {("answered", "forgotten")}
        assert len({one.person for one in found}) == part * CLIENTS
        assert [one.number for one in found] == list(range(1, len(found) + 1))
        forgotten = [one.number for one in found if one.answers[0].outcome == "forgotten"]
        assert len(forgotten) == part * CLIENTS
        named = [n for one in ledger.models("shop")[0].releases for n in one.requests]
        assert sorted(named) == forgotten
        assert len(StandIn(state).facts["people"]) == 100
        check_answers(ledger)


def test_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    """A server that is killed at random moments while it files and works."""
    draw, filed = random.Random(3), dict[str, int]()
    with Ledger.create(f"sqlite:///{tmp_path}/ledger.db", key=tmp_path / "ledger.key") as ledger:
        for name in ("shop", "search"):
            ledger.register(name, make_state(tmp_path / name, people=400))
        tokens, names = make_tokens(ledger), iter(range(400))
        for _ in range(5):
            server = Running(tmp_path, tmp_path / "log")
            ask(f"{server.url}/api/models/shop/work", tokens["operator"], method="POST")
            until = time.monotonic() + draw.uniform(0.3, 1.5)
            while time.monotonic() < until:
                person = f"person-{next(names)}"
                data = {"person": person, "model": "shop"}
                status, found = ask(f"{server.url}/api/requests", tokens["requester"], data)
                assert status == 201, found
                filed[person] = found["number"]
            server.kill()
            let_lease_end(ledger)
        assert len(filed) > 5
        for person, number in filed.items():
            assert ledger.get(number).person == ledger.key.hash_person(person)
        while ledger.work():
            pass
        assert {one.state for one in ledger.requests()} == {"answered"}
        check_answers(ledger)
    assert "Traceback" not in (tmp_path / "log").read_text()
