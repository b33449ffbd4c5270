"""Many runs of the engine at once: a stack of certified vectors, one per trial, in one loop.

The parameters of a *stacked* module have a leading dimension, the trial; its loss is the sum of
the trials' losses, so that every trial has its own gradient. Each row is a certified vector of its
own: its norms, clips, roundings and noise never meet another row's. What runs is the engine: the
copy and its checks (``copy_model``), ``Loop.run``, the loader's ``Cycle``, ``compute_gradients``,
``Update``, ``GridVector.start``, ``step`` and ``perturb``, the function ``clip_factor`` for every
row, ``StepNoise`` and the exact sampler. Only what is one number per vector in a run is one per row
here (:class:`StackedVector`), and no trace is kept. A test holds the two to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from expunge.accounting.precision import NoisyRecipe, list_levels
from expunge.errors import InputError
from expunge.noisy.centre import find_centre
from expunge.noisy.loop import Loop
from expunge.noisy.model import CertifiedModel, check_finite, copy_model
from expunge.noisy.noise import Array, Noise, NoiseStream, SeededNoise, StepNoise, SystemNoise
from expunge.noisy.team import Team
from expunge.noisy.vector import GridVector, Norms, Update, clip_factor, round_cells
from expunge.processes.group import Processes
from expunge.training.losses import LossFunction
from expunge.training.randomness import untouched_random

SEEDS = 2**30


def unlearn_stack(
    model: nn.Module,
    retain_loader: Iterable[Any],
    recipe: NoisyRecipe,
    *,
    loss_fn: LossFunction,
    noise: Noise,
    centre: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """A new stacked module: every trial unlearned by a run of its own.

    >>> from expunge import OutputPerturbation
    >>> from expunge import SeededNoise
    >>> model = nn.ParameterDict({"weight": torch.zeros(5, 2)})
    >>> recipe = OutputPerturbation(start_clip=1.0, noise_std=2.0)
    >>> stack = unlearn_stack(model, [], recipe, loss_fn=torch.dot, noise=SeededNoise(0))
    >>> stack["weight"].shape, len(stack["weight"].detach().unique())
    (torch.Size([5, 2]), 10)
    """
    if not any(sigma > 0 for sigma in list_levels(recipe)):
        raise InputError.of("noise_std", 0.0, "above 0: a run without noise has one outcome")
    with torch.inference_mode(False), torch.enable_grad(), untouched_random():
        copied = copy_model(model)
        if centre is not None:
            copied = replace(copied, centre=find_centre(copied, centre).tensors)
        stack = StackedModel(**vars(copied))
        check_finite(stack.certified)
        team = StackedTeam(Processes(), stack)
        StackedLoop(stack, recipe, retain_loader, loss_fn, noise, team).run({})
    return stack.model


def check_seed(seed: int | None) -> None:
    """Refuse a seed that has not all its places."""
    if seed is not None and not 0 <= seed < SEEDS:
        raise InputError.of("seed", seed, f"a whole number from 0 to {SEEDS - 1}")


def choose_noise(seed: int | None, place: int) -> Noise:
    """The operating system's, or the noise at one of 2²³ places of a seed."""
    check_seed(seed)
    return SystemNoise() if seed is None else SeededNoise((seed << 23) + place)


@dataclass(frozen=True)
class StackedModel(CertifiedModel):
    """``size`` counts the parameters of one trial."""

    @property
    def trials(self) -> int:
        counts = {len(p) if p.ndim > 0 else 0 for p in self.certified.values()}
        if len(counts) != 1 or 0 in counts:
            raise InputError.of("trials", sorted(counts), "the first dimension of every parameter")
        return counts.pop()

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.certified.values()) // self.trials


class StackedVector(GridVector):
    """x_i = centre + grid · k_i for every row i; a norm or a clip factor is a column of numbers."""

    def __init__(
        self, parameters: Sequence[Tensor], centre: Sequence[Tensor] | None, grid: float
    ) -> None:
        super().__init__([p[0] for p in parameters], None, grid)
        trials = len(parameters[0])
        self.parameters = [p.detach() for p in parameters]
        self._centre = None if centre is None else [c.detach() for c in centre]
        self._cells = self._cells.new_zeros(trials, self.size)
        if len(self._chunks) != 1:
            raise InputError.of("parameters of a trial", self.size, "few enough for one chunk")
        chunk, work, parts = self._chunks[0], torch.empty_like(self._cells), list[Any]()
        for part in chunk.parts:
            start = sum(p.stop for p in parts)
            place = work[:, start : start + part.stop].view(trials, *part.place.shape)
            parts.append(replace(part, place=place))
        self._chunks = [replace(chunk, cells=self._cells, work=work, parts=tuple(parts))]

    def make_noise(self, stream: NoiseStream, levels: Sequence[float]) -> StepNoise:
        """The noise of all rows."""
        return StackedNoise(stream, levels, self._cells.numel())

    def clip_factor(self, norm: Any, bound: float) -> Any:
        """The engine's clip factor of every row; equal norms are looked up once."""
        values, place = torch.unique(norm, return_inverse=True)
        factors = [clip_factor(value, bound, self.size) for value in values.tolist()]
        return torch.tensor(factors, dtype=torch.float64)[place]

    def _square(self, v: Tensor) -> Tensor:
        return torch.einsum("td,td->t", v, v).unsqueeze(1)

    def _root(self, squares: Sequence[Tensor]) -> Any:
        return squares[0].sqrt()

    def _descend(self, chunk: Any, gradients: Sequence[Tensor], alpha: Any) -> None:
        if len(gradients) > 0:
            g = torch.where(alpha > 0, chunk.gather(gradients), 0.0)
            chunk.cells.addcmul_(g, alpha, value=-1)

    def _shrink(self, cells: Tensor, factor: Any) -> None:
        round_cells(cells.copy_(torch.where(factor > 0, cells * factor, 0.0)), "zero")

    def _tell(self, norm: Any, factor: Any, noise: float) -> Norms:
        return Norms(0.0, 0.0)


class StackedNoise(StepNoise):
    """The noise of all rows, one after the other, from one key."""

    def take(self, number: int, start: int, stop: int) -> Array:
        """The noise of step ``number``."""
        return super().take(number, 0, len(self._row))


class StackedTeam(Team):
    """One process, whose vector is a stack."""

    def make_vector(self, grid: float) -> StackedVector:
        centre = self.certified.centre
        points = None if centre is None else list(centre.values())
        return StackedVector(list(self.certified.certified.values()), points, grid)


class StackedLoop(Loop):
    """The engine's loop over a stack."""

    def _note(self, update: Update, norm: float, norms: Norms) -> None:
        """A stack keeps no trace."""
