"""Attempts by somebody who can write the database, or is only careless, and has no key."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

import expunge
from expunge_ledger import Ledger
from expunge_ledger.keys import Key
from expunge_ledger.models import Model
from expunge_ledger.records import hash_token
from ledger.tests import life
from ledger.tests.stand_in import learn_again, make_state

# What somebody who can write the database, and has no key, bends before the worker comes, and bends
# back after it: (before, after). The second model, "b", holds person-35; "shop" does not.
BENT = {
    "another state": ("UPDATE models SET path = '{empty}', identity = '{identity}' WHERE id = 2",
                      "UPDATE models SET path = '{b}', identity = '{real}' WHERE id = 2"),
    "a model not asked": ("DELETE FROM work WHERE model = 2", None),
    "done by hand": ("UPDATE work SET state = 'done', outcome = 'not held' WHERE model = 2",
                     "UPDATE work SET state = 'open', outcome = NULL WHERE model = 2"),
    "names of models changed": (
     "UPDATE models SET name = CASE id WHEN 1 THEN 'b2' ELSE 'shop2' END",
     "UPDATE models SET name = CASE id WHEN 1 THEN 'shop' ELSE 'b' END"),
    "retired": ("UPDATE models SET retired = registered WHERE id = 2",
                "UPDATE models SET retired = NULL WHERE id = 2"),
    "asked of another": ("UPDATE work SET model = 3 WHERE model = 2",
                         "UPDATE work SET model = 2 WHERE model = 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", BENT)
def test_tables_bent_while_a_worker_looks_seal_no_lie(
    small: Ledger, tmp_path: Path, name: str
) -> None:
    """Each made the worker seal "held in none"; bent back, everything verified."""
    small.register("b", make_state(tmp_path / "b", people=40))
    small.request("person-35")
    empty = make_state(tmp_path / "empty", people=1)
    facts = {"empty": empty, "identity": Model(empty).identity, "b": tmp_path / "b"}
    facts["real"] = Model(tmp_path / "b").identity
    (kept,) = life.read(small, "SELECT * FROM work WHERE model = 2")
    before, after = BENT[name]
    life.write(small, before.format(**facts))
    try:
        for done in small.work():
            assert "the ledger does not hold" in (done.failed or "") or done.model == "shop"
    except expunge.VerificationError:
        pass
    if after is None:
        life.put(small, "work", kept)
    else:
        life.write(small, after.format(**facts))
    assert life.list_states(small) == {1: "open"}
    small.verify()
    small.work()
    assert small.get(1).answer == "forgotten"
    small.verify()


# What was bent where person-1 was forgotten and person-2 asks "shop" alone; who reads it next; what
# they say, instead of the lie.
READ = {
    "nothing to do": ("DELETE FROM work WHERE request = 2", Ledger.work, "the open parts of shop"),
    "held in none": ("UPDATE requests SET scope = 0 WHERE number = 2", Ledger.work, "requests: 2"),
    "a reason that says another name": (
        "UPDATE secrets SET what = 'person' WHERE request = 2", Ledger.work, "changed or moved"),
    "exported as answered": (
        "UPDATE requests SET state = 'answered', answer = 'held in none' WHERE number = 2",
        lambda ledger: ledger.export("person-2"), "requests: 2"),
    "never forgotten": ("DELETE FROM work WHERE request = 1",
                        lambda ledger: ledger.request("person-1"), "rows about a person are gone"),
    "never asked": ("DELETE FROM requests WHERE number = 1",
                    lambda ledger: ledger.request("person-1"), "rows about a person are gone"),
}  # fmt: skip


@pytest.mark.parametrize("lie", READ)
def test_the_next_who_reads_what_was_bent_says_so(small: Ledger, lie: str) -> None:
    statement, step, said = READ[lie]
    life.forget(small, "person-1")
    small.request("person-2", model="shop", reason="person-3")
    if lie == "a reason that says another name":
        life.write(small, "DELETE FROM secrets WHERE request = 2 AND what = 'person'")
    life.write(small, statement)
    if step is Ledger.work:
        life.check_fails(small, said)
    else:
        life.check_differs(said, lambda: step(small))
    life.check_differs(r"does not hold|moved", small.verify)
    assert [one.number for one in small.models("shop")[0].releases] == [1]


ROWS = {
    "requests": ("number", 1), "work": ("request", 1), "models": ("id", 1),
    "tokens": ("name", "desk"), "releases": ("number", 1), "book": ("id", 1),
}  # fmt: skip


@pytest.mark.parametrize("table", ROWS)
def test_a_row_of_before_is_not_the_row(small: Ledger, table: str) -> None:
    """It has its MAC, and is old: everything that reads it refuses."""
    secret = small.make_token("desk", "requester")
    column, key = ROWS[table]

    def get() -> Any:
        return life.read(small, f"SELECT * FROM {table} WHERE {column} = ?", key)

    small.request("person-1")
    old = get()
    small.work()
    small.revoke_token("desk")
    if table == "releases":
        (row,) = get()
        old = [(*row[:3], "begun", *row[4:])]
    life.write(small, f"DELETE FROM {table} WHERE {column} = ?", key)
    life.put(small, table, *old)
    with pytest.raises(expunge.VerificationError):
        small.verify()
    tries = {
        "requests": lambda: small.request("person-1"),
        "work": lambda: _raise(small.request("person-1") and small.work()),
        "models": lambda: small.request("person-2"), "tokens": lambda: small.tokens(),
        "releases": lambda: small.models(), "book": lambda: small.request("person-2"),
    }  # fmt: skip
    with pytest.raises((expunge.VerificationError, expunge.RunError)):
        tries[table]()
    if table == "tokens":  # revoked, it does not come back
        life.check_differs("tokens: ", lambda: small.find_token(hash_token(secret)))


def _raise(done: Any) -> None:
    raise expunge.VerificationError(done[0].failed)


def test_a_model_hidden_while_a_request_is_filed_is_found(small: Ledger, tmp_path: Path) -> None:
    """The request would not ask it: nothing is filed."""
    small.register("b", make_state(tmp_path / "b", people=40))
    rows = life.read(small, "SELECT * FROM models WHERE id = 2")
    for statement in ("UPDATE models SET retired = registered WHERE id = 2",
                      "DELETE FROM models WHERE id = 2"):  # fmt: skip
        life.write(small, statement)
        life.check_differs("models: ", lambda: small.request("person-35"))
    life.put(small, "models", *rows)
    small.request("person-35")
    small.verify()


def test_an_event_that_does_not_come_from_those_before_is_not_written(small: Ledger) -> None:
    """With the key, and false: settled though nobody asked, by a release that names others."""
    life.forget(small, "person-1")
    small.request("person-2")
    before = small.anchor()
    for kind, body in (
        ("settled", {"model": "shop", "outcomes": {"1": ["not held", None]}}),
        ("settled", {"model": "shop", "outcomes": {"2": ["already forgotten", 1]}}),
        ("released", {"model": "shop", "release": 1, "requests": [1, 2], "certificate": "x",
                      "parent": None, "generation": None}),
        ("requested", {"request": 2, "person": "0" * 64, "model": None, "models": ["shop"],
                       "received": "2026-01-01", "due": "2026-02-01", "reason": None}),
        ("refused", {"request": 1, "reason": "x"}), ("begun", {"model": "shop", "release": 1,
                     "directory": "/", "replay": 0, "requests": [2]}),
    ):  # fmt: skip
        with pytest.raises(expunge.VerificationError), small.writing() as tables:
            tables.record(kind, **body)
    assert small.anchor() == before


@pytest.mark.parametrize("ended", [False, True])
def test_a_row_put_there_does_not_swallow_a_request(small: Ledger, ended: bool) -> None:
    """Who files is told "was filed before", by a row that is gone, or has ended, a moment later."""
    small.request("person-1")
    (row,) = life.read(small, "SELECT * FROM requests")
    small.work()
    if ended:
        life.write(small, "DELETE FROM requests")
    life.put(small, "requests", row if ended else (9, *row[1:]))
    life.check_differs("the ledger does not hold", lambda: small.request("person-1"))


def test_a_token_is_not_made_by_who_writes_the_database(small: Ledger) -> None:
    secret = small.make_token("desk", "requester")

    def find(given: str) -> object:
        return small.find_token(hash_token(given))

    assert find(secret) is not None
    (row,) = life.read(small, "SELECT * FROM tokens")
    for statement in (
        "INSERT INTO tokens SELECT 'evil', 'operator', model, hash, created, revoked, mac "
        "FROM tokens",
        "UPDATE tokens SET role = 'operator'", "UPDATE tokens SET name = 'other'",
        "UPDATE tokens SET model = 'shop'", "DELETE FROM tokens",
    ):  # fmt: skip
        life.write(small, statement)
        life.check_differs("tokens: ", lambda: find(secret))
        life.check_differs("tokens: ", small.verify)
        life.write(small, "DELETE FROM tokens")
        life.put(small, "tokens", row)
    small.request("person-1")
    life.write(small, "INSERT INTO filings SELECT 'desk', 1, bucket, mac FROM requests")
    life.check_differs("filings: desk of 1", small.verify)


def test_only_the_last_request_readmits_and_only_who_is_back(small: Ledger, state: Path) -> None:
    life.forget(small, "person-1")
    life.check_refused("of somebody who is in shop again", small.readmit, 1, "shop")
    done = life.forget(small, "person-1")
    assert done.already == 1
    life.check_refused("the last one by which shop forgot somebody", small.readmit, 2, "shop")
    learn_again(state, "person-1")
    life.forget(small, "person-1")
    learn_again(state, "person-1")
    life.check_refused("the last one", small.readmit, 1, "shop")
    small.readmit(3, "shop")
    assert not life.list_returned(small)
    small.verify()


def test_readmit_consults_the_chain(small: Ledger, state: Path) -> None:
    life.forget(small, "person-1")
    learn_again(state, "person-1")
    life.write(small, "UPDATE work SET readmitted = '2026-01-01T00:00:00+00:00'")
    life.check_differs("work: 1 of 1", lambda: small.readmit(1, "shop"))
    small.request("person-2")
    life.check_fails(small, "work: 1 of 1")


def test_a_file_that_is_gone_takes_no_request(small: Ledger, tmp_path: Path) -> None:
    """Moved or deleted under an open ledger, it swallowed what was filed; an empty one was made,
    and gave numbers away twice."""
    small.request("person-1")
    (tmp_path / "ledger.db").rename(tmp_path / "moved.db")
    for _ in range(2):
        with pytest.raises(expunge.RunError, match="is gone; nothing changed"):
            small.request("person-2")
        small.engine.dispose()
        assert not (tmp_path / "ledger.db").exists()
        with pytest.raises(expunge.ExpungeError):
            small.request("person-2")
    shutil.copy(tmp_path / "moved.db", tmp_path / "ledger.db")
    (tmp_path / "moved.db").unlink()
    assert small.request("person-2").number == 2
    small.verify()


def test_folders_and_links(small: Ledger, state: Path, tmp_path: Path) -> None:
    (tmp_path / "state-releases").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "state-releases")
    other = make_state(tmp_path / "b")
    with pytest.raises(expunge.InputError, match="another: the model shop has it"):
        small.register("b", other, releases=tmp_path / "link")
    with pytest.raises(expunge.InputError, match="outside of the state"):
        small.register("b", other, releases=state / "releases")
    shutil.copytree(state, tmp_path / "backup")
    (tmp_path / "again").symlink_to(state)
    for name in ("backup", "again"):
        with pytest.raises(expunge.InputError, match="no copy of that of the model shop"):
            small.register("fresh", tmp_path / name)
    assert len(small.models()) == 1


def test_a_ledger_copied_with_its_key_is_found(small: Ledger, tmp_path: Path) -> None:
    """Two ledgers at work on one state: neither knows the releases of the other."""
    (tmp_path / "copy").mkdir()
    small.close()
    for name in ("ledger.db", "ledger.key", "ledger.key.anchor"):
        shutil.copy(tmp_path / name, tmp_path / "copy" / name)
    life.forget(small, "person-1")
    place = tmp_path / "copy"
    with Ledger(f"sqlite:///{place}/ledger.db", key=place / "ledger.key") as copy:
        done = life.forget(copy, "person-2")
        assert (done.release, done.forgotten) == (2, 1)
        life.check_differs("release that this ledger does not", copy.verify)
    life.check_differs("0002 is a release that this ledger does", small.verify)
    small.request("person-2")  # gone from the state, and answered by a certificate all the same
    (done,) = small.work()
    assert (done.release, done.forgotten, small.get(2).answer) == (3, 1, "forgotten")


def test_the_key_cannot_be_guessed_from_the_ledger(small: Ledger, tmp_path: Path) -> None:
    """Plain hashes of a guessed identifier are not in it; nor is the key."""
    life.forget(small, "person-1")
    small.close()
    data = b"".join(path.read_bytes() for path in tmp_path.glob("ledger.db*"))
    for make in (hashlib.md5, hashlib.sha1, hashlib.sha256, hashlib.blake2b):
        assert make(b"person-1").hexdigest().encode() not in data
        assert make(b"person-1").digest() not in data
    assert small.key.secret not in data
    assert small.key.secret.hex().encode() not in data
    assert Key(bytes(32)).hash_person("person-1").encode() not in data
