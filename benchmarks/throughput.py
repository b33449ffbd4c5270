"""Whole epochs against three loops: the conventional one, that one compiled, and bare compute.

(a) is what one would write: ``DataLoader`` over the two tensors, ``torch.optim.SGD``, and for
unlearning a clip of the gradient and a ``randn_like`` per tensor; (b) is (a) with the network and
its loss compiled, beside training only: certified steps are never compiled; (c), the limit, is
forward and backward alone on one fixed batch. Pixels are random, torch runs on one thread. Our
times hold all that a call does except compiling, which is a row of its own. Every case is timed
once per round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import networks
from benchmarks.timing import compare, measure
from expunge import Batches, GradientClipping, train, train_many, unlearn

BATCH, SEEDS = 128, 8
RATE, DECAY, CLIP, NOISE = 1e-3, 10.0, 1.0, 1e-4
Case = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """One network, its random data, and how often each case is timed."""

    name: str
    make: Callable[..., nn.Module]
    data: SimpleNamespace
    repeats: int
    faster: float

    @property
    def steps(self) -> int:
        return len(self.data.inputs) // BATCH


def run() -> list[dict[str, Any]]:
    """Ratios with the issue's targets: 4 (small networks) or 2 times (a), 1.15 of (c)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        small = [
            Setting("784-5-10", networks.mnist_net, _draw((784,), 200), 5, 4.0),
            Setting("512-32-32-10", networks.head_net, _draw((512,), 200), 5, 4.0),
        ]
        large = Setting("CIFAR net", networks.cifar_net, _draw((3, 32, 32), 24), 3, 2.0)
        rows: list[dict[str, Any]] = []
        for setting in (*small, large):
            print(f"  {setting.name} …", flush=True)
            rows += [*_compare_epochs(setting), *_compare_unlearning(setting)]
        for setting in small:
            print(f"  {setting.name}, {SEEDS} seeds …", flush=True)
            rows += _compare_seeds(setting)
        return rows
    finally:
        torch.set_num_threads(threads)


def _draw(shape: tuple[int, ...], batches: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batches * BATCH, *shape, generator=generator)
    targets = torch.randint(0, 10, (batches * BATCH,), generator=generator)
    return SimpleNamespace(inputs=inputs, targets=targets)


def _loop(setting: Setting, *, noisy: bool, compiled: bool) -> Case:
    """One epoch of the conventional loop."""
    model = setting.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY if noisy else 0.0)
    dataset = TensorDataset(setting.data.inputs, setting.data.targets)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    measure_loss = torch.compile(compute_loss) if compiled else compute_loss

    def run_epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            measure_loss(x, y).backward()
            if noisy:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=False)
            optimizer.step()
            if noisy:
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(torch.randn_like(p), alpha=NOISE)

    return run_epoch


def _bare(setting: Setting) -> Case:
    """Forward and backward of as many steps, on one batch."""
    model = setting.make()
    x, y = setting.data.inputs[:BATCH], setting.data.targets[:BATCH]

    def run_epoch() -> None:
        for _ in range(setting.steps):
            model.zero_grad()
            cross_entropy(model(x), y).backward()

    return run_epoch


def _train(setting: Setting, *, compile: bool) -> Case:
    model = setting.make()

    def run_epoch() -> None:
        log = train(model, setting.data, epochs=1, learning_rate=RATE, compile=compile)
        assert log.compiled == compile, log.note

    return run_epoch


def _unlearn(setting: Setting) -> Case:
    recipe = GradientClipping(
        start_clip=1.0,
        grad_clip=CLIP,
        learning_rate=RATE,
        weight_decay=DECAY,
        steps=setting.steps,
        noise_std=NOISE,
    )
    model, generator = setting.make(), torch.Generator().manual_seed(0)
    loader = Batches(
        setting.data.inputs, setting.data.targets, batch_size=BATCH, generator=generator
    )
    return lambda: unlearn(model, loader, recipe, loss_fn=cross_entropy, centre="zero")


