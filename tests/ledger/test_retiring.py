"""A model that was withdrawn is asked no more; what it answered stays."""

import shutil
from pathlib import Path

import pytest

import expunge
from ledger_life import list_states, make_state


def test_a_model_is_retired(ledger: expunge.Ledger, state: Path, tmp_path: Path) -> None:
    ledger.register("old", make_state(tmp_path / "old", people=40, seed=3))
    ledger.request("person-1")
    ledger.work()
    ledger.request("person-35")
    ledger.request("person-36", model="old")
    with pytest.raises(expunge.InputError, match="why nobody uses the model any more"):
        ledger.retire("old", " ")
    assert ledger.retire("old", "switched off on 1 November, weights deleted") == (2, 3)
    assert ledger.models("old")[0].retired is not None
    (event,) = [one for one in ledger.events() if one.kind == "retired"]
    assert event.body["requests"] == [2, 3]
    assert "switched off" not in str(event.body)
    assert ledger.get(3).answer == "model withdrawn"
    assert event in ledger.events(request=2)
    assert list_states(ledger) == {1: "answered", 2: "open", 3: "answered"}
    (done,) = ledger.work()
    assert (done.model, done.not_held) == ("shop", 1)
    answer = ledger.get(2)
    assert answer.answer == "held in none"
    assert {one.model: one.outcome for one in answer.answers} == {
        "shop": "not held",
        "old": "model withdrawn",
    }
    shutil.rmtree(tmp_path / "old")  # its weights may go; its certificates stay
    (tmp_path / "old-releases" / "0001" / "model.safetensors").unlink()
    ledger.verify()
    assert [one.model for one in ledger.request("person-3").answers] == ["shop"]
    assert ledger.export("person-1").startswith(b"PK")


def test_what_a_retired_model_does_no_more(ledger: expunge.Ledger, tmp_path: Path) -> None:
    old = make_state(tmp_path / "old", seed=3)
    ledger.register("old", old)
    ledger.retire("old", "gone")
    for call in (
        lambda: ledger.retire("old", "gone"),
        lambda: ledger.request("person-1", model="old"),
        lambda: ledger.work("old"),
        lambda: ledger.replay("old"),
        lambda: ledger.register("old", old),
        lambda: ledger.register("new", old),
        lambda: ledger.register("new", shutil.copytree(old, tmp_path / "copy")),
    ):
        with pytest.raises(expunge.InputError):
            call()
    ledger.verify()


def test_a_model_at_work_is_not_retired(
    small: expunge.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    from expunge.ledger import fulfilment

    def fail(*given: object) -> None:
        raise OSError("no space left")

    small.request("person-1")
    with monkeypatch.context() as patch:
        patch.setattr(fulfilment, "check_release", fail)
        (done,) = small.work()
    assert done.failed
    with pytest.raises(expunge.InputError, match="has work that began"):
        small.retire("shop", "gone")
    small.work()
    assert small.retire("shop", "gone") == ()
    assert small.get(1).answer == "forgotten"
    small.verify()
