"""The processes that work on one run: what they tell each other, and how they stop together.

One model, one process, or several started by ``torchrun``. Every process holds the model, or its
shard of it, and takes its share of every batch. What crosses between them is a handful of
operations: sums, one broadcast of the noise key, plain data by value. All of them go through
:class:`Processes`, which turns a process that died or hung into one sentence. For a run of one
process they are identities, and ``torch.distributed`` is not touched.

Numbers that steer the run are sums over all processes, and every process sees the same bits: they
clip by the same factor, stop at the same step, and save at the same step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from expunge.errors import (
    CertificateError,
    ExpungeError,
    InputError,
    RunError,
    UnlearningError,
    VerificationError,
)

CHECK_EVERY = 50
TIMEOUT_SECONDS = 600.0
BUCKET = 1 << 23

T = TypeVar("T")
_KINDS = (InputError, UnlearningError, RunError, CertificateError, VerificationError)


class Processes:
    """This process among those of the run: ``rank`` of ``size``; ``Processes()`` is one alone.

    ``check_every`` is how many steps lie between two checks that all of them agree. ``sent`` counts
    the bytes of tensors handed to the sums of gradients, ``checks`` the checks that were held.

    >>> one = Processes()
    >>> one.leads, one.sum([1.0, 2.0]), one.gather("a"), one.share("b")
    (True, [1.0, 2.0], ['a'], 'b')
    """

    def __init__(
        self, rank: int = 0, size: int = 1, check_every: int = CHECK_EVERY, control: Any = None
    ) -> None:
        self.rank, self.size, self.check_every = rank, size, check_every
        self.sent = self.checks = 0
        self._control = control

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether this is a run of one process."""
        return self.size == 1

    def describe(self, layout: str) -> dict[str, Any] | None:
        """What the record keeps; nothing of a run of one process."""
        if self.alone:
            return None
        facts = {"count": self.size, "layout": layout, "backend": dist.get_backend()}
        return facts | {"check_every": self.check_every, "checks": self.checks}

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, in float64, the same bits everywhere."""
        return self._reduce(values, "SUM")

    def find_largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each over all processes."""
        return self._reduce(values, "MAX")

    def add_up(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over all processes, in float32 or wider, in buckets.

        The averages of a run come from here: every process scales by its share first.
        """
        if self.alone:
            return list(tensors)
        found = list(tensors)
        for kind in (torch.float32, torch.float64):
            wide = kind is torch.float64
            own = [i for i, t in enumerate(tensors) if (t.dtype is torch.float64) is wide]
            if not own:
                continue
            flat = torch.cat([tensors[i].detach().reshape(-1).to(kind) for i in own])
            self.sent += flat.nbytes
            with self.listening("summing gradients"):
                for bucket in flat.split(BUCKET):
                    dist.all_reduce(bucket)
            for i, part in zip(own, flat.split([tensors[i].numel() for i in own]), strict=True):
                found[i] = part.view(tensors[i].shape)
        return found

    def gather(self, value: T) -> list[T]:
        """Plain data of every process, by rank, on every process."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        with self.listening("comparing notes"):
            dist.all_gather_object(found, value, group=self._control)
        return cast(list[T], found)

    def share(self, value: T) -> T:
        """The plain data of rank 0, on every process."""
        if self.alone:
            return value
        held: list[Any] = [value if self.leads else None]
        with self.listening("waiting for rank 0"):
            dist.broadcast_object_list(held, src=0, group=self._control)
        return cast(T, held[0])

    def share_key(self, key: bytes | None) -> bytes:
        """The noise key of rank 0, broadcast once; it stays in memory on both ends."""
        if self.alone:
            assert key is not None
            return key
        held = torch.zeros(32, dtype=torch.uint8)
        if self.leads:
            assert key is not None
            held.copy_(torch.frombuffer(bytearray(key), dtype=torch.uint8))
        with self.listening("waiting for the noise key of rank 0"):
            dist.broadcast(held, src=0, group=self._control)
        found = held.numpy().tobytes()
        held.zero_()
        return found

    def post(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        """Begin to hand a tensor to one other process; what is returned waits for the end."""
        work = dist.isend(tensor, dst=rank)

        def wait() -> None:
            with self.listening(f"sending weights to rank {rank}"):
                if work is not None:
                    work.wait()

        return wait

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a tensor with what one other process sends."""
        with self.listening(f"receiving weights from rank {rank}"):
            dist.recv(tensor, src=rank)

    def wait(self) -> None:
        """Until every process is here."""
        self.gather(None)

    @contextmanager
    def together(self) -> Generator[None]:
        """Do something that may be refused on some ranks: refused on one, it is refused on all.

        Rank 0 tells the sentence; where only some refuse, it names the first of them.
        """
        if self.alone:
            yield
            return
        error: ExpungeError | None = None
        try:
            yield
        except ExpungeError as raised:
            error = raised
        told = self.gather(None if error is None else (str(error), type(error).__name__))
        first = next((rank for rank, text in enumerate(told) if text is not None), None)
        if first is None:
            return
        text, kind = cast(tuple[str, str], told[first])
        alone = any(text is None for text in told)
        sentence = f"rank {first}: {text}" if alone and first > 0 else text
        same = next((known for known in _KINDS if known.__name__ == kind), UnlearningError)
        raise mark_told(same(sentence), self.rank) from error

    @contextmanager
    def listening(self, doing: str) -> Generator[None]:
        """Say in one sentence that another process is gone."""
        try:
            yield
        except RuntimeError as error:
            if self.alone:
                raise
            raise lose(self.rank, self.size, doing, error) from error

    def _reduce(self, values: Sequence[float], how: str) -> list[float]:
        if self.alone:
            return list(map(float, values))
        held = torch.tensor(values, dtype=torch.float64)
        with self.listening("adding up"):
            dist.all_reduce(held, op=getattr(dist.ReduceOp, how), group=self._control)
        return cast(list[float], held.tolist())


def lose(rank: int, size: int, doing: str, error: Exception) -> RunError:
    """The one sentence about a process that is gone: the run may be tried again."""
    detail = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0][:160]
    return RunError(
        f"rank {rank} of {size} lost another process while {doing}: it ended, hung for longer than "
        f"the timeout, or could not be reached ({detail}); nothing is certified, and --resume goes "
        "on from the last checkpoint"
    )


def is_lost(error: BaseException) -> bool:
    """Whether torch says that a process is gone, inside a forward or backward pass.

    >>> is_lost(RuntimeError("[pair.cc:537] Read error: Connection reset by peer")), is_lost(
    ...     RuntimeError("shapes cannot be multiplied"))
    (True, False)
    """
    text = str(error)
    signs = ("Connection", "gloo", "NCCL", "Timed out", "timeout", "Broken pipe")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def mark_told(error: ExpungeError, rank: int) -> ExpungeError:
    """Only rank 0 prints an error that every process raises."""
    error.told_by_another = rank > 0
    return error


def find_processes(
    distributed: bool | Processes | None = None, check_every: int = CHECK_EVERY
) -> Processes:
    """The processes of an initialised process group; this one alone where there is none.

    ``distributed`` None takes those there are, True insists on some, False works alone.

    >>> find_processes(None).size, find_processes(False, check_every=10).check_every
    (1, 10)
    """
    if isinstance(distributed, Processes):
        return distributed
    if distributed not in (None, True, False):
        raise InputError.of("distributed", distributed, "True, False or None")
    if check_every != int(check_every) or check_every < 1:
        raise InputError.of("check_every", check_every, "a whole number >= 1")
    ready = dist.is_available() and dist.is_initialized()
    if distributed is True and not ready:
        raise InputError(
            "distributed is True, but there is no process group; call "
            "torch.distributed.init_process_group first, or start with torchrun"
        )
    if distributed is False or not ready or dist.get_world_size() == 1:
        return Processes(check_every=int(check_every))
    control = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return Processes(dist.get_rank(), dist.get_world_size(), int(check_every), control)


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the model.

    >>> is_sharded(nn.Linear(2, 2))
    False
    """
    kinds = (kind.__name__ for module in model.modules() for kind in type(module).__mro__)
    return "FSDPModule" in kinds or any(hasattr(p, "device_mesh") for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Give back what a forward pass gathered: the outermost module keeps it for the backward."""
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            cast(Any, module).reshard()


def count_started() -> int:
    """How many processes torchrun started; 1 without it.

    >>> count_started()
    1
    """
    given = os.environ.get("WORLD_SIZE", "1")
    return int(given) if "RANK" in os.environ and given.isdecimal() else 1


def is_restarted() -> bool:
    """Whether torchrun started this process anew after another one failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


@contextmanager
def joined(timeout_seconds: float, check_every: int) -> Generator[Processes]:
    """The processes that torchrun started, in a process group for as long as this lasts.

    This one alone without torchrun. A group that is there already is used and left as it is.
    """
    if count_started() == 1 or dist.is_initialized():
        yield find_processes(None, check_every)
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    try:
        _init(backend, timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"rank {rank} of {size} cannot join the others: {str(error).splitlines()[0][:200]}"
        ) from error
    try:
        yield find_processes(None, check_every)
    finally:
        dist.destroy_process_group()


def _init(backend: str, timeout: timedelta) -> None:
    """``init_process_group`` under a name of its own for every restart.

    Restarted processes find the store of the ones before, with addresses where nobody answers.
    """
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    own = PrefixStore(f"expunge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
