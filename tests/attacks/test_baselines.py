"""Attempts to get a false certificate out of retraining, DP-SGD and descent, which failed."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from engine import flatten, make_mlp
from expunge import Batches, GroupDPSGD, SeededNoise, SystemNoise, certify, retrain, train_dpsgd
from expunge.accounting.precision import softmax_constants
from expunge.baselines.descent import SoftmaxRegression, descend, forget
from expunge.errors import InputError, UnlearningError
from expunge.recipes import NoisyDescent

torch.set_num_threads(1)
N = 40
RECIPE = GroupDPSGD(clip=0.5, noise_multiplier=2.0, sampling_rate=0.2, steps=12, group_size=2)


def make_data(count=N):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, 6, generator=g), torch.randint(0, 3, (count,), generator=g)
    return Batches(x, y, batch_size=8, ids=[f"s{i}" for i in range(count)])


def private(model=None, data=None, recipe=RECIPE, **options):
    given = {"learning_rate": 0.1, "noise": SeededNoise(0)} | options
    return train_dpsgd(make_mlp() if model is None else model, data or make_data(), recipe, **given)


# --- DP-SGD: randomness tied to a place


class Flipping(nn.Module):
    """Draws from a generator that vmap does not see."""

    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = make_mlp(), draw

    def forward(self, x):
        return self.inner(x) * (1 + self.draw())


@pytest.mark.parametrize("draw", [lambda: np.random.rand(), lambda: random.random()])  # noqa: NPY002
def test_randomness_in_the_model_is_refused(draw):
    with pytest.raises(UnlearningError, match="draws random numbers"):
        private(Flipping(draw))


def test_dropout_is_refused_unless_it_is_off():
    """Masks by place: means 11.6 σ apart where 0.5 was certified."""
    with pytest.raises(UnlearningError, match="draws random numbers"):
        private(make_mlp(dropout=0.5))
    with pytest.raises(UnlearningError):
        private(nn.Sequential(nn.Linear(6, 3), nn.RReLU()))
    private(make_mlp(dropout=0.5).eval())


def test_augmentation_is_refused():
    with pytest.raises(TypeError, match="augment"):
        private(augment=lambda x, g: x)
    with pytest.raises(UnlearningError, match="draws random numbers"):
        private(prepare=lambda x: x + torch.rand_like(x))


def test_a_generator_of_the_models_own_is_seen():
    own = np.random.default_rng(0)
    with pytest.raises(UnlearningError, match="depends on the rest of its batch"):
        private(Flipping(lambda: own.random()))


# --- DP-SGD: neighbours


def test_batch_statistics_are_refused():
    layers = nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)
    with pytest.raises(UnlearningError):
        private(nn.Sequential(*layers))
    layers = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    with pytest.raises(UnlearningError):
        private(nn.Sequential(*layers), public=["1.*"])


def test_a_prepare_that_mixes_examples_is_refused():
    with pytest.raises(UnlearningError, match="depends on the rest of its batch"):
        private(prepare=lambda x: x - x.mean(0) + x.mean())


class Counting(nn.Module):
    """An example's gradient would depend on how many were seen before it."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = make_mlp(), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) / self.calls


def test_a_model_that_counts_is_refused():
    with pytest.raises(UnlearningError, match="what was computed before it"):
        private(Counting())


def test_the_choice_of_a_way_does_not_read_the_data():
    """Made-up examples: data that are all alike, or not finite, change no code path."""
    plain = private().record.noise["physical_batch"]
    data = make_data()
    for value in (0.0, torch.nan, 1e30):
        odd = Batches(torch.full_like(data.inputs, value), data.targets, batch_size=8)
        assert private(data=odd).record.noise["physical_batch"] == plain


