"""States by commands: learn, forget, replay, and whatever is opened without knowing its kind."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import expunge
from expunge.errors import InputError
from expunge.jobs.learning import JOB, learn_job
from expunge.states import State
from tests.helpers import small_shards
from tests.helpers.job_folder import EXACT, LINEAR, SHARDS, call, list_files, succeed, write_job
from tests.helpers.sample_releases import edit_json

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS: dict[str, dict[str, dict[str, Any]]] = {"linear-model": LINEAR, "shards": SHARDS}
NETWORK: dict[str, dict[str, Any]] = LINEAR | {"model": {"build": "own.py:build"}}


def answer(state: Path, *words: str | Path) -> str:
    return succeed("forget", state, state.parent / "forget.txt", "--out", *words)


@pytest.mark.parametrize("kind", KINDS)
def test_learn_forget_verify_replay(tmp_path: Path, kind: str) -> None:
    path = write_job(tmp_path, KINDS[kind])
    assert "50 examples are new; it has 50 of 50 people and is private" in succeed("learn", path)
    state, first, second = (tmp_path / name for name in ("state", "release-1", "release-2"))
    shown = answer(state, second)
    assert "epsilon = 0, delta = 0" in shown
    assert "forgotten: 3 people on 3 samples; retained: 47 people on 47 samples" in shown
    found = expunge.verify(second, parent=first, people=["p3", "p7", "p31"]).certificate
    assert (found.forget.count, found.forget.samples, found.retained.samples) == (3, 3, 47)
    for release in (first, second):
        assert "the same bits again" in succeed("replay", release, path)
    assert "0 examples are new; it has 47" in succeed("learn", write_without(path))
    assert call("learn", path).returncode == 2, "who was forgotten does not come back unasked"
    assert not [name for name in list_files(tmp_path) if ".tmp" in name]
    edit_json(second / "record.json", lambda plain: plain.update(nonce="0" * 64))
    assert call("replay", second, path).returncode == 1, "the record is not the certificate's"
    (second / "record.json").unlink()
    edit_json(second / "certificate.json", lambda c: c["retained"].update(count=9), seal=False)
    assert call("replay", second, path).returncode != 0, "the certificate does not hold"


def write_without(path: Path) -> Path:
    """The same job, whose data have lost the forgotten people's rows."""
    own = path.with_name("own.py")
    text = own.read_text()
    gone = '["p3", "p7", "p31"]'
    if "def load_rest" not in text:
        own.write_text(text + f"\n\ndef load_rest():\n    return load().without({gone})\n")
    job = path.read_text().replace('"own.py:load"', '"own.py:load_rest"')
    (path.with_name("rest.toml")).write_text(job)
    return path.with_name("rest.toml")


