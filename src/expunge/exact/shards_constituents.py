"""One constituent of an ensemble: a function of a public string and of its own slices alone.

It starts from ``build()`` under a seed of its own and is trained on slice 1, then on slices 1-2, …,
then on 1-R, each stage with its own seed. After each stage there is a checkpoint: the tensors that
training changed, and the dictionary ``state`` where ``train`` names it. What a checkpoint was made
from is its *lineage*, with K the state's keyed hash:

    L_0 = SHA-256(settings ‖ shard)        L_j = SHA-256(L_{j-1} ‖ K(rows of slice j))

A checkpoint whose lineage is not that of the slices as they are now is stale and is not used. CPU
training runs on one thread, so that its bits do not depend on how many are trained at once.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from expunge.certificates.hashes import hash_tensor
from expunge.certificates.sources import read_source
from expunge.data.data import Data
from expunge.errors import InputError, RunError, UnlearningError
from expunge.exact.shards_examples import decode, encode
from expunge.exact.shards_slices import FEWEST
from expunge.networks.building import call_build
from expunge.networks.randomness import derive_seed
from expunge.networks.tensors import find_nonfinite, list_published, list_tensors, list_trainable
from expunge.progress import open_bar
from expunge.training.calling import Train, run_training

Build = Callable[[], nn.Module]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """What all constituents share."""

    build: Build
    train: Train
    seed: str

    @property
    def start_seed(self) -> int:
        """The public seed of the base: what is frozen there all constituents share."""
        return derive_seed("shards build", self.seed)

    def make(self, shard: int | None = None) -> nn.Module:
        """The base; or the network whose trainable tensors one constituent starts with, because
        networks that start alike err alike."""
        seed = self.start_seed if shard is None else derive_seed("shards start", self.seed, shard)
        return call_build(self.build, seed)


def train_stage(plan: Plan, before: bytes | None, data: Data, shard: int, stage: int) -> bytes:
    """The checkpoint after a stage (from 1) on the examples of slices 1 … stage."""
    module, tensors, kept = plan.make(), Tensors(), dict[str, Any]()
    start = {name: hash_tensor(t, name) for name, t in list_published(module).items()}
    if before is not None:
        tensors, kept = decode(before)
    if len(data) >= FEWEST:
        load_own(module, tensors or list_trainable(plan.make(shard)))
        with _on_one_thread():
            seed = derive_seed("shards train", plan.seed, shard, stage)
            trained = run_training(plan.train, module, data, seed, state=kept)
        tensors = list_own(trained, start)
        wrong = find_nonfinite({n: t for n, t in tensors.items() if n in list_trainable(trained)})
        if wrong is not None:
            raise UnlearningError(
                f"{wrong} of constituent {shard} is not finite after slice {stage}: training "
                "diverged; lower the learning rate"
            )
    return encode((tensors, kept), "state=, which train filled,")


def list_own(module: nn.Module, start: Mapping[str, bytes]) -> Tensors:
    """What a constituent has of its own: trainable tensors, and others that training changed."""
    own = {name: p.detach() for name, p in list_trainable(module).items()}
    others = list_published(module).items()
    return own | {name: t for name, t in others if hash_tensor(t, name) != start.get(name)}


@torch.no_grad()
def load_own(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy what a constituent has of its own into a module of ``build()``."""
    own = list_tensors(module)
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            raise InputError(f"build() gives another network than before: {name} does not fit")
        own[name].copy_(tensor)


@contextmanager
def _on_one_thread() -> Generator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def describe_source(function: Any) -> str | None:
    """The hash of the source of somebody's code, wherever it was imported from."""
    if function is None:
        return None
    module = getattr(function, "__module__", None) or type(function).__module__
    text = read_source(function).replace(f"{module}.", "")
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Work:
    """A shard to train: from the checkpoint before its first stale stage, stage by stage."""

    shard: int
    first: int
    before: bytes | None
    stages: Sequence[Callable[[], Data]]


Keep = Callable[[int, int, bytes], None]
Submit = Callable[..., Future[Any]]


def train_shards(
    plan: Plan, works: Sequence[Work], keep: Keep, workers: int, ray: bool | str, progress: bool
) -> None:
    """Train these shards and ``keep(shard, stage, checkpoint)`` every stage as soon as it is there:
    here, in processes of this machine, or as Ray's tasks, which Ray schedules and tries again."""
    ready = [(work, work.first, work.before) for work in reversed(works)]
    waiting, done = dict[Future[Any], tuple[Work, int]](), 0
    total = sum(len(work.stages) for work in works)
    with open_bar(total, "slices", progress) as update, _open_pool(plan, workers, ray) as submit:
        while ready or waiting:
            while ready and (ray or len(waiting) < workers):
                work, stage, before = ready.pop()
                data = work.stages[stage - work.first]()
                task = submit(train_stage, plan, before, data, work.shard, stage)
                waiting[task] = work, stage
            for task in wait(waiting, return_when=FIRST_COMPLETED).done:
                work, stage = waiting.pop(task)
                keep(work.shard, stage, task.result())
                if stage < work.first + len(work.stages) - 1:
                    ready.append((work, stage + 1, task.result()))
                done += 1
                update(done)


@contextmanager
def _open_pool(plan: Plan, workers: int, ray: bool | str) -> Generator[Submit]:
    if ray:
        yield _start_ray(ray)
    elif workers == 1:
        yield _run_here
    else:
        try:
            pickle.dumps(plan)
        except (AttributeError, TypeError, pickle.PicklingError):
            valid = "1 unless build and train can be imported by name"
            raise InputError.of("workers", workers, valid) from None
        try:
            with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
                yield pool.submit  # pyright: ignore[reportReturnType]
        except BrokenProcessPool:
            raise RunError("a worker died; what was trained is kept: call again") from None


def _run_here(function: Callable[..., bytes], *given: Any) -> Future[Any]:
    task: Future[Any] = Future()
    task.set_result(function(*given))
    return task


def _start_ray(address: bool | str) -> Submit:
    try:
        import ray
    except ImportError:
        raise InputError('ray is not installed; pip install "expunge[ray]"') from None
    cluster: Any = ray
    if not cluster.is_initialized():
        cluster.init(address=None if address is True else address, log_to_driver=False)
    remote = cluster.remote(train_stage)
    return lambda _, *given: remote.remote(*given).future()
