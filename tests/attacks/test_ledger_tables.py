"""Attempts by somebody who can write the database, or is only careless, and has no key."""

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import expunge
from ledger_life import learn_again, list_states, make_state


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[expunge.Ledger]:
    made = expunge.Ledger.create(f"sqlite:///{tmp_path}/ledger.db")
    made.register("shop", make_state(tmp_path / "state"))
    yield made
    made.close()


def write(ledger: expunge.Ledger, statement: str, *given: object) -> None:
    with sqlite3.connect(ledger.url.database) as raw:
        raw.execute(statement, given)
    raw.close()


# What somebody who can write the database, and has no key, bends before the worker comes, and bends
# back after it: (before, after). The second model, "b", holds person-35; "shop" does not.
BENT = {
    "another state": (
        "UPDATE models SET path = '{empty}', identity = '{identity}' WHERE id = 2",
        "UPDATE models SET path = '{b}', identity = '{real}' WHERE id = 2",
    ),
    "a model not asked": (
        "DELETE FROM work WHERE model = 2",
        "INSERT INTO work VALUES (1, 2, 'open', NULL, NULL, NULL)",
    ),
    "done by hand": (
        "UPDATE work SET state = 'done', outcome = 'not held' WHERE model = 2",
        "UPDATE work SET state = 'open', outcome = NULL WHERE model = 2",
    ),
    "names of models changed": (
        "UPDATE models SET name = CASE id WHEN 1 THEN 'b2' ELSE 'shop2' END",
        "UPDATE models SET name = CASE id WHEN 1 THEN 'shop' ELSE 'b' END",
    ),
    "retired": (
        "UPDATE models SET retired = registered WHERE id = 2",
        "UPDATE models SET retired = NULL WHERE id = 2",
    ),
}


@pytest.mark.parametrize("name", BENT)
def test_tables_bent_while_a_worker_looks_seal_no_lie(
    ledger: expunge.Ledger, tmp_path: Path, name: str
) -> None:
    """Each made the worker seal "held in none"; bent back, everything verified."""
    from expunge.ledger.models import identify

    ledger.register("b", make_state(tmp_path / "b", people=40, seed=3))
    ledger.request("person-35")
    empty = make_state(tmp_path / "empty", people=1, seed=5)
    known = {"empty": empty, "identity": identify("state", empty), "b": tmp_path / "b"}
    known["real"] = identify("state", tmp_path / "b")
    before, after = (statement.format(**known) for statement in BENT[name])
    write(ledger, before)
    for done in ledger.work():
        assert "the ledger does not hold" in (done.failed or "")
    write(ledger, after)
    assert list_states(ledger) == {1: "open"}
    ledger.verify()
    ledger.work()
    assert ledger.get(1).answer == "forgotten"
    ledger.verify()


def test_a_request_to_one_model_is_not_made_one_to_all(ledger: expunge.Ledger) -> None:
    ledger.request("nobody", model="shop")
    write(ledger, "UPDATE requests SET scope = 0")
    (done,) = ledger.work()
    assert "requests: 1 is not what the events tell" in (done.failed or "")
    write(ledger, "UPDATE requests SET scope = 1")
    ledger.work()
    assert ledger.get(1).answer == "not held"


def test_a_model_hidden_while_a_request_is_filed_is_found(
    ledger: expunge.Ledger, tmp_path: Path
) -> None:
    """The request would not ask it; whoever verifies or works is told so."""
    ledger.register("b", make_state(tmp_path / "b", people=40, seed=3))
    write(ledger, "UPDATE models SET retired = registered WHERE id = 2")
    ledger.request("person-35")
    write(ledger, "UPDATE models SET retired = NULL WHERE id = 2")
    with pytest.raises(expunge.VerificationError, match="does not ask the models that there were"):
        ledger.verify()
    assert all("does not follow" in (done.failed or "") for done in ledger.work())
    assert list_states(ledger) == {1: "open"}


