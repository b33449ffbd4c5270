"""Compiled steps and gradients against the uncompiled ones, seed for seed.

Most tests run what was captured operation by operation (the backend "aot_eager"), which needs no
C++ compiler and takes no time. Those that compile for real say on a machine without a compiler that
the run went uncompiled, and check that instead.
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
from expunge import GradientClipping, ModelClipping, SeededNoise, train, unlearn
from expunge.errors import InputError
from expunge.noisy import gradients
from expunge.tasks.networks import dense_net
from expunge.tasks.samples import normalise
from expunge.training import compiled as compiling
from expunge.training.batches import Batches
from expunge.training.compiled import CheckedCode
from expunge.training.train import TrainingLog

pytestmark = pytest.mark.usefixtures("one_thread")
MAKE = compiling.make_compiled
HAS_COMPILER = compiling.find_compiler() is not None
N, BATCH = 52, 8


@pytest.fixture(autouse=True)
def nothing_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test compares what it compiles, whatever others have compiled before."""
    for module in (compiling, gradients):
        monkeypatch.setattr(module, "_COMPARED", CheckedCode())


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured whole, run operation by operation, two steps at a time."""
    monkeypatch.setattr(compiling, "find_compiler", lambda: "c++")
    monkeypatch.setattr(compiling, "UNROLLED", 2)
    for module in (compiling, gradients):
        monkeypatch.setattr(module, "make_compiled", lambda function: MAKE(function, "aot_eager"))


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"momentum": 0.8, "weight_decay": 0.05, "schedule": "one-cycle"},
        {"epochs": 2.4},
        {"epochs": 0.5, "seed": 11},
        {"batch_size": 26},
    ],
    ids=str,
)
@pytest.mark.usefixtures("captured")
def test_compiled_training_is_the_plain_training(options: dict[str, Any]) -> None:
    expected, found = run_both(make_net(), make_data(), **options)
    assert (found.compiled, found.note, expected.compiled) == (True, "", False)


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
    assert [loss for _, loss in told[3:]] == list(found.losses)


@pytest.mark.usefixtures("captured")
def test_dropout_draws_the_same_numbers() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3)).double()
    _, found = run_both(model, make_data())
    assert found.compiled, found.note


class Counting(nn.Module):
    """Changes as it runs: its outputs shrink with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = make_net(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) / self.calls


class Branching(nn.Module):
    """Cannot be captured whole: what it does depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_net()

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        return output if float(output.detach().sum()) > 0 else 2 * output


class Unused(nn.Module):
    """One of its parameters has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle = make_net(), nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def add_hook(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.register_hook(lambda g: 0.5 * g)
    return model


def add_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Branching, ""),
        (add_batch_norm, ""),
        (Counting, ""),
        (Unused, "a parameter has no part in the loss"),
    ],
)
@pytest.mark.usefixtures("captured")
def test_what_cannot_be_compiled_runs_as_it_is_and_says_why(
    make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.warns(RuntimeWarning, match=f"training is not compiled: {reason}"):
        _, found = run_both(make(), make_data(), weight_decay=0.1)
    assert not found.compiled
    assert reason in found.note
    assert len(found.note) > 20


@pytest.mark.usefixtures("captured")
def test_hooks_keep_a_run_uncompiled() -> None:
    def run(compile: bool) -> tuple[list[Tensor], TrainingLog]:
        model = add_hook(make_net())
        log = train(model, make_data(), epochs=2, learning_rate=0.3, batch_size=8, compile=compile)
        return list_tensors(model), log

    expected, _ = run(compile=False)
    with pytest.warns(RuntimeWarning, match="a parameter has hooks"):
        found, log = run(compile=True)
    assert log.note == "a parameter has hooks"
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


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
def test_only_sgd_on_data_in_memory_with_a_loss_is_compiled() -> None:
    data = make_data()
    batches = [(data.inputs[:8], data.targets[:8]), (data.inputs[8:], data.targets[8:])]
    with pytest.warns(RuntimeWarning, match="the data is not in memory"):
        run_both(make_net(), batches)
    with pytest.warns(RuntimeWarning, match="only SGD is compiled"):
        run_both(make_net(), data, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    with pytest.warns(RuntimeWarning, match="no whole batch"):
        run_both(make_net(), data, batch_size=N + 1)
    model, loader = make_net(), Batches(data.inputs, data.targets, batch_size=BATCH)
    sgd = compiling.Sgd(list(model.parameters()), 0.1, 0.0, 0.0)
    assert compiling.plan_steps("auto", model, loader, sgd, None, 9) == (
        "the model computes its own loss"
    )


@pytest.mark.usefixtures("captured")
def test_a_compiled_model_is_not_compiled_again() -> None:
    model = nn.Sequential(torch.compile(make_net(), backend="eager"))  # pyright: ignore[reportArgumentType]
    batches = Batches(make_data().inputs, make_data().targets, batch_size=BATCH)
    assert compiling.find_obstacle(model, batches) == "the model is compiled already"


@pytest.mark.usefixtures("captured")
def test_short_runs_do_not_pay() -> None:
    log = train(make_net(), make_data(), epochs=3, learning_rate=0.1, batch_size=BATCH)
    assert not log.compiled
    assert log.note == "21 steps of about 0.2 ms do not pay for compiling"


@pytest.mark.usefixtures("captured")
def test_auto_compiles_what_takes_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "PAYS_AFTER", 21 * compiling.STEP_OVERHEAD)
    log = train(make_net(), make_data(), epochs=3, learning_rate=0.1, batch_size=BATCH)
    assert log.compiled


@pytest.mark.parametrize("value", ["yes", None, 1, 0, "inductor"])
def test_other_answers_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match="compile"):
        train(make_net(), make_data(), epochs=1, learning_rate=0.1, compile=value)
    with pytest.raises(InputError, match="compile"):
        forget(value)


