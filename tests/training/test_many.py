"""Runs that are trained together against the same runs one by one, seed for seed.

What is mapped is run operation by operation here, which needs no C++ compiler; one test compiles.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from augmentation import Augmentation
from expunge import train, train_many
from expunge.errors import InputError
from expunge.tasks.networks import dense_net
from expunge.tasks.samples import normalise
from expunge.training import compiled as compiling
from expunge.training import many as ensembles
from expunge.training.train import TrainingLog

pytestmark = pytest.mark.usefixtures("one_thread")
HAS_COMPILER = compiling.find_compiler() is not None
N, BATCH, RUNS = 44, 8, 3


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped and captured whole, run operation by operation."""
    monkeypatch.setattr(compiling, "find_compiler", lambda: "c++")

    def capture(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)

    for module in (compiling, ensembles):
        monkeypatch.setattr(module, "make_compiled", capture)


def make_data(seed: int = 7, n: int = N) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return SimpleNamespace(inputs=inputs, targets=torch.randint(0, 3, (n,), generator=generator))


def make_nets(make: Callable[[int], nn.Module] | None = None) -> list[nn.Module]:
    return [(make or make_net)(seed) for seed in range(RUNS)]


def make_net(seed: int) -> nn.Module:
    return dense_net((6, 4, 3), torch.Generator().manual_seed(seed)).double()


def pick(value: Any, run: int) -> Any:
    return value[run] if isinstance(value, list) else value


def run_both(models: list[nn.Module], data: Any, **options: Any) -> list[TrainingLog]:
    """Train copies together and one by one; checks that both end alike."""
    given = {"epochs": 2, "learning_rate": 0.3, "batch_size": BATCH} | options
    seeds = list(range(20, 20 + len(models)))
    together, single = copy.deepcopy(models), copy.deepcopy(models)
    before = torch.get_rng_state()
    logs = train_many(together, data, seeds=seeds, compile=True, **given)
    assert torch.equal(before, torch.get_rng_state())
    for run, model in enumerate(single):
        mine = {name: pick(value, run) for name, value in given.items()}
        log = train(model, pick(data, run), seed=seeds[run], compile=False, **mine)
        check_alike(models[run], model, together[run])
        assert logs[run].losses == pytest.approx(log.losses, rel=1e-9)
        for name in ("optimizer", "epochs", "steps", "learning_rate", "batch_size", "schedule"):
            assert getattr(logs[run], name) == getattr(log, name), name
        assert logs[run].gradient_evaluations == log.gradient_evaluations
    return logs


def check_alike(start: nn.Module, expected: nn.Module, found: nn.Module) -> None:
    moved = 0.0
    for s, a, b in zip(*(m.state_dict().values() for m in (start, expected, found)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        moved += float((a - s).double().norm())
    assert moved > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": [0.0, 0.1, 0.3], "schedule": "one-cycle"},
        {"learning_rate": [0.1, 0.2, 0.7], "epochs": 1.4},
        {"batch_size": 22, "epochs": 0.5},
        {"batch_size": N, "momentum": 0.5},
    ],
    ids=str,
)
@pytest.mark.usefixtures("captured")
def test_runs_together_are_the_runs_one_by_one(options: dict[str, Any]) -> None:
    logs = run_both(make_nets(), make_data(), **options)
    assert [log.compiled for log in logs] == [True] * RUNS
    assert {log.note for log in logs} == {"together with 2 others"}


@pytest.mark.usefixtures("captured")
def test_every_run_may_have_its_own_data() -> None:
    logs = run_both(make_nets(), [make_data(seed) for seed in range(RUNS)])
    assert all(log.compiled for log in logs)


@pytest.mark.usefixtures("captured")
def test_pixels_are_augmented_from_every_runs_own_seed() -> None:
    generator = torch.Generator().manual_seed(8)
    pixels = torch.randint(0, 256, (N, 1, 4, 4), generator=generator).to(torch.uint8)
    data = SimpleNamespace(inputs=pixels, targets=make_data().targets)

    def prepare(x: Tensor) -> Tensor:
        return normalise(x, (0.4,), (0.2,)).double()

    models = make_nets(lambda s: dense_net((16, 3), torch.Generator().manual_seed(s)).double())
    logs = run_both(models, data, prepare=prepare, augment=Augmentation(padding=1))
    assert all(log.compiled for log in logs), logs[0].note


@pytest.mark.usefixtures("captured")
def test_models_that_come_from_training_start_where_they_are() -> None:
    models = make_nets()
    for seed, model in enumerate(models):
        train(model, make_data(), epochs=1 + seed, learning_rate=0.5, batch_size=8, seed=seed)
    logs = run_both(models, make_data())
    assert all(log.compiled for log in logs)
    again = make_nets(lambda _: make_net(0))
    train_many(again, make_data(), seeds=[3, 3, 4], epochs=1, learning_rate=0.3, batch_size=BATCH)
    same, twin, other = ([p.detach() for p in model.parameters()] for model in again)
    assert all(torch.equal(a, b) for a, b in zip(same, twin, strict=True))
    assert not torch.allclose(same[0], other[0], rtol=1e-3)


