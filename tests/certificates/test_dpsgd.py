"""DP-SGD certified, and its guarantee computed a second time."""

import json
import math
from dataclasses import replace

import pytest
import torch

from engine import make_mlp
from expunge import GroupDPSGD, SeededNoise, SystemNoise, certify, guarantee, verify
from expunge.accounting.dpsgd import group_log_delta
from expunge.baselines.dpsgd import train_dpsgd
from expunge.certificates.certificate import Certificate
from expunge.certificates.second_accountant import recompute_group_delta
from expunge.errors import InputError, UnlearningError, VerificationError
from expunge.processes.weights import save_weights
from expunge.training.batches import Batches

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


# --- the certificate


def write_run(folder, run, delta=1e-5):
    certificate = certify(run.record, delta=delta)
    certificate.save(folder / "certificate.json")
    run.record.save(folder / "record.json")
    save_weights(
        folder / "model.safetensors", run.model.state_dict(), certificate.safetensors_metadata()
    )
    return certificate


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_certificate_holds_and_says_what_is_assumed(rate, tmp_path):
    recipe = GroupDPSGD(clip=0.5, noise_multiplier=8.0, sampling_rate=rate, steps=30, group_size=2)
    run = go(recipe, noise=SystemNoise(), forget_ids=["s1", "s7"])
    certificate = write_run(tmp_path, run)
    assert certificate.epsilon == guarantee(recipe, delta=1e-5).epsilon
    assert certificate.releasable
    assert certificate.data.forget.count == 2
    assert certificate.data.retain.count == N - 2
    kinds = [sentence.partition(":")[0] for sentence in certificate.scope.assumptions]
    assert kinds == ["computed", "assumed", "assumed"]
    verify(tmp_path / "certificate.json", record=tmp_path / "record.json")
    for change, named in (
        ({"epsilon": certificate.epsilon * 0.999}, "too small"),
        ({"epsilon": certificate.epsilon * 1.05}, "a smaller one holds"),
        ({"survival_bound": certificate.survival_bound * 0.99}, "survival_bound is"),
        ({"recipe": {"group_size": 3}}, "too small"),
        ({"recipe": {"noise_multiplier": 7.9}}, "schedule is"),
        ({"scope": {"assumptions": []}}, "scope is"),
    ):
        forge(tmp_path, certificate, change)
        with pytest.raises(VerificationError, match=named):
            verify(tmp_path / "certificate.json")


def forge(folder, certificate, changes):
    plain = certificate.model_dump(mode="json")
    for name, value in changes.items():
        plain[name] = {**plain[name], **value} if isinstance(value, dict) else value
        if name == "epsilon":
            plain["retrained"]["epsilon"] = value
            plain["finite_precision"]["ideal_epsilon"] = value
    forged = Certificate.model_validate_json(json.dumps(plain))
    forged.model_copy(update={"digest": forged.compute_digest()}).save(folder / "certificate.json")


def test_contradictions_are_refused():
    record = go(noise=SystemNoise(), forget_ids=["s1"]).record
    certify(record, delta=1e-5)
    for changes, sentence in (
        ({"start": "model"}, "a 'fresh' one"),
        ({"forget": replace(record.forget, count=3)}, "3 examples were forgotten"),
        ({"recipe": replace(RECIPE, noise_multiplier=3.0)}, "noise_std differs"),
        ({"recipe": replace(RECIPE, steps=11)}, "the trace has 12 steps"),
        ({"parent": "a" * 64}, "one training run covers one request"),
    ):
        with pytest.raises(UnlearningError, match=sentence):
            certify(replace(record, **changes), delta=1e-5)
    assert not certify(go().record, delta=1e-5).releasable


# --- the second computation of the guarantee


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 4.0])
@pytest.mark.parametrize(
    ("multiplier", "rate", "steps", "group_size"),
    [
        (4.0, 0.01, 1000, 5),
        (1.0, 0.01, 1000, 1),
        (1.0, 0.3, 30, 1),
        (5.0, 0.1, 10, 20),
        (50.0, 0.00256, 1760, 450),
        (2.0, 0.06, 800, 25),
        (2.0, 0.0066, 2600, 3),
        (30.0, 0.05, 10**6, 1),
    ],
)
def test_two_computations_agree(multiplier, rate, steps, group_size, epsilon):
    """Losses rounded up on a grid against a Laplace inversion: never below, and close."""
    recipe = GroupDPSGD(
        clip=1.0, noise_multiplier=multiplier, sampling_rate=rate, steps=steps,
        group_size=group_size,
    )  # fmt: skip
    truth = math.log(recompute_group_delta(recipe, epsilon))
    claimed = group_log_delta(recipe, epsilon)
    assert truth - 1e-7 <= claimed <= truth + 0.01


def test_a_wrong_recomputation_would_be_seen():
    recipe = GroupDPSGD(
        clip=1.0, noise_multiplier=4.0, sampling_rate=0.01, steps=1000, group_size=5
    )
    truth = math.log(recompute_group_delta(recipe, 2.0))
    for name, value in (("noise_multiplier", 4.01), ("sampling_rate", 0.0101), ("steps", 1010)):
        other = math.log(recompute_group_delta(replace(recipe, **{name: value}), 2.0))
        assert abs(other - truth) > 0.01


def test_one_large_step_cannot_be_recomputed():
    recipe = GroupDPSGD(clip=1.0, noise_multiplier=1.0, sampling_rate=0.5, steps=1, group_size=1)
    with pytest.raises(InputError, match="so few or so large steps"):
        recompute_group_delta(recipe, 1.0)
    record = go(recipe, noise=SystemNoise()).record
    with pytest.raises(UnlearningError, match="so few or so large steps"):
        certify(record, delta=1e-5)