@pytest.mark.parametrize("part", ["parameters", "losses"])
def test_a_wrong_compiled_step_is_caught(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def make_wrong(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def step(*args: Any) -> Tensor:
            point, before = args[2], [p.clone() for p in args[2]]
            losses = function(*args)
            if part == "losses":
                return 1.01 * losses
            point[0].add_(0.01 * (point[0] - before[0]))
            return losses

        return step

    monkeypatch.setattr(compiling, "find_compiler", lambda: "c++")
    monkeypatch.setattr(compiling, "make_compiled", make_wrong)
    with pytest.warns(RuntimeWarning, match="differ"):
        _, found = run_both(make_net(), make_data(), momentum=0.9)
    assert not found.compiled


def test_small_differences_are_seen() -> None:
    old, new = torch.zeros(100), torch.ones(100)
    assert compiling.is_close(old, new, new * (1 + 5e-4))
    assert not compiling.is_close(old, new, new * (1 + 2e-3))
    one = new.clone()
    one[3] = torch.nan
    assert not compiling.is_close(old, new, one)
    assert not compiling.is_close(old, one, new)
    assert compiling.is_close(old, one, one)


@pytest.mark.usefixtures("captured")
def test_a_bad_target_late_in_the_data_is_an_error_as_it_is_uncompiled() -> None:
    data = make_data()
    data.targets[-1] = 7
    batches = Batches(data.inputs, data.targets, batch_size=BATCH)
    with pytest.raises(IndexError, match="out of bounds"):
        train(make_net(), batches, epochs=1, learning_rate=0.1, compile=True)


def look(_: int, model: nn.Module) -> None:
    """Somebody looks after every step, so that steps are not compiled several as one."""


def forget(compile: Any, net: nn.Module | None = None, data: Any = None, **options: Any) -> Any:
    recipe = options.pop("recipe", None) or GradientClipping(
        start_clip=1.0, grad_clip=0.5, learning_rate=0.1, weight_decay=1.0, steps=9, noise_std=0.01
    )
    data = make_data() if data is None else data
    loader = data
    if isinstance(data, SimpleNamespace):
        generator = torch.Generator().manual_seed(2)
        loader = Batches(data.inputs, data.targets, batch_size=BATCH, generator=generator)
    options = {"loss_fn": cross_entropy, "noise": SeededNoise(4), "on_step": look} | options
    return unlearn(net or make_net().float(), loader, recipe, compile=compile, **options)


def make_single() -> SimpleNamespace:
    data = make_data()
    return SimpleNamespace(inputs=data.inputs.float(), targets=data.targets)


@pytest.mark.parametrize(
    "recipe",
    [
        None,
        ModelClipping(
            start_clip=1.0, model_clip=2.0, learning_rate=0.1, weight_decay=1.0, steps=9,
            noise_std=0.01,
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("captured")
def test_certified_runs_agree_and_have_exactly_the_same_noise(recipe: Any) -> None:
    expected = forget(False, data=make_single(), recipe=recipe)
    found = forget(True, data=make_single(), recipe=recipe)
    check_runs(expected, found)


def check_runs(expected: Any, found: Any) -> None:
    for a, b in zip(list_tensors(expected.model), list_tensors(found.model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    a, b = expected.record, found.record
    assert a.trace.noise_norm == b.trace.noise_norm
    assert min(a.trace.noise_norm) > 0
    assert a.trace.gradient_norm == pytest.approx(b.trace.gradient_norm, rel=1e-5)
    assert a.gradient_evaluations == b.gradient_evaluations
    assert (a.recipe, a.grid, a.execution) == (b.recipe, b.grid, b.execution)


def test_a_wrong_compiled_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def make_wrong(function: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any) -> Any:
            calls.append(1)
            found, loss = function(*args)
            return [1.01 * g for g in found], loss

        return compute

    monkeypatch.setattr(compiling, "find_compiler", lambda: "c++")
    monkeypatch.setattr(gradients, "make_compiled", make_wrong)
    expected, found = forget(False, data=make_single()), forget(True, data=make_single())
    assert len(calls) == 2
    assert expected.record.weights_after == found.record.weights_after


@pytest.mark.usefixtures("captured")
def test_gradients_are_compared_where_no_model_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model clipping needs steps that are functions of the present weights alone."""
    seen: list[list[Tensor]] = []
    compare = gradients.CompiledGradients._compare

    def watch(self: Any, *args: Any) -> bool:
        compute = self._compute
        point = list[Tensor]()
        self._compute = lambda batch: point.extend(p.clone() for p in self._point) or compute(batch)
        here = [p.clone() for p in self._point]
        agreed = compare(self, *args)
        assert all(map(torch.equal, here, self._point))
        self._compute = compute
        seen.append(point)
        return agreed

    monkeypatch.setattr(gradients.CompiledGradients, "_compare", watch)
    for seed in (0, 1):
        monkeypatch.setattr(gradients, "_COMPARED", CheckedCode())
        forget(True, net=make_net(seed).float(), data=make_single())
    assert len(seen) == 2
    assert all(map(torch.equal, *seen))
    assert float(seen[0][0].abs().sum()) > 0


@pytest.mark.usefixtures("captured")
def test_gradients_that_cannot_be_captured_are_computed_as_they_are() -> None:
    expected = forget(False, net=Branching().float(), data=make_single())
    found = forget(True, net=Branching().float(), data=make_single())
    assert expected.record.weights_after == found.record.weights_after


@pytest.mark.usefixtures("captured")
def test_gradients_are_not_compiled_without_need_or_loss() -> None:
    def compute(_: Any) -> list[Tensor]:
        return []

    model, names = make_net(), ["1.weight"]
    batches = Batches(make_data().inputs, make_data().targets, batch_size=BATCH)
    assert (
        gradients.plan_gradients("auto", model, names, batches, cross_entropy, 9, compute) is None
    )
    assert gradients.plan_gradients(False, model, names, batches, cross_entropy, 9, compute) is None
    with pytest.warns(RuntimeWarning, match="gradients are not compiled: the model computes its"):
        assert gradients.plan_gradients(True, model, names, batches, None, 9, compute) is None


@pytest.mark.slow
def test_training_compiled_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "UNROLLED", 2)
    options = {"momentum": 0.9, "weight_decay": 0.1, "schedule": "one-cycle", "epochs": 2.4}
    if HAS_COMPILER:
        _, found = run_both(make_net(), make_data(), **options)
        assert found.compiled, found.note
        return
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler"):
        run_both(make_net(), make_data(), **options)


@pytest.mark.slow
def test_gradients_compiled_for_real() -> None:
    data = make_single()
    if HAS_COMPILER:
        check_runs(forget(False, data=data), forget(True, data=data))
        return
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler"):
        forget(True, data=data)
