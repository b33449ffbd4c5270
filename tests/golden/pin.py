"""Computes what tests/golden/pinned.json pins: ``python tests/golden/pin.py`` writes it anew.

Every float is written as ``float.hex()``, every vector as its SHA-256 and its ends. The file was
made by the code as it was before the core was founded anew (issue 25); a change of any bit in it
is a change of a guarantee, of a grid, of the noise or of the certified vector.

Everything that knows where modules lie is in the adaptors below; the rest is numbers. The whole
runs (``whole``) have a loss that is linear in the parameters: its gradient is the same numbers on
every processor, whose kernels add in other orders. They were pinned anew when that was found.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from expunge.accounting.calibration import calibrate
from expunge.accounting.guarantee import guarantee
from expunge.accounting.planning import plan
from expunge.accounting.precision import choose_precision
from expunge.recipes import (
    Execution,
    GradientClipping,
    ModelClipping,
    OutputPerturbation,
    Retraining,
    schedule,
)

FILE = Path(__file__).with_name("pinned.json")
Noisy = OutputPerturbation | GradientClipping | ModelClipping


# Adaptors: what has to change when modules move. Modules that need torch are imported inside.


def draw_noise(seed: int, step: int, position: int, std: float, size: int) -> np.ndarray:
    from expunge.noisy.noise import SeededNoise

    out = np.empty(size)
    SeededNoise(seed).begin().draw(out, step=step, position=position, std=std)
    return out


def derive_seed(seed: int, purpose: str) -> int:
    from expunge.noisy.noise import SeededNoise

    return SeededNoise(seed).begin().derive_seed(purpose)


def make_vector(
    parameters: Sequence[Tensor], centre: Sequence[Tensor] | None, recipe: Noisy, seed: int
) -> Any:
    """The certified vector of a run, with the noise of a seed."""
    from expunge.noisy.noise import SeededNoise
    from expunge.noisy.vector import GridVector

    size = sum(p.numel() for p in parameters)
    grid = choose_precision(recipe, size).grid
    return GridVector(parameters, centre, grid, SeededNoise(seed).begin())


def take_step(vector: Any, gradients: Sequence[Tensor], **update: Any) -> tuple[float, float]:
    """One update; returns ‖x - c‖ before the noise, and ‖noise‖."""
    from expunge.noisy.vector import Update

    return tuple(vector.step(gradients, Update(**update)))


def cells_of(vector: Any) -> Tensor:
    return vector.cells


def run_whole(recipe: Noisy, seed: int) -> nn.Module:
    """``unlearn`` of a small network around zero, in as many processes as there are."""
    from expunge.data.data import Data
    from expunge.noisy.noise import SeededNoise
    from expunge.noisy.unlearn import unlearn

    inputs = torch.tensor([[0.5, -1.25, 2.0]]).repeat(9, 1)
    data = Data((inputs, torch.tensor([1]).repeat(9)), ids=["gone", *"abcdefgh"])
    return unlearn(
        build_small(),
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
        data,
        forget=["gone"],
        recipe=recipe,
        loss=weigh_parameters,
        centre="zero",
        noise=SeededNoise(seed),
        delta=0.5,
    ).model


def weigh_parameters(model: nn.Module, batch: Any) -> Tensor:
    """Σ ⟨a_i, p_i⟩ with fixed a_i, which are its gradient."""
    each = enumerate(model.parameters())
    return sum((make_values(p.numel(), 800 + i, 3.0).reshape(p.shape) * p).sum() for i, p in each)


def sum_over_ranks(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients that every rank has scaled by its share, summed."""
    from expunge.noisy.processes import find_processes

    return find_processes().sum(gradients)


# Numbers.


def to_hex(value: Any) -> Any:
    """The same structure with every float as its bits."""
    if isinstance(value, bool | str | int | None):
        return value
    if isinstance(value, float):
        return float(value).hex()
    if isinstance(value, dict):
        return {str(k): to_hex(v) for k, v in value.items()}
    return [to_hex(v) for v in value]


def digest(values: Any) -> dict[str, Any]:
    """The SHA-256 of little-endian float64, and the first and last four of them."""
    flat = np.ascontiguousarray(np.asarray(values, dtype="<f8").reshape(-1))
    ends = [float(x).hex() for x in (*flat[:4], *flat[-4:])]
    return {"sha256": hashlib.sha256(flat.tobytes()).hexdigest(), "size": flat.size, "ends": ends}


