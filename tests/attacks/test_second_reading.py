"""What a second reading of retraining, cached features, fresh starts and resuming tried."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import expunge
from expunge import SeededNoise
from expunge.certificates.verification import find_differences
from expunge.errors import InputError, UnlearningError
from expunge.processes.adapters import describe_adapter
from expunge.tasks.samples import Samples, number_ids
from expunge.training.holding import find_held
from expunge.training.randomness import choose_generators
from expunge.training.resuming import Keeper
from expunge.training.shares import Shares
from tests.attacks.test_exact_routes import edit
from tests.helpers.handmade import make_run

X = torch.arange(32.0).view(8, 4)
Y = torch.arange(8) % 3
IDS = [f"p{i}" for i in range(8)]
GONE, KEPT = IDS[:4], [4, 5, 6, 7]
RECIPE = expunge.GradientClipping(
    start_clip=1.0, grad_clip=1.0, learning_rate=0.1, weight_decay=1.0, steps=4, noise_std=5.0
)
OPTIONS: dict[str, Any] = {"epochs": 2, "learning_rate": 0.01}


class Watched(nn.Linear):
    """It tells the first number of every row that it was given."""

    seen: list[float]

    def forward(self, input: Tensor) -> Tensor:
        Watched.seen += input.detach()[:, 0].tolist()
        return super().forward(input)


def watch() -> Watched:
    Watched.seen = []
    return Watched(4, 3)


FORGOTTEN = {0.0, 4.0, 8.0, 12.0}


# --- forgotten rows that a loader leaves out, and something reads all the same


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x, self.y, self.ids = X, Y, IDS

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


@pytest.mark.parametrize("way", ["retrain", "fine_tune", "unlearn"])
def test_workers_that_live_on_hold_the_rows_of_before(way: str) -> None:
    """They were started before the request, with a copy of the data set as it was then."""
    rows = Rows()
    loader: Any = DataLoader(rows, batch_size=2, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 4
    rows.x, rows.y, rows.ids = X[KEPT], Y[KEPT], [IDS[i] for i in KEPT]
    model = watch()
    if way == "retrain":
        run = expunge.retrain(model, loader, forget_ids=GONE, **OPTIONS)
    elif way == "unlearn":
        run = expunge.unlearn(model, loader, RECIPE, loss_fn=cross_entropy, forget_ids=GONE)
    else:
        kept = expunge.Batches(X[KEPT], Y[KEPT], batch_size=2, ids=rows.ids)
        noisy = expunge.unlearn(model, kept, RECIPE, loss_fn=cross_entropy, forget_ids=GONE)
        Watched.seen.clear()
        run = expunge.fine_tune(noisy, loader, **OPTIONS)
    assert run.record.checked
    assert set(Watched.seen) == {16.0, 20.0, 24.0, 28.0}
    assert loader._iterator is None, "nor do workers with this run's seeds live on"


def leave_out(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    return ((x, y) for x, y in batches if float(x[0, 0]) >= 16)


class Skips(DataLoader[Any]):
    def __iter__(self) -> Any:
        return leave_out(super().__iter__())


class SkipsInMemory(expunge.Batches):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return leave_out(super().__iter__())


class OwnLoop:
    """It has all rows, and gives some."""

    inputs, targets, batch_size = X, Y, 2

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(X[4:6], Y[4:6]), (X[6:], Y[6:])])


TABLE = TensorDataset(X, Y)
PARTIAL: dict[str, Callable[[], Any]] = {
    "a sampler": lambda: DataLoader(TABLE, batch_size=2, sampler=SubsetRandomSampler(KEPT)),
    "a batch sampler": lambda: DataLoader(TABLE, batch_sampler=[[4, 5], [6, 7]]),
    "a sampler of other data": lambda: DataLoader(
        TABLE, batch_size=2, sampler=RandomSampler(range(4, 8))
    ),
    "a loader's own loop": lambda: Skips(TABLE, batch_size=4),
    "the own loop of batches in memory": lambda: SkipsInMemory(X, Y, batch_size=4),
}


@pytest.mark.parametrize("kind", PARTIAL)
def test_features_are_not_computed_of_rows_that_the_loader_leaves_out(kind: str) -> None:
    first = watch().requires_grad_(False).eval()
    model = nn.Sequential(first, nn.Linear(3, 3))
    public = {f"0.{name}": tensor.clone() for name, tensor in first.state_dict().items()}
    with pytest.raises(InputError, match="gives every sample of its data set"):
        expunge.retrain(model, PARTIAL[kind](), features="0", public=public, **OPTIONS)
    assert not FORGOTTEN.intersection(Watched.seen)


def test_a_loop_of_its_own_is_what_trains() -> None:
    """All rows were in reach as ``inputs``, and were taken instead of what the loop gives."""
    model: Any = watch()
    expunge.retrain(model, OwnLoop(), **OPTIONS)
    run = expunge.unlearn(model, OwnLoop(), RECIPE, loss_fn=cross_entropy)
    expunge.fine_tune(run, OwnLoop(), **OPTIONS)
    assert set(Watched.seen) == {16.0, 20.0, 24.0, 28.0}


class Two:
    """One of two processes."""

    rank, size, alone, leads = 0, 2, False, True


def test_a_loop_of_its_own_is_what_processes_share() -> None:
    shares = Shares(Skips(TABLE, batch_size=4), Two(), even=False)  # pyright: ignore[reportArgumentType]
    rows = [float(share.batch[0][0, 0]) for share in shares if share.count]
    assert rows
    assert not FORGOTTEN.intersection(rows)


# --- what an earlier training left in a generator


class Drawing:
    """An augmentation, preparation or loss with a generator of its own."""

    def __init__(self, left: int) -> None:
        self.random = random.Random(left)

    def __call__(self, x: Tensor, y: Any = None) -> Tensor:
        drawn = x * (1 + self.random.random())
        return cross_entropy(drawn, y) if isinstance(y, Tensor) else drawn


class DrawingSteps(torch.optim.SGD):
    def __init__(self, parameters: Any, left: int) -> None:
        super().__init__(parameters, 0.1)
        self.random = random.Random(left)

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] *= 1 + self.random.random()
        return super().step(closure)


IN_MEMORY = Samples(X, Y, number_ids("p", np.arange(8)))
DRAWN: dict[str, Callable[[int], dict[str, Any]]] = {
    "augment": lambda left: {"augment": Drawing(left)},
    "prepare": lambda left: {"prepare": Drawing(left)},
    "loss_fn": lambda left: {"loss_fn": Drawing(left)},
}


@pytest.mark.parametrize("kind", DRAWN)
def test_generators_of_options_are_not_what_training_left(kind: str) -> None:
    old = nn.Linear(4, 3)
    hashes = {
        expunge.retrain(old, IN_MEMORY, **DRAWN[kind](left), **OPTIONS).record.weights_after
        for left in (1, 2)
    }
    run = expunge.unlearn(old, [(X, Y)], RECIPE, loss_fn=cross_entropy)
    tuned = {
        expunge.fine_tune(run, IN_MEMORY, **DRAWN[kind](left), **OPTIONS).record.weights_after
        for left in (1, 2)
    }
    assert (len(hashes), len(tuned)) == (1, 1)


def test_a_generator_of_the_loss_does_not_steer_noisy_steps() -> None:
    old = nn.Linear(4, 3)
    hashes = {
        expunge.unlearn(
            old, [(X, Y)], RECIPE, loss_fn=Drawing(left), noise=SeededNoise(3)
        ).record.weights_after
        for left in (1, 2)
    }
    assert len(hashes) == 1


def test_a_generator_that_an_optimizer_is_made_with() -> None:
    old, hashes = nn.Linear(4, 3), set[str]()
    for left in (1, 2):
        held = random.Random(left)

        def make(parameters: Any, held: random.Random = held) -> torch.optim.Optimizer:
            return DrawingSteps(parameters, held.getrandbits(32))

        run = expunge.retrain(old, IN_MEMORY, optimizer=make, **OPTIONS)
        hashes.add(run.record.weights_after)
    assert len(hashes) == 1


class DrawingModel(nn.Linear):
    def __init__(self, held: Any) -> None:
        super().__init__(4, 3)
        self.held = held

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 + float(self.held.random()))


@pytest.mark.parametrize("held", [random.Random(1), [random.Random(1)], np.random.default_rng(1)])
def test_a_generator_of_the_model_is_refused(held: Any) -> None:
    """It draws the same at every noisy step: whatever the original training left."""
    for route in (
        lambda: expunge.retrain(DrawingModel(held), IN_MEMORY, **OPTIONS),
        lambda: expunge.unlearn(DrawingModel(held), [(X, Y)], RECIPE, loss_fn=cross_entropy),
    ):
        with pytest.raises(UnlearningError, match=r"the model holds a (random.Random|tensor)"):
            route()


class Transform:
    def __init__(self) -> None:
        self.drawn = np.random.default_rng(0)


class ManyRows(list[tuple[str, int]]):
    def __init__(self, count: int) -> None:
        super().__init__((f"file-{i}", i) for i in range(count))
        self.files = [(f"file-{i}", i) for i in range(count)]
        self.transform = Transform()


def test_a_generator_behind_a_great_many_samples_is_found() -> None:
    """Nobody looks at more objects than there are limits for; samples are looked at last."""
    loader: Any = DataLoader(ManyRows(250_000))  # pyright: ignore[reportArgumentType]
    assert len(choose_generators(find_held(loader))) == 1


# --- a stopped run of other data


def stop(done: int, model: Any = None) -> None:
    if done == 2:
        raise KeyboardInterrupt


OTHERS: dict[str, tuple[Any, ...]] = {
    "parts of a data set": tuple(
        DataLoader(Subset(TABLE, part), batch_size=2) for part in (range(4), range(4, 8))
    ),
    "samplers": tuple(
        DataLoader(TABLE, batch_size=2, sampler=SubsetRandomSampler(part))
        for part in (range(4), range(4, 8))
    ),
    "loops of their own": (Skips(TABLE, batch_size=4), Skips(TABLE, batch_size=4)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_state_of_other_data_is_not_gone_on_from(tmp_path: Path, kind: str) -> None:
    """Without identifiers nothing told two sets of rows of the same size apart."""
    first, second = OTHERS[kind]
    file, old = tmp_path / "state.safetensors", nn.Linear(4, 3)
    checkpoint = expunge.Checkpoint(file, resume=True)
    for data in (first, second):
        with pytest.raises(InputError, match="retain_ids is None; it must be given with a check"):
            expunge.retrain(old, data, keeper=Keeper(file, {}, 0), on_step=stop, **OPTIONS)
        with pytest.raises(InputError, match="retain_ids is None; it must be given with a check"):
            expunge.unlearn(old, data, RECIPE, loss_fn=cross_entropy, checkpoint=checkpoint)
    assert not file.exists()


def test_with_identifiers_the_state_is_of_those_people(tmp_path: Path) -> None:
    old, (first, second) = nn.Linear(4, 3), OTHERS["parts of a data set"]
    file = tmp_path / "state.safetensors"
    given: dict[str, Any] = OPTIONS | {"keeper": Keeper(file, {}, 0)}
    with pytest.raises(KeyboardInterrupt):
        expunge.retrain(old, first, retain_ids=IDS[:4], on_step=stop, **given)
    with pytest.raises(InputError, match="belongs to another training: its with people is"):
        expunge.retrain(old, second, retain_ids=IDS[4:], **given)
    assert expunge.retrain(old, first, retain_ids=IDS[:4], **given).record.resumed == 1


def test_a_state_of_another_start_is_not_gone_on_from(tmp_path: Path) -> None:
    """The same data, people and options: only where the training began differs."""
    old, rows = nn.Linear(4, 3), expunge.Batches(X, Y, batch_size=2, ids=IDS)
    given: dict[str, Any] = OPTIONS | {"keeper": Keeper(tmp_path / "state.safetensors", {}, 0)}
    one, other = (expunge.GaussianInitialisation(std) for std in (0.1, 0.2))
    with pytest.raises(KeyboardInterrupt):
        expunge.retrain(old, rows, initialise=one, on_step=stop, **given)
    with pytest.raises(InputError, match="belongs to another training: its with start is"):
        expunge.retrain(old, rows, initialise=other, **given)
    assert expunge.retrain(old, rows, initialise=one, **given).record.resumed == 1


class Remembering(nn.Linear):
    """A public buffer into which the forward pass writes."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("memory", torch.zeros(4))

    def forward(self, input: Tensor) -> Tensor:
        self.get_buffer("memory").add_(input.detach().sum(0))
        return super().forward(input)


