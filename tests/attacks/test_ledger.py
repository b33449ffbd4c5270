"""Attempts to make the ledger say what is not so, each of which must fail."""

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import expunge
from expunge.ledger import fulfilment
from expunge.ledger.names import Key
from ledger_life import Killed, let_lease_end, list_states, make_state


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


def test_a_certificate_of_others_does_not_answer(
    ledger: expunge.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that holds, put where the next one belongs, names other people."""
    ledger.request("person-1")
    (first,) = ledger.work()
    ledger.request("person-2")

    def place(state: Path, directory: Path, people: list[str]) -> tuple[str, ...]:
        shutil.copytree(first.directory, directory)
        return ()

    monkeypatch.setattr(fulfilment, "release_again", place)
    (done,) = ledger.work()
    assert "does not name the people of these requests" in (done.failed or "")
    assert list_states(ledger)[2] == "running"
    monkeypatch.undo()
    shutil.rmtree(first.directory.with_name("0002"))
    (done,) = ledger.work()
    assert done.forgotten == 1


def test_a_certificate_without_the_deed_does_not_answer(
    ledger: expunge.Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same people, forgotten in a copy: the state that was registered still holds them."""
    ledger.request("person-1")
    real = fulfilment.release_again

    def elsewhere(state: Path, directory: Path, people: list[str]) -> tuple[str, ...]:
        shutil.copytree(state, tmp_path / "copy", dirs_exist_ok=True)
        return real(tmp_path / "copy", directory, people)

    monkeypatch.setattr(fulfilment, "release_again", elsewhere)
    (done,) = ledger.work()
    assert "still holds people" in (done.failed or "")
    assert list_states(ledger) == {1: "running"}


def test_an_edited_certificate_does_not_answer(
    ledger: expunge.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.request("person-1")
    real = fulfilment.release_again

    def edit(*given: object) -> tuple[str, ...]:
        said = real(*given)  # type: ignore[arg-type]
        path = Path(str(given[1])) / "certificate.json"
        path.write_bytes(path.read_bytes().replace(b'"epsilon":0', b'"epsilon":1', 1))
        return said

    monkeypatch.setattr(fulfilment, "release_again", edit)
    (done,) = ledger.work()
    assert done.failed
    assert list_states(ledger) == {1: "running"}


def test_a_name_swapped_in_the_database_forgets_nobody(ledger: expunge.Ledger) -> None:
    """Whoever can write the database, and has no key, moves the seal of one request to another."""
    ledger.request("person-1")
    ledger.request("person-2")
    write(ledger, "UPDATE requests SET sealed = (SELECT sealed FROM requests WHERE number = 2) "
                  "WHERE number = 1")  # fmt: skip
    (done,) = ledger.work()
    assert "sealed text of the ledger was changed or moved" in (done.failed or "")
    assert set(list_states(ledger).values()) == {"open"}
    assert ledger.models("shop")[0].releases == ()


def test_a_whole_row_copied_in_the_database_is_found(ledger: expunge.Ledger) -> None:
    """A seal is bound to its request; the chain tells who asked."""
    ledger.request("person-1")
    ledger.request("person-2", model="shop")
    second = "FROM requests WHERE number = 2"
    write(
        ledger,
        f"UPDATE requests SET sealed = (SELECT sealed {second}), "
        f"person = (SELECT person {second}) WHERE number = 1",
    )
    with pytest.raises(expunge.VerificationError, match="requests: 1 is not what the events tell"):
        ledger.verify()
    (done,) = ledger.work()
    assert "sealed text of the ledger was changed or moved" in (done.failed or "")
    assert set(list_states(ledger).values()) == {"open"}


def test_a_request_put_into_the_table_is_not_worked_on(ledger: expunge.Ledger) -> None:
    """Somebody who is forgotten without having asked: no event tells of the request."""
    ledger.request("person-1")
    write(ledger, "INSERT INTO requests SELECT 2, person, 1, sealed, reason, received, due, filed, "
                  "state, answer, ended, why FROM requests")  # fmt: skip
    write(ledger, "INSERT INTO work VALUES (2, 1, 'open', NULL, NULL, NULL)")
    with pytest.raises(
        expunge.VerificationError, match="requests: 2 is in the table, and no event"
    ):
        ledger.verify()
    (done,) = ledger.work()
    assert "sealed text of the ledger was changed or moved" in (done.failed or "")


def test_a_state_that_was_exchanged_is_not_asked(ledger: expunge.Ledger, tmp_path: Path) -> None:
    """A state without the person would answer "held in none"."""
    ledger.request("person-1")
    shutil.rmtree(tmp_path / "state")
    make_state(tmp_path / "state", people=1, seed=5)
    (done,) = ledger.work()
    assert "is not the state that was registered" in (done.failed or "")
    assert list_states(ledger) == {1: "open"}


def test_a_link_to_another_state_is_not_asked(ledger: expunge.Ledger, tmp_path: Path) -> None:
    ledger.request("person-1")
    (tmp_path / "state").rename(tmp_path / "moved")
    make_state(tmp_path / "empty", people=1, seed=5)
    (tmp_path / "state").symlink_to(tmp_path / "empty")
    (done,) = ledger.work()
    assert done.failed
    assert list_states(ledger) == {1: "open"}


def test_invisible_characters_make_no_second_person(ledger: expunge.Ledger) -> None:
    for name in ("person-1\u200b", "person\u00ad-1", "person-1 ", "person-1\n"):
        with pytest.raises(expunge.InputError):
            ledger.request(name)
    assert ledger.requests() == ()


def test_the_key_cannot_be_guessed_from_the_ledger(ledger: expunge.Ledger) -> None:
    """Plain hashes of a guessed identifier are not in it; nor is the key."""
    ledger.request("person-1")
    ledger.work()
    ledger.close()
    folder = Path(ledger.url.database).parent
    data = b"".join(
        path.read_bytes() for path in folder.glob("ledger.db*") if path.suffix != ".key"
    )
    for make in (hashlib.md5, hashlib.sha1, hashlib.sha256, hashlib.blake2b):
        assert make(b"person-1").hexdigest().encode() not in data
        assert make(b"person-1").digest() not in data
    assert ledger.key.secret not in data
    assert ledger.key.secret.hex().encode() not in data
    assert Key(bytes(32)).hash_person("person-1").encode() not in data


def test_a_dead_worker_does_not_keep_a_request_for_itself(
    ledger: expunge.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the deed and the answer, five times over: one release, one answer."""
    ledger.request("person-1")

    def die(*given: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(fulfilment, "complete", die)
        patch.setattr(fulfilment, "let_go", lambda worker, name: None)
        for _ in range(5):
            with pytest.raises(Killed):
                ledger.work()
            let_lease_end(ledger)
    (done,) = ledger.work()
    assert (done.release, done.forgotten) == (1, 1)
    assert len(ledger.models("shop")[0].releases) == 1
    ledger.verify()


def test_an_anchor_of_another_ledger_is_found(ledger: expunge.Ledger) -> None:
    ledger.request("person-1")
    (done,) = ledger.work()
    path = done.directory / "ledger.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"ledger": "0" * 64}))
    with pytest.raises(expunge.VerificationError, match="is of another ledger"):
        ledger.verify()
    path.write_text("{")
    with pytest.raises(expunge.CertificateError, match="is damaged"):
        ledger.verify()


def test_noise_that_can_be_repeated_answers_nobody(tmp_path: Path) -> None:
    """A job with a seed certifies for experiments; that is no answer to a person."""
    from job_folder import write_job

    job = write_job(tmp_path / "job", method={"seed": 1})
    with expunge.Ledger.create(f"sqlite:///{tmp_path}/l.db") as ledger:
        ledger.register("net", job)
        ledger.request("p3")
        (done,) = ledger.work()
        assert "is not for release" in (done.failed or "")
        assert list_states(ledger) == {1: "running"}


@pytest.fixture
def net(tmp_path: Path) -> Iterator[expunge.Ledger]:
    """A ledger of one job, whose data are those its weights were trained on."""
    from job_folder import write_job

    with expunge.Ledger.create(f"sqlite:///{tmp_path}/net.db") as made:
        made.register("net", write_job(tmp_path / "job"))
        yield made


def drop_first(job: Path) -> None:
    """Take p0 out of the data that the job loads; their rows stay in the weights."""
    own = job / "own.py"
    text = own.read_text().replace('"ids": ids, "test": test}', '"ids": ids[1:], "test": test}')
    own.write_text(text.replace("TensorDataset(x[:50], y[:50])", "TensorDataset(x[1:50], y[1:50])"))


def test_nobody_leaves_the_data_of_a_job_unnoticed(net: expunge.Ledger, tmp_path: Path) -> None:
    """Taken out of data.load before they asked: the weights were trained on them all the same."""
    before = (tmp_path / "job" / "own.py").read_text()
    drop_first(tmp_path / "job")
    net.request("p0")
    net.request("nobody")
    (done,) = net.work()
    assert done.not_held == 1
    assert "request 1 stays open: this person was in the data of the job" in done.said[0]
    assert list_states(net) == {1: "open", 2: "answered"}
    net.verify()
    (tmp_path / "job" / "own.py").write_text(before)
    (done,) = net.work()
    assert (done.forgotten, net.get(1).answer) == (1, "forgotten")
    drop_first(tmp_path / "job")  # now they may go: a release names them
    net.request("p0")
    (done,) = net.work()
    assert done.already == 1


def test_nobody_is_not_held_in_weights_that_were_not_registered(
    net: expunge.Ledger, tmp_path: Path
) -> None:
    """Weights trained on more people than the ledger ever saw, put in place of the others."""
    from safetensors.torch import load_file, save_file

    file = tmp_path / "job" / "weights.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    net.request("stranger")
    (done,) = net.work()
    assert "model.weights is not the file that was registered" in done.said[0]
    assert list_states(net) == {1: "open"}
    net.register("net", tmp_path / "job" / "job.toml")
    (done,) = net.work()
    assert (done.not_held, net.get(1).answer) == (1, "held in none")
    net.verify()


def test_whom_a_job_held_cannot_be_unwritten(net: expunge.Ledger, tmp_path: Path) -> None:
    drop_first(tmp_path / "job")
    net.register("net", tmp_path / "job" / "job.toml")  # adds, and takes nobody away
    net.request("p0")
    net.work()
    assert list_states(net) == {1: "open"}
    write(net, "UPDATE known SET marks = substr(marks, 17)")
    with pytest.raises(expunge.VerificationError, match="known: net is not what the events tell"):
        net.verify()
    write(net, "DELETE FROM known")
    net.work()
    assert list_states(net) == {1: "open"}


def test_a_row_that_was_changed_is_no_evidence(ledger: expunge.Ledger) -> None:
    """An open request, made answered in the table, would be exported as answered."""
    ledger.request("person-1")
    write(ledger, "UPDATE requests SET state = 'answered', answer = 'held in none'")
    with pytest.raises(expunge.VerificationError, match="requests: 1 is not what the events tell"):
        ledger.export("person-1")


def test_the_certificate_of_others_is_no_evidence(ledger: expunge.Ledger) -> None:
    """Release 2 replaced by release 1 as a whole: it holds, and names somebody else."""
    ledger.request("person-1")
    (first,) = ledger.work()
    ledger.request("person-2")
    (second,) = ledger.work()
    shutil.copy(second.directory / "certificate.json", first.directory / "kept.json")
    shutil.copytree(first.directory, second.directory, dirs_exist_ok=True)
    with pytest.raises(expunge.VerificationError, match="not the certificate that the ledger"):
        ledger.export("person-2")
    shutil.copy(first.directory / "kept.json", first.directory / "certificate.json")
    with pytest.raises(expunge.VerificationError, match="not the certificate that the ledger"):
        ledger.export("person-1")


def test_a_chain_that_goes_in_circles_is_no_evidence(ledger: expunge.Ledger) -> None:
    """A release that says it is its own parent: the export would never end."""
    for number in (1, 2):
        ledger.request(f"person-{number}")
        ledger.work()
    write(ledger, "UPDATE releases SET certificate = parent WHERE id = 2")
    with pytest.raises(expunge.VerificationError, match="shop of 2 is not what the events tell"):
        ledger.export("person-2")


def test_nobody_is_readmitted_before_they_are_back(ledger: expunge.Ledger, tmp_path: Path) -> None:
    """Else a backup would bring them back later, and no check would say so."""
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    ledger.request("person-1")
    ledger.work()
    with pytest.raises(expunge.InputError, match="of somebody who is in shop again"):
        ledger.readmit(1, "shop")
    shutil.rmtree(tmp_path / "state")
    shutil.copytree(tmp_path / "backup", tmp_path / "state")
    assert ledger.check("shop").returned == (1,)
    ledger.readmit(1, "shop")
    assert ledger.check("shop").returned == ()
    ledger.verify()


def test_a_copy_from_before_a_model_is_found(tmp_path: Path) -> None:
    """A database that does not know the model does not know where its releases lie either."""
    with expunge.Ledger.create(f"sqlite:///{tmp_path}/l.db"):
        pass
    shutil.copy(tmp_path / "l.db", tmp_path / "old.db")
    with expunge.Ledger(f"sqlite:///{tmp_path}/l.db") as ledger:
        ledger.register("shop", make_state(tmp_path / "state"))
        ledger.request("person-1")
        ledger.work()
    shutil.copy(tmp_path / "old.db", tmp_path / "l.db")
    with expunge.Ledger(f"sqlite:///{tmp_path}/l.db") as ledger:
        ledger.request("person-2")
        ledger.work()
        with pytest.raises(expunge.VerificationError, match="an older copy was put back"):
            ledger.verify()


def test_releases_do_not_go_into_the_state_of_another(
    ledger: expunge.Ledger, tmp_path: Path
) -> None:
    other = make_state(tmp_path / "other")
    with pytest.raises(expunge.InputError, match="outside of the state"):
        ledger.register("other", other, releases=tmp_path / "state" / "releases")


@pytest.mark.parametrize("spelled", ["Person-1", "PERSON-1", "\uff50erson-1"])
def test_another_spelling_is_not_held_in_none(ledger: expunge.Ledger, spelled: str) -> None:
    """The state knows person-1; who writes it otherwise is asked, and not told that nobody is."""
    ledger.request(spelled)
    ledger.request("stranger")
    (done,) = ledger.work()
    assert "request 1 stays open: nobody is held under this identifier" in done.said[0]
    assert list_states(ledger) == {1: "open", 2: "answered"}


def test_another_spelling_is_not_held_in_none_of_a_job(net: expunge.Ledger) -> None:
    net.request("P3")
    (done,) = net.work()
    assert "differs only in case or width" in done.said[0]
    assert list_states(net) == {1: "open"}


def test_a_backup_under_another_name_brings_nobody_back(
    ledger: expunge.Ledger, tmp_path: Path
) -> None:
    """A copy is no new model: what the first forgot, it holds, and no check of it would say so."""
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    (tmp_path / "link").symlink_to(tmp_path / "state")
    for name in ("backup", "link"):
        with pytest.raises(expunge.InputError, match="no copy of that of the model shop"):
            ledger.register("fresh", tmp_path / name)
    assert len(ledger.models()) == 1


def test_a_job_starts_from_the_release_that_the_ledger_knows(
    net: expunge.Ledger, tmp_path: Path
) -> None:
    """Release 2 replaced by release 1, whose weights hold p2: no third is made from it."""
    job = tmp_path / "job" / "job.toml"
    job.write_text(job.read_text().replace("[data]", "[data]\nchanged = true"))
    for name in ("p1", "p2"):
        net.request(name)
        (done,) = net.work()
    shutil.copytree(done.directory.with_name("0001"), done.directory, dirs_exist_ok=True)
    net.request("p3")
    (done,) = net.work()
    assert "is not the certificate that the ledger knows" in (done.failed or "")
    assert list_states(net) == {1: "answered", 2: "answered", 3: "open"}


def test_one_model_does_not_answer_for_all(ledger: expunge.Ledger) -> None:
    ledger.request("stranger", model="shop")
    ledger.request("stranger")
    ledger.work()
    assert [request.answer for request in ledger.requests()] == ["not held", "held in none"]
    ledger.verify()


def test_nobody_stops_the_clock_of_another(ledger: expunge.Ledger) -> None:
    """Filed for somebody, due in a thousand years: their own request would be taken for it."""
    ledger.request("person-1", due="2999-01-01")
    asked = ledger.request("person-1")
    assert (asked.number, asked.new, asked.clock.days < 32) == (1, False, True)
    assert ledger.request("person-1", due="2999-01-01").due == asked.due
    ledger.verify()


def test_a_job_that_answers_from_a_state_is_not_looked_up_in_its_data(tmp_path: Path) -> None:
    """The state may hold people whom data.load does not give: it must be registered itself."""
    from job_folder import write_job

    make_state(tmp_path / "job" / "state")
    job = write_job(tmp_path / "job", model={"state": "state"})
    text = job.read_text()
    start, end = text.index("[method]"), text.index("[finetune]")
    job.write_text(text[:start] + '[method]\nname = "plan"\n' + text[end:])
    with expunge.Ledger.create(f"sqlite:///{tmp_path}/l.db") as ledger:
        with pytest.raises(expunge.InputError, match="register the state instead of the job"):
            ledger.register("net", job)
        assert ledger.models() == ()


def test_whom_a_job_held_is_not_unwritten_for_a_moment(net: expunge.Ledger, tmp_path: Path) -> None:
    drop_first(tmp_path / "job")
    net.request("p0")
    with sqlite3.connect(net.url.database) as raw:
        ((marks,),) = raw.execute("SELECT marks FROM known").fetchall()
    raw.close()
    write(net, "UPDATE known SET marks = substr(marks, 1, 16)")
    (done,) = net.work()
    assert "known: net is not what the events tell" in (done.failed or "")
    write(net, "UPDATE known SET marks = ?", marks)
    assert list_states(net) == {1: "open"}
    net.verify()


def test_the_check_of_a_job_says_nothing_false(net: expunge.Ledger) -> None:
    """Its data still have who was forgotten; its releases do not."""
    net.request("p0")
    net.work()
    with pytest.raises(expunge.InputError, match="a job keeps the forgotten out"):
        net.check("net")
