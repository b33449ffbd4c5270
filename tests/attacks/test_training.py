"""Attempts to bring forgotten data or the old model back through training, each of which failed."""

import copy
import functools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from engine import GRADIENT, equal, flatten, make_mlp
from expunge import Batches, SeededNoise, certify, evaluate, fine_tune, train, unlearn
from expunge.errors import InputError, UnlearningError
from expunge.training.evaluation import measure
from expunge.training.losses import check_loss
from expunge.training.many import fine_tune_many
from expunge.training.randomness import seeded_random
from expunge.training.settings import check_optimizer

torch.set_num_threads(1)
LOSS = nn.functional.cross_entropy


def make_data(count=24, ids=True):
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(count, 6, generator=g), torch.arange(count) % 3
    return Batches(x, y, batch_size=8, ids=[f"r{i}" for i in range(count)] if ids else None)


def forget(model=None, **options):
    given = {"loss_fn": LOSS, "noise": SeededNoise(0), "forget_ids": ["f1", "f2"]}
    given = given | {"centre": "zero"} | options
    return unlearn(make_mlp() if model is None else model, make_data(), GRADIENT, **given)


def tune(run, data=None, **options):
    given = {"epochs": 1, "learning_rate": 0.1} | options
    return fine_tune(run, make_data() if data is None else data, **given)


# --- the model between unlearn and fine_tune


@pytest.mark.parametrize("how", ["replaced", "one bit", "loaded"])
def test_weights_replaced_after_the_run_are_refused(how):
    run = forget()
    if how == "replaced":
        run.model[0].weight = nn.Parameter(make_mlp()[0].weight.detach().clone())
    elif how == "loaded":
        run.model.load_state_dict(make_mlp().state_dict())
    else:
        bits = run.model[0].bias.detach().view(torch.int32)
        bits[0] ^= 1
    with pytest.raises(UnlearningError, match=r"run\.model is not what the record says"):
        tune(run, epochs=0)
    with pytest.raises(UnlearningError, match=r"run\.model is not what the record says"):
        fine_tune_many([run], make_data(), seeds=[0], epochs=0, learning_rate=0.1)


def make_partly_frozen():
    model = make_mlp()
    model[0].requires_grad_(False)
    model.register_buffer("scale", torch.ones(1))
    model.register_buffer("hidden", torch.ones(2), persistent=False)
    return model


def make_public():
    """The same frozen part and buffers, and a start of the rest that saw no data."""
    model = make_partly_frozen()
    model[-1].reset_parameters()
    return model


@pytest.mark.parametrize("name", ["0.weight", "scale", "hidden"])
def test_a_public_part_changed_after_the_run_is_refused(name):
    run = forget(make_partly_frozen(), public=make_public())
    with torch.no_grad():
        held = dict(run.model.named_parameters()) | dict(run.model.named_buffers())
        held[name].add_(1.0)
    with pytest.raises(UnlearningError, match="not what the record says"):
        tune(run, epochs=0)


def test_a_frozen_part_trained_by_fine_tuning_is_refused():
    run = forget(make_partly_frozen(), public=make_public())
    tune(run)
    run.model[0].requires_grad_(True)
    with pytest.raises(UnlearningError, match=r"0\.bias, 0\.weight changed during fine-tuning"):
        tune(run)


