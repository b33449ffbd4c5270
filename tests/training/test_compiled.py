"""Compiled losses against the uncompiled ones, seed for seed.

Most tests run what was captured operation by operation (the backend "aot_eager"), which needs no
C++ compiler and takes no time.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from augmentation import Augmentation
from expunge import train
from expunge.errors import InputError
from expunge.tasks.networks import dense_net
from expunge.tasks.samples import normalise
from expunge.training import compiled as compiling
from expunge.training.batches import Batches
from expunge.training.train import TrainingLog

pytestmark = pytest.mark.usefixtures("one_thread")
HAS_COMPILER = compiling.find_compiler() is not None
N, BATCH = 52, 8


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured, and run operation by operation."""

    def capture(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)

    monkeypatch.setattr(compiling, "find_compiler", lambda: "c++")
    monkeypatch.setattr(compiling, "make_compiled", capture)


def make_data(n: int = N) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return SimpleNamespace(inputs=inputs, targets=torch.randint(0, 3, (n,), generator=generator))


def make_images() -> SimpleNamespace:
    generator = torch.Generator().manual_seed(8)
    inputs = torch.randint(0, 256, (N, 2, 5, 5), generator=generator).to(torch.uint8)
    return SimpleNamespace(inputs=inputs, targets=torch.randint(0, 3, (N,), generator=generator))


def prepare(pixels: Tensor) -> Tensor:
    return normalise(pixels, (0.4, 0.5), (0.2, 0.3)).double()


def make_net(seed: int = 0) -> nn.Module:
    return dense_net((6, 4, 3), torch.Generator().manual_seed(seed)).double()


def make_image_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(3, 3)
        return nn.Sequential(*layers).double()


