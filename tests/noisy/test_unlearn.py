"""``unlearn``: limits, the law of what is released, centres, controls, modules, post-processing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from expunge import (
    Data,
    ExpungeError,
    InputError,
    SeededNoise,
    SystemNoise,
    guarantee,
    unlearn,
    verify,
)
from expunge.accounting.precision import list_levels
from expunge.certificates.hashes import hash_tensors
from expunge.certificates.record import Record
from expunge.networks.building import call_build
from expunge.noisy.processes import Processes
from expunge.noisy.steps import Steps
from expunge.noisy.vector import GridVector
from expunge.recipes import GradientClipping, ModelClipping, OutputPerturbation
from expunge.training.batches import Batches
from tests.noisy.networks import (
    GRADIENT,
    MODEL,
    NOISY,
    OUTPUT,
    equal,
    flatten,
    make_data,
    make_mlp,
    make_old,
    make_rows,
    run,
)

pytestmark = pytest.mark.usefixtures("one_thread")
each_method = pytest.mark.parametrize("recipe", NOISY.values(), ids=NOISY.keys())
ZERO = {"centre": "zero"}


def still(output, target):
    return output.sum() * 0.0


# The same law, and no other
@each_method
def test_a_seed_repeats_itself_and_the_system_never_does(recipe):
    first, again, other = (run(recipe=recipe, noise=SeededNoise(s)) for s in (0, 0, 1))
    assert equal(first, again)
    assert first.record.trace == again.record.trace
    assert not equal(first, other)
    assert not equal(*(run(recipe=recipe, noise=SystemNoise()) for _ in range(2)))


def noise_p_value(record: Record, scale: float) -> float:
    """Two-sided, of Σ ‖ξ_t‖²/σ_t² ~ χ²(T d), if σ were ``scale`` times the recipe's."""
    trace, d = record.trace, record.parameters
    total = sum(
        (n / (scale * s)) ** 2 for n, s in zip(trace.noise_norm, trace.noise_std, strict=True)
    )
    law = stats.chi2(d * len(trace))
    return 2 * min(law.cdf(total), law.sf(total))


@each_method
def test_realised_noise_has_its_scale_and_no_other(recipe):
    record = run(recipe=recipe, noise=SeededNoise(5)).record
    assert noise_p_value(record, 1.0) > 1e-3
    if not isinstance(recipe, OutputPerturbation):
        assert noise_p_value(record, 1.2) < 1e-3
        assert noise_p_value(record, 1 / 1.2) < 1e-3


@each_method
def test_noise_in_the_weights_is_what_the_recipe_says(recipe):
    """No gradient, no pull, start at the centre: what is released is the sum of the draws."""
    if isinstance(recipe, GradientClipping):
        recipe = replace(recipe, weight_decay=0.0, model_clip=None)
    if isinstance(recipe, ModelClipping):
        recipe = replace(recipe, steps=1)
    sigma = math.sqrt(sum(level**2 for level in list_levels(recipe)))
    release = run(recipe=recipe, loss=still, start="centre", noise=SeededNoise(2), **ZERO)
    x = flatten(release).numpy() / sigma
    assert stats.kstest(x, "norm").pvalue > 1e-3
    assert stats.chi2(len(x)).sf(np.sum((1.3 * x) ** 2)) < 1e-2
    assert stats.chi2(len(x)).cdf(np.sum((x / 1.3) ** 2)) < 1e-2
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.3


def test_without_noise_to_speak_of_it_is_clipped_sgd_around_the_centre():
    """σ = 1e-7 leaves the equation itself, with a projected start, against float64 by hand."""
    recipe = replace(GRADIENT, noise_std=1e-7)
    (x, y), module = make_rows(), call_build(make_mlp, 0)
    parameters = list(module.parameters())
    fresh = [p.detach().clone() for p in parameters]
    vector = GridVector(parameters, fresh, 2.0**-40)
    batches = Batches((x[:24], y[:24]), batch_size=24, seed=0)
    steps = Steps(module, vector, recipe, batches, cross_entropy, SeededNoise(0), Processes())
    steps.start([p.detach() for p in make_old().parameters()])
    steps.run()
    centre = [p.detach().double() for p in call_build(make_mlp, 0).parameters()]
    old = [p.detach().double() for p in make_old().parameters()]
    length = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(old, centre, strict=True)))
    factor = min(1.0, 0.5 / length)
    weights = [(c + factor * (a - c)).requires_grad_() for a, c in zip(old, centre, strict=True)]
    for _ in range(7):
        w1, b1, w2, b2 = weights
        output = torch.relu(x[:24].double() @ w1.T + b1) @ w2.T + b2
        g = torch.autograd.grad(cross_entropy(output, y[:24]), weights)
        norm = math.sqrt(sum(float(part.square().sum()) for part in g))
        clip = min(1.0, 1.0 / norm)
        weights = [
            (w - 0.1 * (clip * part + 2.0 * (w - c))).detach().requires_grad_()
            for w, part, c in zip(weights, g, centre, strict=True)
        ]
    expected = torch.cat([w.detach().reshape(-1) for w in weights])
    found = torch.cat([p.detach().reshape(-1).double() for p in parameters])
    assert torch.allclose(found, expected, atol=5e-6)


