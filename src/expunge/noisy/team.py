"""What a run of several processes does differently from one: its vector, gradients, key and checks.

    replicated  every process holds the whole vector; gradients are averaged over the processes,
                weighted by their examples; the noise is drawn everywhere, from the same key
    sharded     every process holds its rows (``fully_shard``), whose gradients torch averages; the
                noise of its positions is drawn there and nowhere else

Either way the averaged gradient is clipped once, by its global norm, and the released vector is the
one that one process would release, up to the order in which gradients are added.

The state of a run of several processes on disk: ``torch.distributed.checkpoint`` and a pointer.

A checkpoint is a folder. The vector goes into a new folder inside it, every process writing its own
part; when all of it is there, rank 0 replaces ``state.safetensors``, which holds everything else
and so names that folder, in one rename. A run killed at any moment finds the old state or the new
one. Every process must be able to reach the folder. It never holds a noise key, and is private.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from expunge.errors import InputError, UnlearningError
from expunge.noisy.checkpoint import Progress, load_checkpoint, remove_leftovers, save_checkpoint
from expunge.noisy.model import Subject
from expunge.noisy.noise import Drawing, Noise, NoiseStream
from expunge.noisy.sharded_vector import ShardedVector
from expunge.noisy.vector import CHUNK, CertifiedVector, FloatVector, GridVector
from expunge.processes.agreement import (
    check_start,
    check_step,
    digest_bytes,
    digest_key,
    digest_tensor,
)
from expunge.processes.group import Processes, is_lost, is_sharded, lose
from expunge.processes.stopping import Stopped
from expunge.processes.weights import hash_together, hash_weights, to_local
from expunge.training.batches import Cycle
from expunge.training.randomness import capture_random, draw_apart, restore_random
from expunge.training.shares import Share, Shares


class Team:
    """This process in a run: what it does together with the others."""

    def __init__(self, processes: Processes, subject: Subject) -> None:
        self.processes, self.subject = processes, subject
        self.sharded = is_sharded(subject.model)
        self.seed = 0
        self._key = b""
        if subject.buffers.modules:
            raise UnlearningError(
                f"{subject.buffers.reset[0]} would be reset, which needs one process: the "
                "statistics of a share of a batch are not those of the batch; use GroupNorm or "
                "LayerNorm, or freeze the module"
            )
        wrapped = type(subject.model).__name__
        if wrapped in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UnlearningError(
                f"the model is wrapped in {wrapped}; give the module inside it, or one on which "
                "fully_shard was called"
            )

    @property
    def leads(self) -> bool:
        return self.processes.leads

    def describe(self) -> dict[str, Any]:
        """What the record says of how the processes worked together."""
        return self.processes.describe("sharded" if self.sharded else "replicated")

    def share_out(self, loader: Iterable[Any]) -> Shares:
        """This process's shares of the batches."""
        return Shares(loader, self.processes)

    def hash_state(self, tensors: Mapping[str, Tensor]) -> str:
        """``hash_weights``, of tensors that may be sharded."""
        return hash_together(tensors, self.processes) if self.sharded else hash_weights(tensors)

    def make_vector(self, grid: float, noisy: bool) -> CertifiedVector:
        """The certified vector, or this process's part of it."""
        certified, centre = self.subject.certified, self.subject.centre
        if self.sharded:
            if not noisy:
                raise UnlearningError(
                    "a run without noise certifies nothing, and a sharded model can only be "
                    "certified; give the recipe noise, or run it in one process"
                )
            return ShardedVector(certified, centre, grid, self.processes)
        parameters = list(certified.values())
        points = None if centre is None else list(centre.values())
        return GridVector(parameters, points, grid) if noisy else FloatVector(parameters, points)

    def begin(self, facts: Mapping[str, Any], loader: Iterable[Any]) -> None:
        """Refuse processes that differ; give all of them the random state of rank 0."""
        check_start(self.processes, facts)
        generator = loader.generator if isinstance(loader, Shares) else None
        state = self.processes.share(capture_random(generator))
        if not self.processes.leads:
            restore_random(state, generator)
        self.seed = int.from_bytes(hashlib.sha256(state["torch"].numpy().data).digest()[:7], "big")

    def make_drawing(self, noise: Noise, levels: Sequence[float], vector: GridVector) -> Drawing:
        """The noise of a new key: rank 0's, which every process is told once."""
        stream = noise.begin() if self.processes.leads else None
        self._key = self.processes.share_key(None if stream is None else stream.export_key())
        stream = NoiseStream.from_key(self._key) if stream is None else stream
        if isinstance(vector, ShardedVector):
            return vector.make_drawing(stream, levels)
        return Drawing(stream, levels, vector.size, min(vector.size, CHUNK))

    @contextmanager
    def computing(self, step: int) -> Generator[None]:
        """Dropout draws numbers of this rank and step; the order of the data stays everybody's.

        A process that is lost inside a forward or backward pass is told about.
        """
        try:
            with draw_apart(f"expunge/dropout {self.seed} {step} {self.processes.rank}"):
                yield
        except RuntimeError as error:
            if not is_lost(error):
                raise
            rank, size = self.processes.rank, self.processes.size
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
        self, done: int, columns: np.ndarray[Any, Any], cycle: Cycle | None, vector: CertifiedVector
    ) -> None:
        """Compare notes with all processes; a difference stops the run."""
        facts = {"step": str(done), "noise key": digest_key(self._key)}
        facts["trace"] = digest_bytes(np.ascontiguousarray(columns[: max(done, 1)]).tobytes())
        if cycle is not None:
            place = cycle.place()
            order = place.get("now.generator", place["now.torch"])
            facts["data order"] = digest_tensor(order) + digest_tensor(place["taken"])
        if not self.sharded:
            parts = [digest_tensor(t) for t in (*vector.state().values(), *vector.parameters)]
            facts["parameters"] = digest_bytes("".join(parts).encode())
        check_step(self.processes, facts)

    def save(
        self,
        path: Path,
        progress: Progress,
        identity: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        vector: CertifiedVector,
    ) -> None:
        """The state of the run to ``path``, a folder, by all processes."""
        kept = dict(tensors) | {"dropout": torch.tensor(self.seed)}
        save_state(path, self.processes, progress, identity, kept, vector)

    def load(
        self, path: Path, identity: Mapping[str, Any], vector: CertifiedVector
    ) -> tuple[Progress, dict[str, Tensor]] | None:
        """The state that ``save`` left, if any; the vector stands where it stood."""
        found = load_state(path, self.processes, identity, vector)
        if found is not None:
            self.seed = int(found[1]["dropout"])
        return found

    def is_due(self, done: int, last: int) -> bool:
        """Whether the processes compare notes after this step."""
        return done == last or done % self.processes.check_every == 0


