"""DP-SGD: what is summed, what is added and what is sampled."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import cross_entropy

from engine import equal, flatten, make_mlp, train_by_hand
from expunge import GroupDPSGD, SeededNoise, SystemNoise, certify
from expunge.baselines import dpsgd
from expunge.baselines.dpsgd import (
    NoisySum,
    PoissonSampler,
    bound_norms,
    choose_grid,
    train_dpsgd,
)
from expunge.errors import InputError, UnlearningError
from expunge.noisy.model import copy_model
from expunge.training.batches import Batches
from expunge.training.randomness import capture_random

torch.set_num_threads(1)
N = 40
RECIPE = GroupDPSGD(clip=0.5, noise_multiplier=2.0, sampling_rate=0.2, steps=12, group_size=2)


def make_data(seed=0, count=N):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    y = torch.randint(0, 3, (count,), generator=g)
    return Batches(x, y, batch_size=count, ids=[f"s{i}" for i in range(count)])


def go(recipe=RECIPE, model=None, data=None, **options):
    given = {"learning_rate": 0.1, "noise": SeededNoise(0)} | options
    return train_dpsgd(make_mlp() if model is None else model, data or make_data(), recipe, **given)


def make_sum(recipe, data=None, model=None):
    certified = copy_model(make_mlp() if model is None else model)
    data = make_data() if data is None else data
    return NoisySum(certified, recipe, cross_entropy, SeededNoise(0), data, None, 16), certified


# --- limits


def test_without_clip_noise_and_sampling_it_is_full_batch_sgd():
    data = make_data()
    free = GroupDPSGD(clip=1e6, noise_multiplier=0.0, sampling_rate=1.0, steps=9, group_size=1)
    run = go(free, data=data, weight_decay=0.2)
    plain = train_by_hand(make_mlp(), [(data.inputs, data.targets)], 9, 0.1, 0.2)
    assert torch.allclose(flatten(run.model), flatten(plain), rtol=1e-5, atol=1e-7)
    assert run.record.grid == 0
    assert run.record.noise["source"] == "none"
    with pytest.raises(UnlearningError, match="cannot be certified"):
        certify(run.record, delta=1e-5)


def test_sum_is_that_of_gradients_taken_one_by_one():
    data = make_data()
    recipe = replace(RECIPE, noise_multiplier=0.0)
    mechanism, certified = make_sum(recipe, data)
    mechanism.add_up(np.arange(25))
    expected = torch.zeros(certified.size, dtype=torch.float64)
    model = make_mlp()
    for x, y in zip(data.inputs[:25], data.targets[:25], strict=True):
        model.zero_grad()
        cross_entropy(model(x[None]), y[None]).backward()
        g = torch.cat([p.grad.reshape(-1).double() for p in model.parameters()])
        expected += g * min(1.0, recipe.clip / float(g.norm()))
    assert torch.allclose(mechanism._sum, expected, rtol=1e-4, atol=1e-6)
    assert expected.norm() > 1


@pytest.mark.parametrize("physical_batch", [1, 7, 1000])
def test_chunks_change_nothing_but_memory(physical_batch):
    found = flatten(go(physical_batch=physical_batch).model)
    assert torch.allclose(found, flatten(go().model), rtol=1e-5, atol=1e-6)


# --- the sensitivity, in exact arithmetic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_one_example_moves_the_sum_by_at_most_the_clip(dtype, scale):
    """Whole cells: the difference of two sums, in integers, against (C/grid)²."""
    data, model = make_data(), make_mlp().to(dtype)
    for p in model.parameters():
        p.data.mul_(scale)
    data = Batches(data.inputs.to(dtype), data.targets, batch_size=N)
    mechanism, _ = make_sum(RECIPE, data, model)
    limit = (Fraction(RECIPE.clip) / Fraction(mechanism.grid)) ** 2
    largest = 0
    for i in range(8):
        cells = []
        for stop in (i + 1, i):
            mechanism.add_up(np.arange(stop))
            cells.append([int(v) for v in mechanism._sum.tolist()])
            assert mechanism._sum.frac().abs().max() == 0
        moved = sum((a - b) ** 2 for a, b in zip(*cells, strict=True))
        largest = max(largest, moved)
        assert moved <= limit
    if scale >= 1:
        assert largest > limit * 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1.0, 1e15])
def test_norms_are_never_below_the_truth(dtype, scale):
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(4, n, generator=g, dtype=dtype) * scale for n in (1, 37, 9000)]
    for i, bound in enumerate(bound_norms(rows).tolist()):
        exact = sum(Fraction(v) ** 2 for part in rows for v in part[i].tolist())
        assert Fraction(bound) ** 2 >= exact
        assert bound <= math.sqrt(exact) * (1 + 3e-4) + 1e-16


def test_an_example_that_is_not_finite_counts_as_zero():
    data = make_data()
    data.inputs[3] = math.nan
    run = go(replace(RECIPE, sampling_rate=1.0), data=data)
    assert torch.isfinite(flatten(run.model)).all()
    assert all(run.record.trace.nonfinite)


def make_images(count=N):
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 3))
    return model, Batches(
        torch.randn(count, 3, 8, 8, generator=g), torch.arange(count) % 3, batch_size=count
    )


def check_additions(mechanism):
    """Bit for bit, in whole cells: the rest of the batch moves up, its gradients stay."""

    def add(places):
        mechanism.add_up(np.array(places))
        return mechanism._sum.clone()

    everything = list(range(37))
    whole = add(everything)
    for gone in (0, 3, 15, 36):
        rest = add([i for i in everything if i != gone])
        assert torch.equal(whole - rest, add([gone]))


@pytest.mark.parametrize("kind", ["dense", "convolution"])
def test_dropping_an_example_moves_nothing_but_its_own_gradient(kind):
    model, data = (make_mlp(), make_data()) if kind == "dense" else make_images()
    check_additions(make_sum(RECIPE, data, model)[0])


def place_kernel(off, ways=(False, True)):
    """A simulated kernel whose result is off by so many units in the last place times its place."""
    inner = dpsgd.differentiate

    def make(certified, loss_fn, *, apart):
        gradients = inner(certified, loss_fn, apart=apart)

        def compute(x, y):
            for g in gradients(x, y):
                place = torch.arange(len(g)).view(-1, *[1] * (g.ndim - 1))
                yield g * (1 + off * place * 2.0**-23) if apart in ways else g

        return compute

    return make


def test_kernels_that_round_by_place_are_worked_around(monkeypatch):
    """No result may depend on the place, and none of these plain networks is refused."""
    monkeypatch.setattr(dpsgd, "differentiate", place_kernel(3, ways=(False,)))
    mechanism, _ = make_sum(RECIPE)
    assert mechanism.physical_batch == 16
    check_additions(mechanism)
    monkeypatch.undo()
    monkeypatch.setattr(dpsgd, "differentiate", place_kernel(3))
    mechanism, _ = make_sum(RECIPE)
    assert mechanism.physical_batch == 1
    check_additions(mechanism)
    assert go(physical_batch=16).record.noise["physical_batch"] == 1


def test_kernels_that_mix_more_than_rounding_are_refused(monkeypatch):
    inner = dpsgd.differentiate

    def make(certified, loss_fn, *, apart):
        gradients = inner(certified, loss_fn, apart=apart)
        return lambda x, y: (g + 0.1 * x.sum() for g in gradients(x, y))

    monkeypatch.setattr(dpsgd, "differentiate", make)
    with pytest.raises(UnlearningError, match="depends on the rest of its batch"):
        go()


def test_what_is_kept_between_calls_is_refused(monkeypatch):
    inner, calls = dpsgd.differentiate, iter(range(10**6))

    def make(certified, loss_fn, *, apart):
        gradients = inner(certified, loss_fn, apart=apart)
        return lambda x, y: (g * (1 + 1e-6 * next(calls)) for g in gradients(x, y))

    monkeypatch.setattr(dpsgd, "differentiate", make)
    with pytest.raises(UnlearningError, match="what was computed before it"):
        go(physical_batch=1)


def test_sums_that_could_round_are_refused():
    with pytest.raises(InputError, match="noise_multiplier is 1e-08"):
        choose_grid(replace(RECIPE, noise_multiplier=1e-8), 10**6)


# --- the noise


def test_realised_noise_matches_its_sigma_and_no_other():
    record = go(replace(RECIPE, steps=40)).record
    sigma = RECIPE.clip * RECIPE.noise_multiplier
    assert set(record.trace.noise_std) == {sigma}
    law = stats.chi2(record.parameters * 40)

    def p_value(scale):
        total = sum((n / (scale * sigma)) ** 2 for n in record.trace.noise_norm)
        return 2 * min(law.cdf(total), law.sf(total))

    assert p_value(1.0) > 1e-3
    assert p_value(1.05) < 1e-3
    assert p_value(1 / 1.05) < 1e-3


def test_noise_reaches_the_weights_divided_once():
    model = make_mlp()
    run = go(
        replace(RECIPE, steps=1), model, learning_rate=1.0, divisor=4.0,
        loss_fn=lambda output, target: output.sum() * 0.0,
    )  # fmt: skip
    moved = (flatten(model) - flatten(run.model)).numpy() * 4.0
    assert stats.kstest(moved, "norm", args=(0, 1.0)).pvalue > 1e-3
    assert stats.chi2(len(moved)).sf(np.sum((moved * 1.3) ** 2)) < 1e-3
    assert stats.chi2(len(moved)).cdf(np.sum((moved / 1.3) ** 2)) < 1e-3


def test_empty_batches_add_noise_too():
    run = go(replace(RECIPE, sampling_rate=1e-9))
    assert run.record.trace.gradient_norm == (0.0,) * 12
    assert min(run.record.trace.noise_norm) > 0
    assert not equal(run.model, make_mlp())


def test_seeds_repeat_and_systems_do_not():
    assert equal(go().model, go().model)
    assert not equal(go().model, go(noise=SeededNoise(1)).model)
    assert not equal(go(noise=SystemNoise()).model, go(noise=SystemNoise()).model)
    norms = go(noise=SystemNoise()).record.trace.noise_norm
    assert len(set(norms)) == len(norms)


# --- the sampling


def test_batches_are_poisson_samples_of_this_rate():
    n, q, steps = 500, 0.07, 400
    sampler = PoissonSampler(bytes(range(32)), q)
    chosen = np.zeros((steps, n), bool)
    for t in range(steps):
        chosen[t, sampler.draw(t, n)] = True
    total = int(chosen.sum())
    assert stats.binomtest(total, n * steps, q).pvalue > 1e-3
    assert stats.binomtest(total, n * steps, q * 1.03).pvalue < 1e-3
    sizes = chosen.sum(1)
    spread = sizes.var() / (n * q * (1 - q)) * (steps - 1)
    law = stats.chi2(steps - 1)
    assert 1e-3 < law.cdf(spread) < 1 - 1e-3  # batches of one size would have a spread of 0
    per_example = chosen.sum(0)
    assert stats.chi2(n - 1).cdf(per_example.var() / (steps * q * (1 - q)) * (n - 1)) > 1e-3
    both = (chosen[1:] & chosen[:-1]).sum()
    assert stats.binomtest(int(both), n * (steps - 1), q * q).pvalue > 1e-3


def test_extreme_rates_are_exact():
    key = bytes(32)
    assert len(PoissonSampler(key, 1.0).draw(0, 50)) == 50
    assert len(PoissonSampler(key, 1e-18).draw(0, 50_000)) == 0
    assert PoissonSampler(key, 0.1).draw(3, 99).tolist() == (
        PoissonSampler(key, 0.1).draw(3, 99).tolist()
    )
    assert PoissonSampler(key, 0.1)._threshold == int(Fraction(0.1) * 2**64)


def test_realised_sizes_are_not_recorded():
    counts = {go(noise=SeededNoise(s)).record.gradient_evaluations for s in range(4)}
    assert counts == {round(RECIPE.sampling_rate * N * RECIPE.steps)}


def test_a_private_n_does_not_show():
    """With a divisor of its own, one example more or less changes nothing where none is drawn."""
    quiet = replace(RECIPE, sampling_rate=1e-9)
    first = go(quiet, data=make_data(count=N), divisor=8.0)
    second = go(quiet, data=make_data(count=N + 1), divisor=8.0)
    assert equal(first.model, second.model)
    assert first.record.noise["divisor"] == 8.0
    assert go().record.noise["divisor"] == RECIPE.sampling_rate * N


# --- the module


def test_model_and_random_state_are_untouched():
    model = make_mlp(dropout=0.5).eval()
    state = capture_random()
    run = go(model=model, schedule="one-cycle", momentum=0.9)
    after = capture_random()
    assert all(torch.equal(state[name], after[name]) for name in state)
    assert equal(model, make_mlp(dropout=0.5))
    assert all(p.grad is None for p in run.model.parameters())
    rates = run.record.trace.learning_rate
    assert max(rates) > 2 * rates[0]


def test_frozen_parameters_stay_and_other_optimizers_serve():
    model = make_mlp()
    model[0].requires_grad_(False)
    with pytest.raises(UnlearningError, match=r"0\.weight"):
        go(model=model)
    run = go(
        model=model,
        optimizer=lambda ps: torch.optim.Adam(ps, lr=0.01),
        public=make_mlp().state_dict(),
    )
    assert torch.equal(run.model[0].weight, model[0].weight)
    assert not torch.equal(run.model[3].weight, model[3].weight)
    assert run.record.public.names == ("0.weight", "0.bias")
    assert run.record.public.compared
    assert run.record.parameters == 51


def test_images_are_prepared():
    x = torch.randint(0, 256, (N, 1, 4, 4), generator=torch.Generator().manual_seed(0))
    data = Batches(x.to(torch.uint8), torch.arange(N) % 3, batch_size=N)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    seen = []

    def prepare(images):
        seen.append((images.dtype, len(images)))
        return images.float() / 255

    train_dpsgd(model, data, RECIPE, learning_rate=0.1, prepare=prepare)
    assert len(set(seen)) == 1


def test_it_learns():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (600,), generator=g)
    x = nn.functional.one_hot(y, 6) * 4.0 + torch.randn(600, 6, generator=g)
    data = Batches(x, y, batch_size=600)
    recipe = GroupDPSGD(clip=1.0, noise_multiplier=1.0, sampling_rate=0.1, steps=120, group_size=1)
    model = go(recipe, data=data, learning_rate=0.5).model
    assert float((model(x).argmax(1) == y).float().mean()) > 0.9


# --- refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"recipe": "x"}, "recipe is 'x'; it must be GroupDPSGD"),
        ({"recipe": replace(RECIPE, group_size=N)}, "group_size is 40"),
        ({"divisor": 0.0}, "divisor is 0.0"),
        ({"physical_batch": 0}, "physical_batch is 0"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"schedule": "cosine"}, "schedule is 'cosine'"),
        ({"forget_ids": ["s1", "s2", "s3"]}, "number of forgotten examples is 3"),
        ({"forget_ids": ["zz"]}, "forget_ids holds 'zz'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(options, sentence):
    with pytest.raises(InputError, match=sentence):
        go(**options)


def test_modules_that_vmap_cannot_take_are_refused_in_a_sentence():
    class Choosy(nn.Linear):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)

    with pytest.raises(UnlearningError, match=r"cannot be taken by torch\.func\.vmap"):
        go(model=Choosy(6, 3))


def test_modules_that_mix_examples_are_refused():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(UnlearningError, match="running_mean"):
        go(model=model)


@pytest.mark.parametrize("rate", [[0.1], "0.1", None, -1.0, math.inf])
def test_a_learning_rate_is_one_number(rate):
    with pytest.raises(InputError, match=r"learning_rate is .*; it must be a finite number >= 0"):
        go(learning_rate=rate)
