"""Attempts to make the ledger say what is not so, each of which must fail."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expunge
from expunge.certificates.hashes import hash_tensors
from expunge.certificates.record import Adapter, Weights
from expunge.certificates.release import Contents, describe_contents
from expunge_ledger import Ledger, models
from expunge_ledger.lease import Lease
from expunge_ledger.work import Worker
from ledger.tests import life
from ledger.tests.life import check_differs, check_fails, die_at, file, forget
from ledger.tests.stand_in import FILE, StandIn, make_state
from tests.helpers.job_folder import write_job
from tests.helpers.sample_releases import make_record, make_release


def place_others(state: Path, forget: Any, people: Any, directory: Path, *given: Any) -> None:
    """A release that holds, put where the next one belongs, names other people."""
    shutil.copytree(directory.with_name("0001"), directory)


def forget_in_a_copy(state: Path, forget: Any, *given: object) -> None:
    """The same people, forgotten in a copy: the state that was registered still holds them."""
    copy = shutil.copytree(state, state.with_name("copy"), dirs_exist_ok=True)
    forget(models.Model(copy), *given)


def edit_certificate(state: Path, forget: Any, people: object, directory: Path, *given: Any) -> Any:
    forget(models.Model(state), people, directory, *given)
    path = directory / "certificate.json"
    path.write_bytes(path.read_bytes().replace(b'"cpu"', b'"gpu"', 1))


@pytest.mark.parametrize(
    ("bend", "said"),
    [(place_others, ""), (forget_in_a_copy, "still holds people"), (edit_certificate, "")],
)
def test_a_certificate_that_does_not_fit_does_not_answer(
    small: Ledger, state: Path, bend: Callable[..., object], said: str
) -> None:
    forget(small, "person-1")
    small.request("person-2")
    real = models.Model.forget
    done = life.work_with(
        small, models.Model, "forget", lambda self, *given: bend(state, real, *given)
    )
    assert done.failed
    assert said in done.failed
    assert life.list_states(small)[2] == "running"
    shutil.rmtree(state.with_name("state-releases") / "0002")
    (done,) = small.work()
    assert (done.failed, done.forgotten) == (None, 1)


MOVED = {
    "its seal": "UPDATE secrets SET sealed = (SELECT sealed FROM secrets WHERE request = 2) "
    "WHERE request = 1",
    "its person": "UPDATE requests SET person = (SELECT person FROM requests WHERE number = 2) "
    "WHERE number = 1",
    "one more": "INSERT INTO requests SELECT 3, bucket, person, 1, received, due, filed, reason, "
    "state, answer, ended, why, mac FROM requests WHERE number = 1",
    "one more part": "INSERT INTO work SELECT 3, model, bucket, due, state, outcome, release, "
    "readmitted, mac FROM work WHERE request = 1",
}


@pytest.mark.parametrize("name", MOVED)
def test_a_name_moved_in_the_database_forgets_nobody(small: Ledger, name: str) -> None:
    small.request("person-1")
    small.request("person-2", model="shop")
    life.write(small, MOVED[name])
    for done in small.work():
        assert done.failed or name == "one more"
    with pytest.raises(expunge.VerificationError):
        small.verify()
    assert 3 not in [n for one in small.models("shop")[0].releases for n in one.requests]
    if name != "one more":
        assert small.models("shop")[0].releases == ()


@pytest.mark.parametrize("loss", ["exchanged", "link", "file", "meta", "folder", "count"])
def test_a_state_that_was_exchanged_or_lost_something_is_no_answer(
    small: Ledger, state: Path, tmp_path: Path, loss: str
) -> None:
    """A state without the person would answer "held in none"."""
    file(small, "person-1", "nobody")
    state.rename(tmp_path / "moved")
    match loss:
        case "exchanged":
            make_state(state, people=1)
        case "link":
            state.symlink_to(make_state(tmp_path / "empty", people=1))
        case "file":
            state.mkdir()
        case "meta":
            state.mkdir()
            (state / FILE).write_text("{}")
        case "count":
            shutil.copytree(tmp_path / "moved", state)
            text = (state / FILE).read_text().replace('"person-1", ', "")
            (state / FILE).write_text(text)
        case _:
            pass
    check_fails(small)
    assert life.list_states(small) == {1: "open", 2: "open"}
    small.verify()


def test_a_dead_worker_does_not_keep_a_request_for_itself(
    small: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the deed and the answer, five times over: one release, one answer."""
    small.request("person-1")
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "complete", life.die)
        patch.setattr(Lease, "give_back", lambda self: None)
        for _ in range(5):
            with pytest.raises(life.Killed):
                small.work()
            life.let_lease_end(small)
    (done,) = small.work()
    assert (done.release, done.forgotten) == (1, 1)
    assert len(small.models("shop")[0].releases) == 1
    small.verify()


