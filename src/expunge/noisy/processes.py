"""Several processes that do one noisy run together, started by ``torchrun``.

Every process has the whole module and the whole vector. It takes its share of every batch; the
gradients, scaled by the shares, are summed; every process then clips the same sum by the same
factor and adds the same noise, drawn from the one key of rank 0. So the vector is the same bits
everywhere, and is the one that a single process would have, up to the order in which gradients are
added. For a run of one process everything here is an identity, and ``torch.distributed`` is not
touched.

Processes that disagree, and one that died or hangs, end the run with one sentence.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from expunge import errors
from expunge.errors import ExpungeError, InputError, RunError, UnlearningError
from expunge.noisy.noise import Noise, NoiseStream

CHECK_EVERY = 50  # steps between two comparisons of what the processes have
TIMEOUT_SECONDS = 600.0
BUCKET = 1 << 23

T = TypeVar("T")


class Processes:
    """This process among those of the run: ``rank`` of ``size``; ``Processes()`` is one alone.

    >>> one = Processes()
    >>> one.leads, one.gather("a"), one.share("b"), one.sum([torch.ones(1)])
    (True, ['a'], 'b', [tensor([1.])])
    """

    def __init__(self, rank: int = 0, size: int = 1, control: Any = None) -> None:
        self.rank, self.size = rank, size
        self._control = control  # a group that moves plain data where gradients go by NCCL

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether this is a run of one process."""
        return self.size == 1

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over all processes, in float32 or wider: the same bits everywhere."""
        if self.alone:
            return list(tensors)
        wide = any(tensor.dtype is torch.float64 for tensor in tensors)
        kind = torch.float64 if wide else torch.float32
        flat = torch.cat([tensor.detach().reshape(-1).to(kind) for tensor in tensors])
        with self.listening("summing gradients"):
            for bucket in flat.split(BUCKET):
                dist.all_reduce(bucket)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def gather(self, value: T) -> list[T]:
        """Plain data of every process, by rank, on every process."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        with self.listening("comparing with the others"):
            dist.all_gather_object(found, value, group=self._control)
        return cast(list[T], found)

    def share(self, value: T) -> T:
        """The plain data of rank 0, on every process."""
        if self.alone:
            return value
        box: list[Any] = [value if self.leads else None]
        with self.listening("waiting for rank 0"):
            dist.broadcast_object_list(box, src=0, group=self._control)
        return cast(T, box[0])

    def share_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rank 0's, on every process: in place, but where only rank 0 has any (FSDP)."""
        if 0 in self.gather(len(tensors)):
            return self.share(tensors)
        for tensor in () if self.alone else tensors.values():
            data = tensor.contiguous()
            group = self._control if data.is_cpu else None
            with self.listening("waiting for rank 0"):
                dist.broadcast(data.reshape(-1).view(torch.uint8), src=0, group=group)
            tensor.copy_(data)
        return tensors

    def begin(self, noise: Noise) -> NoiseStream:
        """The stream of one new key: rank 0's, sent once; it stays in memory on both ends."""
        if self.alone:
            return noise.begin()
        key = torch.zeros(32, dtype=torch.uint8)
        if self.leads:
            key.copy_(torch.frombuffer(bytearray(noise.begin().export_key()), dtype=torch.uint8))
        with self.listening("waiting for the noise key of rank 0"):
            dist.broadcast(key, src=0, group=self._control)
        stream = NoiseStream(key.numpy().tobytes())
        key.zero_()
        return stream

    def check_same(self, facts: Mapping[str, Any], when: str = "") -> None:
        """Refuse a run whose processes differ in any of ``facts``, naming the first difference."""
        found = self.gather(dict(facts))
        for rank, other in enumerate(found):
            for name, value in found[0].items():
                if other.get(name) != value:
                    text = (
                        f"rank {rank} has another {name} than rank 0{when}: {other.get(name)!r} "
                        f"and {value!r}; all processes of a run must have the same"
                    )
                    raise self._mark(UnlearningError(text) if when else InputError(text))

    @contextmanager
    def together(self) -> Generator[None]:
        """Something that may be refused on some ranks: refused on one, it is refused on all."""
        if self.alone:
            yield
            return
        error: ExpungeError | None = None
        try:
            yield
        except ExpungeError as raised:
            error = raised
        sentences = self.gather(None if error is None else (type(error).__name__, str(error)))
        first = next((rank for rank, text in enumerate(sentences) if text is not None), None)
        if first is not None:
            kind, text = cast(tuple[str, str], sentences[first])
            sentence = text if first == 0 else f"rank {first}: {text}"
            raise self._mark(getattr(errors, kind, UnlearningError)(sentence)) from error

    @contextmanager
    def listening(self, doing: str) -> Generator[None]:
        """Say in one sentence that another process is gone."""
        try:
            yield
        except RuntimeError as error:
            if self.alone or isinstance(error, ExpungeError):
                raise
            detail = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0][:160]
            raise RunError(
                f"rank {self.rank} of {self.size} lost another process while {doing}: it ended, "
                f"hung for longer than the timeout, or could not be reached ({detail}); nothing is "
                "certified, and the run can be resumed from its last checkpoint"
            ) from error

    def _mark(self, error: ExpungeError) -> ExpungeError:
        """Only rank 0 prints an error that every process raises."""
        error.printed_elsewhere = not self.leads
        return error


def find_processes() -> Processes:
    """Those of an initialised process group; this one alone where there is none.

    >>> find_processes().size
    1
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Processes()
    control = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return Processes(dist.get_rank(), dist.get_world_size(), control)


@contextmanager
def joined(timeout_seconds: float = TIMEOUT_SECONDS) -> Generator[Processes]:
    """The processes that torchrun started, in a process group for as long as this lasts.

    This one alone without torchrun. A group that is there already is used and left as it is.

    >>> with joined() as processes:
    ...     processes.alone
    True
    """
    size = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if size == "1" or dist.is_initialized():
        yield find_processes()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store, rank, count = next(iter(rendezvous("env://", timeout=timeout)))
        # Restarted processes find the store of the ones before, where nobody answers.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"expunge/{restarts}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:200]
        raise RunError(
            f"rank {os.environ['RANK']} of {size} cannot join the others: {reason}"
        ) from error
    try:
        yield find_processes()
    finally:
        dist.destroy_process_group()