RECIPES: dict[str, Noisy] = {
    "output": OutputPerturbation(0.01, 0.0746127),
    "output, large": OutputPerturbation(30.0, 2.0),
    "output, no start": OutputPerturbation(0.0, 0.5),
    "gradients, paper": GradientClipping(0.01, 100.0, 1e-4, 10.0, 1, 0.02827),
    "gradients": GradientClipping(1.0, 0.5, 0.1, 1.0, 10, 0.8),
    "gradients, no decay": GradientClipping(0.3, 0.2, 0.05, 0.0, 40, 0.3),
    "gradients, many": GradientClipping(100.0, 1.0, 0.01, 30.0, 5000, 0.05),
    "gradients, start noise": GradientClipping(1.0, 0.5, 0.1, 1.0, 10, 0.8, start_noise_std=2.5),
    "gradients, varying": GradientClipping(
        1.0, 0.5, (0.1, 0.05, 0.2, 0.0, 0.02), 2.0, 5, (0.5, 0.0, 1.0, 0.25, 0.75)
    ),
    "gradients, varying, projected": GradientClipping(
        5.0, 2.0, (0.1, 0.05, 0.2, 0.1), 1.0, 4, (0.5, 0.1, 1.0, 0.5), 0.25, 0.75
    ),
    "gradients, projected": GradientClipping(10.0, 3.0, 0.1, 0.5, 12, 0.6, model_clip=0.5),
    "model": ModelClipping(0.5, 1e-3, 10.0, 0.5, 6),
    "model, ratio 2.5": ModelClipping(1.25, 0.1, 0.0, 1.0, 9),
    "model, start": ModelClipping(0.5, 0.1, 1.0, 0.5, 4, start_clip=1.0, start_noise_std=3.0),
    "model, varying": ModelClipping(0.5, (0.1, 0.2, 0.3), 1.0, (0.5, 1.0, 0.4), 3),
    "model, long": ModelClipping(1.95, 0.1, 1.0, 1.0, 200),
}
EXECUTIONS = {
    "ideal": Execution(),
    "rounded": Execution(rounding=1e-6),
    "tail": Execution(tail_delta=1e-9),
    "three": Execution(rounding=1e-7, releases=3),
}


def pin_guarantees() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        for ran, execution in EXECUTIONS.items():
            for side in ("retrained", "centre"):
                g = [
                    guarantee(recipe, delta=1e-5, compared_to=side, execution=execution),
                    guarantee(recipe, epsilon=1.0, compared_to=side, execution=execution),
                ]
                found[f"{name} | {ran} | {side}"] = to_hex([_list_numbers(x) for x in g])
    found["retraining"] = to_hex(_list_numbers(guarantee(Retraining(), epsilon=0.0)))
    return found


def _list_numbers(g: Any) -> list[float | None]:
    sides = [x for b in (g.retrained, g.centre) for x in (b.epsilon, b.delta, b.mu)]
    return [g.epsilon, g.delta, g.mu, *sides, g.survival_bound]


TARGETS = [(1.0, 1e-5), (0.1, 1e-6), (8.0, 1e-3)]
FREE: dict[str, tuple[Callable[[float], Noisy], str]] = {
    "output σ": (lambda s: OutputPerturbation(0.01, s), "smallest"),
    "output C0": (lambda c: OutputPerturbation(c, 0.5), "largest"),
    "gradients σ": (lambda s: GradientClipping(1.0, 0.5, 0.1, 1.0, 10, s), "smallest"),
    "gradients C1": (lambda c: GradientClipping(0.001, c, 0.1, 1.0, 10, 1.0), "largest"),
    "gradients T": (lambda t: GradientClipping(1.0, 0.01, 0.1, 1.0, int(t), 1.0), "fewest"),
    "model σ": (lambda s: ModelClipping(0.5, 0.1, 0.0, s, 9), "smallest"),
    "model C2": (lambda c: ModelClipping(c, 0.1, 0.0, 0.7, 5), "largest"),
    "model T": (lambda t: ModelClipping(0.5, 0.1, 0.0, 0.5, int(t)), "fewest"),
}


