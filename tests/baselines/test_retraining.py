"""Retraining from a start that saw nothing."""

import copy
import math

import pytest
import torch
from scipy import stats
from torch import nn

import networks
from engine import equal, flatten, make_batches, make_mlp
from expunge import Retraining, certify, retrain, verify
from expunge.baselines.retraining import GaussianInitialisation, PublicStart
from expunge.errors import InputError, UnlearningError
from expunge.processes.weights import hash_weights, save_weights
from expunge.training.batches import Batches
from expunge.training.randomness import capture_random, seeded_random
from expunge.training.train import train

torch.set_num_threads(1)


def go(model=None, loader=None, **options):
    given = {"epochs": 2, "learning_rate": 0.1} | options
    return retrain(
        make_mlp() if model is None else model,
        make_batches() if loader is None else loader,
        **given,
    )


def spoil(model, factor=1e3):
    """The same architecture with weights that no initialisation gives."""
    model = copy.deepcopy(model)
    for p in model.parameters():
        p.data.mul_(factor).add_(factor)
    return model


# --- where it starts


@pytest.mark.parametrize(
    "initialise",
    [None, GaussianInitialisation(0.3), lambda: make_mlp(seed=int(torch.randint(1000, ())))],
    ids=["own", "gaussian", "built"],
)
def test_nothing_of_the_old_weights_is_used(initialise):
    first, second = (
        go(make_mlp(), initialise=initialise),
        go(spoil(make_mlp()), initialise=initialise),
    )
    assert equal(first.model, second.model)
    assert flatten(first.model).abs().max() < 10
    assert first.record.weights_before != second.record.weights_before
    assert first.record.weights_noisy == second.record.weights_noisy


def test_own_initialisation_is_reset_parameters():
    run = go(epochs=0, seed=7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        fresh = make_mlp()
        for module in fresh.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    assert equal(run.model, fresh)
    assert not equal(run.model, go(epochs=0, seed=8).model)
    assert run.record.initialisation == "reset_parameters of every module, seed 7"


def test_gaussian_initialisation_has_its_own_law_and_no_other():
    model = nn.Linear(60, 60)
    run = go(model, [(torch.zeros(2, 60), torch.zeros(2, dtype=torch.long))], epochs=0,
             initialise=GaussianInitialisation(0.2))  # fmt: skip
    x = flatten(run.model).numpy()
    assert stats.kstest(x, "norm", args=(0, 0.2)).pvalue > 1e-3
    assert stats.kstest(x, "norm", args=(0, 0.23)).pvalue < 1e-3
    assert run.record.initialisation == "N(0, 0.2² I), seed 0"


def test_built_network_gives_its_weights():
    def build():
        seed = int(torch.randint(1000, ()))
        return networks.mnist_net(generator=torch.Generator().manual_seed(seed))

    data = [(torch.zeros(2, 784), torch.zeros(2, dtype=torch.long))]
    run = go(spoil(networks.mnist_net()), data, epochs=0, initialise=build)
    with seeded_random(0):
        assert equal(run.model, build())


def test_training_is_that_of_train():
    batches = make_batches()
    start = PublicStart(make_mlp(seed=2).state_dict())
    run = go(loader=batches, initialise=start, epochs=3, weight_decay=0.1, momentum=0.9,
             schedule="one-cycle")  # fmt: skip
    plain = make_mlp(seed=2)
    train(plain, batches, epochs=3, learning_rate=0.1, weight_decay=0.1, momentum=0.9,
          schedule="one-cycle")  # fmt: skip
    assert equal(run.model, plain)
    assert run.record.finetune.steps == 9
    assert run.record.finetune.optimizer == "SGD(momentum=0.9, weight_decay=0.1)"


# --- what is recorded


def test_certificate_is_zero_zero_and_holds(tmp_path):
    x, y = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    data = Batches(x, y, batch_size=5, ids=[f"r{i}" for i in range(20)])
    run = go(loader=data, forget_ids=["f1", "f2"], recipe=Retraining())
    certificate = certify(run.record, delta=1e-5)
    assert certificate.epsilon == 0
    assert certificate.survival_bound == 0
    assert certificate.releasable
    assert certificate.start == "fresh"
    assert certificate.data.retain.count == 20
    assert certificate.finetune.data.count == 20
    assert "The training, which used retained data only." in certificate.scope.covered
    certificate.save(tmp_path / "certificate.json")
    run.record.save(tmp_path / "record.json")
    save_weights(
        tmp_path / "model.safetensors", run.model.state_dict(), certificate.safetensors_metadata()
    )
    verify(tmp_path / "certificate.json", record=tmp_path / "record.json")
    assert run.record.weights_after == hash_weights(run.model.state_dict())


def test_model_and_global_random_state_are_untouched():
    model = make_mlp(dropout=0.5)
    before, state = copy.deepcopy(model), capture_random()
    run = go(model, seed=3)
    assert equal(model, before)
    after = capture_random()
    assert all(torch.equal(state[name], after[name]) for name in state)
    assert equal(run.model, go(model, seed=3).model)
    assert run.model.training is model.training


def test_frozen_parts_stay_and_statistics_are_forgotten():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    model[3].bias.data.fill_(0.25)
    model[1].running_mean.fill_(1e6)
    run = go(model, public=["0.*", "3.bias"])
    assert torch.equal(run.model[0].weight, model[0].weight)
    assert torch.equal(run.model[3].bias, model[3].bias)
    assert run.model[1].running_mean.abs().max() < 100
    assert run.record.buffers == "reset"
    assert run.record.public.names == ("0.weight", "0.bias", "3.bias")
    assert not run.record.public.compared


def test_attention_and_tied_weights_are_reset():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.body(self.embed(x))).mean(1)

    data = [(torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4,)))]
    run = go(spoil(Tied()), data)
    assert flatten(run.model).abs().max() < 10
    assert run.model.head.weight is run.model.embed.weight


