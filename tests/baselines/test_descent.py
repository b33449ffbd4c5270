"""Full-batch descent: its constants, its distance and its certificates, where they hold."""

import math
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, mse_loss

from descents import KINDS, C, D, K, N, bound_distance, drop, go, make_data, make_recipe, model
from engine import equal, flatten
from expunge import SeededNoise, certify
from expunge.accounting.guarantee import mu
from expunge.accounting.precision import (
    bound_descent_rounding,
    bound_gradient_error,
    choose_descent_precision,
    softmax_constants,
)
from expunge.baselines.descent import (
    SoftmaxRegression,
    descend,
    forget,
    softmax_gradient,
)
from expunge.errors import InputError, UnlearningError
from expunge.recipes import STATED, Execution, NoisyDescent, Problem, RewindToDelete
from expunge.training.batches import Batches

# --- the constants


@given(st.integers(0, 10**6), st.floats(0.1, 3.0))
@settings(max_examples=25, deadline=None)
def test_constants_hold_for_every_example(seed, B):
    g = torch.Generator().manual_seed(seed)
    net = model(B)
    net.weight.data.normal_(0, 5, generator=g)
    data = make_data(seed, count=6)
    constants = softmax_constants(B)
    for x, y in zip(data.inputs, data.targets, strict=True):
        one = softmax_gradient(net.weight, net.clip_features(x[None]), y[None])
        assert one.norm() <= constants["gradient_bound"]
        a = net.clip_features(x[None])[0]
        p = torch.softmax(net.weight @ a, 0).detach()
        hessian = torch.kron(torch.diag(p) - torch.outer(p, p), torch.outer(a, a))
        eigenvalues = torch.linalg.eigvalsh(hessian)
        assert eigenvalues.max() <= constants["smoothness"] * (1 + 1e-12)
        assert eigenvalues.min() >= -1e-12


