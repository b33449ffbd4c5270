"""What was changed, cut off or restored is found, and named."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import text

import expunge
from expunge_ledger import Ledger
from expunge_ledger.chain import START, hash_event
from expunge_ledger.tables import Tables
from ledger.tests.life import check_answers, check_differs, forget, list_states


def live(ledger: Ledger) -> None:
    """Two answered, one refused, one open."""
    for i in (1, 2, 3):
        ledger.request(f"person-{i}", reason=f"letter {i}")
    ledger.refuse(3, "not who they say they are")
    ledger.work()
    ledger.request("person-4", reason="letter 4")


def change(ledger: Ledger, statement: str) -> None:
    with ledger.engine.execution_options(writes=True).begin() as connection:
        connection.execute(text(statement))


ZEROS = f"'{'0' * 64}'"
CHANGES = {
    "an event's words": "UPDATE events SET body = '{}' WHERE number = 4",
    "an event's date": "UPDATE events SET at = '2020-01-01T00:00:00+00:00' WHERE number = 5",
    "an event gone": "DELETE FROM events WHERE number = 4",
    "the last event gone": "DELETE FROM events WHERE number = (SELECT max(number) FROM events)",
    "another seal": "UPDATE events SET mac = hash WHERE number = 3",
    "another end": "UPDATE book SET events = events - 1",
    "fewer requests": "UPDATE book SET requests = requests - 1",
    "answered by hand": "UPDATE requests SET state = 'answered', answer = 'forgotten' "
    "WHERE number = 4",
    "late made good": "UPDATE requests SET due = '2999-01-01' WHERE number = 1",
    "answered earlier": "UPDATE requests SET ended = '2020-01-01T00:00:00+00:00' WHERE number = 1",
    "another person": f"UPDATE requests SET person = {ZEROS} WHERE number = 4",
    "another seal of a name": "UPDATE secrets SET sealed = (SELECT sealed FROM secrets "
    "WHERE request = 2 AND what = 'person') WHERE request = 1 AND what = 'person'",
    "a name gone": "DELETE FROM secrets WHERE request = 4 AND what = 'person'",
    "a request gone": "DELETE FROM work WHERE request = 4",
    "work undone": "UPDATE work SET state = 'open', outcome = NULL, release = NULL "
    "WHERE request = 1",
    "another certificate": f"UPDATE releases SET certificate = {ZEROS}",
    "another directory": "UPDATE releases SET directory = '/tmp'",
    "nobody named": "UPDATE releases SET requests = '[2]'",
    "one more named": "UPDATE releases SET requests = '[1, 2, 4]'",
    "a release gone": "DELETE FROM releases",
    "another state": "UPDATE models SET path = '/tmp'",
    "a model gone": "DELETE FROM models",
    "sums gone": "UPDATE book SET sums = mac",
    "a reason": "DELETE FROM secrets WHERE request = 1 AND what = 'reason'",
    "a refusal": "UPDATE requests SET state = 'open' WHERE number = 3",
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_found(small: Ledger, name: str) -> None:
    live(small)
    assert (small.verify().requests, small.verify().head) == (4, small.anchor().head)
    change(small, CHANGES[name])
    with pytest.raises(expunge.VerificationError) as error:
        small.verify()
    assert "person-" not in str(error.value)


@pytest.mark.parametrize("name", ["an event gone", "answered by hand", "one more named"])
def test_what_was_changed_is_found_on_both(ledger: Ledger, name: str) -> None:
    live(ledger)
    change(ledger, CHANGES[name])
    check_differs("the ledger does not hold: ", ledger.verify)


def test_a_chain_written_anew_has_no_macs(small: Ledger) -> None:
    """Who has the database and not the key can make hashes that fit; not the MACs."""
    live(small)
    with sqlite3.connect(str(small.url.database)) as raw:
        rows = raw.execute("SELECT number, at, kind, body FROM events ORDER BY number").fetchall()
        previous = START
        for number, at, kind, _ in rows:
            day = "2020-01-01T00:00:00+00:00" if kind == "refused" else at
            previous = hash_event(previous, number, day, kind, "0" * 64)
            change_ = "UPDATE events SET at = ?, hash = ? WHERE number = ?"
            raw.execute(change_, (day, previous, number))
        raw.execute("UPDATE book SET head = ?", (previous,))
        raw.execute("UPDATE requests SET ended = '2020-01-01T00:00:00+00:00' WHERE number = 3")
    raw.close()
    check_differs("not written with the key", small.verify)


def copy_database(ledger: Ledger, target: Path) -> None:
    with sqlite3.connect(str(ledger.url.database)) as one, sqlite3.connect(target) as two:
        one.backup(two)
    one.close()
    two.close()


def restore(ledger: Ledger, copy: Path, key: Path) -> Ledger:
    file = Path(str(ledger.url.database))
    ledger.close()
    for name in (f"{file.name}-wal", f"{file.name}-shm"):
        (file.with_name(name)).unlink(missing_ok=True)
    shutil.copyfile(copy, file)
    return Ledger(f"sqlite:///{file}", key=key)


def test_an_older_copy_is_found_and_survived(small: Ledger, tmp_path: Path) -> None:
    """Its open requests are answered again, by a release that names them."""
    small.request("person-1")
    copy_database(small, tmp_path / "copy.db")
    small.work()
    forget(small, "person-2")
    with restore(small, tmp_path / "copy.db", tmp_path / "ledger.key") as old:
        check_differs("an older copy was restored", old.verify)
        assert list_states(old) == {1: "open"}
        (done,) = old.work()
        assert (done.forgotten, done.release) == (1, 3)
        check_differs("that this ledger does not know", old.verify)
        old.accept("the disk died; the copy of Monday was restored")
        check_answers(old)


def test_what_was_cut_off_since_the_last_verification_is_found(
    small: Ledger, tmp_path: Path
) -> None:
    copy_database(small, tmp_path / "copy.db")
    small.request("person-1")
    small.verify()
    with (
        restore(small, tmp_path / "copy.db", tmp_path / "ledger.key") as old,
        pytest.raises(expunge.VerificationError, match="the end was cut off"),
    ):
        old.verify()


def test_a_certificate_that_was_changed_is_found(small: Ledger) -> None:
    live(small)
    path = small.models("shop")[0].releases[0].directory / "certificate.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"cpu"', b'"gpu"'))
    check_differs("does not hold", small.verify)
    small.verify(certificates=False)
    path.write_bytes(data)
    small.verify()


def test_only_the_last_release_needs_its_weights(small: Ledger) -> None:
    for person in ("person-1", "person-2"):
        forget(small, person)
    first, last = small.models("shop")[0].releases
    (first.directory / "model.safetensors").unlink()
    small.verify()
    (last.directory / "model.safetensors").unlink()
    with pytest.raises(expunge.ExpungeError, match=r"model\.safetensors"):
        small.verify()


def test_an_event_that_nobody_knows_is_refused(small: Ledger) -> None:
    with pytest.raises(expunge.VerificationError, match="nothing is known"), small.writing() as t:
        t.record("forgiven", request=1)


def test_an_anchor_of_another_ledger_is_found(small: Ledger) -> None:
    forget(small, "person-1")
    path = small.anchor_file
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"ledger": "0" * 64}))
    check_differs("is of another ledger", small.verify)
    path.write_text("{")
    with pytest.raises(expunge.CertificateError, match="is damaged"):
        small.verify()


def test_verifying_while_a_worker_finishes(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written meanwhile is of no state that is verified, and no fault of it."""
    ledger.request("person-1")
    real = Tables.events

    def read(*given: object) -> object:
        (done,) = ledger.work()
        assert done.forgotten == 1
        monkeypatch.undo()
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Tables, "events", read)
    assert ledger.verify().releases == 0
    assert ledger.verify().releases == 1