def run_both(model: nn.Module, data: object, **options: Any) -> tuple[TrainingLog, TrainingLog]:
    """Train two copies; checks that they end alike, and that no random state has moved."""
    given = {"epochs": 3, "learning_rate": 0.3, "batch_size": BATCH, "seed": 5} | options
    plain, other, before = copy.deepcopy(model), copy.deepcopy(model), torch.get_rng_state()
    expected = train(plain, data, compile=False, **given)  # pyright: ignore[reportArgumentType]
    found = train(other, data, compile=True, **given)  # pyright: ignore[reportArgumentType]
    assert torch.equal(before, torch.get_rng_state())
    moved = 0.0
    for start, a, b in zip(*map(list_tensors, (model, plain, other)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        moved += float((a - start).double().norm())
    assert moved > 1e-3
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert found.gradient_evaluations == expected.gradient_evaluations
    assert (found.steps, found.optimizer) == (expected.steps, expected.optimizer)
    return expected, found


def list_tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in model.state_dict().values()]


class Branching(nn.Module):
    """What it does depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_net()

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        return output if float(output.detach().sum()) > 0 else 2 * output


def make_normal() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()


def make_dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3)).double()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.8, "weight_decay": 0.05, "schedule": "one-cycle"},
        {"epochs": 2.4},
        {"batch_size": 26},
        {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.usefixtures("captured")
def test_compiled_training_is_the_plain_training(options: dict[str, Any]) -> None:
    expected, found = run_both(make_net(), make_data(), **options)
    assert (found.compiled, found.note, expected.compiled) == (True, "", False)


@pytest.mark.parametrize("make", [make_normal, make_dropping])
@pytest.mark.usefixtures("captured")
def test_statistics_and_dropout_are_the_same(make: Callable[[], nn.Module]) -> None:
    _, found = run_both(make(), make_data())
    assert found.compiled, found.note


@pytest.mark.usefixtures("captured")
def test_pixels_are_augmented_and_prepared_alike() -> None:
    options = {"prepare": prepare, "augment": Augmentation(padding=1), "momentum": 0.5}
    _, found = run_both(make_image_net(), make_images(), **options)
    assert found.compiled, found.note


@pytest.mark.usefixtures("captured")
def test_the_order_matters_so_that_equal_results_mean_equal_batches() -> None:
    models = [make_net(), make_net()]
    for seed, model in enumerate(models):
        train(model, make_data(), epochs=3, learning_rate=0.3, batch_size=BATCH, seed=seed)
    first, second = map(list_tensors, models)
    assert not torch.allclose(first[0], second[0], rtol=1e-3)


@pytest.mark.usefixtures("captured")
def test_frozen_parameters_stay_and_passes_are_told() -> None:
    model, told = make_net(), list[tuple[int, float]]()
    model[1].weight.requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    _, found = run_both(model, make_data(), on_pass=lambda k, loss: told.append((k, loss)))
    assert found.compiled
    assert [k for k, _ in told] == [1, 2, 3, 1, 2, 3]
    assert [loss for _, loss in told[3:]] == pytest.approx(list(found.losses))


class Different(Branching):
    """Another function when it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return (1.01 if torch.compiler.is_compiling() else 1.0) * self.inner(x)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Different, "compiled and uncompiled gradients differ"), (Branching, "data-dependent")],
)
@pytest.mark.usefixtures("captured")
def test_a_model_that_compiles_to_something_else_runs_as_it_is(
    make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.warns(RuntimeWarning, match=reason):
        _, found = run_both(make(), make_data(), weight_decay=0.1)
    assert not found.compiled


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_what_cannot_be_compiled_runs_as_it_is_and_says_why(
    monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    def fail_later(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        left = iter(range(calls))

        def compute(*args: Any) -> Any:
            if next(left, None) is None:
                raise RuntimeError("no kernel for this")
            return function(*args)

        return compute

    monkeypatch.setattr(compiling, "find_compiler", lambda: "c++")
    monkeypatch.setattr(compiling, "make_compiled", fail_later)
    with pytest.warns(RuntimeWarning, match="not compiled: RuntimeError: no kernel for this"):
        _, found = run_both(make_dropping(), make_data())
    assert not found.compiled


def test_without_a_compiler_the_run_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "find_compiler", lambda: None)
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler"):
        _, found = run_both(make_net(), make_data())
    assert not found.compiled


def test_the_compiler_is_the_one_that_torch_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-anywhere")
    assert compiling.find_compiler() is None
    monkeypatch.setenv("CXX", "python3")
    assert str(compiling.find_compiler()).endswith("python3")


@pytest.mark.usefixtures("captured")
def test_only_data_in_memory_with_a_loss_is_compiled() -> None:
    data = make_data()
    batches = [(data.inputs[:8], data.targets[:8]), (data.inputs[8:], data.targets[8:])]
    with pytest.warns(RuntimeWarning, match="the data is not in memory"):
        run_both(make_net(), batches)
    with pytest.warns(RuntimeWarning, match="no whole batch"):
        run_both(make_net(), data, batch_size=N + 1)


@pytest.mark.usefixtures("captured")
def test_short_runs_do_not_pay_and_long_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    log = train(make_net(), make_data(), epochs=3, learning_rate=0.1, batch_size=BATCH)
    assert not log.compiled
    assert log.note == "21 steps with 43 parameters do not pay for compiling"
    monkeypatch.setattr(compiling, "PAYS_AFTER", 6 * 43 * BATCH * 21 / 1e11)
    log = train(make_net(), make_data(), epochs=3, learning_rate=0.1, batch_size=BATCH)
    assert log.compiled


@pytest.mark.parametrize("value", ["yes", None, 1, 0, "inductor"])
def test_other_answers_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match="compile"):
        train(make_net(), make_data(), epochs=1, learning_rate=0.1, compile=value)


def test_small_differences_are_seen() -> None:
    new = torch.ones(100)
    assert compiling.is_close(new, new * (1 + 5e-4))
    assert not compiling.is_close(new, new * (1 + 2e-3))
    one = new.clone()
    one[3] = torch.nan
    assert not compiling.is_close(new, one)
    assert not compiling.is_close(one, new)
    assert compiling.is_close(one, one)


@pytest.mark.usefixtures("captured")
def test_a_bad_target_late_in_the_data_is_an_error_as_it_is_uncompiled() -> None:
    data = make_data()
    data.targets[-1] = 7
    batches = Batches(data.inputs, data.targets, batch_size=BATCH)
    with pytest.raises(IndexError, match="out of bounds"):
        train(make_net(), batches, epochs=1, learning_rate=0.1, compile=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:training is not compiled")
def test_losses_compiled_for_real() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) + 0.01 * output.square().mean()

    _, found = run_both(make_dropping(), make_data(), momentum=0.9, loss_fn=loss_fn)
    assert found.compiled or not HAS_COMPILER, found.note