def test_one_example_moves_nothing_but_its_own_part():
    """At one step without noise: with and without the example, the rest adds up to the same."""
    recipe = replace(RECIPE, sampling_rate=1.0, steps=1)
    data, old = make_data(), flatten(make_mlp())
    moved = []
    for count in (N, N - 1):
        less = Batches(data.inputs[:count], data.targets[:count], batch_size=8)
        run = private(data=less, recipe=recipe, divisor=8.0, learning_rate=1.0)
        moved.append((old - flatten(run.model)).double() * 8.0)
    rounding = 8.0 * 4 * float(old.abs().max()) * 2.0**-24 * len(old) ** 0.5
    assert float((moved[0] - moved[1]).norm()) <= recipe.clip + rounding


def test_sizes_of_samples_are_nowhere():
    records = [private(noise=SystemNoise()).record for _ in range(4)]
    assert len({record.gradient_evaluations for record in records}) == 1


def test_more_samples_than_the_group_are_refused_however_few_people():
    data = make_data()
    data.ids = ["one"] * 3 + [f"s{i}" for i in range(N - 3)]
    with pytest.raises(InputError, match="number of forgotten examples is 3"):
        private(data=data, forget_ids=["one"])
    run = private(forget_ids=["s1"])
    assert run.record.checked
    assert run.forgotten == {"s1"}


# --- retraining


def make_retrained(model, **options):
    given = {"epochs": 1, "learning_rate": 0.1, "forget_ids": ["f"]} | options
    return retrain(model, make_data(), **given)


class Extra(nn.Linear):
    def get_extra_state(self):
        return self.weight.detach().clone()

    def set_extra_state(self, state):
        pass


class Saving(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "old"] = torch.ones(3)


def add_hook(model):
    model.register_state_dict_post_hook(lambda m, state, *_: state.update(old=torch.ones(3)))
    return model


def add_attribute(model):
    model.old = torch.ones(3)
    return model


@pytest.mark.parametrize(
    "model", [Extra(6, 3), Saving(6, 3), add_hook(nn.Linear(6, 3)), add_attribute(nn.Linear(6, 3))]
)
def test_retraining_releases_no_state_beside_the_tensors(model):
    with pytest.raises(UnlearningError):
        make_retrained(model)


def test_teachers_averages_and_copies_need_to_be_public():
    for extra in (torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.int64)):
        model = make_mlp()
        model.register_buffer("copy_of_weights", extra)
        with pytest.raises(UnlearningError, match="copy_of_weights"):
            make_retrained(model)
    student = nn.Sequential(make_mlp(), nn.Linear(3, 3).requires_grad_(False))
    with pytest.raises(UnlearningError, match=r"1\.weight"):
        make_retrained(student)
    with pytest.raises(UnlearningError, match=r"1\.weight"):
        make_retrained(student, public={"1.weight": torch.zeros(3, 3), "1.bias": torch.zeros(3)})
    with pytest.raises(InputError, match="is the old model"):
        make_retrained(student, public=student.state_dict())
    base = student[1].state_dict(prefix="1.")
    assert make_retrained(student, public=base).record.public.compared


def test_retraining_on_forgotten_data_is_refused_and_unchecked_says_so():
    with pytest.raises(InputError, match="holds 's3', which is forgotten"):
        make_retrained(make_mlp(), forget_ids=["s3"])
    run = make_retrained(make_mlp())
    assert run.record.checked
    assert run.record.finetune.checked
    assert run.forgotten == {"f"}
    run = make_retrained(make_mlp(), forget_ids=None)
    assert not run.record.checked
    assert not certify(run.record, delta=1e-5).releasable


def test_a_retrained_model_that_left_the_numbers_is_no_release():
    with pytest.raises(UnlearningError, match="diverged at batch"):
        make_retrained(make_mlp(), learning_rate=1e30, epochs=3)


# --- the loss and the optimizer


def remember(parameters):
    optimizer = torch.optim.SGD(parameters, 1.0, momentum=0.9)
    for p in parameters:
        optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 100.0)
    return optimizer


@pytest.mark.parametrize("go", [lambda **o: make_retrained(make_mlp(), **o), private])
def test_a_loss_or_an_optimizer_that_remembers_is_refused(go):
    with pytest.raises(InputError, match="the loss holds a tensor"):
        go(loss_fn=nn.CrossEntropyLoss(weight=torch.ones(3)))
    with pytest.raises(InputError, match="an earlier training"):
        go(optimizer=remember)
    go(optimizer=lambda parameters: torch.optim.Adagrad(parameters))


