"""Stopped at any moment, a run goes on, repeats and skips nothing, and says so."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from expunge import InputError, SeededNoise, SystemNoise
from expunge.noisy import steps as module
from expunge.noisy.steps import FILE, uninterrupted
from expunge.training.checkpoints import read_checkpoint, write_checkpoint
from tests.noisy import networks

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = SimpleNamespace()  # no plain value: the source of the loss stays the same


class KilledError(BaseException):
    pass


def loss(output, target):
    PLAN.seen.append(target.tolist())
    if len(PLAN.seen) == PLAN.stop:
        raise PLAN.error
    return cross_entropy(output, target)


def build():
    return networks.make_mlp(dropout=0.2)


def go(folder, *, stop=None, error=KeyboardInterrupt, old=None, data=None, **options):
    """The first step evaluates the loss twice, every other once."""
    PLAN.stop, PLAN.seen, PLAN.error = stop, [], error
    return networks.run(old, build, data, loss=loss, resume=folder, **options)


def stop_at(loss, folder, **options):
    with pytest.raises(KeyboardInterrupt):
        go(folder, stop=loss, **options)


@pytest.mark.parametrize("recipe", [r for r in networks.NOISY.values() if r is not networks.OUTPUT])
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, recipe, stop):
    stop_at(stop, tmp_path / "state", recipe=recipe)
    first = PLAN.seen[1:-1]
    resumed, rest = go(tmp_path / "state", recipe=recipe), PLAN.seen[1:]
    whole = go(tmp_path / "other", recipe=recipe)
    assert networks.equal(resumed, whole)
    assert resumed.record.trace == whole.record.trace
    assert (resumed.record.resumed, resumed.record.noise.keys) == (1, 2)
    assert first + rest == PLAN.seen[1:]  # the rest of a shuffled pass


def test_after_a_kill_it_goes_on_from_the_last_save(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAVE_EVERY", 0.0)
    for stop in (4, 2, 3):
        with pytest.raises(KilledError):
            go(tmp_path, stop=stop, error=KilledError)
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    resumed = go(tmp_path)
    assert resumed.record.resumed == 2  # the second was killed before its first save
    assert networks.equal(resumed, networks.run(build=build, loss=loss))


def test_noise_is_fresh_after_a_resume(tmp_path):
    stop_at(5, tmp_path, noise=SystemNoise())
    kept, ends = (tmp_path / FILE).read_bytes(), []
    for _ in range(2):
        (tmp_path / FILE).write_bytes(kept)
        ends.append(go(tmp_path, noise=SystemNoise(), delta=1e-5))
    first, second = (release.record.trace.noise_norm for release in ends)
    assert first[:3] == second[:3]
    assert not set(first[3:]) & set(second[3:])
    assert ends[0].certificate.noise.keys == 2


def test_no_key_is_in_a_checkpoint(tmp_path):
    go(tmp_path)
    assert SeededNoise(0).begin().export_key() not in (tmp_path / FILE).read_bytes()


@pytest.mark.parametrize(
    "recipe", [networks.GRADIENT, networks.OUTPUT], ids=["gradients", "output"]
)
def test_a_finished_run_draws_nothing_again(tmp_path, recipe):
    first = go(tmp_path, recipe=recipe, noise=SystemNoise())
    again = go(tmp_path, recipe=recipe, noise=SystemNoise())
    assert networks.equal(first, again)
    assert PLAN.seen == []
    assert (again.record.resumed, again.record.noise.keys) == (0, 1)
    assert again.record.trace == first.record.trace


def test_another_run_is_refused_by_what_differs(tmp_path):
    stop_at(3, tmp_path)
    x, y = networks.make_rows()
    x[3, 2] += 1
    for options, name in [
        ({"recipe": networks.MODEL}, "recipe"),
        ({"recipe": replace(networks.GRADIENT, steps=8)}, "recipe"),
        ({"old": networks.make_old(8)}, "old model"),
        ({"noise": SystemNoise()}, "noise"),
        ({"seed": 1}, "public start"),
        ({"data": networks.make_data((x, y))}, "data"),
        ({"forget": ["p3"]}, "people to forget"),
        ({"batch_size": 9}, "batch_size"),
        ({"centre": "zero"}, "centre"),
    ]:
        with pytest.raises(InputError, match=rf"run with other .*\b{name}\b"):
            go(tmp_path, **options)
    assert go(tmp_path).record.resumed == 1


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    go(tmp_path)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-7] if damage is None else damage)
    with pytest.raises(InputError, match="cannot be read"):
        go(tmp_path)


def interrupt(done):
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(torch.ones(3).sum())
    done.append("never")


def test_ctrl_c_waits_for_the_end_of_a_step():
    done = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt(done)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(done) == 1


@pytest.mark.parametrize("recipe", networks.NOISY.values(), ids=list(networks.NOISY))
@pytest.mark.parametrize("change", ["far", "no noise", "trace", "short"])
def test_a_vector_that_no_step_led_to_is_refused(tmp_path, recipe, change):
    if recipe is networks.OUTPUT:
        go(tmp_path, recipe=recipe)
    else:
        stop_at(3, tmp_path, recipe=recipe)
    saved = read_checkpoint(tmp_path / FILE)
    match change:
        case "far":
            saved["cells"] *= 100
        case "no noise":
            saved["cells"] *= 0
        case "trace":
            saved["cells"] *= 100
            saved["trace"][:, 4] = 100 * saved["trace"][:, 4:6].norm(dim=1)
        case "short":
            saved["cells"] = saved["cells"][:1].clone()
    write_checkpoint(tmp_path / FILE, saved)
    with pytest.raises(InputError, match="is not one of this run: "):
        go(tmp_path, recipe=recipe)


def test_a_start_beyond_its_clip_is_refused(tmp_path):
    stop_at(1, tmp_path)
    saved = read_checkpoint(tmp_path / FILE)
    write_checkpoint(tmp_path / FILE, saved | {"cells": 2 * saved["cells"]})
    with pytest.raises(InputError, match="to which no step led"):
        go(tmp_path)


def test_checkpoints_without_their_run_are_refused(tmp_path):
    stop_at(3, tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(InputError, match=f"which has {FILE} and no run.json"):
        go(tmp_path)
