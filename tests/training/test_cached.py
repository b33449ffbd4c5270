"""Features of a frozen module, once per sample: the same training, and nothing but that."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import expunge
from expunge.errors import InputError
from expunge.processes.weights import hash_weights, list_tensors

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
CALLS: list[int] = []


class Backbone(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(len(x))
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = Backbone(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.backbone.requires_grad_(False).eval()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def batches(**more: Any) -> expunge.Batches:
    generator = torch.Generator().manual_seed(3)
    return expunge.Batches(X, Y, batch_size=8, generator=generator, **more)


OPTIONS: dict[str, Any] = {"epochs": 5, "learning_rate": 0.1}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_same_training(optimizer: str) -> None:
    plain, cached = Model(), Model()
    told = expunge.train(plain, batches(), optimizer=optimizer, **OPTIONS)
    CALLS.clear()
    log = expunge.train(cached, batches(), optimizer=optimizer, features="backbone", **OPTIONS)
    assert sum(CALLS) == len(X) + 12, "once for each sample, and one batch to compare, and a half"
    assert (log.steps, log.gradient_evaluations) == (told.steps, told.gradient_evaluations)
    assert log.losses == pytest.approx(told.losses, rel=1e-4)
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(tensor, cached.state_dict()[name], atol=1e-5), name
    assert isinstance(cached.backbone, Backbone)
    assert list(dict(cached.named_modules())) == list(dict(plain.named_modules()))


def test_any_loader_with_positions() -> None:
    for loader in (
        DataLoader(TensorDataset(X, Y), batch_size=8),
        DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
    ):
        model = Model()
        CALLS.clear()
        log = expunge.train(model, loader, features="backbone", **OPTIONS)
        assert sum(CALLS) == len(X) + 12
        assert log.losses[-1] < log.losses[0]


def test_fine_tuning_and_retraining_certify_as_before() -> None:
    public = Model().state_dict()
    model, recipe = Model(), expunge.GradientClipping(0.1, 1.0, 0.1, 1.0, 2, 1.0)
    ids = [f"p{i}" for i in range(30)]
    loader = expunge.Batches(X[3:], Y[3:], batch_size=8, ids=ids[3:])
    public = {name: tensor for name, tensor in public.items() if name.startswith("backbone")}
    given: dict[str, Any] = {"public": public, "forget_ids": ids[:3]}
    CALLS.clear()
    run = expunge.unlearn(model, loader, recipe, loss_fn=cross_entropy, **given)
    assert sum(CALLS) == 16, "the noisy steps run the whole model"
    tuned = expunge.fine_tune(run, loader, features="backbone", **OPTIONS)
    again = expunge.retrain(model, loader, features="backbone", **OPTIONS, **given)
    for one in (tuned, again):
        assert expunge.certify(one.record, delta=1e-5).releasable
        assert hash_weights(list_tensors(one.model)) == one.record.weights_after
        assert one.record.public is not None
        assert one.record.public.compared


class Skips(Model):
    """Its head sees the input too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x)) + x.mean()


class Late(Model):
    """Something stands before the backbone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(2 * x))


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> Any:
        return X[i] + torch.rand(4), Y[i]


def thawed() -> Model:
    model = Model()
    model.backbone[0].requires_grad_(True)
    return model


def awake() -> Model:
    model = Model()
    model.backbone.train()
    return model


REFUSED: dict[str, tuple[Any, Any, str, str]] = {
    "no such module": (Model, batches, "body", "such as backbone, backbone.0"),
    "the model itself": (Model, batches, "", "the name of a module"),
    "a module that is trained": (thawed, batches, "backbone", "a frozen module: all its"),
    "a module in train mode": (awake, batches, "backbone", "a module in eval mode"),
    "the head": (Model, batches, "head", "a frozen module"),
    "another that sees the input": (Skips, batches, "backbone", "the only module that sees"),
    "something before it": (Late, batches, "backbone", "the only module that sees"),
    "a part of it": (Model, batches, "backbone.1", "the only module that sees"),
    "data drawn anew": (
        Model,
        lambda: DataLoader(Noisy(), batch_size=8),
        "backbone",
        "not the same when they are read again",
    ),
    "augmented data": (
        Model,
        lambda: batches(augment=lambda x, g: x + torch.rand(1, generator=g)),
        "backbone",
        "without augment",
    ),
    "batches without a data set": (Model, lambda: [(X, Y)], "backbone", "samples in memory or a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_and_the_model_is_whole(case: str) -> None:
    make, data, name, sentence = REFUSED[case]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=sentence):
        expunge.train(model, data(), features=name, **OPTIONS)
    assert isinstance(model.backbone, Backbone)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
