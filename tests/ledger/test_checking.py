"""A backup brings nobody back."""

import shutil
from pathlib import Path

import pytest

import expunge
from ledger_life import check_answers, learn_again, list_states


@pytest.fixture
def restored(ledger: expunge.Ledger, state: Path, tmp_path: Path) -> expunge.Ledger:
    """Two were forgotten, then the state of before was put back."""
    shutil.copytree(state, tmp_path / "backup")
    for i in (3, 4):
        ledger.request(f"person-{i}")
        ledger.work()
    assert ledger.check(state).returned == ()
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    return ledger


def test_a_backup_is_caught_and_replayed(restored: expunge.Ledger, state: Path) -> None:
    found = restored.check(state)
    assert (found.model, found.forgotten, found.returned) == ("shop", 2, (1, 2))
    done = restored.replay("shop")
    assert (done.forgotten, done.release) == (2, 3)
    assert restored.check("shop").returned == ()
    assert restored.replay("shop").release is None
    assert restored.models("shop")[0].releases[-1].replay
    check_answers(restored)


def test_nothing_is_released_from_a_backup(restored: expunge.Ledger) -> None:
    restored.request("person-9")
    (done,) = restored.work()
    assert "holds 2 people again who were forgotten (requests 1, 2)" in (done.failed or "")
    assert list_states(restored)[3] == "open"
    restored.replay("shop")
    (done,) = restored.work()
    assert done.forgotten == 1
    check_answers(restored)


def test_a_copy_elsewhere_is_known_by_its_key(restored: expunge.Ledger, tmp_path: Path) -> None:
    assert restored.check(tmp_path / "backup").returned == (1, 2)
    with pytest.raises(expunge.InputError, match="a folder that learn or save wrote"):
        restored.check(tmp_path)


def test_who_comes_back_on_purpose_may_stay(
    small: expunge.Ledger, state: Path, recwarn: pytest.WarningsRecorder
) -> None:
    small.request("person-3")
    small.work()
    learn_again(state, "person-3")
    assert small.check("shop").returned == (1,)
    with pytest.raises(expunge.InputError, match="the last one by which shop forgot somebody"):
        small.readmit(7, "shop")
    small.readmit(1, "shop")
    assert small.check("shop").returned == ()
    small.verify()
    small.request("person-3")
    (done,) = small.work()
    assert done.forgotten == 1
    learn_again(state, "person-3")
    assert small.check("shop").returned == (2,)


def test_a_replay_that_was_killed_goes_on(
    small: expunge.Ledger, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from expunge.ledger import fulfilment, leases
    from ledger_life import Killed, let_lease_end

    shutil.copytree(state, tmp_path / "backup")
    small.request("person-3")
    small.work()
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)

    def die(*given: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(fulfilment, "complete", die)
        patch.setattr(leases, "let_go", lambda worker, name: None)
        with pytest.raises(Killed):
            small.replay("shop")
    let_lease_end(small)
    small.request("person-5")
    while small.work():
        pass
    assert small.check("shop").returned == ()
    assert len(small.models("shop")[0].releases) == 3
    check_answers(small)


def test_a_backup_under_a_release_that_has_begun(
    small: expunge.Ledger, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work does not release it; replay names in it who came back."""
    from expunge.ledger import fulfilment
    from ledger_life import Killed, let_lease_end

    shutil.copytree(state, tmp_path / "backup")
    small.request("person-3")
    small.work()
    small.request("person-5")

    def die(*given: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(fulfilment, "release_again", die)
        patch.setattr(fulfilment, "let_go", lambda worker, name: None)
        with pytest.raises(Killed):
            small.work()
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    let_lease_end(small)
    (done,) = small.work()
    assert "holds 1 people again who were forgotten (requests 1)" in (done.failed or "")
    assert len(small.models("shop")[0].releases) == 1
    let_lease_end(small)
    done = small.replay("shop")
    assert (done.release, done.requests) == (2, (1, 2))
    assert list_states(small) == {1: "answered", 2: "answered"}
    check_answers(small)