@each_method
def test_the_certificate_is_that_of_the_recipe(recipe):
    release = run(recipe=recipe, noise=SystemNoise(), delta=1e-5)
    ideal = guarantee(recipe, delta=1e-5).epsilon
    assert ideal <= release.certificate.epsilon <= ideal * 1.001
    assert release.certificate.releasable, release.certificate.warnings
    assert Record.from_bytes(release.record.to_bytes()) == release.record
    assert release.certificate.weights.after == hash_tensors(release.tensors)
    assert not run(recipe=recipe).certificate.releasable  # seeded


# Limits
def test_huge_models_are_forgotten_up_to_the_clip():
    huge = make_old()
    for p in huge.parameters():
        p.detach().mul_(1e30)
    released = [flatten(run(old, **ZERO)) for old in (make_old(), huge)]
    assert torch.allclose(*released, atol=1e-4)


def test_one_step_one_row_one_weight():
    data = Data((torch.ones(2, 1), torch.ones(2, 1)), ids=["a", "gone"])
    recipe = replace(GRADIENT, steps=1)
    release = run(nn.Linear(1, 1, bias=False), lambda: nn.Linear(1, 1, bias=False), data,
                  recipe=recipe, loss=mse_loss)  # fmt: skip
    assert (release.record.parameters, len(release.record.trace)) == (1, 1)


def test_gradients_that_are_not_finite_count_as_zero_and_stay_private():
    x, y = make_rows()
    x[0] = math.nan
    release = run(data=make_data((x, y)), batch_size=24)
    trace = release.record.trace
    assert trace.nonfinite == (True,) * 7
    assert set(trace.clip_factor) == set(trace.gradient_norm) == {0.0}
    assert torch.isfinite(flatten(release)).all()
    assert b"nonfinite" not in release.certificate.to_bytes()


def test_unused_and_frozen_parameters():
    class Extra(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unused = nn.Linear(6, 3), nn.Linear(2, 2)
            self.public = nn.Linear(6, 6).requires_grad_(False)

        def forward(self, x):
            return self.body(self.public(x))

    old = Extra()
    release = run(old, Extra)
    assert release.record.parameters == 6 * 3 + 3 + 2 * 2 + 2
    assert float(release.model.unused.weight.detach().std()) > 0.05
    assert not torch.equal(release.model.public.weight, old.public.weight)
    assert release.certificate.weights.published.names == ("public.weight", "public.bias")
    assert torch.equal(release.model.public.weight, call_build(Extra, 0).public.weight)


def test_tied_weights_are_noised_once_and_stay_tied():
    def build():
        model = nn.Sequential(nn.Embedding(5, 4, sparse=False), nn.Flatten(), nn.Linear(8, 4),
                              nn.Linear(4, 5, bias=False))  # fmt: skip
        model[3].weight = model[0].weight
        return model

    data = Data((torch.randint(0, 5, (9, 2)), torch.randint(0, 5, (9,))), ids=[*"abcdefgh", "gone"])
    release = run(build(), build, data)
    assert release.model[3].weight is release.model[0].weight
    assert release.record.parameters == 20 + 36
    assert torch.equal(release.tensors["0.weight"], release.tensors["3.weight"])


def test_sparse_gradients_are_those_of_dense_ones():
    rows = torch.randint(0, 5, (9, 2)), torch.randint(0, 3, (9,))
    data = Data(rows, ids=[*"abcdefgh", "gone"])

    def build(sparse):
        return nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 3))

    old = build(False)
    one, two = (run(old, lambda s=s: build(s), data) for s in (True, False))
    assert equal(one, two)
    assert one.record.trace == two.record.trace


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_keep_their_dtype_and_the_same_noise(dtype):
    x, y = make_rows()
    release = run(make_old().to(dtype), lambda: make_mlp().to(dtype), make_data((x.to(dtype), y)))
    assert {t.dtype for t in release.tensors.values()} == {dtype}
    assert release.record.trace.noise_norm == run().record.trace.noise_norm


