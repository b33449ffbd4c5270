"""What the processes of a run do together, around its vector; a run of one is a team of one.

    replicated  every process holds the whole vector; gradients are averaged over the processes,
                weighted by their examples; the noise is drawn everywhere, from the same key
    sharded     every process holds its rows (``fully_shard``), whose gradients torch averages; the
                noise of its positions is drawn there and nowhere else

Either way the averaged gradient is clipped once, by its global norm, and the released vector is the
one that one process would release, up to the order in which gradients are added. Whatever else a
run draws at random (the order of the data, dropout) follows from the same key, and so depends on
nothing that happened before the run.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from expunge.errors import UnlearningError
from expunge.noisy.model import CertifiedModel
from expunge.noisy.noise import Noise, NoiseStream
from expunge.noisy.sharded_vector import ShardedVector
from expunge.noisy.vector import CertifiedVector, make_vector
from expunge.processes.agreement import (
    check_start,
    check_step,
    digest_bytes,
    digest_key,
    digest_tensor,
)
from expunge.processes.group import Processes, is_lost, is_sharded, lose
from expunge.processes.stopping import Stopped
from expunge.processes.weights import to_local
from expunge.training.batches import Cycle
from expunge.training.randomness import draw_apart
from expunge.training.shares import Share, Shares


class Team:
    """This process in a run: what it does together with the others, if there are others."""

    def __init__(self, processes: Processes, certified: CertifiedModel) -> None:
        self.processes, self.certified = processes, certified
        self.sharded = is_sharded(certified.model)
        self.stream: NoiseStream | None = None
        if processes.alone:
            if self.sharded:
                raise UnlearningError(
                    "the model is sharded, and this is a run of one process; it takes all "
                    "processes that hold the model (distributed=None)"
                )
            return
        if certified.reset:
            raise UnlearningError(
                f"{certified.reset[0]} would be reset, which needs one process: the statistics of "
                "a share of a batch are not those of the batch; use GroupNorm or LayerNorm, or "
                "freeze the module"
            )
        wrapped = type(certified.model).__name__
        if wrapped in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UnlearningError(
                f"the model is wrapped in {wrapped}; give the module inside it, or one on which "
                "fully_shard was called"
            )

    def describe(self) -> dict[str, Any] | None:
        """What the record says of how the processes worked together."""
        return self.processes.describe("sharded" if self.sharded else "replicated")

    def share_out(self, loader: Iterable[Any]) -> Shares:
        """This process's shares of the batches."""
        return Shares(loader, self.processes, even=not self.processes.alone)

    def make_vector(self, grid: float) -> CertifiedVector:
        """The certified vector, or this process's part of it."""
        certified, centre = self.certified.certified, self.certified.centre
        if self.sharded:
            if grid == 0:
                raise UnlearningError(
                    "a run without noise certifies nothing, and a sharded model can only be "
                    "certified; give the recipe noise, or run it in one process"
                )
            return ShardedVector(certified, centre, grid, self.processes)
        points = None if centre is None else list(centre.values())
        return make_vector(list(certified.values()), points, grid)

    def begin(self, facts: Mapping[str, Any], noise: Noise) -> None:
        """Refuse processes that differ; then all have the stream of one new key."""
        check_start(self.processes, facts)
        self.stream = self.take_key(noise)

    def take_key(self, noise: Noise) -> NoiseStream:
        """The noise of a new key: rank 0's, which every process is told once."""
        stream = noise.begin() if self.processes.leads else None
        key = self.processes.share_key(None if stream is None else stream.export_key())
        return NoiseStream.from_key(key) if stream is None else stream

    def derive_seed(self, purpose: str) -> int:
        """The seed of whatever else is drawn at random, from the run's key, the same everywhere."""
        assert self.stream is not None
        return self.stream.derive_seed(purpose)

    @contextmanager
    def computing(self, purpose: str) -> Generator[None]:
        """Dropout draws numbers of this rank and step; the order of the data stays everybody's.

        A process that is lost inside a forward or backward pass is told about.
        """
        rank, size = self.processes.rank, self.processes.size
        try:
            with draw_apart(str(self.derive_seed(f"{purpose} of rank {rank}"))):
                yield
        except RuntimeError as error:
            if self.processes.alone or not is_lost(error):
                raise
            raise lose(rank, size, "computing gradients", error) from error

    def find_scale(self, share: Share) -> float:
        """What the loss is multiplied with, so that the sum or torch's mean is the batch's mean."""
        return share.weight * self.processes.size if self.sharded else share.weight

    def average(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The mean gradient of the whole batch, from scaled ones; sharded, it is that already."""
        if self.sharded:
            return [to_local(g) for g in gradients]
        return self.processes.add_up(gradients)

    def heed(
        self, stop: KeyboardInterrupt | None, due: bool
    ) -> tuple[KeyboardInterrupt | None, bool]:
        """Whether anybody was asked to stop, and whether rank 0 finds it time to save."""
        number = 0
        if stop is not None:
            number = stop.exit_code - 128 if isinstance(stop, Stopped) else int(signal.SIGINT)
        asked, save = self.processes.find_largest([number, due and self.processes.leads])
        if asked and stop is None:
            stop = Stopped(int(asked))
        return stop, bool(save)

    def check(
        self,
        done: int,
        last: int,
        columns: np.ndarray[Any, Any],
        cycle: Cycle | None,
        vector: CertifiedVector,
    ) -> None:
        """Compare notes with all processes after the last step and every so many; a difference
        stops the run."""
        due = done == last or done % self.processes.check_every == 0
        if self.processes.alone or not due:
            return
        assert self.stream is not None
        facts = {"step": str(done), "noise key": digest_key(self.stream.export_key())}
        facts["trace"] = digest_bytes(np.ascontiguousarray(columns[: max(done, 1)]).tobytes())
        if cycle is not None:
            place = cycle.place()
            order = place.get("now.generator", place["now.torch"])
            facts["data order"] = digest_tensor(order) + digest_tensor(place["taken"])
        if not self.sharded:
            parts = [digest_tensor(t) for t in (*vector.state().values(), *vector.parameters)]
            facts["parameters"] = digest_bytes("".join(parts).encode())
        check_step(self.processes, facts)