def pin_calibrations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (make, find) in FREE.items():
        for epsilon, delta in TARGETS:
            for size in (None, 20_042, 10_000_000):
                recipe = calibrate(
                    make,
                    epsilon=epsilon,
                    delta=delta,
                    find=find,
                    parameters=size,  # pyright: ignore
                )
                found[f"{name} | {epsilon:g} {delta:g} | {size}"] = to_hex(vars(recipe))
    return found


def pin_plans() -> dict[str, Any]:
    found: dict[str, Any] = {}
    options: list[dict[str, Any]] = [
        {},
        {"scale": 0.03, "compared_to": "centre"},
        {"steps": 400, "learning_rate": 0.02, "weight_decay": 5.0},
    ]
    for epsilon, delta in TARGETS:
        for size in (1010, 20_042, 43_000_000):
            for n, option in enumerate(options):
                made = plan(epsilon=epsilon, delta=delta, parameters=size, **option)
                rows = [
                    [
                        vars(c.recipe),
                        _list_numbers(c.guarantee),
                        c.noise_per_step, c.noise_left, c.expected_norm, c.kept_norm,
                        c.survival_bound,
                    ]
                    for c in made.candidates
                    if c.method != "retraining"
                ]  # fmt: skip
                text = json.dumps(to_hex(rows))
                found[f"{epsilon:g} {delta:g} {size} {n}"] = {
                    "sha256": hashlib.sha256(text.encode()).hexdigest(),
                    "norms": to_hex([[row[3], row[5]] for row in rows]),
                    "restart": made.restart_is_as_good,
                }
    return found


def pin_noise() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for seed in (0, 1, 2**53 - 1):
        for step, position, std, size in (
            (0, 0, 1.0, 40), (0, 3, 1.0, 9), (1, 0, 100.0, 24), (7, 12345, 2.0**24, 16),
            (2**40, 2**47, 2.0**40, 8), (3, 1, 0.01, 12), (2, 0, 3.7e6, 70_000),
        ):  # fmt: skip
            out = draw_noise(seed, step, position, std, size)
            raw = [int(k) for k in out] if size < 100 else digest(out)
            found[f"{seed} | {step} | {position} | {std:g} | {size}"] = raw
    found["seeds"] = [derive_seed(s, "data") for s in (0, 1, 7)]
    return found


def pin_grids() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        for size in (1, 1000, 20_042, 43_000_000, 10**10):
            p = choose_precision(recipe, size)
            found[f"{name} | {size}"] = to_hex([p.grid, p.rounding])
    return found


# The certified vector on given gradients.


