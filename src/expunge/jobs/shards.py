"""Shards by commands: a job as an ensemble, the job that a state was learned by, what it costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expunge.certificates.identifiers import read_ids
from expunge.errors import InputError
from expunge.files import write_atomic
from expunge.forgettable.constituents import Folder, Plan
from expunge.forgettable.shards import FORMAT, Shards
from expunge.forgettable.slices import NAME_BYTES
from expunge.forgettable.store import holds_store
from expunge.jobs.jobfile import HeadJobFile, read_head_job
from expunge.jobs.loading import importing_from, load_function, read_weights
from expunge.jobs.tables import ShardsJob
from expunge.training.losses import find_loss

SIZES = ((4, 1), (4, 4), (8, 1), (8, 4))


@dataclass(frozen=True)
class Adam:
    """Adam as a function of the parameters."""

    lr: float
    weight_decay: float

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class AdamW:
    """AdamW as a function of the parameters."""

    lr: float
    weight_decay: float

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)


def make_shards(
    made: HeadJobFile, job: ShardsJob, state: Path, workers: int = 1, progress: bool = False
) -> Shards:
    """The ensemble of a job, with what ``state`` holds. Call inside ``importing_from``."""
    holds_store(state)
    method, model = job.method, job.model
    given: dict[str, Any] = method.model_dump(
        exclude={"name", "train", "optimizer"}, exclude_unset=True
    )
    if method.train is not None:
        given["train"] = load_function("method.train", method.train, made.folder)
    elif model.loss is not None:
        own = find_loss(model.loss, None)
        given["loss_fn"] = own or load_function("model.loss", model.loss, made.folder)
    if method.optimizer != "sgd":
        rate, decay = method.learning_rate or 0.0, method.weight_decay
        given["optimizer"] = (AdamW if method.optimizer == "adamw" else Adam)(rate, decay)
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


def holds_shards(state: Path) -> bool:
    """Whether a folder is the state of shards."""
    try:
        return json.loads((state / "meta.json").read_text()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


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
        file = self.state / "forgotten"
        marks = file.read_bytes() if file.exists() else b""
        return {marks[at : at + NAME_BYTES] for at in range(0, len(marks), NAME_BYTES)}

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
