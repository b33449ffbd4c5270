"""The certified vector of a sharded model: every process keeps, clips and noises its own rows.

``fully_shard`` leaves every process some rows of every parameter. Its part of the vector is those
rows, flattened; where they stand in the whole vector (parameters in ``named_parameters`` order, as
in one process) is what its noise is drawn for. Norms are sums of squares over all processes, so the
clips are those of the whole vector, and nobody ever needs to gather it:

    ‖x‖² = Σ_r ‖x_r‖²,   x_r ← factor · x_r + round(ξ[positions of r])

The noise is therefore exactly that of one process. The norms may differ from one process's in the
last bits, which ``norm_margin`` covers whatever the order of adding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from expunge.errors import UnlearningError
from expunge.noisy.noise import Array, NoiseStream, StepNoise
from expunge.noisy.vector import CHUNK, GridVector, Norms
from expunge.processes.group import Processes
from expunge.processes.weights import cut_rows, locate_rows, to_local


@dataclass(frozen=True)
class Span:
    """``length`` coordinates from ``local`` on of a process's part, and from ``position`` on of
    the whole vector."""

    local: int
    position: int
    length: int


def check_layout(parameters: Mapping[str, Tensor], processes: Processes) -> None:
    """Refuse a model that is sharded in any other way than by rows over all processes."""
    for name, p in parameters.items():
        if not isinstance(p, DTensor):
            raise UnlearningError(
                f"parameter {name} is not sharded while others are; call fully_shard on the whole "
                "model last"
            )
        mesh, places = p.device_mesh, p.placements
        whole = mesh.ndim == 1 and mesh.mesh.tolist() == list(range(processes.size))
        if not whole or len(places) != 1 or places[0] != Shard(0):
            raise UnlearningError(
                f"parameter {name} is placed as {places} on a mesh of shape {tuple(mesh.shape)}; "
                f"it must be sharded by its first dimension over all {processes.size} processes"
            )
        start, stop = locate_rows(p.shape[0], processes.rank, processes.size)
        if p.to_local().shape[0] != stop - start:
            raise UnlearningError(
                f"parameter {name} has {p.to_local().shape[0]} rows on rank {processes.rank}; "
                f"rows {start} to {stop} of {p.shape[0]} were expected"
            )


def locate_spans(shapes: Sequence[torch.Size], rank: int, size: int) -> list[Span]:
    """Where a rank's rows of each tensor stand in the whole vector, in order.

    >>> locate_spans([torch.Size([4, 3]), torch.Size([2])], rank=1, size=2)
    [Span(local=0, position=6, length=6), Span(local=6, position=13, length=1)]
    """
    spans: list[Span] = []
    local = offset = 0
    for shape in shapes:
        width = math.prod(shape[1:])
        start, stop = locate_rows(shape[0], rank, size)
        length = (stop - start) * width
        if length > 0:
            spans.append(Span(local, offset + start * width, length))
        local, offset = local + length, offset + shape[0] * width
    return spans


def check_spans(parts: Sequence[Sequence[tuple[int, int]]], size: int) -> None:
    """Every position of the vector belongs to exactly one process: no noise is drawn twice.

    >>> check_spans([[(0, 3)], [(2, 2)]], 4)
    Traceback (most recent call last):
    ...
    expunge.errors.UnlearningError: position 2 of the vector is held by two processes; ...
    """
    spans = sorted(
        (position, length, rank) for rank, p in enumerate(parts) for position, length in p
    )
    end = 0
    for position, length, _ in spans:
        if position != end:
            held = "two processes" if position < end else "no process"
            raise UnlearningError(
                f"position {min(position, end)} of the vector is held by {held}; its noise would "
                "not be that of one process"
            )
        end = position + length
    if end != size:
        raise UnlearningError(f"the processes hold {end} of {size} positions of the vector")


class ShardedNoise(StepNoise):
    """Cells of noise for a process's part of the vector, drawn at its places in the whole one."""

    def __init__(
        self, stream: NoiseStream, levels: Sequence[float], spans: Sequence[Span], longest: int
    ) -> None:
        super().__init__(stream, levels, longest)
        self._spans = spans

    def take(self, number: int, start: int, stop: int) -> Array:
        """The noise of coordinates [start, stop) of this process's part."""
        out = self._row[: stop - start]
        for span in self._spans:
            a, b = max(start, span.local), min(stop, span.local + span.length)
            if a < b:
                self._stream.draw(
                    out[a - start : b - start],
                    step=number,
                    position=span.position + a - span.local,
                    std=self._levels[number],
                )
        return out


class ShardedVector(GridVector):
    """A process's part of x = centre + grid · k; every norm is that of the whole vector."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        centre: Mapping[str, Tensor] | None,
        grid: float,
        processes: Processes,
    ) -> None:
        check_layout(parameters, processes)
        whole = list(parameters.values())
        local = (
            None
            if centre is None
            else [
                to_local(cut_rows(c, p, processes))
                for p, c in zip(whole, centre.values(), strict=True)
            ]
        )
        super().__init__([to_local(p.detach()) for p in whole], local, grid)
        self.processes, self._names, self._whole = processes, list(parameters), whole
        self.size = sum(p.numel() for p in whole)
        self.spans = locate_spans([p.shape for p in whole], processes.rank, processes.size)
        told = processes.gather([(span.position, span.length) for span in self.spans])
        check_spans(told, self.size)

    def make_noise(self, stream: NoiseStream, levels: Sequence[float]) -> ShardedNoise:
        """The noise of this process's positions."""
        return ShardedNoise(stream, levels, self.spans, min(len(self._cells), CHUNK))

    def state_shards(self) -> dict[str, Tensor]:
        """The cells by parameter, sharded as the parameters are: views of this vector's memory."""
        found: dict[str, Tensor] = {}
        at = 0
        for name, p, local in zip(self._names, self._whole, self.parameters, strict=True):
            assert isinstance(p, DTensor)
            found[name] = DTensor.from_local(
                self._cells[at : at + local.numel()].view(local.shape),
                p.device_mesh,
                p.placements,
                run_check=False,
                shape=p.shape,
                stride=p.stride(),
            )
            at += local.numel()
        return found

    def _root(self, squares: Sequence[Any]) -> float:
        return math.sqrt(self.processes.sum([float(sum(squares))])[0])

    def _tell(self, norm: float, factor: float, noise: float) -> Norms:
        return super()._tell(norm, factor, self.processes.sum([noise])[0])
