"""The noisy route on ordinary models, losses and data: all of these simply work."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot
from torch.nn.utils.rnn import pack_sequence

import expunge
from tests.everyday.conftest import FORGET, NAMES

QUICK = {"epsilon": 1.0, "delta": 1e-5, "forget": FORGET, "batch_size": 16}


def build():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def run(build, data, tmp_path=None, old=None, **more):
    """Unlearn, save, verify."""
    torch.manual_seed(7)
    release = expunge.unlearn(old or build(), build, data, **QUICK | more)
    assert release.certificate.epsilon <= 1.0
    if tmp_path is not None:
        release.save(tmp_path / "run")
        assert expunge.verify(tmp_path / "run").holds
    return release


def test_planned_for_a_target_saved_and_verified(data, tmp_path):
    release = run(build, data, tmp_path, loss=cross_entropy)
    assert release.certificate.releasable
    assert release.certificate.survival_bound < 0.2
    loaded = expunge.load_model(tmp_path / "run", build)
    assert torch.equal(loaded[0].weight, release.model[0].weight)


@pytest.mark.parametrize("method", ["gradient-clipping", "model-clipping", "output-perturbation"])
def test_every_method_then_own_training(data, method):
    train = expunge.Training(epochs=1, learning_rate=0.1)
    release = run(build, data, loss=cross_entropy, method=method, train=train)
    assert release.certificate.training.function == "expunge.Training"


def focal(alpha):
    def loss(output, target):
        log = output.log_softmax(-1).gather(1, target[:, None])[:, 0]
        return (-alpha[target] * (1 - log.exp()) ** 2 * log).mean()

    return loss


def test_losses_with_tensors(rows, data):
    x, y = rows
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
    run(build, data, loss=weighted)
    run(build, data, loss=focal(torch.tensor([0.25, 0.75])))
    multi = expunge.Data((x, one_hot(y, 2).float()), ids=NAMES)
    run(build, multi, loss=nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 1.0])))
    teacher = build().eval()

    def distil(model, batch):
        with torch.no_grad():
            soft = teacher(batch[0]).softmax(-1)
        return cross_entropy(model(batch[0]), soft)

    run(build, data, loss=distil)


def test_regression_autoencoder_and_several_heads(rows):
    x, y = rows
    run(lambda: nn.Linear(6, 1), expunge.Data((x, x[:, :1]), ids=NAMES), loss=mse_loss)
    coder = lambda: nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6))  # noqa: E731
    run(coder, expunge.Data(x, ids=NAMES), loss=mse_loss)

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 2), nn.Linear(6, 1)

        def forward(self, x):
            return self.one(x), self.two(x)

    def both(output, target):
        return cross_entropy(output[0], target[0]) + mse_loss(output[1], target[1])

    nested = expunge.Data((x, (y, x[:, :1])), ids=NAMES)
    run(Heads, nested, loss=both)


def test_arrays_of_doubles(rows):
    arrays = rows[0].double().numpy(), rows[1].numpy()
    run(build, expunge.Data(arrays, ids=NAMES), loss=cross_entropy)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, left, right):
        return self.left(left) + self.right(right)


def test_inputs_in_tuples_and_dictionaries(rows):
    x, y = rows
    run(Two, expunge.Data((x[:, :3], x[:, 3:], y), ids=NAMES), loss=cross_entropy)
    run(Two, expunge.Data(((x[:, :3], x[:, 3:]), y), ids=NAMES), loss=cross_entropy)
    named = {"left": x[:, :3], "right": x[:, 3:]}
    run(Two, expunge.Data((named, y), ids=NAMES), loss=cross_entropy)
    rows = [({"left": a[:3], "right": a[3:]}, b) for a, b in zip(x, y, strict=True)]
    run(Two, expunge.Data(rows, ids=NAMES), loss=cross_entropy)


def test_lengths_that_differ(rows):
    texts = [torch.randint(0, 20, (3 + i % 4,)) for i in range(40)]
    labels = [i % 2 for i in range(40)]

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8, sparse=True)
            self.read, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, packed):
            embedded = packed._replace(data=self.embed(packed.data))
            return self.head(self.read(embedded)[1][0][-1])

    def collate(rows):
        return pack_sequence([r[0] for r in rows], enforce_sorted=False), torch.tensor(
            [r[1] for r in rows]
        )

    data = expunge.Data(list(zip(texts, labels, strict=True)), ids=NAMES, collate=collate)
    run(Reader, data, loss=cross_entropy)
    train = expunge.Training(epochs=1, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    expunge.retrain(Reader, data, forget=FORGET, train=train)