def test_a_public_buffer_that_retraining_writes_to_is_no_release() -> None:
    for public in (["memory"], {"memory": torch.zeros(4)}):
        with pytest.raises(UnlearningError, match="memory was declared public but changed during"):
            expunge.retrain(Remembering(), [(X, Y)], public=public, **OPTIONS)


# --- starts that are not fresh, in tensors too small to tell alone


class Gate(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain, self.kept = nn.Parameter(torch.randn(size)), [0.0] * size

    def reset_parameters(self) -> None:
        with torch.no_grad():
            drawn = torch.randn(len(self.gain))
            self.gain.copy_(
                torch.tensor(self.kept) * (1 + 0.05 * drawn) if any(self.kept) else drawn
            )

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : len(self.gain)] @ self.gain


class Gates(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList([Gate(size) for _ in range(20)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([gate(x) for gate in self.gates], 1)


@pytest.mark.parametrize("size", [3, 4])
def test_old_weights_in_many_small_tensors(size: int) -> None:
    """Each has too few numbers to show a correlation; together they have enough."""
    torch.manual_seed(0)
    model = Gates(size)
    expunge.retrain(model, [(X, Y)], epochs=1, learning_rate=0.0)
    expunge.unlearn(model, [(X, Y)], RECIPE, loss_fn=cross_entropy)
    for gate in model.gates:
        assert isinstance(gate, Gate)
        gate.kept = gate.gain.tolist()
    with pytest.raises(InputError, match="are the same, or alike, under another seed"):
        expunge.retrain(model, [(X, Y)], epochs=1, learning_rate=0.0)
    with pytest.raises(UnlearningError, match="do not follow from the seed"):
        expunge.unlearn(model, [(X, Y)], RECIPE, loss_fn=cross_entropy)


def test_frozen_weights_beside_trained_ones_are_put_back_after_a_reset() -> None:
    """A module's reset draws all of its parameters, and the copy that is reset shares frozen ones
    with the one that runs."""
    torch.manual_seed(0)
    first = nn.Linear(4, 8)
    model = nn.Sequential(first, nn.Linear(8, 3))
    first.weight.requires_grad_(False)
    public = {"0.weight": first.weight.detach().clone()}
    perturbed = expunge.OutputPerturbation(start_clip=1.0, noise_std=4.0)
    for recipe in (RECIPE, perturbed):
        run = expunge.unlearn(model, [(X, Y)], recipe, loss_fn=cross_entropy, public=public)
        assert torch.equal(run.model.get_parameter("0.weight"), public["0.weight"])
    again = expunge.retrain(model, [(X, Y)], public=public, **OPTIONS)
    assert torch.equal(again.model.get_parameter("0.weight"), public["0.weight"])
    assert torch.equal(first.weight, public["0.weight"])


def test_start_clip_and_decay_are_around_the_centre_of_an_initialisation() -> None:
    """The distances that the accountant is told are to the fresh point, not to zero."""
    torch.manual_seed(0)
    model = nn.Linear(200, 200)
    with torch.no_grad():
        model.weight.fill_(7.0)
    tiny = expunge.OutputPerturbation(start_clip=0.5, noise_std=1e-6)
    decayed = expunge.GradientClipping(
        start_clip=0.5, grad_clip=1e-6, learning_rate=0.1, weight_decay=9.999, steps=1,
        noise_std=1e-6,
    )  # fmt: skip
    given: dict[str, Any] = {"loss_fn": cross_entropy, "noise": SeededNoise(0)}

    def go(recipe: Any, **more: Any) -> Tensor:
        batch = [(torch.ones(4, 200), torch.arange(4))]
        model_after = expunge.unlearn(model, batch, recipe, **more, **given).model
        return model_after.get_parameter("weight").detach()

    centre = go(decayed, start="centre")
    assert 0.03 < float(centre.std()) < 0.05, "U(±1/√200): not zero"
    assert 0.45 < float((go(tiny) - centre).norm()) < 0.502
    assert float((go(decayed) - centre).norm()) < 1e-3


# --- a mask that training chose, in the configuration of an adapter


def test_ranks_that_training_chose_are_not_released_with_an_adapter() -> None:
    import peft

    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    config = peft.AdaLoraConfig(
        target_modules=["0"], init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2
    )
    model: Any = peft.get_peft_model(base, config)
    model.peft_config["default"].rank_pattern = {"0.lora_E": [True, False, True, False]}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    given: dict[str, Any] = {"loss_fn": cross_entropy, "public": frozen}
    run = expunge.unlearn(model, [(X, Y)], RECIPE, **given)
    assert run.record.origin is not None
    assert run.record.adapter is None
    assert describe_adapter(run.model, run.record.public) is None


# --- records and certificates of retraining that contradict themselves


def test_weights_that_nothing_trained_are_not_certified(tmp_path: Path) -> None:
    rows = expunge.Batches(X[KEPT], Y[KEPT], batch_size=2, ids=[IDS[i] for i in KEPT])
    record = expunge.retrain(nn.Linear(4, 3), rows, forget_ids=GONE, **OPTIONS).record
    assert record.finetune is not None
    idle = replace(record.finetune, steps=0, epochs=0.0)
    for changed in (replace(record, finetune=None), replace(record, finetune=idle)):
        with pytest.raises(UnlearningError, match="no step of training is recorded"):
            expunge.certify(changed, delta=1e-5)
    still = replace(record, finetune=idle, weights_after=record.weights_noisy)
    assert expunge.certify(still, delta=1e-5).epsilon == 0
    path, _ = make_run(tmp_path, expunge.Retraining())
    assert not find_differences(path)
    edit(path, lambda content: content["finetune"].update(steps=0))
    assert any("no step of training is recorded" in found for found in find_differences(path))


# --- shards: a generator that goes on from one constituent to the next


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_constituent_draws_nothing_that_another_left(deterministic: bool) -> None:
    """How often the first shard drew told the second one how many examples the first had."""

    people = [f"user-{i}" for i in range(24)]
    x, y = X.repeat(3, 1), Y.repeat(3)

    def learn(kept: list[int]) -> expunge.Shards:
        ensemble = expunge.Shards(
            lambda: nn.Linear(4, 3), shards=2, slices=1, seed="public", epochs=2, batch_size=2,
            learning_rate=0.01, augment=Drawing(1), deterministic=deterministic,
        )  # fmt: skip
        ensemble.learn((x[kept], y[kept]), ids=[people[i] for i in kept])
        return ensemble

    whole = learn(list(range(24)))
    first = [i for i in range(24) if 0 in whole.plan.assignment.find_touched([people[i]])]
    never = learn([i for i in range(24) if i not in first[:4]])
    run = whole.forget([people[i] for i in first[:4]])
    assert run.record.weights_after == never.release().record.weights_after


# --- other weights, and a person who is back, under a certificate that was made before


def test_weights_or_people_that_come_back_after_the_certificate(tmp_path: Path) -> None:
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    ids = [f"p{i}" for i in range(40)]
    head = expunge.StatisticsHead(expunge.Features(None), classes=3)
    head.learn((x, y), ids=ids)
    old = head.release()
    run = head.forget(ids[:4])
    certificate = expunge.certify(run.record, delta=1e-5)
    with pytest.warns(UserWarning, match="forgotten before, and learned again"):
        head.learn((x[:1], y[:1]), ids=ids[:1])
    back = head.release()
    for other in (old, back):
        for record in (run.record, other.record):
            with pytest.raises(expunge.ExpungeError, match="not the weights the certificate"):
                expunge.write_run(
                    tmp_path / "run", model=other.model, record=record, certificate=certificate
                )
    assert not (tmp_path / "run").exists()
    assert expunge.certify(back.record, delta=1e-5, parent=certificate).data.forget is None


def test_the_old_weights_put_into_the_module_after_the_certificate(tmp_path: Path) -> None:
    model, x, y = nn.Linear(6, 3), torch.randn(20, 6), torch.arange(20) % 3
    recipe = expunge.OutputPerturbation(start_clip=0.1, noise_std=1.0)
    batches = expunge.Batches(x, y, batch_size=5, ids=[f"p{i}" for i in range(20)])
    run = expunge.unlearn(
        model, batches, recipe, loss_fn=nn.functional.cross_entropy, forget_ids=["gone"]
    )
    certificate = expunge.certify(run.record, delta=1e-5)
    with torch.no_grad():
        run.model.weight.copy_(model.weight)
    with pytest.raises(expunge.ExpungeError, match="not the weights the certificate"):
        expunge.write_run(
            tmp_path / "run", model=run.model, record=run.record, certificate=certificate
        )
    assert not (tmp_path / "run").exists()