# Centres and controls
@each_method
def test_the_control_never_sees_the_old_model(recipe):
    runs = [run(make_old(s), recipe=recipe, start="centre") for s in (1, 2)]
    assert equal(*runs)
    assert equal(runs[0], unlearn(None, make_mlp, make_data(), forget=["gone"], recipe=recipe,
                                  loss=cross_entropy, noise=SeededNoise(0), batch_size=8,
                                  delta=0.1, start="centre"))  # fmt: skip
    assert runs[0].record.weights.old is None
    assert not equal(runs[0], run(recipe=recipe))


def test_a_strong_pull_ends_at_what_build_gave():
    strong = replace(GRADIENT, grad_clip=0.0, weight_decay=5.0, learning_rate=0.15, steps=20)
    release = run(recipe=replace(strong, noise_std=1e-6), delta=1 - 1e-9, seed=3)
    centre = torch.cat([p.detach().reshape(-1) for p in call_build(make_mlp, 3).parameters()])
    assert torch.allclose(flatten(release), centre.double(), atol=1e-4)
    assert release.certificate.origin == "build"
    zero = run(recipe=replace(strong, noise_std=1e-6), delta=1 - 1e-9, **ZERO)
    assert float(flatten(zero).abs().max()) < 1e-4


def test_missing_names_start_at_the_centre_if_that_is_asked_for():
    old = dict(make_old().state_dict())
    del old["3.bias"]
    release, control = run(old, recipe=OUTPUT, strict=False), run(recipe=OUTPUT, start="centre")
    assert release.certificate.missing == ("3.bias",)
    same = {n: torch.equal(t, control.tensors[n]) for n, t in release.tensors.items()}
    assert same == {"0.weight": False, "0.bias": False, "3.weight": False, "3.bias": True}


def test_a_recipe_is_planned_around_build():
    release = run(recipe=None, epsilon=1.0, delta=1e-5)
    assert release.certificate.epsilon <= 1.0
    other = run(recipe=None, epsilon=1.0, delta=1e-5, method="output-perturbation")
    assert isinstance(other.record.recipe, OutputPerturbation)
    sizes = []
    run(recipe=lambda size: sizes.append(size) or GRADIENT)
    assert sizes == [release.record.parameters]


# What belongs to a step, and what comes after
def test_dropout_and_shuffling_do_not_depend_on_what_was_drawn_before():
    torch.manual_seed(7)
    first = run(build=lambda: make_mlp(dropout=0.3))
    torch.manual_seed(8)
    state = torch.get_rng_state()
    assert equal(first, run(build=lambda: make_mlp(dropout=0.3)))
    assert torch.equal(state, torch.get_rng_state())
    other = run(build=lambda: make_mlp(dropout=0.3), seed=1)
    assert other.record.trace.gradient_norm != first.record.trace.gradient_norm


def test_the_module_is_trained_in_train_mode_and_the_old_one_is_left_alone():
    old, modes = make_old(), []

    class Watch(nn.Sequential):
        def forward(self, x):
            modes.append(self.training)
            return super().forward(x)

    kept = {name: t.clone() for name, t in old.state_dict().items()}
    run(old, lambda: Watch(*make_mlp()).eval())
    assert set(modes) == {True}
    assert all(torch.equal(t, kept[name]) for name, t in old.state_dict().items())
    assert all(p.grad is None for p in old.parameters())


def test_running_statistics_are_builds_in_every_step_and_of_retained_data_at_the_end():
    seen = []

    class Watch(nn.BatchNorm1d):
        def forward(self, x):
            if self.training and self.momentum is not None:
                seen.append(self.running_mean.clone())
            return super().forward(x)

    def build():
        return nn.Sequential(nn.Linear(6, 16), Watch(16), nn.Linear(16, 3))

    old = build()
    old[1].running_mean.fill_(1e6)
    release = run(old, build)
    assert len(seen) == 8
    assert all(not mean.any() for mean in seen)
    assert release.certificate.buffers == tuple(
        f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    )
    hidden = release.model[0](make_rows()[0][:24]).detach()
    assert torch.allclose(release.tensors["1.running_mean"], hidden.mean(0), atol=1e-5)
    assert release.model[1].momentum == 0.1
    # Frozen normalisations are as build() gave them.
    frozen = run(build=lambda: nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16).requires_grad_(False).eval(), nn.Linear(16, 3)),
        old=old)  # fmt: skip
    assert frozen.certificate.buffers == ()


