"""What was changed, cut off or put back is found, and named."""

import json
import shutil
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

import expunge
from expunge.ledger import chain, verification
from expunge.ledger.chain import START, hash_event
from expunge.ledger.clocks import read_now
from expunge.ledger.database import writing
from ledger_life import check_answers, list_states


def live(ledger: expunge.Ledger) -> None:
    """Two answered, one refused, one open."""
    for i in (1, 2, 3, 4):
        ledger.request(f"person-{i}", reason=f"letter {i}")
    ledger.refuse(3, "not who they say they are")
    ledger.work(most=2)


def change(ledger: expunge.Ledger, statement: str) -> None:
    with writing(ledger.engine) as connection:
        connection.execute(text(statement))


def test_a_ledger_that_holds(ledger: expunge.Ledger) -> None:
    live(ledger)
    found = ledger.verify()
    assert (found.requests, found.releases, found.said) == (4, 1, ())
    assert (found.events, found.head) == (ledger.anchor().events, ledger.anchor().head)


CHANGES = {
    "an event's words": "UPDATE events SET body = '{}' WHERE number = 4",
    "an event's date": "UPDATE events SET at = '2020-01-01T00:00:00+00:00' WHERE number = 5",
    "an event gone": "DELETE FROM events WHERE number = 4",
    "the last event gone": "DELETE FROM events WHERE number = (SELECT max(number) FROM events)",
    "another seal": "UPDATE events SET seal = hash WHERE number = 3",
    "another end": "UPDATE book SET events = events - 1",
    "answered by hand": "UPDATE requests SET state = 'answered', answer = 'forgotten' "
    "WHERE number = 4",
    "late made good": "UPDATE requests SET due = '2999-01-01' WHERE number = 1",
    "answered earlier": "UPDATE requests SET ended = '2020-01-01T00:00:00+00:00' WHERE number = 1",
    "another person": "UPDATE requests SET person = repeat_zero WHERE number = 4",
    "another seal of a name": "UPDATE requests SET sealed = (SELECT sealed FROM requests "
    "WHERE number = 2) WHERE number = 1",
    "a request gone": "DELETE FROM work WHERE request = 4",
    "work undone": "UPDATE work SET state = 'open', outcome = NULL, release = NULL "
    "WHERE request = 1",
    "another certificate": "UPDATE releases SET certificate = parent_zero",
    "another directory": "UPDATE releases SET directory = '/tmp'",
    "nobody named": "DELETE FROM named WHERE request = 1",
    "one more named": "INSERT INTO named VALUES (1, 4)",
    "another state": "UPDATE models SET path = '/tmp'",
    "a reason": "UPDATE requests SET reason = NULL WHERE number = 1",
    "a refusal": "UPDATE requests SET state = 'open' WHERE number = 3",
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_found(small: expunge.Ledger, name: str) -> None:
    live(small)
    zeros = f"'{'0' * 64}'"
    change(
        small,
        CHANGES[name].replace("repeat_zero", zeros).replace("parent_zero", zeros),
    )
    with pytest.raises(expunge.VerificationError, match="the ledger does not hold: ") as error:
        small.verify()
    assert "person-" not in str(error.value)


@pytest.mark.parametrize("name", ["an event gone", "answered by hand", "one more named"])
def test_what_was_changed_is_found_on_both(ledger: expunge.Ledger, name: str) -> None:
    live(ledger)
    change(ledger, CHANGES[name])
    with pytest.raises(expunge.VerificationError, match="the ledger does not hold: "):
        ledger.verify()


def test_a_chain_written_anew_is_not_sealed(small: expunge.Ledger) -> None:
    """Who has the database and not the key can make hashes that fit; not the seals."""
    live(small)
    file = small.url.database
    with sqlite3.connect(file) as raw:
        rows = raw.execute("SELECT number, at, kind, body FROM events ORDER BY number").fetchall()
        previous = START
        for number, at, kind, body in rows:
            told = json.loads(body)
            if kind == "refused":
                at = "2020-01-01T00:00:00+00:00"
            previous = hash_event(previous, number, at, kind, told)
            raw.execute(
                "UPDATE events SET at = ?, hash = ? WHERE number = ?", (at, previous, number)
            )
        raw.execute("UPDATE book SET head = ?", (previous,))
        raw.execute("UPDATE requests SET ended = '2020-01-01T00:00:00+00:00' WHERE number = 3")
    raw.close()
    with pytest.raises(expunge.VerificationError, match="was not sealed with the key"):
        small.verify()


def copy_database(ledger: expunge.Ledger, target: Path) -> None:
    with sqlite3.connect(ledger.url.database) as one, sqlite3.connect(target) as two:
        one.backup(two)
    one.close()
    two.close()


def put_back(ledger: expunge.Ledger, copy: Path, key: Path) -> expunge.Ledger:
    file = Path(ledger.url.database)
    ledger.close()
    for name in (f"{file.name}-wal", f"{file.name}-shm"):
        (file.with_name(name)).unlink(missing_ok=True)
    shutil.copyfile(copy, file)
    return expunge.Ledger(f"sqlite:///{file}", key=key)


def test_an_older_copy_is_found_and_survived(small: expunge.Ledger, tmp_path: Path) -> None:
    """Its open requests are answered again, by a release that names them."""
    small.request("person-1")
    copy_database(small, tmp_path / "copy.db")
    small.work()
    small.request("person-2")
    small.work()
    old = put_back(small, tmp_path / "copy.db", tmp_path / "ledger.key")
    with pytest.raises(expunge.VerificationError, match="an older copy was put back"):
        old.verify()
    assert list_states(old) == {1: "open"}
    (done,) = old.work()
    assert (done.forgotten, done.release) == (1, 3)
    with pytest.raises(expunge.VerificationError, match="a release that this ledger does not know"):
        old.verify()
    old.accept("the disk died; the copy of Monday was put back")
    check_answers(old)
    old.close()


def test_what_was_cut_off_since_the_last_verification_is_found(
    small: expunge.Ledger, tmp_path: Path
) -> None:
    copy_database(small, tmp_path / "copy.db")
    small.request("person-1")
    small.verify()
    old = put_back(small, tmp_path / "copy.db", tmp_path / "ledger.key")
    with pytest.raises(expunge.VerificationError, match="the end was cut off"):
        old.verify()
    old.close()


def test_a_clock_that_was_set_back_is_said(
    ledger: expunge.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.request("person-1")
    now = read_now()
    monkeypatch.setattr(chain, "read_now", lambda: now - timedelta(days=400))
    ledger.request("person-2")
    monkeypatch.undo()
    ledger.work()
    found = ledger.verify()
    assert found.said == ("event 4 is dated before the one before it: a clock was set",)
    check_answers(ledger)


def test_a_certificate_that_was_changed_is_found(small: expunge.Ledger) -> None:
    live(small)
    path = small.models("shop")[0].releases[0].directory / "certificate.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"cpu"', b'"gpu"'))
    with pytest.raises(expunge.VerificationError, match="does not hold"):
        small.verify()
    small.verify(certificates=False)
    path.write_bytes(data)
    small.verify()


def test_only_the_last_release_needs_its_weights(small: expunge.Ledger) -> None:
    for i in (1, 2):
        small.request(f"person-{i}")
        small.work()
    first, last = small.models("shop")[0].releases
    (first.directory / "model.safetensors").unlink()
    small.verify()
    (last.directory / "model.safetensors").unlink()
    with pytest.raises(expunge.ExpungeError, match=r"model\.safetensors"):
        small.verify()


def test_an_unknown_event_is_not_guessed_at(small: expunge.Ledger) -> None:
    with writing(small.engine) as connection:
        chain.append(connection, "forgiven", request=1)
    with pytest.raises(expunge.VerificationError, match="nothing is known of 'forgiven'"):
        small.verify()


def test_a_full_disk_under_the_database(small: expunge.Ledger) -> None:
    small.request("person-1")
    before = small.anchor()
    with small.engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        connection.rollback()

    def fill() -> None:
        for i in range(2, 400):
            small.request(f"person-{i}", reason="x" * 2000)

    with pytest.raises(expunge.RunError, match=r"disk is full.*nothing changed"):
        fill()
    count = len(small.requests())
    assert small.anchor().events - before.events == count - 1
    with small.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
        connection.rollback()
    assert small.request("person-1000").number == count + 1
    small.verify()


def test_verifying_while_a_worker_finishes(
    ledger: expunge.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written meanwhile is of no state that is verified, and no fault of it."""
    ledger.request("person-1")
    real = verification.read_tables

    def read(*given: object) -> object:
        (done,) = ledger.work()
        assert done.forgotten == 1
        monkeypatch.undo()
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(verification, "read_tables", read)
    assert ledger.verify().releases == 0
    assert ledger.verify().releases == 1