def freeze_first(seed: int) -> nn.Module:
    """The same frozen layer for all."""
    model = make_net(seed)
    layer = model.get_submodule("1")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(0.3).requires_grad_(requires_grad=False)
    return model


@pytest.mark.usefixtures("captured")
def test_frozen_layers_that_all_share_stay() -> None:
    models = make_nets(freeze_first)
    assert all(log.compiled for log in run_both(models, make_data()))


def make_different(seed: int) -> nn.Module:
    return dense_net((6, 4 + seed, 3), torch.Generator().manual_seed(seed)).double()


def make_dropping(seed: int) -> nn.Module:
    return nn.Sequential(make_net(seed), nn.Dropout(0.3))


def make_normal(seed: int) -> nn.Module:
    return nn.Sequential(make_net(seed), nn.BatchNorm1d(3, dtype=torch.float64))


def freeze_apart(seed: int) -> nn.Module:
    model = make_net(seed)
    model.get_submodule("1").requires_grad_(requires_grad=False)
    return model


class Counting(nn.Module):
    """Changes as it runs: its outputs shrink with every call."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner, self.calls = make_net(seed), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) / self.calls


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_different, "the models are of different kinds"),
        (freeze_apart, "the models differ in what is not trained"),
        (make_dropping, ""),
        (make_normal, ""),
        (Counting, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:training is not compiled")
@pytest.mark.usefixtures("captured")
def test_what_cannot_be_mapped_runs_one_by_one_and_says_why(
    make: Callable[[int], nn.Module], reason: str
) -> None:
    logs = run_both(make_nets(make), make_data())
    for log in logs:
        assert log.note.startswith(f"not together: {reason}")
        assert len(log.note) > 30


def test_other_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "find_compiler", lambda: None)

    def note(models: list[nn.Module], data: Any, compile: Any = "auto", epochs: float = 1) -> str:
        seeds = range(len(models))
        logs = train_many(
            models, data, seeds=seeds, epochs=epochs, learning_rate=0.1, compile=compile
        )
        assert not any(log.compiled for log in logs)
        return logs[0].note.partition(". ")[0].removeprefix("not together: ").rstrip(".")

    data = make_data(n=200)
    assert note(make_nets(), data).startswith("there is no C++ compiler")
    assert note(make_nets(), data, compile=False).startswith("compile=False")
    assert note(make_nets()[:1], data) == "there is one run"
    assert note(make_nets(), data, epochs=0) == "there is no step"
    several = [make_data(0, 200), make_data(1, 200), make_data(2, 201)]
    assert note(make_nets(), several) == "the data sets are of different shapes"
    monkeypatch.setattr(compiling, "find_compiler", lambda: "c++")
    assert "do not pay for compiling" in note(make_nets(), data)
    monkeypatch.setattr(ensembles, "SHORT_STEP", 1e-9)
    assert note(make_nets(), data).endswith("parameters are as fast one by one")


def test_a_wrong_mapped_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_wrong(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
        def step(*args: Any) -> Any:
            losses = function(*args)
            if function.__name__ == "_take_step":
                args[2][0][1] += 0.01
            return losses

        return step

    monkeypatch.setattr(compiling, "find_compiler", lambda: "c++")
    monkeypatch.setattr(compiling, "make_compiled", make_wrong)
    monkeypatch.setattr(ensembles, "make_compiled", make_wrong)
    logs = run_both(make_nets(), make_data())
    assert logs[0].note == "not together: mapped and plain steps differ."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [1, 2]}, "number of seeds"),
        ({"learning_rate": [0.1, 0.2]}, "number of learning rates"),
        ({"weight_decay": [0.1]}, "number of weight decays"),
        ({"data": [make_data()]}, "number of data sets"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"epochs": float("nan")}, "epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"compile": "always"}, "compile"),
    ],
    ids=str,
)
def test_bad_values_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {"data": make_data(), "seeds": range(RUNS), "epochs": 1, "learning_rate": 0.1} | changes
    models = make_nets()
    with pytest.raises(InputError, match=message):
        train_many(models, given.pop("data"), **given)
    for model, fresh in zip(models, make_nets(), strict=True):
        for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(a, b)


def test_no_model_twice_and_none_at_all() -> None:
    model = make_net(0)
    with pytest.raises(InputError, match="same module twice"):
        train_many([model, model], make_data(), seeds=[0, 1], epochs=1, learning_rate=0.1)
    with pytest.raises(InputError, match="at least 1"):
        train_many([], make_data(), seeds=[], epochs=1, learning_rate=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:training is not compiled")
def test_runs_compiled_together_for_real() -> None:
    logs = run_both(make_nets(), make_data(), momentum=0.9, schedule="one-cycle")
    if HAS_COMPILER:
        assert all(log.compiled for log in logs), logs[0].note
    else:
        assert "no C++ compiler" in logs[0].note
