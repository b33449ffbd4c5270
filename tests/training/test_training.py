"""The built-in training, batches, losses and evaluation against torch's own arithmetic."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from expunge import Data, InputError, Training, UnlearningError, evaluate
from expunge.training.batches import Batches
from expunge.training.calling import check_train, run_training
from expunge.training.losses import compute_loss, run_twice

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        ({"weight_decay": 0.01}, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
        ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, 0.1)),
        ({"optimizer": "adamw"}, lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.0)),
    ],
)
def test_it_is_torchs_own_optimizer_bit_for_bit(options, make):
    model, other = network(), network()
    Training(epochs=2, batch_size=8, **options)(model, (X, Y), seed=4)
    optimizer = make(other.parameters())
    batches = Batches((X, Y), batch_size=8, seed=4)
    for number in range(2):
        for x, y in batches.read(number):
            optimizer.zero_grad()
            cross_entropy(other(x), y).backward()
            optimizer.step()
    assert torch.equal(model.weight, other.weight)


def test_a_fraction_of_an_epoch_and_clipping():
    model, other = network(), network()
    Training(epochs=0.4, batch_size=8, clip_norm=1e-3, learning_rate=1.0)(model, (X, Y), seed=0)
    x, y = next(Batches((X, Y), batch_size=8, seed=0).read(0))
    cross_entropy(other(x), y).backward()
    norm = math.hypot(other.weight.grad.norm(), other.bias.grad.norm())
    steps = (network().weight - model.weight).norm()
    assert norm > 1e-3
    assert steps <= 2e-3  # 0.4 of three batches: two steps of at most 1e-3


def test_schedules_end_where_they_should():
    from expunge.training.training import SCHEDULES

    assert [SCHEDULES[n](0.0) for n in ("constant", "linear", "cosine")] == [1.0, 1.0, 1.0]
    assert SCHEDULES["one-cycle"](0.3) == 1.0
    assert SCHEDULES["linear"](1.0) == SCHEDULES["cosine"](1.0) == 0.0
    assert SCHEDULES["one-cycle"](1.0) < 1e-4


def test_another_seed_is_another_order_and_the_same_seed_the_same():
    def train(seed):
        model = network()
        Training(epochs=1, batch_size=4)(model, (X, Y), seed=seed)
        return model.weight

    assert torch.equal(train(1), train(1))
    assert not torch.equal(train(1), train(2))


def test_every_example_once_a_pass_and_resumed_at_any_place():
    batches = Batches(torch.arange(10), batch_size=3, seed=7)
    assert sorted(torch.cat(list(batches.read(5))).tolist()) == list(range(10))
    assert not torch.equal(next(batches.read(0)), next(batches.read(1)))
    stream, later = batches.repeat(), batches.repeat(taken=6)
    for _ in range(6):
        next(stream)
    assert all(torch.equal(next(stream), next(later)) for _ in range(5))


def test_a_last_example_alone_joins_the_batch_before():
    """BatchNorm takes no batch of one, and a request may leave any number of examples."""
    sizes = [len(batch) for batch in Batches(torch.arange(9), batch_size=4, seed=0).read(0)]
    assert sizes == [4, 5]
    rows = [torch.tensor(float(i)) for i in range(9)]
    batches = Batches(rows, batch_size=4, seed=0)
    assert [len(batch) for batch in batches.read(0)] == [4, 5]
    assert len(batches) == 2
    assert len(Batches(torch.arange(1), batch_size=4, seed=0)) == 1
    assert len(Batches(torch.arange(3), batch_size=1, seed=0)) == 3


def test_early_stopping_restores_the_best_weights():
    model = network()
    train = Training(epochs=30, learning_rate=5.0, batch_size=4, patience=2)
    train(model, (X, 1 - Y), seed=0, validation=(X, Y))
    after_one = network()
    Training(epochs=1, learning_rate=5.0, batch_size=4)(after_one, (X, 1 - Y), seed=0)
    assert torch.equal(model.weight, after_one.weight)
    with pytest.raises(InputError, match="patience is given without validation"):
        train(model, (X, Y), seed=0)


def test_state_goes_on_where_it_was():
    train, state = Training(epochs=1, optimizer="adam", batch_size=20), {}
    model = network()
    train(model, (X, Y), seed=0, state=state)
    fresh = copy.deepcopy(model)
    train(model, (X, Y), seed=1, state=state)
    train(fresh, (X, Y), seed=1)
    assert not torch.equal(model.weight, fresh.weight)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epochs": -1}, "epochs is -1"),
        ({"epochs": math.nan}, "epochs is nan"),
        ({"epochs": 1, "batch_size": 0}, "batch_size is 0"),
        ({"epochs": 1, "optimizer": "lion"}, "optimizer is 'lion'; it must be one of sgd, adam"),
        ({"epochs": 1, "optimizer": "adam", "momentum": 0.9}, "momentum is 0.9"),
        ({"epochs": 1, "schedule": "step"}, "schedule is 'step'"),
        ({"epochs": 1, "loss": nn.CrossEntropyLoss}, "the class CrossEntropyLoss"),
        ({"epochs": 1, "clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"epochs": 1, "patience": 0}, "patience is 0"),
    ],
)
def test_options_that_cannot_be(options, sentence):
    with pytest.raises(InputError, match=sentence):
        Training(**options)


def test_losses_in_every_way():
    model = network()
    plain = compute_loss(model, (X, Y), cross_entropy)
    assert torch.equal(plain, compute_loss(model, [X, Y], nn.CrossEntropyLoss()))
    own = compute_loss(model, (X, Y), lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    assert torch.equal(plain, own)
    with pytest.raises(UnlearningError, match="it must be one number"):
        compute_loss(model, (X, Y), nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(InputError, match="loss is None"):
        compute_loss(model, (X, Y), None)
    with pytest.raises(InputError, match="returns no loss itself"):
        compute_loss(model, {"input": X}, None)


def test_two_gradients_are_told_apart_however_they_are_permuted_or_negated():
    g = torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0])
    swapped = g + torch.eye(5)[0] - torch.eye(5)[1]
    for other, same in ((g.clone(), True), (-g, False), (swapped, False)):
        pair = iter([[g], [other]])
        assert run_twice(lambda pair=pair: next(pair))[1] is same
    lost = iter([[g / 0], [g / 0]])
    assert run_twice(lambda: next(lost))[1]  # counts as zero in a noisy step


def test_evaluation_is_the_mean_over_examples():
    model = network()
    found = evaluate(model, Data((X, Y)), batch_size=7)
    assert found.loss == pytest.approx(cross_entropy(model(X), Y).item(), rel=1e-6)
    assert found.accuracy == (model(X).argmax(1) == Y).double().mean().item()
    assert evaluate(nn.Identity(), (X, X), loss=mse_loss).accuracy is None
    with pytest.raises(InputError, match="nothing to evaluate"):
        evaluate(model, (X[:0], Y[:0]))


def test_functions_are_given_what_they_name():
    seen = {}

    def everything(model, examples, seed, *, validation, collate, resume, state, device):
        seen.update(locals())

    data = Data([1, 2], validation=Data([3]), collate=list)
    check_train(everything)
    run_training(everything, network(), data, 5, resume="here")
    assert (seen["seed"], seen["validation"], seen["resume"]) == (5, [3], "here")
    run_training(lambda model, rows: seen.update(rows=rows), network(), data, 5)
    run_training(lambda net, rows, number: seen.update(number=number), network(), data, 6)
    run_training(lambda *given: seen.update(given=len(given)), network(), data, 6)
    assert (seen["rows"], seen["number"], seen["given"]) == ([1, 2], 6, 3)
    inner, wrapper = network(), nn.Sequential(network())
    assert run_training(lambda model, rows: wrapper, inner, data, 0) is wrapper
    assert run_training(lambda model, rows: {"loss": 1}, inner, data, 0) is inner
