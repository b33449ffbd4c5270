"""Work: all together, answered by what holds, and through every death."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from sqlalchemy import select

import expunge
from expunge.jobs.heads import learn_job
from expunge.ledger import fulfilment, leases, running
from expunge.ledger.database import reading, writing
from expunge.ledger.evidence import check_release
from expunge.ledger.fulfilment import Batching, work
from expunge.ledger.leases import Worker
from expunge.ledger.schema import REQUESTS
from head_folder import write_head_job
from job_folder import write_job
from ledger_life import Killed, check_answers, learn_again, let_lease_end, list_states, make_state


def test_all_open_requests_are_one_release(ledger: expunge.Ledger, state: Path) -> None:
    for i in (3, 5, 9):
        ledger.request(f"person-{i}")
    ledger.request("nobody")
    told = list[str]()
    (done,) = ledger.work(tell=lambda model, stage: told.append(f"{model} {stage}"))
    assert (done.forgotten, done.not_held, done.release) == (3, 1, 1)
    assert told == ["shop taken", "shop looking", "shop forgetting", "shop checking"]
    found = ledger.get(2)
    assert (found.state, found.answer, found.clock.pace) == ("answered", "forgotten", "on time")
    (answer,) = found.answers
    assert answer.directory == state.with_name("state-releases") / "0001"
    check_release(answer.directory, ["person-3", "person-5", "person-9"], answer.certificate)
    assert ledger.get(4).answer == "held in none"
    assert not ledger.work()
    assert json.loads((answer.directory / "ledger.json").read_text())["events"] > 5
    check_answers(ledger)


def test_the_next_release_is_chained_to_the_last(ledger: expunge.Ledger) -> None:
    for i in (1, 2):
        ledger.request(f"person-{i}")
        ledger.work()
    first, second = ledger.models("shop")[0].releases
    assert (first.parent, second.parent) == (None, first.certificate)
    files = [release.directory / "certificate.json" for release in (first, second)]
    assert len(expunge.verify_chain(files)) == 2
    assert (first.requests, second.requests) == ((1,), (2,))


def test_who_was_forgotten_is_answered_by_the_earlier_certificate(ledger: expunge.Ledger) -> None:
    ledger.request("person-1")
    ledger.work()
    again = ledger.request("person-1")
    assert again.new
    (done,) = ledger.work()
    assert (done.already, done.release) == (1, None)
    ours, before = ledger.get(2).answers[0], ledger.get(1).answers[0]
    assert (ours.outcome, ours.certificate) == ("already forgotten", before.certificate)
    assert ledger.get(2).answer == "forgotten"
    check_answers(ledger)


def test_who_was_learned_again_is_forgotten_again(
    ledger: expunge.Ledger, state: Path, recwarn: pytest.WarningsRecorder
) -> None:
    ledger.request("person-1")
    ledger.work()
    learn_again(state, "person-1")
    ledger.request("person-1")
    (done,) = ledger.work()
    assert (done.forgotten, done.release) == (1, 2)
    check_answers(ledger)


def test_an_earlier_certificate_that_does_not_hold_answers_nobody(
    ledger: expunge.Ledger, state: Path
) -> None:
    """The state still says that they are forgotten: a new certificate names them."""
    ledger.request("person-1")
    ledger.work()
    (state.with_name("state-releases") / "0001" / "record.json").unlink()
    ledger.request("person-1")
    (done,) = ledger.work()
    assert (done.forgotten, done.already, done.release) == (1, 0, 2)
    check_release(done.directory, ["person-1"])


def test_who_was_forgotten_without_the_ledger_is_named_by_a_new_certificate(
    ledger: expunge.Ledger, state: Path, tmp_path: Path
) -> None:
    from expunge.jobs.releases import release_state

    release_state(state, tmp_path / "outside", ["person-4"])
    ledger.request("person-4")
    (done,) = ledger.work()
    assert (done.forgotten, done.not_held) == (1, 0)
    check_release(done.directory, ["person-4"])


def test_a_model_that_cannot_be_read_is_no_answer(
    ledger: expunge.Ledger, state: Path, tmp_path: Path
) -> None:
    other = make_state(tmp_path / "other", seed=1)
    ledger.register("other", other)
    ledger.request("nobody")
    ledger.request("person-1")
    (other / "sums").rename(tmp_path / "sums")
    first, second = ledger.work()
    assert (first.failed, first.forgotten) == (None, 1)
    assert "damaged" in (second.failed or "")
    assert list_states(ledger) == {1: "open", 2: "open"}
    assert [answer.outcome for answer in ledger.get(1).answers] == ["not held", None]
    (tmp_path / "sums").rename(other / "sums")
    (done,) = ledger.work()
    assert (done.model, done.forgotten, done.not_held) == ("other", 1, 1)
    assert ledger.get(1).answer == "held in none"
    assert ledger.get(2).answer == "forgotten"
    check_answers(ledger)


@pytest.mark.parametrize("loss", ["bucket", "meta", "folder", "another"])
def test_a_state_that_lost_something_is_no_answer(
    small: expunge.Ledger, state: Path, tmp_path: Path, loss: str
) -> None:
    match loss:
        case "bucket":
            next((state / "rows").iterdir()).unlink()
        case "meta":
            (state / "meta.json").unlink()
        case "folder":
            shutil.rmtree(state)
        case _:
            shutil.rmtree(state)
            make_state(state, seed=3)
    small.request("nobody")
    (done,) = small.work()
    assert done.failed
    assert list_states(small) == {1: "open"}
    small.verify()


def test_without_models_nobody_is_held_in_none(url: str, state: Path, tmp_path: Path) -> None:
    ledger = expunge.Ledger.create(url, key=tmp_path / "key")
    ledger.request("person-1")
    assert ledger.work() == ()
    assert list_states(ledger) == {1: "open"}
    ledger.register("shop", state)
    (done,) = ledger.work()
    assert done.forgotten == 1
    check_answers(ledger)
    ledger.close()


def test_a_request_for_one_model_leaves_the_others_alone(
    ledger: expunge.Ledger, tmp_path: Path
) -> None:
    ledger.register("other", make_state(tmp_path / "other", seed=1))
    ledger.request("person-1", model="other")
    assert [done.model for done in ledger.work()] == ["other"]
    assert ledger.get(1).answer == "forgotten"
    assert ledger.models("shop")[0].releases == ()


def test_batches_by_size_and_by_due_date(ledger: expunge.Ledger) -> None:
    for i in range(5):
        ledger.request(f"person-{i}")
    assert ledger.work(least=6) == ()
    (done,) = ledger.work(most=2)
    assert done.requests == (1, 2)
    urgent = ledger.request("person-9", received="2026-01-01", due="2026-01-05")
    assert urgent.clock.pace == "overdue"
    (done,) = ledger.work(most=1, least=50)
    assert done.requests == (urgent.number,)
    (done,) = ledger.work(least=3)
    assert done.requests == (3, 4, 5)
    with pytest.raises(expunge.InputError, match="most is 0"):
        ledger.work(most=0)


DEATHS = [
    (fulfilment, "_finish"),
    (fulfilment, "find_standing"),
    (fulfilment, "_sort"),
    (fulfilment, "release_again"),
    (fulfilment, "check_release"),
    (fulfilment, "complete"),
    (fulfilment, "write_anchor"),
]


@pytest.mark.parametrize(("module", "name"), DEATHS, ids=[name for _, name in DEATHS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_anywhere_is_survived(
    ledger: expunge.Ledger, monkeypatch: pytest.MonkeyPatch, module: object, name: str, when: str
) -> None:
    for i in (1, 2):
        ledger.request(f"person-{i}")
    ledger.request("nobody")
    real = getattr(module, name)

    def die(*given: object, **more: object) -> None:
        if when == "after":
            real(*given, **more)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, name, die)
        patch.setattr(fulfilment, "let_go", lambda worker, name: None)
        with pytest.raises(Killed):
            ledger.work()
    assert ledger.work() == ()
    before = list_states(ledger)
    ledger.verify()
    let_lease_end(ledger)
    ledger.request("person-3")
    while ledger.work():
        pass
    assert set(list_states(ledger).values()) == {"answered"}
    assert ledger.get(3).answer == "held in none"
    assert all(n not in before or s != "answered" or n <= 3 for n, s in before.items())
    check_answers(ledger)
    named = [n for release in ledger.models("shop")[0].releases for n in release.requests]
    assert sorted(named) == [1, 2, 4]


def make_worker(ledger: expunge.Ledger) -> Worker:
    return Worker.make(ledger.engine, ledger.key, 900.0)


def test_two_workers_never_take_the_same(ledger: expunge.Ledger) -> None:
    ledger.request("person-1")
    one, two = make_worker(ledger), make_worker(ledger)
    assert fulfilment._take(one, "shop", Batching())
    ledger.request("person-2")
    assert not fulfilment._take(two, "shop", Batching())
    with pytest.raises(expunge.InputError, match="is at work on shop"):
        ledger.replay("shop")
    with pytest.raises(expunge.InputError, match="being worked on"):
        ledger.withdraw(1)
    fulfilment.let_go(one, "shop")
    assert fulfilment._take(two, "shop", Batching())


@pytest.mark.parametrize("moment", ["_sort", "release_again", "check_release", "complete"])
def test_a_worker_that_was_only_slow(
    ledger: expunge.Ledger, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its lease ended, another went on and finished: it answers nothing a second time."""
    ledger.request("person-1")
    real, slept = getattr(fulfilment, moment), list[int]()

    def sleep(*given: object, **more: object) -> object:
        if not slept:
            slept.append(1)
            let_lease_end(ledger)
            (done,) = work(make_worker(ledger), ["shop"], Batching())
            assert done.forgotten == 1, done
        return real(*given, **more)

    monkeypatch.setattr(fulfilment, moment, sleep)
    (done,) = ledger.work()
    assert (done.forgotten == 1) != bool(done.failed)
    assert list_states(ledger) == {1: "answered"}
    assert len(ledger.models("shop")[0].releases) == 1
    check_answers(ledger)