STATE = "state.safetensors"


def save_state(
    path: Path,
    processes: Processes,
    progress: Progress,
    identity: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    vector: CertifiedVector,
) -> None:
    """Write everything; the state before stays until the new one is complete."""
    name = _name(progress)
    if processes.leads:
        path.mkdir(parents=True, exist_ok=True)
    if processes.share((path / name / ".metadata").exists()):
        return  # nothing was done since the last save
    with processes.listening("saving a checkpoint"):
        save(_list_parts(vector), checkpoint_id=str(path / name))
    if processes.leads:
        save_checkpoint(path / STATE, progress, identity, tensors)
        _remove_others(path, name)


def load_state(
    path: Path, processes: Processes, identity: Mapping[str, Any], vector: CertifiedVector
) -> tuple[Progress, dict[str, Tensor]] | None:
    """What ``save_state`` wrote, if it is of this very run, read into the vector; None if nothing.

    The number of processes may be another one than before.
    """
    found: tuple[Progress, dict[str, Tensor]] | None = None
    with processes.together():
        if processes.leads and path.is_dir():
            remove_leftovers(path / STATE)
            if (path / STATE).exists():
                found = load_checkpoint(path / STATE, identity)
            _remove_others(path, None if found is None else _name(found[0]))
    found = processes.share(found)
    if found is None:
        return None
    parts = _list_parts(vector)
    with processes.listening("reading a checkpoint"):
        try:
            load(parts, checkpoint_id=str(path / _name(found[0])))
        except CheckpointException as error:
            first = next(iter(error.failures.values()), (error, None))
            raise InputError(f"checkpoint {path} cannot be read: {first[0]}") from None
    vector.load(vector.state())
    return found


def _list_parts(vector: CertifiedVector) -> dict[str, Any]:
    """The vector by name; what is loaded goes into its own memory."""
    if isinstance(vector, ShardedVector):
        return {f"cells.{name}": tensor for name, tensor in vector.state_shards().items()}
    return dict(vector.state())


def _name(progress: Progress) -> str:
    return f"step-{progress.steps}-key-{progress.noise_keys}"


def _remove_others(path: Path, name: str | None) -> None:
    for other in path.glob("step-*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
