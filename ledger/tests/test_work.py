"""Work: all together, answered by what holds, and through every death."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import select, update

import expunge
from expunge_ledger import Ledger, lease, models
from expunge_ledger.chain import Anchor
from expunge_ledger.database import connected
from expunge_ledger.lease import Lease
from expunge_ledger.models import check_release
from expunge_ledger.schema import LEASES, SECRETS
from expunge_ledger.work import Worker
from ledger.tests import life
from ledger.tests.life import check_fails, die_at, file, forget, list_states
from ledger.tests.stand_in import FILE, StandIn, learn_again, make_state


def test_all_open_requests_are_one_release(ledger: Ledger, state: Path) -> None:
    file(ledger, "person-3", "person-5", "person-9", "nobody")
    (done,) = ledger.work()
    assert (done.forgotten, done.not_held, done.release) == (3, 1, 1), done
    found = ledger.get(2)
    assert (found.state, found.answer, found.pace) == ("answered", "forgotten", "on time")
    (answer,) = found.answers
    place = state.with_name("state-releases") / "0001"
    check_release(place, ["person-3", "person-5", "person-9"], answer.certificate)
    assert ledger.get(4).answer == "held in none"
    assert not ledger.work()
    assert Anchor.load(ledger.anchor_file) == ledger.anchor()
    life.check_answers(ledger)


def test_who_was_forgotten_is_answered_by_the_earlier_certificate(ledger: Ledger) -> None:
    forget(ledger, "person-1")
    assert ledger.request("person-1").new
    (done,) = ledger.work()
    assert (done.already, done.release) == (1, None)
    ours, before = ledger.get(2).answers[0], ledger.get(1).answers[0]
    assert (ours.outcome, ours.certificate) == ("already forgotten", before.certificate)
    assert ledger.get(2).answer == "forgotten"
    life.check_answers(ledger)


def test_an_earlier_certificate_that_does_not_hold_answers_nobody(
    ledger: Ledger, state: Path
) -> None:
    """The state still says that they are forgotten: a new certificate names them."""
    forget(ledger, "person-1")
    (state.with_name("state-releases") / "0001" / "record.json").unlink()
    done = forget(ledger, "person-1")
    assert (done.forgotten, done.already, done.release) == (1, 0, 2)
    assert done.directory is not None
    check_release(done.directory, ["person-1"])


def test_who_was_forgotten_without_the_ledger_is_named_by_a_new_certificate(
    ledger: Ledger, state: Path, tmp_path: Path
) -> None:
    StandIn(state).forget(["person-4"]).save(tmp_path / "outside")
    done = forget(ledger, "person-4")
    assert (done.forgotten, done.not_held) == (1, 0)


def test_a_model_that_cannot_be_read_is_no_answer(ledger: Ledger, tmp_path: Path) -> None:
    other = make_state(tmp_path / "other")
    ledger.register("other", other)
    file(ledger, "nobody", "person-1")
    (other / FILE).rename(tmp_path / FILE)
    first, second = ledger.work()
    assert (first.failed, first.forgotten) == (None, 1)
    assert "damaged" in (second.failed or "")
    assert list_states(ledger) == {1: "open", 2: "open"}
    assert [answer.outcome for answer in ledger.get(1).answers] == ["not held", None]
    (tmp_path / FILE).rename(other / FILE)
    (done,) = ledger.work()
    assert (done.model, done.forgotten, done.not_held) == ("other", 1, 1)
    assert (ledger.get(1).answer, ledger.get(2).answer) == ("held in none", "forgotten")
    life.check_answers(ledger)


def test_without_models_nobody_is_held_in_none(url: str, state: Path, tmp_path: Path) -> None:
    with Ledger.create(url, key=tmp_path / "key") as ledger:
        ledger.request("person-1")
        assert ledger.work() == ()
        assert list_states(ledger) == {1: "open"}
        ledger.register("shop", state)
        (done,) = ledger.work()
        assert done.forgotten == 1
        life.check_answers(ledger)


def test_a_request_for_one_model_leaves_the_others_alone(ledger: Ledger, tmp_path: Path) -> None:
    ledger.register("other", make_state(tmp_path / "other"))
    ledger.request("person-1", model="other")
    assert [done.model for done in ledger.work()] == ["other"]
    assert ledger.get(1).answer == "forgotten"
    assert ledger.models("shop")[0].releases == ()


DEATHS = [
    (Worker, "_work"), (Worker, "_look"), (Worker, "_find_history"), (Worker, "begin"),
    (Worker, "finish"), (models.Model, "forget"), (models, "check_release"), (Worker, "complete"),
    (Anchor, "write"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name"), DEATHS, ids=[name for _, name in DEATHS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_anywhere_is_survived(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, module: object, name: str, when: str
) -> None:
    file(ledger, "person-1", "person-2", "nobody")
    real = getattr(module, name)

    def kill(*given: object, **more: object) -> None:
        if when == "after":
            real(*given, **more)
        raise life.Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, name, kill)
        patch.setattr(Lease, "give_back", lambda self: None)
        with pytest.raises(life.Killed):
            ledger.work()
    assert ledger.work() == ()
    ledger.verify()
    life.let_lease_end(ledger)
    ledger.request("person-3")
    while ledger.work():
        pass
    assert set(list_states(ledger).values()) == {"answered"}
    assert ledger.get(3).answer == "held in none"
    life.check_answers(ledger)
    named = [n for release in ledger.models("shop")[0].releases for n in release.requests]
    assert sorted(named) == [1, 2, 4]


def test_two_workers_never_take_the_same(ledger: Ledger) -> None:
    ledger.request("person-1")
    one, two = Worker(ledger, "shop"), Worker(ledger, "shop")
    assert one.lease.take()
    assert not two.lease.take()
    assert ledger.work() == ()
    with pytest.raises(expunge.RunError, match="at work on shop"):
        ledger.replay("shop")
    one.lease.give_back()
    assert two.lease.take()
    two.lease.give_back()
    die_at(models.Model, "forget", ledger.work)
    life.check_refused("being worked on", ledger.withdraw, 1)


@pytest.mark.parametrize(
    "moment", ["_look", "_find_history", "finish", "complete", "check_release"]
)
def test_a_worker_that_was_only_slow(ledger: Ledger, moment: str) -> None:
    """Its lease ended, another went on and finished: it answers nothing a second time."""
    ledger.request("person-1")
    module = models if moment == "check_release" else Worker
    real, slept = getattr(module, moment), list[int]()

    def sleep(*given: object, **more: object) -> object:
        if not slept:
            slept.append(1)
            life.let_lease_end(ledger)
            done = Worker(ledger, "shop").work()
            assert done is not None
            assert done.forgotten == 1, done
        return real(*given, **more)

    done = life.work_with(ledger, module, moment, sleep)
    assert (done.forgotten == 1) != bool(done.failed) or moment == "finish"
    assert list_states(ledger) == {1: "answered"}
    assert len(ledger.models("shop")[0].releases) == 1
    life.check_answers(ledger)


def test_a_worker_that_lives_is_not_taken_for_dead(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.request("person-1")
    renewed, renew, forget = threading.Event(), Lease.renew, models.Model.forget
    seen = list[bool]()

    def note(self: Lease) -> bool:
        if threading.current_thread() is not threading.main_thread():
            renewed.set()
        return renew(self)

    def wait(*given: object) -> None:
        assert renewed.wait(60)
        seen.append(Worker(ledger, "shop").lease.take())
        forget(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Lease, "renew", note)
    monkeypatch.setattr(models.Model, "forget", wait)
    monkeypatch.setattr(lease, "SECONDS", 3.0)
    (done,) = ledger.work()
    assert done.forgotten == 1
    assert seen == [False]


def test_leases_end_and_those_of_wrong_clocks_are_none(small: Ledger) -> None:
    for place, (seconds, rounds) in enumerate([(50, 0), (-1, 1), (1e9, 1)]):
        small.request(f"person-{place}")
        with connected(small.engine, writes=True) as connection:
            values = {"worker": "elsewhere/1/x", "until": time.time() + seconds}
            connection.execute(update(LEASES).values(**values))
        assert len(small.work()) == rounds


def test_a_full_disk_under_the_release(
    ledger: Ledger, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state has forgotten, and the release is not there: the next round writes it."""
    from ledger.tests.stand_in import Saving

    def fill(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ledger.request("person-1")
    with monkeypatch.context() as patch:
        patch.setattr(Saving, "save", fill)
        check_fails(ledger, "No space left")
    assert list_states(ledger) == {1: "running"}
    ledger.verify()
    (done,) = ledger.work()
    assert (done.forgotten, done.failed) == (1, None)
    life.check_answers(ledger)


def test_a_release_that_cannot_begin_is_given_up(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise expunge.InputError("ids is 'person-1'; it must be somebody else")

    ledger.request("person-1")
    done = life.work_with(ledger, models.Model, "forget", refuse)
    assert done.failed == "ids is the person of 1; it must be somebody else"
    assert list_states(ledger) == {1: "open"}
    assert ledger.withdraw(1).state == "withdrawn"
    ledger.verify()


def test_names_that_are_needed_no_more_are_gone(ledger: Ledger) -> None:
    file(ledger, "person-1", "nobody", "person-2", "person-3")
    ledger.refuse(3, "no")
    ledger.withdraw(4)
    ledger.work()
    with connected(ledger.engine) as connection:
        chosen = select(SECRETS.c.request).where(SECRETS.c.what == "person")
        assert connection.execute(chosen).scalars().all() == [1]


@pytest.fixture
def restored(ledger: Ledger, state: Path, tmp_path: Path) -> Ledger:
    """Two were forgotten, then the state of before was restored."""
    shutil.copytree(state, tmp_path / "backup")
    for person in ("person-3", "person-4"):
        forget(ledger, person)
    assert not life.list_returned(ledger)
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    return ledger


def test_a_backup_is_caught_and_replayed(restored: Ledger) -> None:
    assert life.list_returned(restored) == [1, 2]
    restored.request("person-9")
    check_fails(restored, "holds 2 people again who were forgotten (requests 1, 2)")
    assert list_states(restored)[3] == "open"
    done = restored.replay("shop")
    assert (done.forgotten, done.release) == (2, 3)
    assert not life.list_returned(restored)
    assert restored.replay("shop").release is None
    assert restored.models("shop")[0].releases[-1].replay
    (done,) = restored.work()
    assert done.forgotten == 1


def test_who_comes_back_on_purpose_may_stay(small: Ledger, state: Path) -> None:
    forget(small, "person-3")
    learn_again(state, "person-3")
    assert life.list_returned(small) == [1]
    life.check_refused("the last one by which shop forgot somebody", small.readmit, 7, "shop")
    small.readmit(1, "shop")
    assert not life.list_returned(small)
    small.verify()
    done = forget(small, "person-3")
    assert done.forgotten == 1
    learn_again(state, "person-3")
    assert life.list_returned(small) == [2]


@pytest.mark.parametrize("moment", ["forget", "complete"])
def test_a_backup_under_work_that_was_killed(
    small: Ledger, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Work does not release it; replay names who came back, and nobody is lost."""
    shutil.copytree(state, tmp_path / "backup")
    forget(small, "person-3")
    small.request("person-5")
    die_at(models.Model if moment == "forget" else Worker, moment, small.work)
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    check_fails(small)
    small.replay("shop")
    while small.work():
        pass
    assert list_states(small) == {1: "answered", 2: "answered"}
    assert not life.list_returned(small)
    small.verify()


def test_a_model_is_retired(ledger: Ledger, tmp_path: Path) -> None:
    old = make_state(tmp_path / "old", people=40)
    ledger.register("old", old)
    ledger.request("person-1")
    ledger.work()
    ledger.request("person-35")
    ledger.request("person-36", model="old")
    life.check_refused("why nobody uses the model any more", ledger.retire, "old", " ")
    assert ledger.retire("old", "switched off on 1 November, weights deleted") == (2, 3)
    (event,) = [one for one in ledger.events() if one.kind == "retired"]
    assert "switched off" not in str(event.body)
    assert event in ledger.events(request=2)
    assert (ledger.get(3).answer, ledger.get(2).state) == ("model withdrawn", "open")
    (done,) = ledger.work()
    assert (done.model, done.not_held) == ("shop", 1)
    outcomes = {one.model: one.outcome for one in ledger.get(2).answers}
    assert outcomes == {"shop": "not held", "old": "model withdrawn"}
    assert ledger.get(2).answer == "held in none"
    (tmp_path / "old-releases" / "0001" / "model.safetensors").unlink()
    ledger.verify()
    assert [one.model for one in ledger.request("person-3").answers] == ["shop"]
    assert ledger.export("person-1").startswith(b"PK")
    for call in (
        lambda: ledger.retire("old", "gone"), lambda: ledger.request("person-1", model="old"),
        lambda: ledger.work("old"), lambda: ledger.replay("old"),
        lambda: ledger.register("old", old), lambda: ledger.register("new", old),
        lambda: ledger.register("new", shutil.copytree(old, tmp_path / "copy")),
    ):  # fmt: skip
        with pytest.raises(expunge.InputError):
            call()


def test_a_model_at_work_is_not_retired(small: Ledger) -> None:
    small.request("person-1")
    die_at(Worker, "complete", small.work)
    life.check_refused("has work that began", small.retire, "shop", "gone")
    small.work()
    assert small.retire("shop", "gone") == ()
    assert small.get(1).answer == "forgotten"
    small.verify()
