"""Several certified steps compiled as one: the plain run seed for seed, and proposals only.

What was captured is run operation by operation (the backend "aot_eager"), which takes no compiler
and no time; one test compiles for real.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge import Batches, GradientClipping, ModelClipping, SeededNoise, unlearn
from expunge.certificates.consistency import find_contradictions
from expunge.noisy import gradients, unrolling
from expunge.noisy import loop as stepping
from expunge.noisy import noise as drawing
from expunge.noisy.noise import Drawing, NoiseStream
from expunge.tasks.networks import dense_net
from expunge.training import compiled as capturing
from expunge.training import compiled as compiling

pytestmark = pytest.mark.usefixtures("one_thread")
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


@pytest.mark.parametrize("recipe", [GRADIENT, LATER], ids=["constant", "schedules"])
@pytest.mark.parametrize("centred", [False, True])
def test_unrolled_runs_are_the_plain_runs(captured: Spy, recipe: Any, centred: bool) -> None:
    centre = {k: 0.1 * v for k, v in make_net().state_dict().items()} if centred else None
    found = forget(True, recipe, centre=centre)
    # 52 examples are six batches of 8 and one of 4, which is a step by itself.
    assert captured.proposed == [UNROLLED] * 6, captured.notes
    assert captured.single == [7, 14]
    check_runs(forget(False, recipe, centre=centre), found)
    assert min(found.record.trace.clip_factor) < 1
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


def trust_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all that was compiled had been checked for what it knows of the noise."""
    monkeypatch.setattr(unrolling._CHECKED, "covers", lambda: True)


def distrust_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolling._CHECKED, "covers", lambda: False)


@pytest.mark.parametrize("place", range(UNROLLED))
@pytest.mark.parametrize("later", [0, 1])
def test_gradients_that_know_the_noise_are_not_used(
    captured: Spy, monkeypatch: pytest.MonkeyPatch, place: int, later: int
) -> None:
    """A gradient that changes in its last digits with the noise of its own or a later step."""
    if place + later >= UNROLLED:
        return
    call = unrolling.UnrolledSteps._call

    def leak(steps: Any, batches: Any, updates: Any, noise: Tensor) -> list[Any]:
        found = call(steps, batches, updates, noise)
        told = found[place].gradient * (1 + 1e-12 * torch.sign(noise[place + later]))
        found[place] = replace(found[place], gradient=told)
        return found

    distrust_compiled(monkeypatch)
    monkeypatch.setattr(unrolling.UnrolledSteps, "_call", leak)
    found = forget(True, GRADIENT)
    assert captured.notes[-1] == unrolling.LEAKS
    assert not any(captured.proposed)
    assert forget(False, GRADIENT).record.weights_after == found.record.weights_after