def test_an_event_that_does_not_follow_is_found(ledger: expunge.Ledger) -> None:
    """Sealed with the key, and false: answered though a model owes it; by a release that does not
    name the person."""
    from expunge.ledger.chain import append
    from expunge.ledger.telling import tell

    ledger.request("person-1")
    ledger.work()
    ledger.request("person-2")
    events = list(ledger.events())
    with ledger.engine.execution_options(writes=True).begin() as connection:
        append(connection, "answered", request=2, answer="held in none")
        append(connection, "taken", model="shop", requests=[1], worker="w")
        append(connection, "settled", model="shop", outcomes={"2": ["already forgotten", 1]})
    more = [event for event in ledger.events() if event.number > len(events)]
    for event, said in zip(more, ["another answer", "does not owe", "does not name"], strict=True):
        (problem,) = tell([*events, event]).problems
        assert said in problem
    with pytest.raises(expunge.VerificationError, match="does not follow"):
        ledger.verify()


@pytest.mark.parametrize("ended", [False, True])
def test_a_row_put_there_does_not_swallow_a_request(ledger: expunge.Ledger, ended: bool) -> None:
    """Who files is told "was filed before", by a row that is gone, or has ended, a moment later."""
    ledger.request("person-1")
    ledger.work()
    row = "person, scope, sealed, reason, received, due, filed"
    if ended:
        write(ledger, "UPDATE requests SET state = 'open'")
    else:
        write(ledger, f"INSERT INTO requests (number, {row}, state) SELECT 9, {row}, 'open' "
                      "FROM requests")  # fmt: skip
    with pytest.raises(expunge.VerificationError, match="nothing is filed"):
        ledger.request("person-1")


def test_a_token_is_not_made_by_who_writes_the_database(ledger: expunge.Ledger) -> None:
    from expunge.ledger.tokens import find_token, hash_token, make_token

    secret = make_token(ledger.engine, "desk", "requester")
    assert find_token(ledger.engine, hash_token(secret)) is not None
    write(ledger, "INSERT INTO tokens SELECT 'evil', 'operator', ?, NULL, created FROM tokens",
          hash_token("mine"))  # fmt: skip
    assert find_token(ledger.engine, hash_token("mine")) is None
    with pytest.raises(expunge.VerificationError, match="tokens: evil is in the table, and no ev"):
        ledger.verify()
    write(ledger, "DELETE FROM tokens WHERE name = 'evil'")
    for change in ("role = 'operator'", "name = 'other'", "model = 'shop'"):
        write(ledger, f"UPDATE tokens SET {change}")
        assert find_token(ledger.engine, hash_token(secret)) is None
        with pytest.raises(expunge.VerificationError, match="tokens: "):
            ledger.verify()
        write(ledger, "UPDATE tokens SET role = 'requester', name = 'desk', model = NULL")
    ledger.request("person-1")
    write(ledger, "INSERT INTO filings VALUES ('desk', 1)")
    with pytest.raises(expunge.VerificationError, match="filings: desk of 1 is in the table"):
        ledger.verify()