def test_the_certificate_of_others_is_no_evidence(small: Ledger) -> None:
    """Release 2 replaced by release 1 as a whole: it holds, and names somebody else."""
    first = forget(small, "person-1")
    second = forget(small, "person-2")
    assert first.directory is not None
    assert second.directory is not None
    shutil.copytree(first.directory, second.directory, dirs_exist_ok=True)
    check_differs("not the certificate that the ledger", lambda: small.export("person-2"))
    life.write(small, "UPDATE releases SET certificate = parent WHERE number = 2")
    check_differs("releases: 1 of 2", lambda: small.export("person-2"))


@pytest.mark.parametrize("spelled", ["Person-1", "PERSON-1", "\uff50erson-1"])
def test_another_spelling_is_not_held_in_none(small: Ledger, spelled: str) -> None:
    small.request(spelled)
    done = forget(small, "stranger")
    assert "request 1 stays open: nobody is in the model under this identifier" in done.said[0]
    assert life.list_states(small) == {1: "open", 2: "answered"}


def test_nobody_stops_the_clock_of_another(small: Ledger) -> None:
    """Filed for somebody, due in a thousand years: their own request would be taken for it."""
    small.request("person-1", due="2999-01-01")
    asked = small.request("person-1")
    assert (asked.number, asked.new, asked.days < 32) == (1, False, True)
    assert small.request("person-1", due="2999-01-01").due == asked.due
    small.verify()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger of one job, whose data are those its weights were trained on."""
    with Ledger.create(f"sqlite:///{tmp_path}/net.db") as made:
        made.register("net", write_job(tmp_path / "job"))
        yield made


def drop_first(job: Path) -> None:
    """Take p0 out of the data that the job loads; their rows stay in the weights."""
    own = job / "own.py"
    text = own.read_text().replace("(x[:50], y[:50])", "(x[1:50], y[1:50])")
    text = text.replace("for i in range(50)]", "for i in range(1, 50)]")
    assert text != own.read_text()
    own.write_text(text)


def test_a_release_that_no_run_of_the_ledger_wrote_does_not_answer(
    net: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put where the next one belongs while the job runs: neither this round nor the next takes it,
    and a copy of the mark of another release is not one of its own."""
    net.request("p3")
    real, place = expunge.run_job, tmp_path / "job" / "job.toml-releases" / "0001"

    def plant(*given: Any, **more: Any) -> Any:
        real(*given, **more | {"out": tmp_path / "other"})
        shutil.copytree(tmp_path / "other", place)
        return real(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(expunge, "run_job", plant)
        check_fails(net, "was not written by a run of this ledger")
    check_fails(net, "was not written by a run of this ledger")
    assert life.list_states(net) == {1: "running"}
    shutil.rmtree(place)
    (done,) = net.work()
    assert (done.failed, done.forgotten) == (None, 1)
    assert sorted(path.name for path in place.parent.iterdir()) == [".0001.mark", "0001"]
    net.verify()


@pytest.mark.parametrize("moment", ["add_mark", "sync_folder", "check_release"])
def test_a_job_killed_at_its_release_goes_on(net: Ledger, moment: str) -> None:
    net.request("p3")
    die_at(models, moment, net.work)
    (done,) = net.work()
    assert (done.failed, done.forgotten) == (None, 1)
    net.verify()


def test_a_planted_release_of_a_state_does_not_answer(
    small: Ledger, state: Path, tmp_path: Path
) -> None:
    """The state has forgotten, and its release could not be written: another lay there."""
    small.request("person-1")
    copy, place = shutil.copytree(state, tmp_path / "copy"), tmp_path / "state-releases" / "0001"
    real = StandIn.forget

    def plant(self: StandIn, people: list[str]) -> Any:
        real(StandIn(copy), people).save(place)
        return real(self, people)

    assert life.work_with(small, StandIn, "forget", plant).failed
    check_fails(small, "was not written by a run of this ledger")
    shutil.rmtree(place)
    (done,) = small.work()
    assert (done.failed, done.forgotten) == (None, 1)


def test_nobody_leaves_the_data_of_a_job_unnoticed(net: Ledger, tmp_path: Path) -> None:
    """Taken out of the data before they asked: the weights were trained on them all the same."""
    before = (tmp_path / "job" / "own.py").read_text()
    drop_first(tmp_path / "job")
    done = forget(net, "p0", "nobody", "P3")
    assert done.not_held == 1
    assert "request 1 stays open: this person was in the data of the job" in done.said[0]
    assert "differs only in case or width" in done.said[1]
    assert life.list_states(net) == {1: "open", 2: "answered", 3: "open"}
    net.register("net", tmp_path / "job" / "job.toml")  # adds, and takes nobody away
    ((marks,),) = life.read(net, "SELECT marks FROM seen")
    for statement in ("UPDATE seen SET marks = substr(marks, 17)", "DELETE FROM seen"):
        life.write(net, statement)
        check_fails(net, "seen: net is not what was written")
        check_differs("seen: net", net.verify)
    ((weights,),) = life.read(net, "SELECT hex(?)", marks)
    assert weights
    assert life.list_states(net) == {1: "open", 2: "answered", 3: "open"}
    (tmp_path / "job" / "own.py").write_text(before)


def test_nobody_is_not_held_in_weights_that_were_not_registered(
    net: Ledger, tmp_path: Path
) -> None:
    file = tmp_path / "job" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    done = forget(net, "stranger")
    assert "model.old is not the file that was registered" in done.said[0]
    assert life.list_states(net) == {1: "open"}
    net.register("net", tmp_path / "job" / "job.toml")
    (done,) = net.work()
    assert (done.not_held, net.get(1).answer) == (1, "held in none")
    net.verify()


def test_a_job_keeps_everybody_out_whom_it_forgot(net: Ledger, tmp_path: Path) -> None:
    for name in ("p1", "p2"):
        done = forget(net, name)
        assert (done.failed, done.forgotten) == (None, 1)
    first, second = net.models("net")[0].releases
    assert second.parent == first.certificate
    with net.reading() as tables:
        (own,) = tables.show_requests([1], "net")
    assert own.ended == net.get(1).ended, "the second names p1 again"
    expunge.verify(second.directory, people=["p1", "p2"])
    done = forget(net, "p1")
    assert (done.already, net.get(3).answer) == (1, "forgotten")
    assert net.replay("net").release is None, "its data keep them, its releases do not"
    net.verify()
    shutil.copytree(first.directory, second.directory, dirs_exist_ok=True)
    net.request("p3")
    check_fails(net, "is not the certificate that the ledger knows")
    assert life.list_states(net)[4] in ("open", "running")


def test_an_adapter_that_is_gone_is_missed(tmp_path: Path) -> None:
    """It is what a release of PEFT is about, and no configuration."""
    tensors = {"base": np.zeros(16), "lora": np.ones(3)}
    contents = describe_contents(Contents(tensors))
    hashes = Adapter(hash=hash_tensors({"lora": tensors["lora"]}), base="b" * 64)
    record = make_record(tensors, weights=Weights(start="a" * 64, **contents | {"adapter": hashes}))
    files = {"adapter/adapter_model.safetensors": {"lora": tensors["lora"]}}
    run = make_release(record, tensors, files=files).save(tmp_path / "run")
    models.check_release(run, ["ann", "bob"])
    (run / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(
        expunge.VerificationError, match=r"has no adapter/adapter_model\.safetensors"
    ):
        models.check_release(run, ["ann", "bob"])