class Remembering(nn.Module):
    """Writes what it sees into a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = make_mlp()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        if not self.training:
            return self.inner(x)
        self.seen.copy_(x[0])
        return self.inner(x)


def test_a_buffer_written_by_fine_tuning_is_refused():
    run = forget(Remembering().eval(), public=["seen"])
    run.model.train()
    with pytest.raises(UnlearningError, match="seen changed during fine-tuning"):
        tune(run)


@pytest.mark.parametrize("how", ["extra", "hook", "attribute"])
def test_a_module_that_says_more_after_the_run_is_refused(how):
    run, old = forget(), flatten(make_mlp())
    if how == "extra":
        run.model[0].get_extra_state = lambda: old
    elif how == "hook":
        run.model.register_state_dict_post_hook(lambda m, state, *_: state.update(old=old))
    else:
        run.model.old = old
    with pytest.raises(UnlearningError):
        tune(run, epochs=0)


# --- the data


def test_the_whole_training_set_is_refused_by_name():
    run = forget()
    data = make_data()
    data.ids = ["f2", *data.ids[1:]]
    with pytest.raises(InputError, match="holds 'f2', which is forgotten"):
        tune(run, data)
    with pytest.raises(InputError, match="holds 'f2', which is forgotten"):
        fine_tune_many([run], data, seeds=[0], epochs=1, learning_rate=0.1)
    with pytest.raises(InputError, match="number of retain_ids is 3; it must be 24"):
        tune(run, ids=["a", "b", "c"])
    run = forget(forget_ids=["Zoe\u0301"])
    with pytest.raises(InputError, match="which is forgotten"):
        tune(run, ids=["Zo\u00e9", *[f"r{i}" for i in range(23)]])


def test_what_was_not_checked_says_so():
    assert tune(forget()).record.finetune.checked
    assert tune(forget()).forgotten == {"f1", "f2"}
    assert not tune(forget(), make_data(ids=False)).record.finetune.checked
    assert not tune(forget(forget_ids=None)).record.finetune.checked
    unknown = copy.copy(forget())
    object.__setattr__(unknown, "forgotten", None)
    with pytest.raises(InputError, match="not the set that the record commits to"):
        tune(unknown, forget_ids=["nobody"])
    assert tune(unknown, forget_ids=["f2", "f1"]).record.finetune.checked
    certificate = certify(tune(forget(), make_data(ids=False)).record, delta=1e-5)
    assert not certificate.releasable


class Writing(nn.Module):
    """A forward pass that writes into its input, and a loss that writes into the target."""

    def __init__(self):
        super().__init__()
        self.inner = make_mlp()

    def forward(self, x):
        output = self.inner(x.clone())
        x.fill_(7.0)
        return output


def write_target(output, target):
    loss = LOSS(output, target.clone())
    target.fill_(0)
    return loss


@pytest.mark.parametrize("kind", ["in memory", "ordered", "batches", "loader"])
def test_a_forward_pass_cannot_write_into_the_data(kind):
    data = make_data()
    inputs, targets = data.inputs.clone(), data.targets.clone()
    held = (data.inputs, data.targets)
    given = {
        "in memory": data,
        "ordered": Batches(*held, batch_size=24),
        "batches": [held],
        "loader": DataLoader(TensorDataset(*held), batch_size=8),
    }[kind]
    train(Writing(), given, epochs=2, learning_rate=0.1, loss_fn=write_target)
    measure(Writing(), given, write_target)
    evaluate(Writing(), *held, loss_fn=write_target)
    assert torch.equal(data.inputs, inputs)
    assert torch.equal(data.targets, targets)


class WritingArrays(Writing):
    """A forward pass that writes into whatever it is given."""

    def forward(self, x, extra):
        output = self.inner(torch.from_numpy(x["x"]).clone())
        x["x"][:] = 7.0
        extra.rows.append(float(output.detach().sum()))
        return output


def test_a_forward_pass_cannot_write_into_arrays_and_objects_of_the_data():
    data, extra = make_data(), SimpleNamespace(rows=[])
    array = data.inputs.numpy().copy()
    batches = [({"x": array}, extra, data.targets)]
    train(WritingArrays(), batches, epochs=2, learning_rate=0.1)
    assert np.array_equal(array, make_data().inputs.numpy())
    assert extra.rows == []


# --- the loss and the optimizer


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = make_mlp()

    def forward(self, output, target):
        return LOSS(output, target)


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held

    def loss(self, output, target):
        return LOSS(output, target)


def hold(teacher):
    return lambda output, target: LOSS(output, target) + 0 * len(teacher)


def default(output, target, weights=(torch.ones(3),)):  # noqa: B008
    return LOSS(output, target)


OLD = {"deep": [make_mlp()]}


def read_global(output, target):
    return LOSS(output, target) + 0 * len(OLD)


HOLDING = {
    "module": Teacher(),
    "class weights": nn.CrossEntropyLoss(weight=torch.ones(3)),
    "partial": functools.partial(LOSS, weight=torch.ones(3)),
    "closure": hold(make_mlp()),
    "closure of a closure": hold([hold(torch.ones(3))]),
    "bound method": Slotted({"a": np.ones(3)}).loss,
    "bound method of a module": make_mlp().forward,
    "default": default,
    "global": read_global,
    "class attribute": type("Loss", (), {"old": torch.ones(3), "__call__": read_global})(),
}


@pytest.mark.parametrize("loss_fn", HOLDING.values(), ids=HOLDING.keys())
def test_a_loss_that_holds_a_tensor_is_refused(loss_fn):
    run = forget()
    with pytest.raises(InputError, match=r"the loss holds an? (tensor|array)"):
        tune(run, loss_fn=loss_fn)
    with pytest.raises(InputError, match=r"the loss holds an? (tensor|array)"):
        fine_tune_many([run], make_data(), seeds=[0], epochs=1, learning_rate=0.1, loss_fn=loss_fn)


def test_a_loss_of_numbers_passes():
    for loss_fn in (nn.CrossEntropyLoss(), functools.partial(LOSS, label_smoothing=0.1),
                    hold([0.3, 0.7]), Slotted("x").loss, write_target, None):  # fmt: skip
        check_loss(loss_fn)


def preload(parameters, fill):
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for p in parameters:
        optimizer.state[p]["momentum_buffer"] = fill(p)
    return optimizer


class Pulling(torch.optim.SGD):
    """Steps towards weights it remembers."""

    def __init__(self, parameters, old):
        super().__init__(parameters, 0.1)
        self.old = old


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (lambda ps: preload(ps, torch.randn_like), "an earlier training"),
        (lambda ps: preload(ps, lambda p: torch.full_like(p, 100.0)), "an earlier training"),
        (lambda ps: Pulling(ps, [p.detach().clone() for p in ps]), "an earlier training"),
        (lambda ps: torch.optim.SGD(ps[1:], 0.1), "other parameters"),
        (lambda ps: torch.optim.SGD([*ps, nn.Parameter(torch.ones(3))], 0.1), "other parameters"),
        (lambda ps: "SGD", "a torch optimizer"),
    ],
)
def test_an_optimizer_that_remembers_is_refused(optimizer, sentence):
    with pytest.raises(InputError, match=sentence):
        tune(forget(), optimizer=optimizer)


@pytest.mark.parametrize("kind", ["Adagrad", "Adam", "RMSprop", "Rprop", "NAdam", "LBFGS"])
def test_fresh_optimizers_pass(kind):
    model = make_mlp()
    parameters = list(model.parameters())
    check_optimizer(getattr(torch.optim, kind)(parameters), parameters)


def test_the_moments_of_the_training_do_not_come_back():
    model = make_mlp()
    adam = torch.optim.Adam(model.parameters())
    model(make_data().inputs).sum().backward()
    adam.step()

    def resume(parameters):
        optimizer = torch.optim.Adam(parameters)
        optimizer.load_state_dict(adam.state_dict())
        return optimizer

    with pytest.raises(InputError, match="an earlier training"):
        tune(forget(model), optimizer=resume)


# --- randomness


@pytest.mark.parametrize("kind", ["in memory", "generator", "global"])
def test_fine_tuning_draws_from_its_seed_and_nothing_else(kind):
    """What an earlier training left in any generator changes nothing."""
    held = TensorDataset(make_data().inputs, make_data().targets)

    def draw(output, target):
        noise = random.random() + np.random.rand() + float(torch.rand(1))  # noqa: NPY002
        return LOSS(output * (1 + 0.1 * noise), target)

    runs = []
    for used in (0, 1000):
        torch.manual_seed(used)
        np.random.seed(used)  # noqa: NPY002
        random.seed(used)
        generator = torch.Generator().manual_seed(used)
        data = {
            "in memory": make_data(),
            "generator": Batches(*held.tensors, batch_size=8, generator=generator),
            "global": DataLoader(held, batch_size=8, shuffle=True),
        }[kind]
        run = forget(make_mlp(dropout=0.5), loss_fn=LOSS)
        runs.append([tune(run, data, loss_fn=draw, seed=s).model for s in (5, 5, 6)])
    assert equal(runs[0][0], runs[1][0])
    assert equal(runs[0][0], runs[0][1])
    assert not equal(runs[0][0], runs[0][2])


GENERATORS = {
    "numpy": (np.random.default_rng, lambda g: g.normal()),
    "numpy's others": (lambda s: np.random.Generator(np.random.Philox(s)), lambda g: g.normal()),
    "numpy's old": (np.random.RandomState, lambda g: g.randn()),
    "python": (random.Random, lambda g: g.gauss(0, 1)),
    "torch": (
        lambda s: torch.Generator().manual_seed(s),
        lambda g: torch.randn((), generator=g).item(),
    ),
}


class Augmented(Dataset):
    """Draws from a generator that the original training has used."""

    def __init__(self, transform):
        self.transforms, self.seen = [("first", transform)], []

    def __len__(self):
        return 8

    def __getitem__(self, i):
        self.seen.append(self.transforms[0][1]())
        return torch.full((6,), float(self.seen[-1])), i % 3


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("nested", [False, True])
def test_what_a_training_left_in_a_generator_of_the_data_set_is_not_drawn(kind, nested):
    make, draw = GENERATORS[kind]
    drawn = []
    for used in (0, 7):
        generator = make(0)
        for _ in range(used):
            draw(generator)
        after = draw(copy.deepcopy(generator)) if kind != "torch" else None
        held = Augmented(
            functools.partial(draw, generator) if nested else lambda g=generator: draw(g)
        )
        data = ConcatDataset([Subset(held, range(8))]) if nested else held
        with seeded_random(5, DataLoader(data, batch_size=4)):
            list(DataLoader(data, batch_size=4))
        drawn.append(held.seen[:8])
        assert after in (None, draw(generator)), "its state is put back"
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 8
    run, tuned = forget(), []
    for used in (0, 3):
        generator = make(used)
        loader = DataLoader(Augmented(lambda g=generator: draw(g)), batch_size=4)
        tuned.append(tune(run, loader).model)
    assert equal(*tuned)


# --- what is never returned


def test_a_model_that_left_the_numbers_is_no_release():
    run = forget()
    with pytest.raises(UnlearningError, match=r"diverged at batch \d of epoch \d"):
        tune(run, learning_rate=1e30, epochs=3)
    data = make_data()
    data.inputs[17] = torch.nan
    for epochs in (1, 1.5, 2):
        with pytest.raises(UnlearningError, match="batch 3 of epoch 1 holds a number"):
            tune(run, Batches(data.inputs, data.targets, batch_size=8), epochs=epochs)
    with pytest.raises(UnlearningError, match="diverged at batch"):
        fine_tune_many([run], make_data(), seeds=[0], epochs=3, learning_rate=1e30)


def test_a_run_is_tuned_once():
    tuned = tune(forget())
    with pytest.raises(InputError, match="fine-tuned already"):
        tune(tuned)
