"""Shards by commands: a job as an ensemble, the job that a state was learned by, what it costs."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from expunge.certificates.identifiers import read_ids
from expunge.errors import ExpungeError, InputError, RunError, describe_error
from expunge.files import write_atomic
from expunge.forgettable.constituents import (
    Plan,
    list_lineages,
    read_checkpoint,
    train_constituent,
)
from expunge.forgettable.folders import Folder
from expunge.forgettable.shards import Shards
from expunge.forgettable.store import holds_store
from expunge.forgettable.workers import Workers
from expunge.jobs.checkpoints import read_weights
from expunge.jobs.jobfile import HeadJobFile, read_head_job
from expunge.jobs.loading import importing_from, load_function
from expunge.jobs.many import Item, Pool, connected
from expunge.jobs.tables import ShardsJob
from expunge.training.losses import find_loss

SIZES = ((4, 1), (4, 4), (8, 1), (8, 4))


def make_shards(
    made: HeadJobFile,
    job: ShardsJob,
    state: Path,
    workers: int | Workers = 1,
    progress: bool = False,
) -> Shards:
    """The ensemble of a job, with what ``state`` holds. Call inside ``importing_from``."""
    holds_store(state)
    method, model = job.method, job.model
    places = [place or "" for place in (model.build, method.train, model.loss)]
    if isinstance(workers, int) and workers > 1 and any(".py:" in place for place in places):
        valid = '1, or all functions named as "module:function", for other processes to import'
        raise InputError.of("--workers", workers, valid)
    given: dict[str, Any] = method.model_dump(exclude={"name", "train"}, exclude_unset=True)
    if method.train is not None:
        given["train"] = load_function("method.train", method.train, made.folder)
    elif model.loss is not None:
        own = find_loss(model.loss, None)
        given["loss_fn"] = own or load_function("model.loss", model.loss, made.folder)
    public: Any = model.public
    if isinstance(public, str):
        public = read_weights(made.locate(public), "model.public")
    build = load_function("model.build", model.build, made.folder)
    more: dict[str, Any] = {"public": public, "workers": workers, "progress": progress}
    try:
        return Shards(build, state=state, **given, **more)
    except InputError as error:
        raise InputError(f"{made.path}: {error}") from None


def remember_job(state: Path, path: Path) -> None:
    """Keep where the job is: without it nothing can be trained again."""
    write_atomic(state / "job.json", json.dumps({"job": str(path.absolute())}).encode())


@contextmanager
def open_shards(state: Path, progress: bool = False) -> Generator[Shards]:
    """The ensemble of a state, by the job it was learned by."""
    try:
        path = Path(json.loads((state / "job.json").read_text())["job"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{state} does not say by which job it was learned; run expunge learn with it again"
        ) from None
    if not path.is_file():
        raise InputError(
            f"{state} was learned by {path}, which is gone, and its network is built there; put it "
            "back, or run expunge learn with the job where it is now"
        )
    made = read_head_job(path)
    if not isinstance(made.job, ShardsJob):
        raise InputError(f"{state} holds shards, and {path} is now a job of {made.job.method.name}")
    with importing_from(made.folder):
        yield make_shards(made, made.job, state, progress=progress)


@dataclass(frozen=True)
class Slices:
    """Who is held in the slices of a state, and who was forgotten, by the hashes of their names."""

    plan: Plan
    state: Path

    @property
    def forgotten(self) -> set[bytes]:
        return Folder(self.state).read_forgotten()

    def count_rows(self, ids: Iterable[object]) -> dict[bytes, int]:
        """How many examples each identifier has; one never learned is refused by name."""
        assignment, known = self.plan.assignment, self.forgotten
        names = {assignment.name(name): name for name in read_ids(ids)}
        places = {assignment.find_place(mark) for mark in names}
        held = sum((self._count(*place) for place in places), Counter[bytes]())
        unknown = [name for mark, name in names.items() if not held[mark] and mark not in known]
        if unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            raise InputError(f"ids holds {unknown[0]!r}{more}, which was never learned")
        return {mark: held[mark] for mark in names}

    def count_people(self) -> int:
        """How many identifiers have examples."""
        shards, slices = self.plan.assignment.shards, self.plan.assignment.slices
        return sum(len(self._count(k, j)) for k in range(shards) for j in range(slices))

    def _count(self, shard: int, part: int) -> Counter[bytes]:
        found = Folder(self.state).read_slice(shard, part)
        return Counter() if found is None else Counter(found.read_names())


def train_on_ray(
    plan: Plan, settings: Mapping[str, Any], folder: Folder, shards: Sequence[int], *, pool: Pool
) -> list[tuple[int, int]]:
    """A shard is a task: its slices and checkpoints go out, its new checkpoints come back."""
    slices, found = range(plan.assignment.slices), dict[int, tuple[int, int]]()
    touched = list[int]()
    for shard in shards:
        digests = [folder.scan(plan.assignment, shard, part).digest for part in slices]
        last = folder.path / folder.checkpoint_name(shard, slices[-1])
        if read_checkpoint(last, list_lineages(settings, shard, digests)[-1]) is None:
            touched.append(shard)
    if not touched:
        return [(0, 0)] * len(shards)
    with connected(pool, [Item("shards", None)]) as ray:
        packed = ray.put(ray.cloudpickle.dumps((plan, dict(settings))))
        run = ray.remote(max_retries=pool.retries)(train_apart)
        many = pool.workers or len(touched)
        for start in range(0, len(touched), many):
            batch = touched[start : start + many]
            files = [_read_files(folder, shard, slices) for shard in batch]
            given = zip(batch, files, strict=True)
            tasks = [run.remote(sys.path, packed, *one) for one in given]
            for shard, task in zip(batch, tasks, strict=True):
                found[shard], made = _get(ray, task, pool)
                for name, data in made.items():
                    write_atomic(folder.path / name, data)
    return [found.get(shard, (0, 0)) for shard in shards]


def train_apart(
    places: list[str], packed: bytes, shard: int, files: Mapping[str, bytes]
) -> tuple[tuple[int, int], dict[str, bytes]]:
    """What a worker runs: a shard in a folder of its own; the checkpoints that are new."""
    sys.path.extend(place for place in places if place not in sys.path)
    plan, settings = pickle.loads(packed)
    with TemporaryDirectory(prefix="expunge-shard-") as place:
        folder = Folder(Path(place))
        for name in ("rows", "checkpoints"):
            (folder.path / name).mkdir()
        for name, data in files.items():
            (folder.path / name).write_bytes(data)
        told = train_constituent(plan, settings, folder, shard)
        made = {f"checkpoints/{p.name}": p.read_bytes() for p in folder.path.glob("checkpoints/*")}
    return told, {name: data for name, data in made.items() if files.get(name) != data}


def _read_files(folder: Folder, shard: int, slices: range) -> dict[str, bytes]:
    names = [make(shard, part) for part in slices
             for make in (folder.slice_name, folder.checkpoint_name)]  # fmt: skip
    return {n: (folder.path / n).read_bytes() for n in names if (folder.path / n).exists()}


def _get(ray: Any, task: Any, pool: Pool) -> Any:
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ExpungeError):
            raise error.cause from None
        raise RunError(f"a worker could not train: {describe_error(error.cause)}") from None
    except ray.exceptions.RayError as error:
        raise RunError(
            f"a shard could not be trained, its worker died {pool.retries + 1} times "
            f"({type(error).__name__}); what was asked for is kept, run the same command again"
        ) from None


def expect_work(shards: int, slices: int, people: int) -> float:
    """The part of the ensemble's training that forgetting random ``people`` costs on average.

    A shard is trained again from the first slice j (from 0) that holds one of them, which costs
    c_j = Σ_{i≥j} (i+1) / Σ_i (i+1) of its training; with p_j = (1 - j/SR)^k the chance that nobody
    of k is in the slices before j:  E = Σ_j (p_j - p_{j+1}) c_j, and (2R+1)/(3RS) for one.

    >>> [round(expect_work(8, 4, k), 3) for k in (1, 10, 100)]
    [0.094, 0.605, 0.995]
    """
    cells, whole = shards * slices, slices * (slices + 1) / 2
    chance = [(1 - j / cells) ** people for j in range(slices + 1)]
    cost = [sum(range(j + 1, slices + 1)) / whole for j in range(slices)]
    return sum((chance[j] - chance[j + 1]) * cost[j] for j in range(slices))