def test_a_head_on_a_network_needs_it_for_learning_and_not_for_forgetting(tmp_path: Path) -> None:
    path = write_job(tmp_path, NETWORK)
    succeed("learn", path)
    (tmp_path / "own.py").rename(tmp_path / "away.py")
    answer(tmp_path / "state", tmp_path / "release-2")
    (tmp_path / "away.py").rename(tmp_path / "own.py")
    assert "the same bits again" in succeed("replay", tmp_path / "release-2", path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_opened_whatever_it_is(tmp_path: Path, kind: str) -> None:
    learn_job(write_job(tmp_path, KINDS[kind]))
    state = expunge.open_state(tmp_path / "state")
    assert state.kind == kind
    assert list(state.holds(["p1", "nobody", "p2"])) == ["p1", "p2"]
    before = state.generation
    release = state.forget(["p1"])
    release.save(tmp_path / "release-2")
    assert list(state.holds(["p1", "p2"])) == ["p2"]
    assert list(state.forgot(["p1", "p2"])) == ["p1"]
    again = expunge.open_state(tmp_path / "state")
    assert (again.identity, again.generation != before) == (state.identity, True)
    model = expunge.load_model(
        tmp_path / "release-2", None if kind == "linear-model" else make_network
    )
    assert model is not None


def make_network() -> Any:
    import torch

    return torch.nn.Linear(4, 3)


def test_a_job_is_opened_too(tmp_path: Path) -> None:
    found = expunge.open_state(write_job(tmp_path, EXACT))
    assert found.kind == "job"
    assert len(found.people) == 50
    assert found.holds(["p1", "nobody"]) == ["p1"]


def test_a_request_that_was_cut_short_is_answered_by_the_same_command(tmp_path: Path) -> None:
    learn_job(write_job(tmp_path, SHARDS))
    expunge.open_state(tmp_path / "state").forget(["p3", "p7", "p31"])  # and killed before save
    answer(tmp_path / "state", tmp_path / "release-2")
    release = expunge.verify(tmp_path / "release-2", people=["p3", "p7", "p31"]).certificate
    assert release.forget.samples == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_again_says_so(tmp_path: Path, kind: str) -> None:
    learn_job(write_job(tmp_path, KINDS[kind]))
    answer(tmp_path / "state", tmp_path / "release-2")
    words = ("forget", tmp_path / "state", tmp_path / "forget.txt", "--out", tmp_path / "release-3")
    again = call(*words)
    assert (again.returncode, "already forgotten: 3 of 3" in again.stderr) == (0, True), again


def test_shards_find_their_job_where_both_were_moved(tmp_path: Path) -> None:
    learn_job(write_job(tmp_path / "one", SHARDS))
    shutil.move(tmp_path / "one", tmp_path / "two")
    answer(tmp_path / "two" / "state", tmp_path / "two" / "release-2")
    (tmp_path / "two" / "job.toml").unlink()
    state = expunge.open_state(tmp_path / "two" / "state")
    assert state.holds(["p1"]) == ["p1"]
    with pytest.raises(InputError, match=r"was learned by .*, which is gone"):
        state.forget(["p1"])
    kept = State.open(tmp_path / "two" / "state")
    with kept.writing():
        kept.commit({JOB: None})
    with pytest.raises(InputError, match="does not say by which job it was learned"):
        state.forget(["p1"])


def test_the_job_of_a_state_is_not_exchanged(tmp_path: Path) -> None:
    """Code of that folder is run: a file that the manifest does not name decides nothing."""
    learn_job(write_job(tmp_path / "one", SHARDS))
    other = write_job(tmp_path / "other", SHARDS)
    other.with_name("own.py").write_text("raise SystemExit('the code of another')\n")
    state = tmp_path / "one" / "state"
    (state / JOB).write_text(json.dumps({"job": "../../other/job.toml"}))
    expunge.open_state(state).forget(["p1"]).save(tmp_path / "release")
    (kept,) = state.glob(f"{JOB}.*")
    kept.write_text(json.dumps({"job": "../../other/job.toml"}))
    with pytest.raises(expunge.UnlearningError, match=r"job\.json\..* is not what was written"):
        expunge.open_state(state).forget(["p2"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an option of nobody": ({"method": {"shads": 3}}, "method.shads is not an option of shards; "),
    "no seed": ({"method": {"seed": None}}, "method.seed is missing; shards needs it"),
    "no shards": ({"method": {"shards": 0}}, "method.shards is 0; it must be"),
    "no training": ({"training": None}, "[training] is missing; this job needs it"),
    "a list": ({"data": {"forget": "forget.txt"}}, "data.forget is not a key of [data]"),
    "an old model": (
        {"model": {"old": "weights.safetensors"}},
        "model.old is not a key of [model]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_of_a_job_of_shards(tmp_path: Path, case: str) -> None:
    changes, sentence = REFUSED[case]
    done = call("learn", write_job(tmp_path, SHARDS, **changes))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not (tmp_path / "state").exists()


def test_mistakes_of_a_job_of_a_linear_model(tmp_path: Path) -> None:
    changes = {"method": {"estimator": "Ridge", "alfa": 1.0}, "features": {"layers": "auto"}}
    done = call("learn", write_job(tmp_path, LINEAR, **changes))
    assert done.returncode == 2
    assert "method.alfa is not an option of Ridge; did you mean alpha?" in done.stderr
    assert "[features] is given without [model]" in done.stderr


def check_refused(sentence: str, *words: str | Path) -> None:
    done = call(*words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert sentence in done.stderr


def test_places_that_do_not_fit(tmp_path: Path) -> None:
    path = write_job(tmp_path, LINEAR)
    succeed("learn", path)
    before = list_files(tmp_path)
    names = tmp_path / "forget.txt"
    state, other = tmp_path / "state", {"name": "other.toml", "output": {"dir": "other"}}
    check_refused("outside of the state", "forget", state, names, "--out", state / "out")
    check_refused("already holds files", "forget", state, names, "--out", tmp_path / "release-1")
    nowhere = ("forget", tmp_path / "nowhere", names, "--out", tmp_path / "out")
    check_refused("it must be the folder of a state", *nowhere)
    learn = ("learn", write_job(tmp_path, SHARDS, **other))
    check_refused("a state of shards; it is one of linear-model", *learn)
    after = list_files(tmp_path)
    assert {name: after[name] for name in before if "/lock" not in name} == {
        name: before[name] for name in before if "/lock" not in name
    }


def test_json_and_plan(tmp_path: Path) -> None:
    path = write_job(tmp_path, SHARDS)
    plan = json.loads(succeed("plan", "--job", path, "--json"))
    assert plan["taken"] == "shards"
    assert "method: shards" in succeed("check", path)
    found = json.loads(succeed("learn", path, "--json"))
    assert (found["kind"], found["examples"], found["people"]) == ("shards", 50, 50)
    assert found["certificate"]["epsilon"] == 0


def test_commands_that_are_not_for_this(tmp_path: Path) -> None:
    path, names = write_job(tmp_path, LINEAR), tmp_path / "forget.txt"
    other = write_job(tmp_path, EXACT, "other.toml")
    check_refused("--ray is given, and ", "learn", path, "--ray")
    forget = ("forget", other, names, "--out", tmp_path / "out")
    check_refused("a job.toml forgets by expunge unlearn", *forget)
    succeed("learn", path)
    check_refused("is of linear-model, and ", "replay", tmp_path / "release-1", other)


@pytest.mark.parametrize("kind", KINDS)
def test_check_runs_one_batch(tmp_path: Path, kind: str) -> None:
    changes = {"data": {"load": "own.py:fail"}, "model": {"build": "own.py:fail"}}
    done = call("check", write_job(tmp_path, KINDS[kind], **changes))
    assert "data.load failed: RuntimeError" in done.stderr
    assert done.returncode == 2
    shown = succeed("check", write_job(tmp_path, KINDS[kind]))
    assert ("one batch: 32 rows" if kind == "linear-model" else "build(): Slow, 15") in shown
    assert not (tmp_path / "state").exists()


def test_shards_of_a_program_say_who_is_in_them(tmp_path: Path) -> None:
    shards = small_shards.make(tmp_path / "state")
    shards.learn(small_shards.make_data())
    shards.forget(["user-3"], small_shards.make_data()).save(tmp_path / "run")
    found = expunge.open_state(tmp_path / "state")
    assert found.holds(["user-3", "user-4", "nobody"]) == ["user-4"]
    assert found.forgot(["user-3", "user-4"]) == ["user-3"]
    with pytest.raises(InputError, match="does not say by which job"):
        found.forget(["user-4"])
