"""Training, fine-tuning, evaluation, batches in memory."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from augmentation import Augmentation
from engine import GRADIENT, equal, make_batches, make_mlp, train_by_hand
from expunge import InputError, UnlearningError, certify
from expunge.certificates.identifiers import opens
from expunge.noisy.noise import SeededNoise
from expunge.noisy.run import unlearn
from expunge.processes.weights import hash_weights
from expunge.tasks import digits
from expunge.training.batches import Batches
from expunge.training.evaluation import evaluate
from expunge.training.holding import find_held
from expunge.training.randomness import capture_random, choose_generators, seeded_random
from expunge.training.train import fine_tune, schedule_factor, train

torch.set_num_threads(1)


class Toy:
    """Two tensors in memory and nothing else."""

    def __init__(self, count=40):
        g = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 6, generator=g)
        self.targets = self.inputs[:, :3].argmax(1)


def unlearned():
    given = {"loss_fn": cross_entropy, "noise": SeededNoise(0), "centre": "zero"}
    return unlearn(make_mlp(), make_batches(), GRADIENT, **given)


# Batches in memory


def test_every_pass_is_a_new_permutation_of_everything():
    batches = Batches(
        torch.arange(10.0)[:, None],
        torch.arange(10),
        batch_size=4,
        generator=torch.Generator().manual_seed(0),
    )
    passes = [torch.cat([y for _, y in batches]).tolist() for _ in range(3)]
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    assert all(torch.equal(x[:, 0], y.float()) for x, y in batches)


def test_same_generator_same_order_and_last_batch_can_be_dropped():
    def order(drop_last):
        g = torch.Generator().manual_seed(5)
        inputs = torch.zeros(10, 1)
        return Batches(inputs, torch.arange(10), batch_size=4, generator=g, drop_last=drop_last)

    first, second = ([y.tolist() for _, y in order(False)] for _ in range(2))
    assert first == second
    assert [len(y) for _, y in order(True)] == [4, 4]
    assert len(order(True)) == 2


def test_augment_and_prepare_work_on_whole_batches():
    calls = []

    def augment(x, generator):
        calls.append((x.dtype, len(x)))
        return x + torch.randint(0, 2, x.shape, generator=generator, dtype=torch.uint8)

    batches = Batches(
        torch.zeros(6, 2, dtype=torch.uint8),
        torch.arange(6),
        batch_size=4,
        generator=torch.Generator().manual_seed(0),
        augment=augment,
        prepare=lambda x: x.float() / 2,
    )
    assert {x.dtype for x, _ in batches} == {torch.float32}
    assert calls == [(torch.uint8, 4), (torch.uint8, 2)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": torch.zeros(3)}, "number of targets is 3"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"ids": ["a"]}, "number of ids is 1"),
        ({"augment": lambda x, g: x}, "augment needs a generator"),
    ],
)
def test_bad_batches(change, words):
    given = {"inputs": torch.zeros(4, 2), "targets": torch.zeros(4), "batch_size": 2} | change
    with pytest.raises(InputError, match=words):
        Batches(given.pop("inputs"), given.pop("targets"), **given)


# Training


def test_constant_sgd_is_torch_sgd_bit_for_bit():
    model, batches = make_mlp(), make_batches()
    trained = copy.deepcopy(model)
    log = train(trained, batches, epochs=4, learning_rate=0.1, weight_decay=0.01)
    assert equal(trained, train_by_hand(model, batches, 12, 0.1, 0.01))
    assert (log.steps, log.gradient_evaluations, log.batch_size) == (12, 96, 8)
    assert len(log.losses) == 4
    assert log.losses[-1] < log.losses[0]


def test_training_depends_on_the_seed_alone():
    before = capture_random()
    runs = []
    for seed, disturb in ((1, 3), (1, 4), (2, 3)):
        torch.manual_seed(disturb)
        model = make_mlp(dropout=0.3)
        train(model, Toy(), epochs=2, learning_rate=0.1, batch_size=16, seed=seed)
        runs.append(model)
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])
    torch.set_rng_state(before["torch"])
    train(make_mlp(dropout=0.3), Toy(), epochs=1, learning_rate=0.1)
    assert torch.equal(before["torch"], torch.get_rng_state())


def test_one_cycle_schedule_has_its_corners():
    steps = 1000
    factors = [schedule_factor("one-cycle", t, steps) for t in range(steps)]
    assert factors[0] == pytest.approx(1 / 25)
    assert max(factors) == factors[300] == pytest.approx(1.0)
    assert factors[850] == pytest.approx(1 / 25)
    assert 0 < factors[-1] < 1e-3
    assert all(a < b for a, b in itertools.pairwise(factors[:301]))
    assert all(a > b for a, b in itertools.pairwise(factors[300:]))
    with pytest.raises(InputError, match="schedule is 'cosine'"):
        schedule_factor("cosine", 0, 1)


def test_any_optimizer_follows_the_schedule():
    seen = []

    class Watched(torch.optim.AdamW):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    log = train(
        make_mlp(),
        Toy(),
        epochs=2.5,
        learning_rate=0.0,
        batch_size=10,
        schedule="one-cycle",
        optimizer=lambda parameters: Watched(parameters, lr=0.01),
    )
    assert log.steps == 10
    assert max(seen) == pytest.approx(0.01)
    assert seen[0] == pytest.approx(0.01 / 25)
    assert log.optimizer.startswith("Watched(weight_decay=0.01")


def test_frozen_parameters_and_mode_are_kept():
    model = make_mlp().eval()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    train(model, Toy(), epochs=1, learning_rate=0.5)
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[3].weight, before[3].weight)
    assert not model.training


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": -1}, "epochs is -1"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"schedule": "x"}, "schedule is 'x'"),
        ({"data": []}, "data is empty"),
        ({"data": iter([])}, "data has no length"),
        ({"data": make_batches(), "augment": lambda x, g: x}, "data is a loader"),
    ],
)
def test_bad_training(change, words):
    given = {"data": Toy(), "epochs": 1, "learning_rate": 0.1} | change
    with pytest.raises(InputError, match=words):
        train(make_mlp(), given.pop("data"), **given)
    with pytest.raises(UnlearningError, match="nothing to train"):
        train(make_mlp().requires_grad_(False), Toy(), epochs=1, learning_rate=0.1)


def test_digits_are_learned():
    task = digits.load()
    images, targets = task.train.inputs, task.train.targets
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def prepare(x):
        return x.float() / 16

    train(
        model,
        task.train,
        epochs=15,
        learning_rate=0.1,
        batch_size=64,
        schedule="one-cycle",
        momentum=0.9,
        augment=Augmentation(padding=1, flip=False),
        prepare=prepare,
    )
    result = evaluate(model, task.test.inputs, task.test.targets, prepare=prepare)
    assert result.accuracy > 0.85
    assert result.count == len(task.test)
    assert evaluate(model, images, targets, prepare=prepare).accuracy > 0.85


# Fine-tuning and evaluation


def test_fine_tuning_is_recorded_and_leaves_the_run_alone():
    run = unlearned()
    before = copy.deepcopy(run.model)
    data = Batches(*make_batches(count=1)[0], batch_size=4, ids=list("abcdefgh"))
    tuned = fine_tune(run, data, epochs=3, learning_rate=0.1, schedule="one-cycle")
    assert equal(run.model, before)
    assert run.record.finetune is None
    finetune = tuned.record.finetune
    assert (finetune.optimizer, finetune.steps, finetune.epochs) == ("SGD", 6, 3.0)
    assert (finetune.batch_size, finetune.gradient_evaluations) == (4, 24)
    assert opens(finetune.data, list("hgfedcba"))
    assert tuned.record.weights_noisy == run.record.weights_noisy
    assert tuned.record.weights_after == hash_weights(tuned.model.state_dict())
    assert tuned.record.weights_after != run.record.weights_after
    assert certify(tuned.record, delta=1e-5).epsilon == certify(run.record, delta=1e-5).epsilon
    with pytest.raises(InputError, match="fine-tuned already"):
        fine_tune(tuned, data, epochs=1, learning_rate=0.1)
    with pytest.raises(InputError, match="'c'"):
        fine_tune(run, data, epochs=1, learning_rate=0.1, forget_ids=["c"])


def test_evaluation_matches_by_hand_whatever_the_batch_size():
    model, toy = make_mlp(dropout=0.5), Toy()
    with torch.no_grad():
        output = copy.deepcopy(model).eval()(toy.inputs)
    for batch_size in (7, 4096):
        result = evaluate(model, toy.inputs, toy.targets, batch_size=batch_size)
        assert result.accuracy == (output.argmax(1) == toy.targets).double().mean().item()
        assert result.loss == pytest.approx(float(cross_entropy(output, toy.targets)), rel=1e-5)
    assert model.training
    with pytest.raises(InputError, match="number of inputs is 0"):
        evaluate(model, toy.inputs[:0], toy.targets[:0])


def test_the_global_state_and_the_loaders_generators_are_streams_apart():
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.zeros(4, 1)),
        sampler=torch.utils.data.RandomSampler(range(4), generator=torch.Generator()),
        generator=torch.Generator(),
    )
    own = choose_generators(find_held(loader))
    assert len(own) == 2
    before = [generator.get_state() for generator in own]
    drawn = list[list[float]]()
    for _ in range(2):
        with seeded_random(3, loader):
            drawn += [torch.rand(4, generator=g).tolist() for g in (None, *own)]
    assert drawn[:3] == drawn[3:]
    assert len({tuple(numbers) for numbers in drawn}) == 3
    for generator, state in zip(own, before, strict=True):
        assert torch.equal(generator.get_state(), state)