# --- refusals


class Stubborn(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.scale


class Forgetful(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


def test_a_module_that_cannot_be_reset_is_named():
    model = nn.Sequential(make_mlp(), Stubborn())
    with pytest.raises(UnlearningError, match=r"module 1 \(Stubborn\) has trainable parameters"):
        go(model)
    assert go(model, initialise=GaussianInitialisation(0.1)).record.parameters == 166


def test_a_parameter_that_reset_leaves_alone_is_named():
    with pytest.raises(UnlearningError, match=r"parameter bias was not initialised afresh"):
        go(Forgetful(6, 3))


def test_other_buffers_are_refused():
    model = make_mlp()
    model.register_buffer("memory", torch.ones(3))
    with pytest.raises(UnlearningError, match="memory"):
        go(model)
    assert go(model, public=["memory"]).record.buffers == "frozen"
    assert go(model, public={"memory": torch.ones(3)}).record.public.compared
    with pytest.raises(UnlearningError, match="memory differs"):
        go(model, public={"memory": torch.zeros(3)})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"recipe": "x"}, "recipe is 'x'; it must be Retraining"),
        ({"initialise": 3}, "initialise is 3"),
        ({"initialise": lambda: 3}, "a torch module"),
        ({"initialise": lambda: nn.Linear(2, 2)}, "shape of 0.weight in initialise"),
        ({"epochs": -1}, "epochs is -1"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"forget_ids": ["7"], "retain_ids": range(24)}, "retain_ids holds '7'"),
        ({"retain_ids": range(23)}, "number of retain_ids is 23"),
        ({"forget_ids": []}, "forget_ids is \\[\\]"),
        ({"buffers": "keep"}, "buffers is 'keep'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(options, sentence):
    with pytest.raises(InputError, match=sentence):
        go(**options)


def test_the_old_model_is_no_initialisation():
    model = make_mlp()
    with pytest.raises(InputError, match="it is the old model"):
        go(model, initialise=lambda: model)
    for factor, shift in ((1.0, 0.0), (1.002, 0.0), (-3.0, 0.0), (1.0, 1e-5)):
        near = copy.deepcopy(model)
        with torch.no_grad():
            for p in near.parameters():
                p.mul_(factor).add_(shift)
        with pytest.raises(InputError, match="it is the old model"):
            go(model, initialise=lambda near=near: near)
    with pytest.raises(InputError, match="std is -1"):
        GaussianInitialisation(-1)
