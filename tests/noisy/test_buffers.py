"""Buffers: refused by name, public when frozen or constant, reset and estimated again."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from engine import GRADIENT, equal, make_batches, public_part
from expunge import InputError, UnlearningError, certify
from expunge.certificates.record import Run
from expunge.noisy.noise import SeededNoise
from expunge.noisy.run import unlearn
from expunge.processes.weights import hash_weights

torch.set_num_threads(1)


def go(model, batches=None, **options) -> Run:
    batches = make_batches() if batches is None else batches
    return unlearn(model, batches, GRADIENT, loss_fn=cross_entropy, noise=SeededNoise(0), **options)


class Holder(nn.Module):
    """A linear model, for a test to hang a buffer on."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x):
        return self.body(x)


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[1].running_mean.fill_(123.0)
    return model


def test_running_statistics_are_refused_by_name():
    for model in (batch_norm(), batch_norm().eval()):
        with pytest.raises(UnlearningError, match=r"1\.running_mean, 1\.running_var.*forget data"):
            go(model)
    half = batch_norm()
    half[1].requires_grad_(False)  # frozen parameters, but still in train mode
    with pytest.raises(UnlearningError, match="running_mean"):
        go(half)


@pytest.mark.parametrize("training", [True, False])
def test_reset_statistics_come_from_retained_data_alone(training):
    model = batch_norm().train(training)
    clean = batch_norm().train(training)
    clean[1].running_mean.fill_(-5.0)
    batches = make_batches()
    run, other = (go(m, batches, buffers="reset") for m in (model, clean))
    assert equal(run.model, other.model)
    assert run.model.training is training
    assert model[1].running_mean[0] == 123.0
    hidden = torch.cat([run.model[0](x) for x, _ in batches]).detach()
    assert torch.allclose(run.model[1].running_mean, hidden.mean(0), atol=1e-4)
    assert run.record.buffers == "reset"
    assert run.record.buffer_names == (
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    )
    assert run.record.weights_noisy != run.record.weights_after
    assert run.record.weights_after == hash_weights(run.model.state_dict())
    certify(run.record, delta=1e-5)


def test_frozen_batch_norm_is_public_and_hashed():
    model = batch_norm()
    model[1].requires_grad_(False).eval()
    run = go(model, public=public_part(model))
    assert torch.equal(run.model[1].running_mean, model[1].running_mean)
    assert run.record.buffers == "frozen"
    assert set(run.record.buffer_names) <= set(run.record.public.names)
    certify(run.record, delta=1e-5)


def test_constants_are_public_if_they_are_compared_or_named():
    model = Holder()
    model.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool), persistent=False)
    with pytest.raises(UnlearningError, match="mask is not certified"):
        go(model)
    model.register_buffer("scale", torch.ones(3))
    assert set(go(model, public=["scale", "ma*"]).record.buffer_names) == {"mask", "scale"}
    base = copy.deepcopy(model)
    assert go(model, public=public_part(base)).record.public.compared
    with pytest.raises(UnlearningError, match="mask is not in the public tensors"):
        go(model, public=base.state_dict())
    with pytest.raises(InputError, match="is the old model"):
        go(model, public=model)
    with pytest.raises(InputError, match="'nothing'"):
        go(model, public=["nothing"])
    with pytest.raises(InputError, match="buffers is 'keep'"):
        go(model, buffers="keep")


def test_a_public_buffer_that_a_forward_pass_writes_is_put_back():
    seen = []

    class Counter(Holder):
        def forward(self, x):
            seen.append(int(self.seen))
            self.seen += len(x)
            return self.body(x)

    model = Counter()
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    run = go(model, public={"seen": torch.zeros((), dtype=torch.int64)})
    assert seen == [0] * GRADIENT.steps
    assert int(run.model.seen) == 0


def test_spectral_norm_is_refused():
    model = Holder()
    torch.nn.utils.parametrizations.spectral_norm(model.body)
    with pytest.raises(UnlearningError, match="_u"):
        go(model)