def test_what_was_checked_is_checked_again_when_more_was_compiled(
    captured: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, call, count = list[int](), unrolling.UnrolledSteps._call, [3]

    def count_calls(*args: Any) -> Any:
        calls.append(1)
        return call(*args)

    monkeypatch.setattr(unrolling, "_CHECKED", capturing.CheckedCode())
    monkeypatch.setattr(capturing, "count_compiled", lambda: count[0])
    monkeypatch.setattr(unrolling.UnrolledSteps, "_call", count_calls)
    for compiled, expected in ((3, 6 + UNROLLED), (3, 6), (4, 6 + UNROLLED), (0, 6 + UNROLLED)):
        count[0] = compiled
        calls.clear()
        forget(True, GRADIENT)
        assert len(calls) == expected
    assert captured.proposed == [UNROLLED] * 24, captured.notes


def test_an_error_of_the_noise_ends_the_run(captured: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be added but noise that was drawn, and drawn for this step."""
    draw, drawn = NoiseStream.draw, list[int]()

    def fail_once(stream: Any, out: Any, *, step: int, position: int, std: float) -> None:
        drawn.append(step)
        if len(drawn) == 2:
            raise MemoryError("no room for noise")
        draw(stream, out, step=step, position=position, std=std)

    monkeypatch.setattr(drawing, "AHEAD", UNROLLED * 31)
    monkeypatch.setattr(NoiseStream, "draw", fail_once)
    with pytest.raises(MemoryError):
        forget(True, GRADIENT)
    assert captured.proposed == [UNROLLED]


def test_gradients_are_compared_until_two_are_finite(
    captured: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust_compiled(monkeypatch)
    blocks = list[int]()

    def spoil(found: list[Any]) -> list[Any]:
        blocks.append(1)
        if len(blocks) == 3:
            return [replace(p, gradient=-5 * p.gradient) for p in found]
        return [replace(p, gradient=p.gradient * torch.nan) for p in found]

    change_proposals(monkeypatch, spoil)
    compute = stepping.compute_gradients
    asked = list[int]()

    def compute_nothing(*args: Any) -> Any:
        asked.append(1)
        found = compute(*args)
        return [g * torch.nan for g in found] if len(blocks) in (1, 2) else found

    monkeypatch.setattr(stepping, "compute_gradients", compute_nothing)
    forget(True, GRADIENT)
    assert len(blocks) == 3
    assert captured.notes[-1] == "compiled and uncompiled gradients differ"


def test_preparing_in_place_is_left_alone(captured: Spy) -> None:
    def make() -> SimpleNamespace:
        data = make_data()
        data.how = SimpleNamespace(prepare=lambda x: x.sub_(0.5))
        return data

    data = make()
    stored = data.inputs.clone()
    found = forget(True, GRADIENT, data=data)
    assert torch.equal(data.inputs, stored)
    assert "changes its input" in captured.notes[-1]
    expected = forget(False, GRADIENT, data=make())
    assert expected.record.weights_after == found.record.weights_after


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_others_may_compile_what_they_like(captured: Spy) -> None:
    loss = torch.compile(cross_entropy, backend="eager", dynamic=False)
    found = forget(True, GRADIENT, loss_fn=loss)
    check_runs(forget(False, GRADIENT), found)
    assert captured.single


def test_gradients_at_other_points_are_not_used(
    captured: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cell in one coordinate: the gradients after it were taken elsewhere."""
    trust_compiled(monkeypatch)

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
    trust_compiled(monkeypatch)
    change_proposals(monkeypatch, lambda found: [replace(p, clip=factor) for p in found])
    run = forget(True, LATER)
    check_runs(forget(False, LATER), run)
    trace = run.record.trace
    assert max(np.multiply(trace.gradient_norm, trace.clip_factor)) <= LATER.grad_clip
    assert UNROLLED in captured.proposed


@pytest.mark.parametrize("place", [0, 1])
def test_wrong_gradients_are_caught_and_the_run_is_the_plain_one(
    captured: Spy, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    def spoil(found: list[Any]) -> list[Any]:
        found[place] = replace(found[place], gradient=1.01 * found[place].gradient)
        return found

    trust_compiled(monkeypatch)
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


def test_gradients_that_are_not_finite_count_as_zero(
    captured: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust_compiled(monkeypatch)
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
    expected = forget(False, GRADIENT, make_net(nn.Dropout(0.5), Branching()))
    found = forget(True, GRADIENT, make_net(nn.Dropout(0.5), Branching()))
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
        MODEL,
        replace(GRADIENT, model_clip=5.0),
        replace(GRADIENT, noise_std=0.0),
    ],
    ids=["model clipping", "projected gradient clipping", "no noise"],
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
    noise = Drawing(stream, levels, size, size)
    assert noise.take(0, 0, size)[0] == 0
    for first in range(1, 57, 8):
        seen = noise.preview(first, 8).copy()
        assert seen[:, 0].tolist() == [0 if n == 31 else n for n in range(first, first + 8)]
        for n in range(first, first + 8):
            assert noise.take(n, 0, size)[-1] == seen[n - first, -1]
    assert noise.take(57, 0, size)[0] == 57
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