# --- descent


def test_descent_draws_nothing_and_writes_into_nothing():
    recipe = NoisyDescent(
        learning_rate=0.1, noise_std=0.1, train_steps=3, steps=1, examples=N, group_size=1,
        strong_convexity=0.1, smoothness=10.0, gradient_bound=100.0, convex=False,
    )  # fmt: skip
    with pytest.raises(UnlearningError, match="draws random numbers"):
        descend(make_mlp(dropout=0.5), make_data(), recipe)

    class Writing(nn.Linear):
        def forward(self, x):
            output = super().forward(x.clone())
            x.zero_()
            return output

    data = make_data()
    trained = descend(Writing(6, 3), data, recipe)
    assert torch.equal(data.inputs, make_data().inputs)
    with torch.no_grad():
        trained.model.register_buffer("old", torch.ones(3))
    with pytest.raises(UnlearningError, match="old"):
        forget(trained, data)


SOFTMAX = NoisyDescent(
    learning_rate=0.5, noise_std=0.05, train_steps=3, steps=1, examples=N, group_size=1,
    strong_convexity=0.01, **softmax_constants(1.0),
)  # fmt: skip


def go_down(model=None, **options):
    trained = descend(
        SoftmaxRegression(6, 3, feature_clip=1.0) if model is None else model,
        make_data(), SOFTMAX, noise=SeededNoise(0), **options,
    )  # fmt: skip
    return trained, forget(trained, make_data(), noise=SeededNoise(0)).model


@pytest.mark.parametrize("statistic", [torch.mean, torch.amax])
def test_prepare_sees_one_example_at_a_time(statistic):
    """Standardised over the batch, one outlier moved all the others: d' = 6.9 for mu = 2.07."""
    counts = []

    def prepare(x):
        counts.append(len(x))
        return x - 0.5 * statistic(x, 0)

    _, mixed = go_down(prepare=prepare)
    _, alone = go_down(prepare=lambda x: 0.5 * x)
    assert set(counts) == {1}
    assert torch.equal(mixed.weight, alone.weight)


def test_a_prepare_that_keeps_or_draws_something_is_refused():
    seen = []

    def keep(x):
        seen.append(x)
        return x - torch.cat(seen).mean(0)

    with pytest.raises(UnlearningError, match="treat each example alone and keep nothing"):
        go_down(prepare=keep)
    with pytest.raises(UnlearningError, match="draws random numbers"):
        go_down(prepare=lambda x: x + torch.rand_like(x))


def test_the_clip_is_the_problems_whatever_the_model_says_afterwards():
    trained, before = go_down()
    trained.model.problem = replace(trained.problem, feature_clip=30.0)
    trained.model.clip_features = lambda inputs: 30 * inputs
    after = forget(trained, make_data(), noise=SeededNoise(0)).model
    assert torch.equal(before.weight, after.weight)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "parameter"])
def test_hooks_are_refused(kind):
    def add(model):
        if kind == "parameter":
            model.weight.register_hook(lambda g: 3 * g)
        else:
            getattr(model, f"register_{kind}_hook")(lambda *given: None)
        return model

    with pytest.raises(UnlearningError, match="hooks; descent takes none"):
        go_down(add(SoftmaxRegression(6, 3, feature_clip=1.0)))
    trained, _ = go_down()
    add(trained.model)
    with pytest.raises(UnlearningError, match="hooks; descent takes none"):
        forget(trained, make_data(), noise=SeededNoise(0))


def test_the_loss_of_a_request_is_that_of_the_training():
    trained, _ = go_down()
    with pytest.raises(TypeError, match="loss_fn"):
        forget(trained, make_data(), loss_fn=nn.functional.mse_loss)
    with pytest.raises(InputError, match="the loss holds a tensor"):
        go_down(loss_fn=nn.CrossEntropyLoss(weight=torch.ones(3)))
