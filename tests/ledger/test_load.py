"""Many at once, and many deaths: nobody is lost, nobody is answered twice."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import expunge
from job_folder import make_environment
from ledger_life import check_answers, let_lease_end, make_state

HELPERS = Path(__file__).parents[1] / "helpers"
pytestmark = pytest.mark.slow


def start(name: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HELPERS / name), *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=make_environment(),
    )  # fmt: skip


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    found = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        found.append(out)
    return found


def test_a_thousand_requests_by_eight_clients_while_a_worker_runs(url: str, tmp_path: Path) -> None:
    state = make_state(tmp_path / "state", people=5000, rows=10)
    key = tmp_path / "ledger.key"
    with expunge.Ledger.create(url, key=key) as ledger:
        ledger.register("shop", state)
        clients = [
            start("ledger_client.py", url, key, 125 * i, 125 * (i + 1), 25) for i in range(8)
        ]
        rounds = 0
        while any(client.poll() is None for client in clients):
            rounds += len(ledger.work())
            time.sleep(0.01)
        finish(*clients)
        while done := ledger.work():
            rounds += len(done)
        found = ledger.requests()
        assert {request.state for request in found} == {"answered"}
        assert {request.answer for request in found} == {"forgotten"}
        assert len({request.person for request in found}) == 1000
        assert [request.number for request in found] == list(range(1, len(found) + 1))
        outcomes = [request.answers[0].outcome for request in found]
        assert outcomes.count("forgotten") == 1000
        named = [n for release in ledger.models("shop")[0].releases for n in release.requests]
        assert sorted(named) == [
            request.number for request in found if request.answers[0].outcome == "forgotten"
        ]
        assert rounds > 1
        check_answers(ledger)
        assert len(expunge.load(state)) == 40_000


def test_twenty_kills_of_the_worker(url: str, tmp_path: Path) -> None:
    state = make_state(tmp_path / "state", people=120)
    key = tmp_path / "ledger.key"
    with expunge.Ledger.create(url, key=key) as ledger:
        ledger.register("shop", state)
        for i in range(0, 120, 2):
            ledger.request(f"person-{i}")
    workers = start("ledger_worker.py", url, key, 20, 7)
    with expunge.Ledger(url, key=key) as ledger:
        for i in range(1, 20, 2):
            ledger.request(f"person-{i}")
            time.sleep(0.2)
        assert finish(workers) == ["20\n"]
        assert [event for event in ledger.events() if event.kind == "adopted"]
        ledger.verify()
        let_lease_end(ledger)
        while ledger.work():
            pass
        found = ledger.requests()
        assert len(found) == 70
        assert {(request.state, request.answer) for request in found} == {("answered", "forgotten")}
        named = [n for release in ledger.models("shop")[0].releases for n in release.requests]
        assert sorted(named) == list(range(1, 71))
        check_answers(ledger)