def test_only_the_last_request_readmits_and_only_who_is_back(
    ledger: expunge.Ledger, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """ "May stay" was said of a request that changed nothing."""
    ledger.request("person-1")
    ledger.work()
    ledger.request("person-1")
    (done,) = ledger.work()
    assert done.already == 1
    with pytest.raises(expunge.InputError, match="the last one by which shop forgot somebody"):
        ledger.readmit(2, "shop")
    learn_again(tmp_path / "state", "person-1")
    ledger.request("person-1")
    ledger.work()
    learn_again(tmp_path / "state", "person-1")
    with pytest.raises(expunge.InputError, match="the last one"):
        ledger.readmit(1, "shop")
    ledger.readmit(3, "shop")
    assert ledger.check("shop").returned == ()
    ledger.verify()


def test_a_copy_of_shards_brings_nobody_back(ledger: expunge.Ledger, tmp_path: Path) -> None:
    """They have no key of their own; a copy from before is known by whom it holds."""
    from expunge.jobs.heads import learn_job
    from head_folder import write_head_job

    folder = tmp_path / "learned"
    method = {"name": "shards", "classes": None, "shards": 2, "slices": 2, "seed": "s",
              "epochs": 1, "learning_rate": 0.1}  # fmt: skip
    job = write_head_job(folder, model={"build": "plain.py:build"}, features=None, method=method)
    plain = "from torch import nn\n\n\ndef build():\n    return nn.Linear(4, 3)\n"
    (folder / "plain.py").write_text(plain)
    learn_job(job, release=folder / "first")
    shutil.copytree(folder / "state", tmp_path / "backup")
    ledger.register("parts", folder / "state")
    ledger.request("p3", model="parts")
    ledger.work("parts")
    with pytest.raises(expunge.InputError, match="holds whom that forgot"):
        ledger.register("again", tmp_path / "backup")


def test_a_file_that_is_gone_takes_no_request(ledger: expunge.Ledger, tmp_path: Path) -> None:
    """Moved or deleted under an open ledger, it swallowed what was filed."""
    ledger.request("person-1")
    (tmp_path / "ledger.db").rename(tmp_path / "moved.db")
    with pytest.raises(expunge.RunError, match="is gone; nothing changed"):
        ledger.request("person-2")
    shutil.copy(tmp_path / "moved.db", tmp_path / "ledger.db")
    (tmp_path / "moved.db").unlink()
    number = ledger.request("person-2").number
    ledger.close()
    with expunge.Ledger(f"sqlite:///{tmp_path}/ledger.db") as again:
        assert again.get(number).state == "open"
        again.verify()


def test_a_link_is_no_second_folder_for_releases(ledger: expunge.Ledger, tmp_path: Path) -> None:
    (tmp_path / "state-releases").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "state-releases")
    with pytest.raises(expunge.InputError, match="another: the model shop has it"):
        ledger.register("b", make_state(tmp_path / "b", seed=3), releases=tmp_path / "link")


def test_two_people_on_the_input_are_not_one(ledger: expunge.Ledger) -> None:
    """The second line was not read, and nobody was told."""
    from typer.testing import CliRunner

    from expunge.cli.main import app

    words = ["ledger", "request", "-", "--ledger", f"sqlite:///{ledger.url.database}"]
    for given in ("person-1\nperson-2\n", "", "person-1\n\n"):
        assert CliRunner().invoke(app, words, input=given).exit_code != 0
    assert ledger.requests() == ()
    assert CliRunner().invoke(app, words, input="person-1\r\n").exit_code == 0
    assert len(ledger.requests()) == 1


def test_a_ledger_copied_with_its_key_is_found(ledger: expunge.Ledger, tmp_path: Path) -> None:
    """Two ledgers at work on one state: neither knows the releases of the other."""
    (tmp_path / "copy").mkdir()
    ledger.close()
    for name in ("ledger.db", "ledger.db.key", "ledger.db.key.anchor"):
        shutil.copy(tmp_path / name, tmp_path / "copy" / name)
    ledger.request("person-1")
    ledger.work()
    with expunge.Ledger(f"sqlite:///{tmp_path}/copy/ledger.db") as copy:
        copy.request("person-2")
        (done,) = copy.work()
        assert (done.release, done.forgotten) == (2, 1)
        with pytest.raises(expunge.VerificationError, match="release that this ledger does not"):
            copy.verify()
    with pytest.raises(expunge.VerificationError, match="0002 is a release that this ledger does"):
        ledger.verify()
    ledger.request("person-2")  # gone from the state, and answered by a certificate all the same
    (done,) = ledger.work()
    assert (done.release, done.forgotten, ledger.get(2).answer) == (3, 1, "forgotten")
