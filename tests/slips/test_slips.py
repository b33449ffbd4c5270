"""Slips that people make: each is caught in one sentence, before anything is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import expunge
from expunge import Data, InputError, UnlearningError

NAMES = [f"user-{i % 8}" for i in range(40)]
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
DATA = Data((X, Y), ids=NAMES)
NOISY = {"forget": ["user-3"], "epsilon": 1.0, "delta": 1e-5, "loss": cross_entropy}


def build():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def never(model, examples, seed):
    raise AssertionError("a slip must be found before anything is trained")


@pytest.fixture
def old():
    torch.manual_seed(99)
    return build()


def load(old):
    """The slip: the trained file is loaded where a fresh or published one was meant."""

    def wrong():
        model = build()
        model.load_state_dict(old.state_dict())
        return model

    return wrong


def test_build_loads_the_trained_weights(old):
    with pytest.raises(
        UnlearningError, match=r"the old model's own weights in 0.weight and 3 more"
    ):
        expunge.retrain(load(old), DATA, forget=["user-3"], train=never, old=old)
    with pytest.raises(UnlearningError, match=r"build\(\) returns the old model's own weights"):
        expunge.unlearn(old, load(old), DATA, **NOISY)


def test_what_training_never_touched_is_declared(old):
    def start():
        model = build()
        model[0].weight.data.copy_(old[0].weight.data)
        return model

    with pytest.raises(UnlearningError, match=r"in 0.weight; it must give a public start"):
        expunge.unlearn(old, start, DATA, **NOISY)
    release = expunge.unlearn(old, start, DATA, unchanged=["0.weight"], **NOISY)
    assert release.certificate.unchanged == ("0.weight",)


def test_frozen_weights_are_named_or_compared_with_a_file(old, tmp_path):
    def frozen():
        model = load(old)()
        model[0].requires_grad_(False)
        model[2].reset_parameters()
        return model

    release = expunge.unlearn(old, frozen, DATA, **NOISY)
    assert release.certificate.weights.published.names == ("0.weight", "0.bias")
    assert any("published, says the operator" in s for s in release.certificate.scope.not_covered)
    torch.save(build().state_dict(), tmp_path / "published.pt")
    with pytest.raises((InputError, UnlearningError), match=r"0\.(weight|bias)"):
        expunge.unlearn(old, frozen, DATA, published=tmp_path / "published.pt", **NOISY)
    torch.save(old.state_dict(), tmp_path / "right.pt")
    release = expunge.unlearn(old, frozen, DATA, published=tmp_path / "right.pt", **NOISY)
    assert release.certificate.weights.published.compared == "right.pt"


def test_a_forward_that_remembers(old):
    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.memory = build(), None

        def forward(self, x):
            output = self.net(x)
            if self.memory is not None:
                output = output + self.memory
            self.memory = output.detach().mean(0)
            return output

    with pytest.raises(
        UnlearningError, match=r"forward\(\) keeps something from one call to the next"
    ):
        expunge.unlearn(Bank(), Bank, DATA, **NOISY)
    train = expunge.Training(epochs=1)
    assert expunge.retrain(Bank, DATA, forget=["user-3"], train=train).certificate.epsilon == 0


@pytest.mark.parametrize(
    ("forget", "sentence"),
    [
        ([], "forget is empty"),
        (["user-3", "user-3"], "'user-3' twice"),
        (["user-33"], "who is not in the data; did you mean 'user-3'"),
        (["User-3"], "did you mean 'user-3'"),
        ("user-3", "not one text"),
        ([f"user-{i}" for i in range(8)], "everybody"),
    ],
)
def test_lists_with_a_slip(forget, sentence, old):
    with pytest.raises(InputError, match=sentence):
        expunge.retrain(build, DATA, forget=forget, train=never)
    with pytest.raises(InputError, match=sentence):
        expunge.unlearn(old, build, DATA, **NOISY | {"forget": forget})


def test_somebody_whom_the_parent_forgot_is_back(tmp_path):
    train = expunge.Training(epochs=1)
    first = expunge.retrain(build, DATA, forget=["user-3"], train=train)
    with pytest.raises(InputError, match="the data have 'user-3', whom the parent release forgot"):
        expunge.retrain(build, DATA, forget=["user-4"], train=never, parent=first)
    both = expunge.retrain(build, DATA, forget=["user-3", "user-4"], train=train, parent=first)
    assert both.certificate.forget.count == 2


def test_a_later_noisy_run_starts_from_the_release_before(old, tmp_path):
    first = expunge.unlearn(old, build, DATA, **NOISY)
    first.save(tmp_path / "first")
    with pytest.raises(UnlearningError, match="old is not what the parent released"):
        expunge.unlearn(old, build, DATA, parent=tmp_path / "first", **NOISY)


def test_two_noisy_releases_of_one_model_compose(old, tmp_path):
    expunge.unlearn(old, build, DATA, **NOISY).save(tmp_path / "first")
    second = expunge.unlearn(old, build, DATA, **NOISY)
    with pytest.raises(InputError, match=r"a noisy run of the same old model.*give releases=2"):
        second.save(tmp_path / "second")
    recipe = second.record.recipe
    counted = {"recipe": recipe, "releases": 2, "forget": ["user-3"], "loss": cross_entropy}
    both = expunge.unlearn(old, build, DATA, delta=1e-5, **counted)
    both.save(tmp_path / "second")
    assert both.certificate.epsilon > second.certificate.epsilon


def test_a_resumed_run_with_another_recipe_or_code(old, tmp_path):
    settings = {"resume": tmp_path / "checkpoints", **NOISY}
    expunge.unlearn(old, build, DATA, **settings)
    with pytest.raises(InputError, match="a run with other"):
        expunge.unlearn(old, build, DATA, **settings | {"epsilon": 2.0})
    with pytest.raises(InputError, match="a run with other"):
        expunge.unlearn(old, build, DATA, **settings | {"forget": ["user-4"]})
    with pytest.raises(InputError, match="a run with other"):
        expunge.unlearn(old, lambda: build(), DATA, **settings)


def test_weights_changed_after_the_certificate(tmp_path):
    release = expunge.retrain(build, DATA, forget=["user-3"], train=expunge.Training(epochs=1))
    with torch.no_grad():
        release.model[0].weight.mul_(2)
    with pytest.raises(
        UnlearningError,
        match=r"certified .*Release\.apply\(function, note\) is the way",
    ):
        release.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"build": build()}, "build is a Sequential; it must be a function"),
        ({"build": lambda: None}, r"build\(\) returned a NoneType; it must be an nn\.Module"),
        ({"build": lambda: 1 / 0}, r"build\(\) failed: ZeroDivisionError: .* line"),
        ({"build": lambda: build().requires_grad_(False)}, "nothing to train"),
        ({"data": (X, Y)}, "data is a tuple"),
        ({"train": 3}, "train is 3"),
        ({"train": lambda model: None}, r"train takes \(model\)"),
    ],
)
def test_words_that_are_none_of_the_three(change, sentence):
    given = {"build": build, "data": DATA, "train": never, "forget": ["user-3"]} | change
    with pytest.raises(InputError, match=sentence):
        expunge.retrain(**given)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"device": "cuda:99"}, "device is 'cuda:99'; it must be one that torch has here"),
        ({"unchanged": "0.weight"}, "unchanged is '0.weight'; it must be a list of names"),
        ({"unchanged": ["1.weight"]}, "unchanged is '1.weight'; it must be a list of names"),
        ({"published": "nowhere.pt"}, "published is nowhere.pt, which cannot be read"),
    ],
)
def test_words_with_a_slip(change, sentence, old):
    with pytest.raises(InputError, match=sentence):
        expunge.retrain(build, DATA, forget=["user-3"], train=never, old=old, **change)
    with pytest.raises(InputError, match=sentence):
        expunge.unlearn(old, build, DATA, **NOISY | change)


def test_one_module_twice():
    model = build()
    train = expunge.Training(epochs=1)
    expunge.retrain(lambda: model, DATA, forget=["user-3"], train=train)
    with pytest.raises(InputError, match="one and the same module twice"):
        expunge.retrain(lambda: model, DATA, forget=["user-3"], train=train)


def test_numbers_that_are_none():
    train = expunge.Training(epochs=20, learning_rate=1e30, batch_size=8)
    with pytest.raises(UnlearningError, match=r"0\.weight is not finite, so nothing is released"):
        expunge.retrain(build, DATA, forget=["user-3"], train=train)


def test_old_and_build_do_not_fit(old):
    wide = lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))  # noqa: E731
    with pytest.raises(InputError, match=r"0\.weight"):
        expunge.unlearn(old, wide, DATA, **NOISY)
    deep = lambda: nn.Sequential(*build(), nn.Linear(2, 2))  # noqa: E731
    with pytest.raises(InputError, match=r"3\.weight"):
        expunge.unlearn(old, deep, DATA, **NOISY)
    release = expunge.unlearn(old, deep, DATA, strict=False, **NOISY)
    assert release.certificate.missing == ("3.weight", "3.bias")


def test_all_of_them_at_once(old):
    found = expunge.check(
        load(old), DATA, train=lambda model: None, old=old, forget=["user-33"], loss=cross_entropy
    )
    assert len(found.problems) == 3
    assert not found
    assert expunge.check(build, DATA, train=never, old=old, forget=["user-3"], loss=cross_entropy)


def test_all_slips_of_a_list_at_once():
    names = [*NAMES[:-1], "User-5"]
    data, train = Data((X, Y), ids=names), expunge.Training(epochs=1)
    first = expunge.retrain(build, DATA, forget=["user-3"], train=train)
    wrong = ["user-5", "user-4", "user-4", "user-44"]
    found = expunge.check(build, data, train=train, forget=wrong, parent=first)
    for sentence in (
        "forget names 'user-4' twice",
        "forget names 'user-44', who is not in the data",
        "forget names 'user-5', and the data also have 'User-5', who would stay",
        "the data have 'user-3', whom the parent release forgot",
    ):
        assert sum(sentence in problem for problem in found.problems) == 1, sentence
    assert len(found.problems) == 4
    with pytest.raises(InputError, match=r"(?s)twice.*not in the data.*would stay.*parent release"):
        expunge.retrain(build, data, forget=wrong, train=never, parent=first)


def test_what_cannot_be_seen_is_said():
    release = expunge.retrain(build, DATA, forget=["user-3"], train=expunge.Training(epochs=1))
    words = " ".join(release.certificate.scope.operator + release.certificate.scope.not_covered)
    for word in ("scaler", "vocabular", "hyper-parameter"):
        assert word in words.lower()
