"""Kills, flipped bits and part-restores of a state of shards: each refused by name, or harmless."""

from __future__ import annotations

import random
import shutil
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from expunge import ExpungeError, verify
from tests.helpers.deaths import flip_bit, kill_at, restore_parts
from tests.helpers.small_shards import hash_release, make, make_data, train, train_fresh

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def test_kills_at_twenty_moments_of_learning_and_forgetting(tmp_path: Path) -> None:
    data, gone = make_data(range(8)), ["user-3", "user-5"]
    expected = train_fresh(data.without(gone))
    make(tmp_path / "start").learn(data.take(range(12)))
    state, out = tmp_path / "state", tmp_path / "run"

    def learn() -> None:
        make(state).learn(data)

    def forget() -> None:
        release = make(state).forget(gone, data)
        if not out.exists():
            release.save(out)

    draw, deaths = random.Random(0), 0
    while deaths < 20:
        for folder in (state, out):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "start", state)
        step = draw.randrange(1, 60)
        killed = draw.random() < 0.5 and kill_at(step, learn)
        learn()
        deaths += killed or kill_at(step, forget)
        forget()
        assert hash_release(make(state).release()) == expected
        assert verify(out).certificate.forget.samples == 6
        assert not list(state.glob(".*.tmp"))


def train_slowly(model: nn.Module, examples: Any, seed: int) -> None:
    """Long enough to be killed in."""
    time.sleep(0.05)
    train(model, examples, seed)


def work_until_killed(state: Path) -> None:
    ensemble = make(state, train=train_slowly, workers=2)
    ensemble.learn(make_data())
    ensemble.forget(["user-3"], make_data())


@pytest.mark.slow
def test_twenty_kills_at_any_time_with_workers(tmp_path: Path) -> None:
    """By SIGKILL from outside, one after the other on one state: the last call ends it."""
    draw, state = random.Random(0), tmp_path / "state"
    for _ in range(20):
        process = get_context("spawn").Process(target=work_until_killed, args=(state,))
        process.start()
        process.join(draw.uniform(3, 12))
        process.kill()
        process.join()
    ensemble = make(state, train=train_slowly)
    if not ensemble.forgot(["user-3"]):
        ensemble.learn(make_data())
    release = ensemble.forget(["user-3"], make_data())
    assert hash_release(release) == train_fresh(make_data().without(["user-3"]), train=train_slowly)


def ask(state: Path) -> tuple[str, ...] | str:
    try:
        first = hash_release(make(state).release())
        make(state).forget(["user-6"], make_data())
    except ExpungeError as error:
        return str(error)
    return first


def test_two_hundred_flipped_bits(tmp_path: Path) -> None:
    ensemble = make(tmp_path / "start")
    ensemble.learn(make_data())
    ensemble.forget(["user-3"], make_data())
    draw = random.Random(0)
    for _ in range(200):
        file = flip_bit(tmp_path / "start", tmp_path / "state", draw)
        found = ask(tmp_path / "state")
        assert isinstance(found, str)
        assert f"{file.name} is not what was written; restore the whole folder" in found


def test_a_hundred_part_restores(tmp_path: Path) -> None:
    """Slices, checkpoints, lists and manifests of an older day, over the new ones or in their
    place: whoever was forgotten does not come back."""
    data, gone = make_data(), ["user-3"]
    ensemble = make(tmp_path / "state")
    ensemble.learn(data)
    ensemble.release()
    shutil.copytree(tmp_path / "state", tmp_path / "old")
    ensemble.forget(gone, data)
    expected = train_fresh(data.without(gone))
    assert hash_release(make(tmp_path / "state").release()) == expected
    draw, refused, harmless = random.Random(0), 0, 0
    for trial in range(100):
        target, old = tmp_path / "now", tmp_path / "old"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(tmp_path / "state", target)
        groups = sorted({p.relative_to(old).as_posix().split(".")[0] for p in old.rglob("*.*")})
        chosen = groups if trial % 4 == 0 else [g for g in groups if draw.random() < 0.4]
        restore_parts(old, target, chosen, lambda _: draw.random() < 0.3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = ask(target)
        if isinstance(found, str):
            assert "is damaged: " in found or "1 of the forgotten are in the state" in found
            refused += 1
        else:
            assert found == expected
            harmless += 1
    assert min(refused, harmless) >= 10


def test_a_whole_backup_under_a_newer_list_takes_the_request_again(tmp_path: Path) -> None:
    data = make_data()
    ensemble = make(tmp_path / "state")
    ensemble.learn(data)
    shutil.copytree(tmp_path / "state", tmp_path / "old")
    ensemble.forget(["user-3"], data)
    for file in (tmp_path / "old").rglob("*"):
        if file.is_file():
            shutil.copy(file, tmp_path / "state" / file.relative_to(tmp_path / "old"))
    again = make(tmp_path / "state")
    for call in (again.release, lambda: again.learn(data), lambda: again.forget(["user-4"], data)):
        with pytest.raises(ExpungeError, match="1 of the forgotten are in the state"):
            call()
    release = again.forget(["user-3"], data)
    assert hash_release(release) == train_fresh(data.without(["user-3"]))
