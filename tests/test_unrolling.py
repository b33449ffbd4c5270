"""Several certified steps compiled as one: the plain run seed for seed, and nothing believed.

What was captured is run operation by operation (the backend "aot_eager"), which takes no compiler
and no time; one test compiles for real.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge import (
    Batches,
    GradientClipping,
    ModelClipping,
    SeededNoise,
    compiling,
    gradients,
    stepping,
    unlearn,
    unrolling,
)
from expunge.checking import find_contradictions
from expunge.drawing import Drawing
from expunge.tasks.networks import dense_net

MAKE = compiling.make_compiled
N, BATCH, UNROLLED = 52, 8, 3
GRADIENT = GradientClipping(
    start_clip=1.0, grad_clip=0.5, learning_rate=0.1, weight_decay=1.0, steps=20, noise_std=0.01
)
MODEL = ModelClipping(
    start_clip=1.0, model_clip=0.8, learning_rate=0.1, weight_decay=1.0, steps=20, noise_std=0.01
)
LATER = GradientClipping(
    start_clip=1.0,
    start_noise_std=0.02,
    grad_clip=0.05,
    learning_rate=tuple(np.linspace(0.1, 0.01, 20)),
    weight_decay=1.0,
    steps=20,
    noise_std=(*[0.01] * 7, *[0.0] * 5, *[0.02] * 8),
)


@pytest.fixture(autouse=True)
def plain_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Spy:
    """Counts the steps that were proposed, and those that were taken one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proposed, self.single, self.notes = list[int](), list[int](), list[str]()
        propose, step = unrolling.UnrolledSteps._propose, stepping.Loop._step

        def count_proposals(steps: Any, *args: Any) -> Any:
            found = propose(steps, *args)
            self.proposed.append(len(found))
            self.notes.append(steps.note)
            return found

        def count_single(loop: Any, taken: Any, update: Any) -> None:
            self.single.append(update.number)
            step(loop, taken, update)

        monkeypatch.setattr(unrolling.UnrolledSteps, "_propose", count_proposals)
        monkeypatch.setattr(stepping.Loop, "_step", count_single)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Captured whole, run operation by operation, three steps at a time."""
    monkeypatch.setattr(unrolling, "UNROLLED", UNROLLED)
    for module in (unrolling, gradients):
        monkeypatch.setattr(module, "make_compiled", lambda function: MAKE(function, "aot_eager"))
        monkeypatch.setattr(module, "find_obstacle", lambda *_: "")
    return Spy(monkeypatch)


def make_net(*more: nn.Module) -> nn.Module:
    net = dense_net((6, 4, 3), torch.Generator().manual_seed(0))
    return nn.Sequential(net, *more) if more else net


def make_data(n: int = N) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(n, 6, generator=generator)
    targets = torch.randint(0, 3, (n,), generator=generator)
    return SimpleNamespace(inputs=inputs, targets=targets, how=SimpleNamespace())


def shift(pixels: Tensor, generator: torch.Generator) -> Tensor:
    return pixels + torch.randint(0, 9, (len(pixels), 1), generator=generator).to(torch.uint8)


def test_pixels_are_augmented_and_prepared_alike(captured: Spy) -> None:
    data = make_data()
    data.inputs = (data.inputs * 40 + 120).to(torch.uint8)
    data.how = SimpleNamespace(augment=shift, prepare=lambda x: (x.float() - 120) / 40)
    found = forget(True, GRADIENT, data=data)
    assert captured.proposed == [UNROLLED] * 6, captured.notes
    check_runs(forget(False, GRADIENT, data=data), found)
    data.how = SimpleNamespace(prepare=data.how.prepare)
    other = forget(True, GRADIENT, data=data)
    assert other.record.trace.gradient_norm != found.record.trace.gradient_norm


def forget(compile: Any, recipe: Any, net: nn.Module | None = None, **options: Any) -> Any:
    data = options.pop("data", None) or make_data()
    generator = torch.Generator().manual_seed(2)
    loader = Batches(
        data.inputs, data.targets, batch_size=BATCH, generator=generator, **vars(data.how)
    )
    options = {"loss_fn": cross_entropy, "noise": SeededNoise(4)} | options
    torch.manual_seed(11)
    return unlearn(net or make_net(), loader, recipe, compile=compile, **options)


def check_runs(expected: Any, found: Any) -> None:
    pairs = zip(expected.model.parameters(), found.model.parameters(), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    a, b = expected.record, found.record
    assert a.trace.noise_norm == b.trace.noise_norm
    assert a.trace.gradient_norm == pytest.approx(b.trace.gradient_norm, rel=1e-4)
    assert a.trace.clip_factor == pytest.approx(b.trace.clip_factor, rel=1e-4)
    assert a.trace.model_norm == pytest.approx(b.trace.model_norm, rel=1e-5)
    assert a.trace.nonfinite == b.trace.nonfinite
    assert a.gradient_evaluations == b.gradient_evaluations
    assert (a.recipe, a.grid, a.execution) == (b.recipe, b.grid, b.execution)


@pytest.mark.parametrize("recipe", [GRADIENT, MODEL, LATER], ids=["gradient", "model", "schedules"])
@pytest.mark.parametrize("centred", [False, True])
def test_unrolled_runs_are_the_plain_runs(captured: Spy, recipe: Any, centred: bool) -> None:
    centre = {k: 0.1 * v for k, v in make_net().state_dict().items()} if centred else None
    found = forget(True, recipe, centre=centre)
    # 52 examples are six batches of 8 and one of 4, which is a step by itself.
    assert captured.proposed == [UNROLLED] * 6, captured.notes
    assert captured.single == [7, 14]
    check_runs(forget(False, recipe, centre=centre), found)
    assert min(found.record.trace.clip_factor) < 1 or recipe is MODEL
    assert list(find_contradictions(found.record)) == []


def test_dropout_draws_the_same_numbers(captured: Spy) -> None:
    expected = forget(False, GRADIENT, make_net(nn.Dropout(0.5)))
    found = forget(True, GRADIENT, make_net(nn.Dropout(0.5)))
    assert captured.proposed == [UNROLLED] * 6, captured.notes
    check_runs(expected, found)
    other = forget(True, GRADIENT, make_net())
    assert other.record.trace.gradient_norm != found.record.trace.gradient_norm


def change_proposals(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], list[Any]]
) -> None:
    call = unrolling.UnrolledSteps._call
    monkeypatch.setattr(unrolling.UnrolledSteps, "_call", lambda *args: change(call(*args)))


def test_gradients_at_other_points_are_not_used(
    captured: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cell in one coordinate: the gradients after it were taken elsewhere."""

    def move(proposals: list[Any]) -> list[Any]:
        first, *rest = proposals
        cells = first.cells.clone()
        cells[5] += 1
        broken = [replace(p, gradient=torch.full_like(p.gradient, 9.0)) for p in rest]
        return [replace(first, cells=cells), *broken]

    change_proposals(monkeypatch, move)
    found = forget(True, GRADIENT)
    assert captured.single == [n for n in range(1, 21) if n not in (1, 4, 8, 11, 15, 18)]
    check_runs(forget(False, GRADIENT), found)


