"""A recipe's equation, written a second time for many rows at once; and the engine, row by row.

    k_0     = trunc(clip_{C0}(x̂ - c) / g) + round(N(0, σ0²)/g)
    k_{t+1} = Q(clip_R(ρ_t k_t - (γ_t/g) clip_{C1}(g_t))) + round(N(0, σ_t²)/g),   x = c + g k

Q rounds towards zero after a projection, else to the nearest. Attacks need a million runs, and the
engine (``unlearn``, ``Steps``, ``GridVector``) makes a dozen in a second. So the equation is stated
here a second time, in numpy: it shares the noise stream and the choice of the grid with the engine,
and no other code. Released by both from one key, a model must have the same bits.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from expunge.accounting.precision import LARGEST_CELL, choose_precision, list_levels, norm_margin
from expunge.audit.attacks import DIRECTION, Adversary, Array, Rows
from expunge.data.data import Data
from expunge.errors import InputError, UnlearningError
from expunge.noisy.noise import Noise, SeededNoise, SystemNoise
from expunge.noisy.unlearn import unlearn
from expunge.recipes import GradientClipping, OutputPerturbation, schedule

SEEDS, PLACES = 2**30, 2**23
ROWS = (0, 1, 6, 7)  # both worlds, just outside every ball and far outside
SIZE = len(DIRECTION)


def choose_noise(seed: int | None, place: int) -> Noise:
    """The operating system's, or the noise at one of 2²³ places of a seed."""
    if seed is not None and not 0 <= seed < SEEDS:
        raise InputError.of("seed", seed, f"a whole number from 0 to {SEEDS - 1}")
    return SystemNoise() if seed is None else SeededNoise(seed * PLACES + place)


def release_rows(adversary: Adversary, rows: Rows, noise: Noise) -> Array:
    """What the equation releases of these rows, around the centre.

    >>> attack = Adversary(OutputPerturbation(start_clip=1.0, noise_std=2.0))
    >>> points = release_rows(attack, np.arange(5), SeededNoise(0))
    >>> points.shape, len(np.unique(points))
    ((5, 3), 15)
    """
    recipe, centre = adversary.recipe, adversary.centre
    grid, levels, stream = choose_precision(recipe, SIZE).grid, list_levels(recipe), noise.begin()

    def perturb(k: Array, number: int) -> Array:
        drawn = np.zeros(k.size)
        if levels[number] > 0:
            stream.draw(drawn, step=number, position=0, std=levels[number] / grid)
        return np.clip(k + drawn.reshape(k.shape), -LARGEST_CELL, LARGEST_CELL)

    x = (adversary.start(rows) + centre) - centre
    k = perturb(np.trunc(x * (clip_factors(x, recipe.start_clip) / grid)), 0)
    if not isinstance(recipe, OutputPerturbation):
        bound = recipe.grad_clip if isinstance(recipe, GradientClipping) else None
        for t, gamma in enumerate(schedule(recipe.learning_rate, recipe.steps).tolist()):
            g = adversary.gradient((centre + grid * k) - centre, t, rows)
            rate = gamma * clip_factors(g, bound) / grid
            k = k * (1 - gamma * recipe.weight_decay) - np.where(rate > 0, g * rate, 0.0)
            if recipe.model_clip is None or math.isinf(recipe.model_clip):
                k = np.rint(k)
            else:
                factor = clip_factors(k, recipe.model_clip, grid)
                k = np.trunc(np.where(factor > 0, k * factor, 0.0))
            k = perturb(k, t + 1)
    return (centre + grid * k) - centre


def clip_factors(v: Array, bound: float | None, unit: float = 1.0) -> Array:
    """A column: min(1, bound/‖v‖) of every row, by the engine's margins; 0 for overflow.

    >>> clip_factors(np.array([[3.0, 4.0, 0.0], [0.3, 0.4, 0.0]]), 1.0).round(6).tolist()
    [[0.2], [1.0]]
    """
    # As many calls of the library's dot: the same order of adding as in the engine.
    norm = np.sqrt(np.matmul(v[:, None, :], v[:, :, None])[:, 0]) * unit
    largest = norm * (1 + norm_margin(v.shape[1])) + math.sqrt(v.shape[1]) * 2.0**-500
    limit = np.full_like(norm, math.inf if bound is None else bound)
    shrunk = np.divide(limit, largest, out=np.ones_like(norm), where=largest > limit)
    factor = np.where(largest > limit, shrunk * (1 - 2.0**-50), 1.0)
    return np.where(np.isfinite(norm), factor, 0.0)


class Tiny(nn.Module):
    """A weight of two numbers and a bias of one; the output is x - centre."""

    def __init__(self, row: Array) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(row[:2].copy()))
        self.bias = nn.Parameter(torch.from_numpy(row[2:].copy()))

    def forward(self, centre: Tensor) -> Tensor:
        return torch.cat([self.weight, self.bias]) - centre


def make_data() -> Data:
    """Two people, of whom one goes: who they are does not matter to an attack."""
    return Data((torch.zeros(2, 1), torch.zeros(2)), ids=["gone", "retained"])


def release_engine(adversary: Adversary, row: int, noise: Noise, delta: float) -> Array:
    """What ``unlearn`` itself releases of one row, around the centre."""
    recipe, centre, rows = adversary.recipe, adversary.centre, np.array([row])
    steps = 1 if isinstance(recipe, OutputPerturbation) else recipe.steps
    batches = [(torch.from_numpy(centre), torch.tensor(t)) for t in range(steps)]

    def loss(output: Tensor, step: Tensor) -> Tensor:
        """⟨x, g⟩, whose gradient is g whatever x is."""
        g = adversary.gradient(output.detach().numpy()[None], int(step), rows)
        return (output * torch.from_numpy(g[0])).sum()

    released = unlearn(
        Tiny(adversary.start(rows)[0] + centre), lambda: Tiny(centre), make_data(),
        forget=["gone"], recipe=recipe, delta=delta,
        loss=loss, loader=lambda examples, seed: batches, noise=noise,
    )  # fmt: skip
    with torch.no_grad():
        return released.model(torch.from_numpy(centre)).numpy()


def compare_engine(
    adversaries: Iterable[Adversary], delta: float, seed: int | None, seconds: float
) -> list[str]:
    """Sentences if ``unlearn`` releases other bits than the equation; in the first ``seconds``.

    >>> attack = Adversary(OutputPerturbation(start_clip=1.0, noise_std=2.0))
    >>> compare_engine([attack], 1e-5, 0, 9.0)
    []
    """
    deadline = time.monotonic() + seconds
    key = secrets.randbelow(SEEDS) if seed is None else seed
    for adversary in adversaries:
        for row in ROWS:
            noise = choose_noise(key, PLACES - 1 - row)
            expected = release_rows(adversary, np.array([row]), noise)[0]
            try:
                off = np.abs(release_engine(adversary, row, noise, delta) - expected).max()
            except UnlearningError as error:
                return [f"unlearn fails on a worst case: {error}"]
            if off != 0:
                cells = off / choose_precision(adversary.recipe, SIZE).grid
                return [f"unlearn releases not what its equation gives, but {cells:.3g} cells off"]
            if time.monotonic() > deadline:
                return []
    return []
