"""Checkpoints: killed at any moment, a run goes on, repeats and skips nothing, and says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from engine import GRADIENT, MODEL, OUTPUT, SCHEDULED, equal, make_batches, make_mlp
from expunge import InputError, certify
from expunge.noisy.checkpoint import Checkpoint
from expunge.noisy.noise import SeededNoise, SystemNoise
from expunge.noisy.run import unlearn

torch.set_num_threads(1)
KILLS = 20


class StopError(Exception):
    pass


def go(recipe, path, *, stop=None, model=None, noise=None, resume=False, **options):
    def on_step(done, _):
        if done == stop:
            raise StopError

    return unlearn(
        make_mlp(dropout=0.2) if model is None else model,
        make_batches(),
        recipe,
        loss_fn=cross_entropy,
        noise=SeededNoise(0) if noise is None else noise,
        checkpoint=Checkpoint(path, 0.0, resume),
        on_step=on_step,
        **({"centre": "zero"} | options),
    )


@pytest.mark.slow
def test_killed_twenty_times_it_gives_the_same_run_and_a_valid_certificate(tmp_path):
    here = Path(__file__).parents[1] / "helpers"
    done = subprocess.run(
        [sys.executable, "resume_driver.py", str(tmp_path), str(KILLS)],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["seeded"] == report["system"] == KILLS
    assert report["same_model"]
    assert report["same_trace"]
    assert report["evaluations"]
    assert report["keys"] == 1 + report["resumed"]
    assert report["resumed"] >= 5  # a child killed before its first save counts as a new start
    assert report["distinct"] == 400
    assert report["jumps"] == 0
    assert report["epsilon"] > 0
    assert report["leftovers"] == []


@pytest.mark.parametrize("recipe", [GRADIENT, SCHEDULED, MODEL], ids=["gradient", "both", "model"])
@pytest.mark.parametrize("stop", [2, 3])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, recipe, stop):
    torch.manual_seed(5)
    path = tmp_path / "state"
    with pytest.raises(StopError):
        go(recipe, path, stop=stop)
    resumed = go(recipe, path, resume=True)
    whole = go(recipe, tmp_path / "other")
    assert equal(resumed.model, whole.model)
    assert resumed.record.trace == whole.record.trace
    assert (resumed.record.resumed, resumed.record.noise_keys) == (1, 2)


def test_fresh_noise_after_a_resume(tmp_path):
    path = tmp_path / "state"
    with pytest.raises(StopError):
        go(GRADIENT, path, stop=4, noise=SystemNoise())
    kept = path.read_bytes()
    ends = []
    for _ in range(2):
        path.write_bytes(kept)
        ends.append(go(GRADIENT, path, resume=True, noise=SystemNoise()))
    first, second = (run.record.trace for run in ends)
    assert first.noise_norm[:3] == second.noise_norm[:3]
    assert not set(first.noise_norm[3:]) & set(second.noise_norm[3:])
    certify(ends[0].record, delta=1e-5)


@pytest.mark.parametrize("recipe", [GRADIENT, OUTPUT], ids=["gradient", "output"])
def test_finished_run_is_returned_without_another_draw(tmp_path, recipe):
    path = tmp_path / "state"
    first = go(recipe, path, noise=SystemNoise())
    again = go(recipe, path, resume=True, noise=SystemNoise())
    assert equal(first.model, again.model)
    assert (again.record.resumed, again.record.noise_keys) == (0, 1)
    assert again.record.trace == first.record.trace


def test_resume_without_a_checkpoint_starts_afresh(tmp_path):
    run = go(GRADIENT, tmp_path / "state", resume=True)
    assert (run.record.resumed, run.record.noise_keys) == (0, 1)


def test_checkpoints_are_never_overwritten_or_mixed_up(tmp_path):
    path = tmp_path / "state"
    with pytest.raises(StopError):
        go(GRADIENT, path, stop=3)
    before = path.read_bytes()
    with pytest.raises(InputError, match="exists already"):
        go(GRADIENT, path)
    with pytest.raises(InputError, match="its recipe is"):
        go(MODEL, path, resume=True)
    with pytest.raises(InputError, match="its old weights is"):
        go(GRADIENT, path, resume=True, model=make_mlp(seed=8))
    with pytest.raises(InputError, match="its noise is"):
        go(GRADIENT, path, resume=True, noise=SystemNoise())
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_damaged_checkpoints_are_refused(tmp_path, damage):
    path = tmp_path / "state"
    go(GRADIENT, path)
    path.write_bytes(path.read_bytes()[:-7] if damage is None else damage)
    with pytest.raises(InputError, match="cannot be read"):
        go(GRADIENT, path, resume=True)


def test_folder_must_exist(tmp_path):
    with pytest.raises(InputError, match="folder that exists"):
        go(GRADIENT, tmp_path / "missing" / "state")


def test_resumed_run_sees_the_rest_of_a_shuffled_pass(tmp_path):
    x, y = (torch.cat(t) for t in zip(*make_batches(), strict=True))
    samples = torch.utils.data.TensorDataset(x, y)

    def run(path, stop, *, resume=False):
        seen = []

        def loss(output, target):
            seen.append(target.tolist())
            return cross_entropy(output, target)

        def on_step(done, _):
            if done == stop:
                raise StopError

        loader = torch.utils.data.DataLoader(samples, batch_size=5, shuffle=True)
        torch.manual_seed(3)
        try:
            unlearn(
                make_mlp(dropout=0.5),
                loader,
                GRADIENT,
                loss_fn=loss,
                noise=SeededNoise(0),
                centre="zero",
                checkpoint=Checkpoint(path, 0.0, resume),
                on_step=on_step,
            )
        except StopError:
            seen.pop()  # the step that was stopped before it was saved
        return seen

    whole = run(tmp_path / "whole", None)
    first = run(tmp_path / "state", 6)
    torch.manual_seed(99)
    rest = run(tmp_path / "state", None, resume=True)
    assert [len(batch) for batch in whole] == [5, 5, 5, 5, 4, 5, 5]
    assert first + rest == whole
