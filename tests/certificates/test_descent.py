"""Certificates of full-batch descent: what they say, what they refuse, a second computation."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from descents import KINDS, C, D, K, drop, make_data, make_recipe, model
from engine import equal
from expunge import SystemNoise, calibrate, certify, guarantee, verify
from expunge.accounting.guarantee import mu
from expunge.baselines.descent import descend, forget
from expunge.certificates.second_accountant import recompute
from expunge.errors import UnlearningError, VerificationError
from expunge.processes.weights import save_weights
from expunge.recipes import IDEAL, Execution, NoisyDescent, RewindToDelete

# --- the second computation


@st.composite
def descents(draw):
    kind = draw(st.sampled_from(KINDS))
    steps = draw(st.integers(1, 12))
    return kind(
        learning_rate=draw(st.floats(0.01, 2.0)),
        noise_std=draw(st.floats(0.01, 5.0)),
        train_steps=draw(st.integers(steps, 40)),
        steps=steps,
        gradient_bound=draw(st.floats(0.01, 5.0)),
        smoothness=draw(st.floats(0.0, 3.0)),
        strong_convexity=draw(st.sampled_from([0.0, 0.01, 0.5])),
        examples=100,
        group_size=draw(st.integers(1, 50)),
        convex=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=150)
@given(descents(), st.sampled_from([0.0, 1e-6, 1e-2]))
def test_two_computations_agree(recipe, rounding):
    execution = Execution(rounding=rounding)
    claimed = mu(recipe, execution=execution)
    truth, _ = recompute(recipe, "retrained", execution)
    assert truth * (1 - 1e-15) <= claimed <= truth * (1 + 1e-9)


def test_a_wrong_recomputation_would_be_seen():
    recipe = make_recipe(NoisyDescent)
    truth, _ = recompute(recipe, "retrained", IDEAL)
    for name in ("learning_rate", "noise_std", "gradient_bound", "strong_convexity"):
        other = replace(recipe, **{name: getattr(recipe, name) * (1 + 1e-6)})
        assert abs(recompute(other, "retrained", IDEAL)[0] / truth - 1) > 1e-9


# --- certificates


def write_run(folder, run, delta=1e-5):
    certificate = certify(run.record, delta=delta)
    certificate.save(folder / "certificate.json")
    run.record.save(folder / "record.json")
    save_weights(
        folder / "model.safetensors", run.model.state_dict(), certificate.safetensors_metadata()
    )
    return certificate


@pytest.mark.parametrize("kind", KINDS)
def test_certificate_holds_and_lists_what_was_computed(kind, tmp_path):
    data = make_data(7)
    recipe = calibrate(
        lambda s: make_recipe(kind, noise_std=s),
        epsilon=1.0,
        delta=1e-5,
        parameters=18,
        problem=model().problem,
    )
    trained = descend(model(), data, recipe, noise=SystemNoise())
    run = forget(
        trained, drop(data, K), noise=SystemNoise(), forget_ids=[f"s{i}" for i in range(K)]
    )
    certificate = write_run(tmp_path, run)
    assert 0.999999 < certificate.epsilon <= 1.0
    assert certificate.releasable
    assert certificate.centre is None
    assert certificate.start == "fresh"
    assert certificate.problem.kind == "softmax-regression"
    assert len(certificate.scope.assumptions) == 4
    assert all(sentence.startswith("computed: ") for sentence in certificate.scope.assumptions)
    assert "computed: " in certificate.statement()
    assert "computed: " in certificate.model_card()
    keys = 2 if kind is NoisyDescent else 1
    assert certificate.noise.keys == keys
    verify(tmp_path / "certificate.json", record=tmp_path / "record.json")
    exact = guarantee(recipe, epsilon=0.0).delta
    assert exact <= certificate.survival_bound < exact * 1.001


def forge(folder, certificate, **changes):
    plain = certificate.model_dump(mode="json") | changes
    forged = type(certificate).model_validate_json(json.dumps(plain))
    forged = forged.model_copy(update={"digest": forged.compute_digest()})
    forged.save(folder / "certificate.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: {"recipe": {**c["recipe"], "gradient_bound": 1.0}}, "gradient_bound is 1.0"),
        (lambda c: {"recipe": {**c["recipe"], "smoothness": 0.4}}, "smoothness is 0.4"),
        (lambda c: {"problem": {**c["problem"], "classes": 4}}, "parameters is 18"),
        (lambda c: {"problem": {**c["problem"], "feature_clip": 0.5}}, "scope is"),
        (lambda c: {"problem": None}, "problem must be given"),
        (lambda c: {"recipe": {**c["recipe"], "group_size": 5}}, "epsilon is .* too small"),
        (lambda c: {"recipe": {**c["recipe"], "steps": 9}}, "epsilon is .* too small"),
        (lambda c: {"survival_bound": 0.0}, "survival_bound is 0.0"),
        (
            lambda c: {"finite_precision": {**c["finite_precision"], "rounding": 0}},
            "its grid costs at least",
        ),
        (lambda c: {"scope": {**c["scope"], "assumptions": []}}, "scope is"),
        (lambda c: {"start": "model"}, "training begins at a 'fresh' one"),
    ],
)
def test_forgeries_are_named(change, named, tmp_path):
    data = make_data(7)
    trained = descend(model(), data, make_recipe(RewindToDelete), noise=SystemNoise())
    certificate = write_run(tmp_path, forget(trained, drop(data, K)))
    forge(tmp_path, certificate, **change(certificate.model_dump(mode="json")))
    with pytest.raises(VerificationError, match=named):
        verify(tmp_path / "certificate.json")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"problem": None}, "problem is missing"),
        ({"start": "model"}, "training begins at a 'fresh' one"),
        ({"execution": Execution(rounding=1.0, releases=2)}, "one training run covers one request"),
        ({"execution": Execution()}, "costs at least"),
        ({"noise_keys": 1}, "noise_keys is 1"),
    ],
)
def test_contradictions_are_refused(changes, sentence):
    data = make_data(7)
    trained = descend(model(), data, make_recipe(NoisyDescent), noise=SystemNoise())
    record = forget(trained, drop(data, K)).record
    certify(record, delta=1e-5)
    with pytest.raises(UnlearningError, match=sentence):
        certify(replace(record, **changes), delta=1e-5)
    broken = replace(record.trace, gradient_norm=[2.0] * len(record.trace))
    with pytest.raises(UnlearningError, match="longer than gradient_bound"):
        certify(replace(record, trace=broken), delta=1e-5)
    with pytest.raises(UnlearningError, match="5 examples were forgotten; group_size is 4"):
        certify(replace(record, forget=replace(record.retain, count=1, samples=5)), delta=1e-5)


# --- other models: stated constants


def small_net():
    net = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, C)).double()
    g = torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.data.normal_(0, 0.3, generator=g)
    return net


@pytest.mark.parametrize("kind", KINDS)
def test_stated_constants_are_certified_as_assumed(kind, tmp_path):
    data = make_data(8, scale=1.0)
    recipe = make_recipe(
        kind, gradient_bound=9.0, smoothness=2.0, convex=False, learning_rate=0.01, noise_std=0.2
    )
    net = small_net()
    trained = descend(net, data, recipe, noise=SystemNoise())
    run = forget(trained, drop(data, K), noise=SystemNoise())
    certificate = write_run(tmp_path, run)
    assert certificate.problem.kind == "stated"
    assert all(sentence.startswith("assumed: ") for sentence in certificate.scope.assumptions)
    assert certificate.weights.centre is not None  # the public start, which is not zero
    verify(tmp_path / "certificate.json", record=tmp_path / "record.json")
    assert not equal(run.model, net)


def test_a_gradient_beyond_the_stated_bound_stops_the_run():
    recipe = make_recipe(NoisyDescent, gradient_bound=1e-3, smoothness=2.0)
    with pytest.raises(UnlearningError, match=r"gradient_bound says at most 0\.001"):
        descend(small_net(), make_data(8), recipe)