def _time_first(case: Case) -> float:
    start = time.perf_counter()
    case()
    return time.perf_counter() - start


def _compare_epochs(setting: Setting) -> list[dict[str, Any]]:
    cases: dict[str, Case] = {
        "train, compiled": _train(setting, compile=True),
        "train": _train(setting, compile=False),
        "loop": _loop(setting, noisy=False, compiled=False),
        "compiled loop": _loop(setting, noisy=False, compiled=True),
        "bare": _bare(setting),
    }
    first = _time_first(cases["train, compiled"])
    times = measure(cases, repeats=setting.repeats)
    name = f"{setting.name}, epoch of fine-tuning"
    return [
        _compare_with_loops(name, setting, times, "train, compiled"),
        compare(f"{name}: compiled loop / ours", times, "compiled loop", "train, compiled"),
        compare(f"{name}: ours / bare compute", times, "train, compiled", "bare", target=1.15),
        compare(f"{name}: loop / ours uncompiled", times, "loop", "train"),
        _tell_seconds(f"{name}: seconds to compile", first - min(times["train, compiled"])),
    ]


def _compare_unlearning(setting: Setting) -> list[dict[str, Any]]:
    cases: dict[str, Case] = {
        "unlearn": _unlearn(setting),
        "loop": _loop(setting, noisy=True, compiled=False),
        "bare": _bare(setting),
    }
    times = measure(cases, repeats=setting.repeats)
    name = f"{setting.name}, epoch of unlearning"
    return [
        compare(f"{name}: loop / ours", times, "loop", "unlearn"),
        compare(f"{name}: ours / bare compute", times, "unlearn", "bare"),
    ]


def _compare_with_loops(
    name: str, setting: Setting, times: dict[str, list[float]], ours: str
) -> dict[str, Any]:
    row = compare(f"{name}: loop / ours", times, "loop", ours, target=setting.faster, at_least=True)
    limit = compare("", times, "loop", "bare")
    return row | {"limit": f"loop / bare compute is {limit['ratio']:.3g}"}


def _compare_seeds(setting: Setting) -> list[dict[str, Any]]:
    """Eight seeds at once against eight in sequence, plain and compiled."""
    options: dict[str, Any] = {"epochs": 1, "learning_rate": RATE}
    inputs, targets = setting.data.inputs[: 100 * BATCH], setting.data.targets[: 100 * BATCH]
    data = SimpleNamespace(inputs=inputs, targets=targets)

    def make() -> list[nn.Module]:
        return [setting.make(generator=torch.Generator().manual_seed(r)) for r in range(SEEDS)]

    def run_in_sequence(*, compile: bool) -> Case:
        models = make()
        return lambda: [
            train(model, data, seed=seed, compile=compile, **options)
            for seed, model in enumerate(models)
        ]

    models = make()

    def run_together() -> None:
        logs = train_many(models, data, seeds=range(SEEDS), compile=True, **options)
        assert logs[0].note.startswith("together"), logs[0].note

    first = _time_first(run_together)
    cases: dict[str, Case] = {
        "together": run_together,
        "in sequence": run_in_sequence(compile=False),
        "in sequence, compiled": run_in_sequence(compile=True),
    }
    times = measure(cases, repeats=setting.repeats)
    name = f"{setting.name}, {SEEDS} seeds"
    return [
        compare(f"{name}: in sequence / together", times, "in sequence", "together"),
        compare(
            f"{name}: in sequence, compiled / together", times, "in sequence, compiled", "together"
        ),
        _tell_seconds(f"{name}: seconds to compile", first - min(times["together"])),
    ]


def _tell_seconds(name: str, seconds: float) -> dict[str, Any]:
    """Not a ratio: what compiling took here, with what torch's cache on disk held."""
    return {"name": name, "ratio": seconds, "target": None, "met": None}
