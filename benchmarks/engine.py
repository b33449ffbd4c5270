"""The certified step against the plain step of the same loop; the noisy update of large vectors.

Pixels are random: no time here depends on what they show. Torch runs on one thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import networks
from benchmarks.timing import compare, measure
from expunge import GradientClipping
from expunge.noisy.noise import Noise, SeededNoise, StepNoise, SystemNoise
from expunge.noisy.run import unlearn
from expunge.noisy.vector import CHUNK, GridVector, Update

BATCH = 128
LARGE, HUGE = 11_000_000, 100_000_000
GRID, SIGMA = 2.0**-30, 0.25


def run() -> list[dict[str, Any]]:
    """Ratios, each with the issue's limit as its target."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            *_compare_steps("784-5-10", networks.mnist_net(), (1, 28, 28), 400, (1.35, 2.0), 7),
            *_compare_steps("CIFAR", networks.cifar_net(), (3, 32, 32), 8, (1.10, 1.5), 5),
            *_compare_updates(),
            _compare_growth(),
        ]
    finally:
        torch.set_num_threads(threads)


def _recipe(steps: int, *, plain: bool) -> GradientClipping:
    return GradientClipping(
        start_clip=math.inf if plain else 0.01,
        grad_clip=math.inf if plain else 1.0,
        learning_rate=1e-3,
        weight_decay=0.0 if plain else 10.0,
        steps=steps,
        noise_std=0.0 if plain else 0.003,
    )


def _time_steps(model: nn.Module, batch: Any, steps: int, noise: Noise | None) -> float:
    """Seconds of one step of ``unlearn``, its share of the copy and the hashes included; None is
    plain SGD."""
    recipe = _recipe(steps, plain=noise is None)
    start = time.perf_counter()
    unlearn(model, [batch], recipe, loss_fn=cross_entropy, noise=noise, centre="zero")
    return (time.perf_counter() - start) / steps


def _time_torch(model: nn.Module, batch: Any, steps: int) -> float:
    """Seconds of one step of the shortest loop one would write with torch.optim.SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps


def _compare_steps(
    name: str,
    model: nn.Module,
    shape: tuple[int, ...],
    steps: int,
    targets: tuple[float, float],
    rounds: int,
) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, *shape, generator=generator)
    batch = x, torch.randint(0, 10, (BATCH,), generator=generator)
    cases: dict[str, Callable[[], float]] = {
        "plain": lambda: _time_steps(model, batch, steps, None),
        "seeded": lambda: _time_steps(model, batch, steps, SeededNoise(0)),
        "system": lambda: _time_steps(model, batch, steps, SystemNoise()),
        "torch.optim.SGD": lambda: _time_torch(model, batch, steps),
    }
    times: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, time_case in cases.items():
            times[case].append(time_case())
    first, second = targets
    return [
        compare(f"{name}: step, SeededNoise / plain", times, "seeded", "plain", target=first),
        compare(f"{name}: step, SystemNoise / plain", times, "system", "plain", target=second),
        compare(f"{name}: step, SystemNoise / torch loop", times, "system", "torch.optim.SGD"),
    ]


def make_update(
    size: int,
    noise: Noise | None = None,
    parameters: list[torch.Tensor] | None = None,
    gradients: list[torch.Tensor] | None = None,
) -> tuple[GridVector, Callable[[], None]]:
    """A vector of this size, and one noisy update of it: clip, decay, noise, step."""
    parameters = parameters or [torch.zeros(size // 100, 100)]
    gradients = gradients or [torch.full_like(p, 1e-3) for p in parameters]
    stream = (noise or SeededNoise(0)).begin()
    drawing = StepNoise(stream, [SIGMA / GRID] * 1000, min(size, CHUNK))
    vector = GridVector(parameters, None, GRID, drawing)
    vector.start(1.0)
    numbers = iter(range(1, 1000))

    def update() -> None:
        clip = vector.clip_factor(vector.gradient_norm(gradients), 1.0)
        vector.step(gradients, Update(1e-3, 1.0, clip, math.inf, SIGMA, next(numbers)))

    return vector, update


def _philox(size: int) -> Callable[[], None]:
    generator = np.random.Generator(np.random.Philox(0))
    out = np.empty(CHUNK)

    def draw() -> None:
        for start in range(0, size, CHUNK):
            generator.standard_normal(out=out[: min(CHUNK, size - start)])

    return draw


def _torch_randn(size: int) -> Callable[[], object]:
    out, generator = torch.empty(size), torch.Generator().manual_seed(0)
    return lambda: torch.randn(size, out=out, generator=generator)


def _copy(size: int) -> Callable[[], object]:
    """The bandwidth of memory: one float64 vector read and written."""
    out, source = torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    return lambda: out.copy_(source)


def _compare_updates() -> list[dict[str, Any]]:
    times = measure(
        {
            "Philox": _philox(LARGE),
            "seeded": make_update(LARGE, SeededNoise(0))[1],
            "system": make_update(LARGE, SystemNoise())[1],
            "torch.randn": _torch_randn(LARGE),
            "copy": _copy(LARGE),
        },
        repeats=3,
    )
    name = f"noisy update of {LARGE:,} / Philox normals"
    return [
        compare(f"{name}, SeededNoise", times, "seeded", "Philox", target=1.5),
        compare(f"{name}, SystemNoise", times, "system", "Philox", target=3.0),
        compare(f"noisy update of {LARGE:,} / torch.randn", times, "system", "torch.randn"),
        compare(f"noisy update of {LARGE:,} / plain copy of it", times, "system", "copy"),
    ]


def _compare_growth() -> dict[str, Any]:
    cases = {"small": make_update(LARGE)[1], "large": make_update(HUGE)[1]}
    times = measure(cases, repeats=3)
    name = f"noisy update of {HUGE:,} / {LARGE:,}, per parameter"
    return compare(name, times, "large", "small", scale=LARGE / HUGE, target=1.15)
