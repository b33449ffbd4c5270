"""Checkpoint files: whole or absent, of one run and no other, without a key."""

import errno
import math
import os
from dataclasses import asdict

import pytest
import torch

from expunge import Checkpoint, InputError, RunError
from expunge.noisy.checkpoint import (
    Progress,
    load_checkpoint,
    load_state,
    remove_leftovers,
    save_checkpoint,
    save_state,
)
from expunge.noisy.noise import SeededNoise
from expunge.noisy.vector import FloatVector, GridVector
from expunge.processes.group import Processes
from expunge.processes.weights import save_weights

PROGRESS = Progress(steps=3, noise_keys=2, resumed=1, gradient_evaluations=24)
IDENTITY = {"recipe": {"steps": 7}, "forget set": "ab", "centre": None}
TENSORS = {"trace": torch.arange(6.0).view(2, 3)}


def make_vector(noisy=True):
    parameters = [torch.full((2, 3), 0.5), torch.zeros(3)]
    return GridVector(parameters, None, 2.0**-10) if noisy else FloatVector(parameters, None)


def test_what_is_saved_is_read_back(tmp_path):
    path = tmp_path / "state"
    save_checkpoint(path, PROGRESS, IDENTITY, TENSORS)
    progress, tensors = load_checkpoint(path, IDENTITY)
    assert asdict(progress) == asdict(PROGRESS)
    assert torch.equal(tensors["trace"], TENSORS["trace"])


@pytest.mark.parametrize("noisy", [True, False])
def test_a_vector_goes_on_where_it_stood(tmp_path, noisy):
    vector, processes, path = make_vector(noisy), Processes(), tmp_path / "state"
    vector.start(math.inf)
    save_state(path, processes, PROGRESS, IDENTITY, TENSORS, vector)
    kept = [p.clone() for p in vector.parameters]
    other = make_vector(noisy)
    for p in other.parameters:
        p.fill_(9.0)
    progress, tensors = load_state(path, processes, IDENTITY, other)
    assert progress == PROGRESS
    assert torch.equal(tensors["trace"], TENSORS["trace"])
    assert all(torch.equal(a, b) for a, b in zip(kept, other.parameters, strict=True))


def test_nothing_there_is_nothing(tmp_path):
    vector = make_vector()
    assert load_state(tmp_path / "state", Processes(), IDENTITY, vector) is None


@pytest.mark.parametrize(
    "change",
    [{"forget set": "ac"}, {"recipe": {"steps": 8}}, {"centre": "public"}, {"more": 1}],
)
def test_another_run_is_refused_by_what_differs(tmp_path, change):
    path = tmp_path / "state"
    save_checkpoint(path, PROGRESS, IDENTITY, TENSORS)
    name = next(iter(change))
    with pytest.raises(InputError, match=f"belongs to another run: its {name} is"):
        load_checkpoint(path, IDENTITY | change)
    less = {key: value for key, value in IDENTITY.items() if key != "recipe"}
    with pytest.raises(InputError, match="its recipe is"):
        load_checkpoint(path, less)


def test_weights_that_are_no_checkpoint_and_older_formats_are_refused(tmp_path):
    path = tmp_path / "state"
    save_weights(path, TENSORS)
    with pytest.raises(InputError, match="cannot be read"):
        load_checkpoint(path, IDENTITY)
    about = '{"format": "expunge-checkpoint-1", "identity": {}, "progress": {}}'
    save_weights(path, TENSORS, {"expunge": about})
    with pytest.raises(InputError, match="checkpoint format is 'expunge-checkpoint-1'"):
        load_checkpoint(path, IDENTITY)


def test_half_written_files_are_deleted_and_nothing_else(tmp_path):
    for name in (".state.1.tmp", ".state.2.tmp", ".other.1.tmp", "state"):
        (tmp_path / name).write_bytes(b"x")
    remove_leftovers(tmp_path / "state")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.1.tmp", "state"]


def test_a_full_disk_is_one_sentence_and_keeps_the_state_before(tmp_path, monkeypatch):
    def fill(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    vector, processes, path = make_vector(), Processes(), tmp_path / "state"
    save_state(path, processes, PROGRESS, IDENTITY, TENSORS, vector)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(RunError, match="cannot be written: No space left on device") as caught:
        save_state(path, processes, PROGRESS, IDENTITY, {}, vector)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_no_key_is_in_the_file(tmp_path):
    vector = make_vector()
    stream = SeededNoise(1).begin()
    vector.noise = vector.make_noise(stream, [100.0])
    vector.start(1.0)
    vector.perturb(0, 100.0 * vector.grid)
    save_state(tmp_path / "state", Processes(), PROGRESS, IDENTITY, TENSORS, vector)
    assert stream.export_key() not in (tmp_path / "state").read_bytes()


@pytest.mark.parametrize("every", [-1.0, math.nan])
def test_a_bad_interval_is_refused(every):
    with pytest.raises(InputError, match=r"checkpoint\.every"):
        Checkpoint("state", every)