def make_values(size: int, seed: int, scale: float = 1.0) -> Tensor:
    """Numbers in [-scale, scale), from a multiplicative sequence: the same on every machine."""
    n = np.arange(1, size + 1, dtype=np.uint64) + np.uint64(seed * 1_000_003)
    mixed = (n * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return torch.from_numpy(mixed.astype(np.float64) / 2**23 - 1.0).mul(scale).float()


SHAPES = {
    "small": [(3, 4), (4,), (2, 2, 2)],
    "chunks": [(70_000,), (13,), (40, 300)],
}
VECTORS = {name: RECIPES[name] for name in RECIPES if RECIPES[name].noise_std != 2.0} | {
    "gradients, many": replace(RECIPES["gradients, many"], steps=30),
    "model, long": replace(RECIPES["model, long"], steps=30),
}


def make_tensors(shapes: Sequence[tuple[int, ...]], seed: int, scale: float) -> list[Tensor]:
    return [
        make_values(math.prod(shape), 31 * seed + i, scale).reshape(shape)
        for i, shape in enumerate(shapes)
    ]


def drive(recipe: Noisy, vector: Any, gradients: Iterator[list[Tensor]]) -> list[float]:
    """The recipe's equations on given gradients; returns every norm on the way."""
    start = recipe.start_clip
    seen = [vector.start(math.inf if start is None else start)]
    if isinstance(recipe, OutputPerturbation):
        return [*seen, *vector.perturb(0, recipe.noise_std)]
    if recipe.start_noise_std > 0:
        seen += vector.perturb(0, recipe.start_noise_std)
    gamma, sigma = (
        schedule(recipe.learning_rate, recipe.steps),
        schedule(recipe.noise_std, recipe.steps),
    )
    bound = recipe.grad_clip if isinstance(recipe, GradientClipping) else math.inf
    radius = math.inf if recipe.model_clip is None else recipe.model_clip
    for t in range(recipe.steps):
        g = next(gradients)
        norm = vector.gradient_norm(g)
        clip = vector.clip_factor(norm, bound)
        rate, noise = float(gamma[t]), float(sigma[t])
        norms = take_step(
            vector,
            g,
            learning_rate=rate,
            weight_decay=recipe.weight_decay,
            clip=clip,
            radius=radius,
            noise_std=noise,
            number=t + 1,
        )
        seen += [norm, clip, *norms]
    return seen


def pin_vectors() -> dict[str, Any]:
    found: dict[str, Any] = {}
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    for name, recipe in VECTORS.items():
        for size, centred, kind in (
            ("small", False, "float32"), ("small", True, "float32"), ("small", True, "bfloat16"),
            ("small", False, "float64"), ("chunks", True, "float32"),
        ):  # fmt: skip
            shapes = SHAPES[size]
            parameters = [p.to(kinds[kind]) for p in make_tensors(shapes, 1, 2.0)]
            centre = make_tensors(shapes, 2, 0.5) if centred else None
            vector = make_vector(parameters, centre, recipe, seed=5)
            given = (make_tensors(shapes, 100 + t, 3.0) for t in range(10**6))
            norms = drive(recipe, vector, given)
            found[f"{name} | {size} | centre {centred} | {kind}"] = pin_vector(vector, norms)
    return found


def pin_vector(vector: Any, norms: Sequence[float]) -> dict[str, Any]:
    flat = torch.cat([p.reshape(-1).double() for p in vector.parameters])
    return {
        "grid": float(vector.grid).hex(),
        "cells": digest(cells_of(vector).numpy()),
        "parameters": digest(flat.numpy()),
        "norms": digest(norms)["sha256"],
    }


def build_small() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(make_values(p.numel(), 900 + i).reshape(p.shape))
    return model


WHOLE = ["output", "gradients", "gradients, varying, projected", "model", "model, start"]


def pin_whole() -> dict[str, Any]:
    """Whole runs, and gradients that are summed over the ranks, in the processes there are."""
    found: dict[str, Any] = {}
    for name in WHOLE:
        model = run_whole(RECIPES[name], seed=11)
        flat = torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])
        found[name] = digest(flat.numpy())
    return found


def pin_rank(rank: int, size: int) -> dict[str, Any]:
    """The vector after steps on gradients of which every rank has an equal share."""
    found: dict[str, Any] = {}
    shapes = SHAPES["chunks"]
    for name in ("gradients", "model, varying"):
        vector = make_vector(make_tensors(shapes, 1, 2.0), None, RECIPES[name], seed=5)

        def give() -> Iterator[list[Tensor]]:
            for t in range(10**6):
                own = make_tensors(shapes, 100 + t + 17 * rank, 3.0)
                yield sum_over_ranks([g.mul_(1 / size) for g in own])

        found[name] = pin_vector(vector, drive(RECIPES[name], vector, give()))
    return found | {f"whole: {name}": value for name, value in pin_whole().items()}


def pin_two_processes() -> dict[str, Any]:
    """What both ranks of two have at the end: the same."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)]
        assert [process.wait(300) for process in ranks] == [0, 0]
        first, second = (json.loads((Path(folder) / f"{r}.json").read_text()) for r in (0, 1))
    assert first == second
    return first


def run_rank(folder: str, rank: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(pin_rank(rank, 2)))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that is taken down around them


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "guarantees": pin_guarantees,
    "calibrations": pin_calibrations,
    "plans": pin_plans,
    "noise": pin_noise,
    "grids": pin_grids,
    "vectors": pin_vectors,
    "whole": pin_whole,
    "two processes": pin_two_processes,
}


def main() -> None:
    if len(sys.argv) == 3:
        run_rank(sys.argv[1], int(sys.argv[2]))
        return
    torch.set_num_threads(1)
    made = {name: make() for name, make in SECTIONS.items()}
    FILE.write_text(json.dumps(made, indent=0, separators=(",", ":"), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