def test_training_afterwards_is_post_processing():
    handed = []

    def train(model, examples, seed, validation=None):
        handed.append((len(examples[0]), seed, validation, model[2].running_mean.sum().item()))
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        cross_entropy(model(examples[0]), examples[1]).backward()
        optimizer.step()

    release = run(make_old(norm=True), lambda: make_mlp(norm=True), train=train, seed=4)
    assert handed == [(24, 4, None, 0.0)]
    weights = release.certificate.weights
    assert weights.noisy != weights.after
    assert release.certificate.training.examples == 24
    assert release.certificate.buffers == ()


def test_inputs_written_in_place_are_copies():
    class Greedy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 3)

        def forward(self, x):
            return self.body(x.mul_(2.0))

    x, y = make_rows()
    rows = [(x[i], y[i]) for i in range(25)]
    batch = (x[:24].clone(), y[:24])
    kept = x.clone()
    run(Greedy(), Greedy, make_data(rows))
    run(Greedy(), Greedy, loader=lambda examples, seed: [batch])
    assert torch.equal(batch[0], kept[:24])
    assert torch.equal(x, kept)


def test_works_inside_no_grad_and_inference_mode():
    plain = run()
    with torch.no_grad():
        assert equal(plain, run())
    old, data = make_old(), make_data()
    with torch.inference_mode():
        assert equal(plain, run(old, data=data))


def test_model_clipping_stays_in_its_ball():
    trace = run(recipe=MODEL).record.trace
    assert max(trace.model_norm) <= 1.0
    assert min(trace.clip_factor) == 1.0


@pytest.mark.parametrize("saved", [True, False])
def test_a_second_request_starts_from_the_release_before(tmp_path, saved):
    first = run(make_old(norm=True), lambda: make_mlp(norm=True), noise=SystemNoise())
    folder = first.save(tmp_path / "first")
    place = folder if saved else first
    again = {"build": lambda: make_mlp(norm=True), "noise": SystemNoise(), "parent": place}
    with pytest.raises(InputError, match="whom the parent release forgot"):
        run(place, forget=["p1"], **again)
    second = unlearn(None, data=make_data(), forget=["p1", "gone"], recipe=GRADIENT,
                     loss=cross_entropy, delta=0.1, **again)  # fmt: skip
    assert second.certificate.parent == first.certificate.sha256
    assert second.certificate.weights.old == first.certificate.weights.after
    second.save(tmp_path / "second")
    assert verify(tmp_path / "second", parent=folder).holds


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"centre": "fresh"}, "centre is 'fresh'; it must be 'build' or 'zero'"),
        ({"start": "zero"}, "start is 'zero'; it must be 'model' or 'centre'"),
        ({"noise": 3}, "noise is 3; it must be SystemNoise"),
        ({"recipe": 3}, "recipe is 3; it must be GradientClipping"),
        ({"recipe": None}, "recipe and epsilon are both left out"),
        ({"recipe": None, "epsilon": 1, "releases": 2}, "releases is 2; it must be 1"),
        ({"recipe": None, "epsilon": 1, "method": "retraining"}, "method is 'retraining'"),
        ({"recipe": replace(OUTPUT, noise_std=0.0)}, "noise_std is 0"),
        ({"recipe": replace(OUTPUT, noise_std=1e-6)}, "certifies nothing"),
        ({"epsilon": 0.01}, "and epsilon is 0.01; it needs more noise"),
        ({"loss": None}, "loss is None"),
        ({"loss": lambda o, t: torch.zeros(())}, "depends on no trainable parameter"),
        ({"build": lambda: nn.Linear(6, 3, dtype=torch.complex64)}, "dtype of weight is"),
        ({"train": 3}, "train is 3"),
    ],
)
def test_one_sentence_before_anything_is_trained(options, sentence):
    with pytest.raises(ExpungeError, match=sentence):
        run(**options)