def test_a_worker_that_lives_is_not_taken_for_dead(
    ledger: expunge.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    ledger.request("person-1")
    renewed, real, seen = threading.Event(), leases.renew, list[bool]()

    def renew(worker: Worker, name: str) -> bool:
        found = real(worker, name)
        if threading.current_thread() is not threading.main_thread():
            renewed.set()
        return found

    def wait(*given: object) -> tuple[str, ...]:
        assert renewed.wait(60)
        seen.append(fulfilment._take(make_worker(ledger), "shop", Batching()))
        return running.release_again(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(leases, "renew", renew)
    monkeypatch.setattr(fulfilment, "release_again", wait)
    (done,) = ledger.work(lease=3.0)
    assert done.forgotten == 1
    assert seen == [False]


def test_a_lease_of_a_wrong_clock_does_not_last(ledger: expunge.Ledger) -> None:
    from sqlalchemy import update

    from expunge.ledger.schema import MODELS

    ledger.request("person-1")
    with writing(ledger.engine) as connection:
        connection.execute(update(MODELS).values(worker="dead", until="2999-01-01T00:00:00+00:00"))
    (done,) = ledger.work()
    assert done.forgotten == 1


def test_a_full_disk_under_the_release(
    ledger: expunge.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    from expunge.jobs import releases

    def fill(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ledger.request("person-1")
    with monkeypatch.context() as patch:
        patch.setattr(releases, "write_run", fill)
        (done,) = ledger.work()
    assert "No space left" in (done.failed or "")
    assert list_states(ledger) == {1: "running"}
    ledger.verify()
    (done,) = ledger.work()
    assert (done.forgotten, done.failed) == (1, None)
    check_answers(ledger)


def test_a_release_that_cannot_begin_is_given_up(
    ledger: expunge.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise expunge.InputError("ids is 'person-1'; it must be somebody else")

    ledger.request("person-1")
    with monkeypatch.context() as patch:
        patch.setattr(fulfilment, "release_again", refuse)
        (done,) = ledger.work()
    assert done.failed == "ids is the person of 1; it must be somebody else"
    assert list_states(ledger) == {1: "open"}
    assert ledger.withdraw(1).state == "withdrawn"
    ledger.verify()


def test_names_that_are_needed_no_more_are_gone(ledger: expunge.Ledger) -> None:
    ledger.request("person-1")
    ledger.request("nobody")
    ledger.work()
    with reading(ledger.engine) as connection:
        sealed = dict(connection.execute(select(REQUESTS.c.number, REQUESTS.c.sealed)).all())
    assert (sealed[1] is None, sealed[2] is None) == (False, True)


@pytest.mark.parametrize("method", ["convex-head", "shards"])
def test_other_states(small: expunge.Ledger, tmp_path: Path, method: str) -> None:
    folder = tmp_path / "learned"
    if method == "shards":
        changes: dict = {
            "model": {"build": "plain.py:build"},
            "features": None,
            "method": {"name": "shards", "classes": None, "shards": 2, "slices": 2, "seed": "s",
                       "epochs": 1, "learning_rate": 0.1},
        }  # fmt: skip
    else:
        changes = {"method": {"name": method}}
    job = write_head_job(folder, **changes)
    plain = "from torch import nn\n\n\ndef build():\n    return nn.Linear(4, 3)\n"
    (folder / "plain.py").write_text(plain)
    learn_job(job, release=folder / "first")
    small.register("learned", folder / "state")
    for name in ("p3", "p7", "nobody"):
        small.request(name, model="learned")
    (done,) = small.work("learned")
    assert (done.forgotten, done.not_held, done.failed) == (2, 1, None)
    release = small.models("learned")[0].releases[0]
    assert release.parent is not None
    small.request("p3", model="learned")
    (done,) = small.work("learned")
    assert done.already == 1
    check_answers(small)
    lost = sorted((folder / "state" / "rows").iterdir())
    for file in lost:
        file.rename(tmp_path / file.name)
        for i in range(8):
            small.request(f"stranger-{i}", model="learned")
        (done,) = small.work("learned")
        assert "damaged" in done.failed or "trained on" in done.failed, done
        (tmp_path / file.name).rename(file)
        break
    (done,) = small.work("learned")
    assert done.not_held == 8


def test_a_job(small: expunge.Ledger, tmp_path: Path) -> None:
    """Anything else: each run starts from the last release, and keeps all earlier people out."""
    job = write_job(tmp_path / "job")
    small.register("net", job)
    known = Path(job).parent
    for name in ("person-1", "nobody"):
        small.request(name, model="net")
    people = (known / "forget.txt").read_text().split()
    first, second = people[0], people[1]
    small.request(first, model="net")
    (done,) = small.work("net")
    assert (done.failed, done.forgotten, done.not_held) == (None, 1, 2)
    small.request(second, model="net")
    small.request(first, model="net")
    (done,) = small.work("net")
    assert (done.failed, done.forgotten, done.already) == (None, 1, 1)
    one, two = small.models("net")[0].releases
    assert two.parent == one.certificate
    expunge.verify_chain([r.directory / "certificate.json" for r in (one, two)])
    left = [path.name for path in [*known.iterdir(), *one.directory.parent.iterdir()]]
    assert not [name for name in left if "lists" in name or name.startswith(".job")]
    with pytest.raises(expunge.InputError, match="a job keeps the forgotten out"):
        small.replay("net")
    small.verify()


def test_a_job_that_was_killed_is_resumed(
    small: expunge.Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from expunge.jobs import run
    from expunge.jobs.directory import workspace_of

    small.register("net", write_job(tmp_path / "job"))
    small.request("p3", model="net")

    def die(*given: object, **more: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_run", die)
        with pytest.raises(Killed):
            small.work("net")
    folder = small.models("net")[0].folder
    assert workspace_of(folder / "0001").is_dir()
    (folder / ".0001.lists").mkdir()
    (folder / ".0001.lists" / "0.txt").write_text("p3")
    (done,) = small.work("net")
    assert (done.failed, done.forgotten) == (None, 1)
    assert [path.name for path in folder.iterdir()] == ["0001"]
    small.verify()


def test_a_process_that_is_gone_is_not_waited_for(small: expunge.Ledger) -> None:
    import platform
    import subprocess
    import sys
    from datetime import timedelta

    from sqlalchemy import update

    from expunge.ledger.clocks import read_now
    from expunge.ledger.schema import MODELS

    small.request("person-1")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    later, here = (read_now() + timedelta(seconds=600)).isoformat(), platform.node()[:40]
    holders = {f"{here}/{os.getpid()}/x": 0, "elsewhere/1/x": 0, f"{here}/{gone.pid}/x": 1}
    for name, rounds in holders.items():
        with writing(small.engine) as connection:
            connection.execute(update(MODELS).values(worker=name, until=later))
        assert len(small.work()) == rounds
