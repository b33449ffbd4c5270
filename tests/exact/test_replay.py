"""Replay: the same bits again, or what differs and what could be the cause."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import expunge
from expunge import Data, InputError

NAMES = [f"user-{i % 5}" for i in range(20)]
X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
DATA = Data((X, (X[:, 0] > 0).long()), ids=NAMES)
RATE = 0.1


def build():
    return nn.Linear(3, 2)


def train(model, examples, seed):
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(examples[0]), examples[1]).backward()
        optimizer.step()


@pytest.fixture
def run(tmp_path):
    release = expunge.retrain(build, DATA, forget=["user-1"], train=train, seed=9)
    return release.save(tmp_path / "run")


def test_without_the_rows_and_without_the_record(run):
    left = DATA.without(["user-1"])
    assert expunge.replay(run, build, left, train=train).same
    (run / "record.json").unlink()
    assert str(expunge.replay(run, build, left, train=train)) == "the same bits again"


def test_weights_that_saw_them_do_not_come_out_again(run):
    """A certificate of retraining over weights that were trained on everybody."""
    cheat = expunge.retrain(
        build, Data(DATA.examples, ids=[*NAMES[:-1], "nobody"]), forget=["nobody"], train=train
    )
    save_file(dict(cheat.tensors), run / "model.safetensors", {"format": "pt"})
    found = expunge.replay(run, build, DATA, train=train)
    assert not found
    assert "tensors differ" in found.differences[0]


def test_other_data_and_other_code_are_named(run):
    fewer = DATA.without(["user-1", "user-2"])
    found = expunge.replay(run, build, fewer, train=train)
    assert "the data are others" in str(found)

    def other(model, examples, seed):
        train(model, examples, seed)
        train(model, examples, seed)

    found = expunge.replay(run, build, DATA, train=other)
    assert "the source of train is another" in str(found)
    assert "it may be" in str(found)


def test_noisy_runs_cannot_be_replayed(tmp_path):
    release = expunge.unlearn(
        build(), build, DATA, forget=["user-1"], epsilon=1.0, loss=nn.functional.cross_entropy
    )
    with pytest.raises(InputError, match="run is 'gradient-clipping'; it must be a retraining"):
        expunge.replay(release, build, DATA, train=train)


def test_a_copy_of_a_run_is_a_run(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    assert load_file(copy / "model.safetensors").keys() == {"weight", "bias"}
    assert expunge.replay(copy, build, DATA, train=train).same


def test_the_same_bits_by_other_code_are_the_same_bits(run):
    def spelt_otherwise(model, examples, seed):
        """A comment more, and the same steps."""
        train(model, examples, seed)

    found = expunge.replay(run, build, DATA, train=spelt_otherwise)
    assert found.same
    assert "the same bits again; the source of train is another" in str(found)