def test_constants_are_attained_so_that_one_per_cent_less_is_false():
    net = model(2.0)
    a = net.clip_features(torch.full((1, D), 9.0, dtype=torch.float64))
    constants = softmax_constants(2.0)
    net.weight.data[0] = 100 * a[0]
    wrong = softmax_gradient(net.weight, a, torch.tensor([1]))
    assert wrong.norm() > 0.99 * constants["gradient_bound"]
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    hessian = torch.kron(torch.diag(p) - torch.outer(p, p), torch.outer(a[0], a[0]))
    assert torch.linalg.eigvalsh(hessian).max() > 0.99 * constants["smoothness"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_no_feature_vector_is_longer_than_its_clip_in_exact_arithmetic(dtype):
    x = (torch.rand(50, D, generator=torch.Generator().manual_seed(0)) * 200).to(dtype)
    for B in (0.3, 1.0, 150.0):
        for row in model(B).clip_features(x).tolist():
            assert sum(Fraction(v) ** 2 for v in row) <= Fraction(B) ** 2
            assert row[-1] > 0  # the bias is clipped with the rest


def test_gradient_is_that_of_torch():
    net, data = model(), make_data(1)
    net.weight.data.normal_(0, 2, generator=torch.Generator().manual_seed(2))
    cross_entropy(net(data.inputs), data.targets).backward()
    found = softmax_gradient(net.weight, net.clip_features(data.inputs), data.targets)
    assert torch.allclose(found, net.weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reach", [1.0, 1e3, 1e6])
def test_gradient_error_is_within_its_bound(reach):
    """Against 60 digits, with weights as large as the grid holds."""
    net, data = model(), make_data(3, count=5)
    net.weight.data.normal_(0, 1, generator=torch.Generator().manual_seed(4))
    net.weight.data.mul_(reach / net.weight.data.abs().max())
    a = net.clip_features(data.inputs)
    found = softmax_gradient(net.weight, a, data.targets)
    mp = mpmath.MPContext()
    mp.dps = 60
    W = [[mp.mpf(v) for v in row] for row in net.weight.tolist()]
    exact = [[mp.mpf(0)] * (D + 1) for _ in range(C)]
    for row, y in zip(a.tolist(), data.targets.tolist(), strict=True):
        z = [mp.fsum(w * mp.mpf(v) for w, v in zip(ws, row, strict=True)) for ws in W]
        e = [mp.exp(v - max(z)) for v in z]
        for c in range(C):
            r = e[c] / mp.fsum(e) - (c == y)
            exact[c] = [g + r * mp.mpf(v) / 5 for g, v in zip(exact[c], row, strict=True)]
    error = mp.sqrt(
        mp.fsum(
            (e - mp.mpf(f)) ** 2
            for exacts, founds in zip(exact, found.tolist(), strict=True)
            for e, f in zip(exacts, founds, strict=True)
        )
    )
    problem = Problem("softmax-regression", 1.0, D + 1, C)
    assert error <= bound_gradient_error(problem, 5, reach / 2.0**44)


def test_gradient_error_refuses_where_it_is_no_small_error():
    problem = Problem("softmax-regression", 1.0, D + 1, C)
    assert bound_gradient_error(problem, 5, 1.0) == math.inf
    assert bound_gradient_error(STATED, 5, 1.0) == 0


# --- the distance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_measured_distance_never_exceeds_the_bound(kind, seed):
    """The run with a request, and the certifying one that never sees the forget set, coupled."""
    rng = np.random.default_rng(seed)
    recipe = make_recipe(
        kind,
        learning_rate=float(rng.uniform(0.1, 3.0)),
        strong_convexity=float(rng.choice([0.0, 0.01, 0.3])),
        train_steps=int(rng.integers(12, 60)),
        noise_std=float(rng.choice([1e-3, 0.3])),
    )
    data = make_data(seed, scale=float(rng.choice([0.1, 5.0])))
    retained = drop(data, K)
    run = go(recipe, data, retained, seed)
    other = replace(recipe, examples=N - K, group_size=1)
    reference = go(other, retained, retained, seed)
    distance = float((flatten(run.model) - flatten(reference.model)).norm())
    limit = bound_distance(recipe, run.record.execution.rounding)
    assert distance <= limit * (1 + 1e-9)


def test_the_bound_is_near_what_hostile_examples_reach():
    """One class with one feature forgotten, everything else at zero: a third of the bound."""
    x = torch.zeros(N, D, dtype=torch.float64)
    y = torch.zeros(N, dtype=torch.int64)
    x[:K], y[:K] = 100.0, 1
    data = Batches(x, y, batch_size=N)
    recipe = make_recipe(RewindToDelete, train_steps=2, steps=1, noise_std=1e-3, learning_rate=0.1)
    retained = Batches(x[K:], y[K:], batch_size=N)
    run = go(recipe, data, retained)
    reference = go(replace(recipe, examples=N - K, group_size=1), retained, retained)
    distance = float((flatten(run.model) - flatten(reference.model)).norm())
    assert distance > 0.3 * bound_distance(recipe, run.record.execution.rounding)


def test_without_noise_it_is_gradient_descent():
    data = make_data(5)
    recipe = make_recipe(NoisyDescent, noise_std=0.0)
    trained = descend(model(), data, recipe)
    weight = torch.zeros(C, D + 1, dtype=torch.float64)
    features = model().clip_features(data.inputs)
    for _ in range(recipe.train_steps):
        g = softmax_gradient(weight, features, data.targets)
        weight = weight - 0.7 * (g + 0.1 * weight)
    assert torch.allclose(trained.model.weight, weight, rtol=1e-12, atol=1e-15)
    assert trained.noise["source"] == "none"
    with pytest.raises(UnlearningError, match="cannot be certified"):
        certify(forget(trained, drop(data, K)).record, delta=1e-5)


def test_rewinding_everything_is_retraining():
    data = make_data(6)
    recipe = make_recipe(RewindToDelete, train_steps=10, steps=10)
    run = go(recipe, data, drop(data, K))
    assert certify(run.record, delta=1e-5).epsilon == 0


# --- precision


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sigma", [1e-6, 1e-2, 10.0])
def test_finite_precision_costs_little(kind, sigma):
    recipe = make_recipe(kind, noise_std=sigma)
    problem = Problem("softmax-regression", 1.0, D + 1, C)
    precision = choose_descent_precision(recipe, problem, 18)
    assert math.frexp(precision.grid)[0] == 0.5
    assert precision.rounding >= 2 * precision.grid * math.sqrt(18)
    real, ideal = mu(recipe, execution=Execution(rounding=precision.rounding)), mu(recipe)
    assert ideal < real < ideal * 1.0003


def test_expansion_is_paid_for_in_rounding():
    gentle, steep = (
        make_recipe(NoisyDescent, convex=False, smoothness=smoothness) for smoothness in (0.5, 50.0)
    )
    small, large = (bound_descent_rounding(r, STATED, 2.0**-30, 18) for r in (gentle, steep))
    assert large > 10 * small


# --- use


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_forgets_the_same(kind, tmp_path):
    data, recipe = make_data(9), make_recipe(kind)
    trained = descend(model(), data, recipe, noise=SeededNoise(3))
    torch.save(trained, tmp_path / "descent.pt")
    loaded = torch.load(tmp_path / "descent.pt", weights_only=False)
    first, second = (forget(t, drop(data, K), noise=SeededNoise(3)) for t in (trained, loaded))
    assert equal(first.model, second.model)
    assert first.record.trace == second.record.trace


def test_two_phases_never_share_a_draw():
    """The seed's stream goes on where training stopped: 40 norms, all different."""
    data = make_data(9)
    record = go(make_recipe(NoisyDescent), data, drop(data, K)).record
    assert len(set(record.trace.noise_norm)) == 40
    assert not certify(record, delta=1e-5).releasable


def test_start_is_untouched_and_identifiers_are_committed():
    data, start = make_data(9), model()
    run = go(make_recipe(NoisyDescent), data, drop(data, K), start=start)
    assert not start.weight.any()
    assert run.record.retain.count == N - K
    assert run.record.gradient_evaluations == 30 * N + 10 * (N - K)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda r, d: descend(model(), drop(d, 1), r), "examples is 40; it must be 39"),
        (lambda r, d: descend(model(), d, "x"), "NoisyDescent or RewindToDelete"),
        (lambda r, d: descend(model(features=4), d, r), "number of features is 5"),
        (lambda r, d: descend(model(2.0), d, r), "features clipped to 2.0 give 2.8284"),
        (lambda r, d: descend(model().float(), d, r), "weight.dtype is torch.float32"),
        (lambda r, d: descend(model(), d, r, loss_fn=mse_loss), "torch's cross_entropy"),
        (lambda r, d: go(r, d, drop(d, K + 1)), "from 36 to 40"),
        (lambda r, d: forget(descend(model(), d, r), drop(d, K), noise=SeededNoise(0)), "noise is"),
        (
            lambda r, d: forget(descend(model(), d, r), drop(d, K), forget_ids=["zz"]),
            "forget_ids holds 'zz', which was not trained on",
        ),
        (
            lambda r, d: forget(descend(model(), d, r), drop(d, K), forget_ids=["s9"]),
            "retain_ids holds 's9', which is forgotten",
        ),
        (
            lambda r, d: descend(model(), replace_inputs(d, math.nan), r),
            "values that are not finite",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(act, sentence):
    with pytest.raises(InputError, match=sentence):
        act(make_recipe(NoisyDescent), make_data(9))


def replace_inputs(data, value):
    return Batches(torch.full_like(data.inputs, value), data.targets, batch_size=N)


@pytest.mark.parametrize(
    "act",
    [
        lambda: SoftmaxRegression(3, 1, feature_clip=1.0),
        lambda: SoftmaxRegression(3, 2, feature_clip=0.0),
        lambda: SoftmaxRegression(3, 2, feature_clip=math.inf),
        lambda: softmax_constants(-1.0),
        lambda: Problem("logistic"),
        lambda: Problem("stated", feature_clip=1.0),
        lambda: Problem("softmax-regression", 1.0, 3, True),
    ],
)
def test_bad_problems_are_refused(act):
    with pytest.raises(InputError):
        act()
