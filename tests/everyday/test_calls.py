"""The calls of the documentation, word for word, and what each word promises."""

from __future__ import annotations

import inspect

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.functional import cross_entropy

import expunge
from tests.everyday.conftest import FORGET


def build():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def my_train(model, examples, seed):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(examples[0]), examples[1]).backward()
        optimizer.step()


def test_words_of_the_calls():
    words = "build data forget train seed parent old resume device"
    assert set(words.split()) <= set(inspect.signature(expunge.retrain).parameters)
    words = "old build data forget epsilon delta train loss batch_size recipe centre noise start"
    assert set(words.split()) <= set(inspect.signature(expunge.unlearn).parameters)


def test_exact(data, tmp_path):
    release = expunge.retrain(
        build, data, forget=FORGET, train=my_train, seed=0, parent=None, old=None, resume=None,
        device=None,
    )  # fmt: skip
    assert isinstance(release.model, nn.Module)
    certificate = release.certificate
    assert (certificate.epsilon, certificate.delta, certificate.forget.samples) == (0.0, 0.0, 5)
    release.save(tmp_path / "run")
    assert expunge.verify(tmp_path / "run")
    model = expunge.load_model(tmp_path / "run", build)
    assert torch.equal(model[0].weight, release.model[0].weight)
    assert expunge.replay(tmp_path / "run", build, data, train=my_train)


def test_the_paper(data):
    train = {"train": my_train, "loss": cross_entropy, "batch_size": 128}
    release = expunge.unlearn(build(), build, data, forget=FORGET, epsilon=1.0, delta=1e-5, **train)
    assert (release.certificate.delta, release.certificate.releasable) == (1e-5, True)
    recipe = expunge.GradientClipping(
        start_clip=1.0, grad_clip=1.0, learning_rate=0.1, weight_decay=1.0, steps=3, noise_std=5.0
    )
    control = expunge.unlearn(
        build(), build, data, forget=FORGET, recipe=recipe, delta=1e-5, centre="zero",
        noise=expunge.SeededNoise(0), start="centre", loss=cross_entropy,
    )  # fmt: skip
    assert not control.certificate.releasable
    assert control.record.origin == "zero"


def test_check_is_every_refusal_at_once(data):
    assert expunge.check(build, data, train=my_train, old=build())
    found = expunge.check(lambda: None, data, train=lambda model: None, old=build())
    assert len(found.problems) == 2


def test_build_is_called_once_a_run(data, tmp_path):
    calls = []

    def counted():
        calls.append(1)
        return build()

    training = {"forget": FORGET, "train": my_train}
    expunge.retrain(counted, data, old=build(), resume=tmp_path / "kept", **training)
    assert len(calls) == 1
    expunge.unlearn(build(), counted, data, epsilon=1.0, loss=cross_entropy, **training)
    assert len(calls) == 2
    expunge.check(counted, data, old=build(), loss=cross_entropy, **training)
    assert len(calls) == 3


def test_names_of_wrappers_are_never_kept(data, tmp_path):
    def wrapped():
        return nn.DataParallel(torch.compile(build(), backend="eager"))

    def train(model, examples, seed):
        my_train(model, examples, seed)
        return torch.optim.swa_utils.AveragedModel(model)

    release = expunge.retrain(wrapped, data, forget=FORGET, train=train)
    with safe_open(release.save(tmp_path / "run") / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(build().state_dict())
    assert expunge.verify(tmp_path / "run")
    assert isinstance(expunge.load_model(tmp_path / "run", build), nn.Sequential)


def test_what_a_function_is_given_and_returns(rows):
    data = expunge.Data(rows, ids=range(40), validation=expunge.Data(rows, ids=range(40)))
    seen = []

    def train(model, examples, seed, *, validation=None, device="cpu"):
        seen.append((len(examples[0]), len(validation[0]), seed, device, model.training))
        nn.init.zeros_(next(model.parameters()))
        return 0.93  # an accuracy, as many functions return

    expunge.retrain(build, data, forget=[3], train=train, seed=5)
    expunge.retrain(build, data, forget=[3], train=train, seed=5, device="cpu")
    assert seen[0][:3] == (39, 39, 5)
    assert seen[1] == (39, 39, 5, "cpu", True)
    assert seen[0][3] == "cpu"