@pytest.mark.parametrize("factor", [50.0, -1.0, float("nan"), float("inf")])
def test_no_factor_is_believed_that_clips_too_little(
    captured: Spy, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    change_proposals(
        monkeypatch, lambda found: [replace(p, clip=factor, shrink=factor) for p in found]
    )
    for recipe in (LATER, MODEL):
        run = forget(True, recipe)
        check_runs(forget(False, recipe), run)
        trace = run.record.trace
        bound = recipe.grad_clip if isinstance(recipe, GradientClipping) else np.inf
        radius = recipe.model_clip if isinstance(recipe, ModelClipping) else np.inf
        assert max(np.multiply(trace.gradient_norm, trace.clip_factor)) <= bound
        assert max(trace.model_norm) <= radius
    assert UNROLLED in captured.proposed


@pytest.mark.parametrize("place", [0, 1])
def test_wrong_gradients_are_caught_and_the_run_is_the_plain_one(
    captured: Spy, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    def spoil(found: list[Any]) -> list[Any]:
        found[place] = replace(found[place], gradient=1.01 * found[place].gradient)
        return found

    change_proposals(monkeypatch, spoil)
    run = forget(True, GRADIENT)
    assert captured.proposed[0] == UNROLLED
    assert not any(captured.proposed[1:])
    assert captured.notes[-1] == "compiled and uncompiled gradients differ"
    expected = forget(False, GRADIENT)
    check_runs(expected, run)
    if place == 0:
        assert expected.record.weights_after == run.record.weights_after


class Bad(nn.Module):
    """No number for batches with a large input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.log(2.4 - x.amax())


def test_gradients_that_are_not_finite_count_as_zero(captured: Spy) -> None:
    expected = forget(False, GRADIENT, nn.Sequential(Bad(), make_net()))
    found = forget(True, GRADIENT, nn.Sequential(Bad(), make_net()))
    assert captured.proposed == [UNROLLED] * 6, captured.notes
    bad = np.array(found.record.trace.nonfinite, dtype=bool)
    assert 0 < bad.sum() < 20
    check_runs(expected, found)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > 0 else 2 * x


def test_what_cannot_be_captured_runs_as_it_is(captured: Spy) -> None:
    expected = forget(False, GRADIENT, make_net(Branching()))
    found = forget(True, GRADIENT, make_net(Branching()))
    assert not any(captured.proposed)
    assert captured.notes[-1]
    assert expected.record.weights_after == found.record.weights_after


def test_who_looks_at_every_step_sees_every_step(captured: Spy) -> None:
    seen = list[int]()
    forget(True, GRADIENT, on_step=lambda done, _: seen.append(done))
    assert seen == list(range(1, 21))
    assert captured.proposed == []


@pytest.mark.parametrize(
    "recipe",
    [
        replace(GRADIENT, model_clip=5.0),
        replace(GRADIENT, noise_std=0.0),
    ],
    ids=["projected gradient clipping", "no noise"],
)
def test_what_is_not_unrolled(captured: Spy, recipe: Any) -> None:
    check_runs(forget(False, recipe), forget(True, recipe))
    assert captured.proposed == []


def test_statistics_keep_a_run_from_being_unrolled(captured: Spy) -> None:
    forget(True, GRADIENT, make_net(nn.BatchNorm1d(3)), buffers="reset")
    assert captured.proposed == []


def test_short_runs_do_not_pay_by_themselves(captured: Spy) -> None:
    forget("auto", GRADIENT)
    assert captured.proposed == []


def test_a_run_goes_on_from_its_checkpoint(captured: Spy, tmp_path: Path) -> None:
    path = tmp_path / "state"
    forget(True, GRADIENT, checkpoint=path, checkpoint_seconds=0.0)
    run = forget(True, GRADIENT, checkpoint=path, checkpoint_seconds=0.0, resume=True)
    assert len(run.record.trace) == 20
    assert run.record.gradient_evaluations == 18 * BATCH + 2 * 4


class Streamed:
    """Counts how often each step is drawn, and draws its number."""

    def __init__(self) -> None:
        self.drawn = list[int]()

    def draw(self, out: Any, *, step: int, position: int, std: float) -> None:
        rows = np.atleast_2d(out)
        self.drawn += range(step, step + len(rows))
        rows[:] = np.arange(step, step + len(rows))[:, None]


@pytest.mark.parametrize("size", [2, 1 << 14, 1 << 15])
def test_noise_is_seen_before_it_is_taken_and_drawn_once(size: int) -> None:
    levels = [1.0, *[2.0] * 30, 0.0, *[1.0] * 30]
    stream = Streamed()
    drawing = Drawing(stream, levels, size, size)
    assert drawing.take(0, 0, size)[0] == 0
    for first in range(1, 57, 8):
        seen = drawing.preview(first, 8).copy()
        assert seen[:, 0].tolist() == [0 if n == 31 else n for n in range(first, first + 8)]
        for n in range(first, first + 8):
            assert drawing.take(n, 0, size)[-1] == seen[n - first, -1]
    assert drawing.take(57, 0, size)[0] == 57
    assert len(stream.drawn) == len(set(stream.drawn))


def test_compiled_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolling, "UNROLLED", 2)
    spy, options = Spy(monkeypatch), {"data": make_data(48)}
    if compiling.find_compiler() is None:
        with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler"):
            forget(True, GRADIENT, **options)
        return
    found = forget(True, GRADIENT, **options)
    assert spy.proposed == [2] * 10, spy.notes
    assert spy.single == []
    check_runs(forget(False, GRADIENT, **options), found)
