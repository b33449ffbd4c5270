"""What a request to a model built to forget takes here, timed on the smallest honest thing.

A head: the network on a few rows, and a head of that width that learns random numbers and forgets
one of them. Shards: training steps of one network; what a request repeats is a part of all such
steps. The rows are public noise of the shape of the job's examples: shards and slices may be chosen
by what is told here, and nobody's data are in it. Nothing that is written stays.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from expunge.errors import UnlearningError
from expunge.forgettable.constituents import Plan, find_behaviour
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features, make_probe
from expunge.forgettable.folders import Folder, holds_shards
from expunge.forgettable.memory import Memory, Targets, open_memory
from expunge.forgettable.slices import Examples, read_examples
from expunge.forgettable.statistics import StatisticsHead
from expunge.jobs.data import find_tensors
from expunge.jobs.heads import build_network, make_head
from expunge.jobs.jobfile import HeadJobFile
from expunge.jobs.shards import make_shards, open_shards
from expunge.jobs.states import Request
from expunge.jobs.tables import HeadJob, ShardsJob
from expunge.jobs.timing import SECONDS, Clock, Enough
from expunge.training.train import train

SELF_TESTS = 2  # when a state is opened; before and after its training
FEW, SOME, MANY = 32, 96, 1000  # rows through a network, and of a head's random numbers


@dataclass(frozen=True)
class Measured:
    """Seconds of one ``request``, and of learning everything ``anew``."""

    request: float
    anew: float


def time_head_job(made: HeadJobFile, job: HeadJob, train: Any, count: int) -> Measured | None:
    """The job's network on a few rows like its ``count`` examples, and a head of that width."""
    network, method = build_network(made, job), job.method
    with TemporaryDirectory(prefix="expunge-plan-") as folder:
        features = make_head(made, job, network, Path(folder) / "state", False).features
    rows = make_probe(_take_one(train)[0], SOME)
    features.compute(rows[:FEW])
    began = time.perf_counter()
    width = features.compute(rows).shape[1]
    extraction = (time.perf_counter() - began) / len(rows)
    own: dict[str, Any] = method.model_dump(exclude={"name", "classes", "outputs", "target_scale"})
    given = job.features.model_dump(include={"bits", "lift", "seed"})
    targets = Targets(method.classes, method.outputs, method.target_scale)
    return time_head(method.name, own, targets, width, count, extraction, **given)


def time_head(
    kind: str,
    own: Mapping[str, Any],
    targets: Targets,
    width: int,
    count: int,
    extraction: float = 0.0,
    **given: Any,
) -> Measured | None:
    """A head on random vectors of this ``width`` learns, and forgets one; None if those are too
    hard. ``extraction`` is the network's seconds for a row; ``given`` are options of the features.

    >>> found = time_head("statistics-head", {}, Targets(classes=2), width=3, count=20)
    >>> found is not None and 0 < found.request < found.anew
    True
    """
    rows, draw = max(min(count, MANY), 4), np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(rows, width)).astype(np.float32))
    y = torch.from_numpy(draw.poisson(1.0, (rows, targets.columns)).astype(np.int64))
    y = y if targets.classes is None else y[:, 0] % targets.classes
    ids = [str(row) for row in range(rows)]
    with TemporaryDirectory(prefix="expunge-plan-") as folder:
        make: Any = StatisticsHead if kind == "statistics-head" else ConvexHead
        about = {"classes": targets.classes, "outputs": targets.outputs}
        about |= {"target_scale": targets.scale, "state": Path(folder) / "state"}
        head = make(Features(None, **given), **own, **about)
        head.learn((x[:2], y[:2]), ids[:2])
        began = time.perf_counter()
        head.learn((x[2:], y[2:]), ids[2:])
        product = (time.perf_counter() - began) / (rows - 2)
        try:
            head.forget(["0"])
            began = time.perf_counter()
            head.forget(["1"])
        except UnlearningError:
            return None
        request = time.perf_counter() - began
    if kind != "statistics-head":  # it passes over all rows
        request *= max(count / rows, 1.0)
    return Measured(request, count * (extraction + product) + request)


def time_shards_job(made: HeadJobFile, job: ShardsJob, train: Any, ids: list[str]) -> float:
    """Seconds of all training of a job of shards."""
    with TemporaryDirectory(prefix="expunge-plan-") as folder:
        plan = make_shards(made, job, Path(folder) / "state").plan
        like = read_examples(plan.assignment, _take_one(train), ids[:1])
        return time_shards(plan, like, len(ids))


def time_shards(plan: Plan, like: Examples, count: int) -> float:
    """Seconds of all training of an ensemble of ``count`` examples, on one thread as constituents
    are; of a function that trains, from one call."""
    cells, settings = plan.assignment.shards * plan.assignment.slices, plan.settings
    share = max(count // cells, 1)
    if settings is None:  # each stage j of R sees j slices: (R + 1)/2 on average
        some = _draw(like, min(share, MANY))
        began = time.perf_counter()
        plan.train_stage(None, some, 0, 1)
        each = (time.perf_counter() - began) / len(some)
        return each * count * (plan.assignment.slices + 1) / 2
    batch = min(settings.batch_size, share)
    options: dict[str, Any] = {name: getattr(settings, name) for name in vars(settings)}
    options |= {"batch_size": batch, "augment": None, "prepare": None}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = replace(settings, batch_size=batch).make_batches(_draw(like, FEW * batch))
    found = 0.0
    try:
        for seconds in (0.0, SECONDS):  # torch loads what it needs in the first few steps
            clock = Clock(seconds)
            with contextlib.suppress(Enough):
                train(plan.make(0), batches, on_step=clock, **options)
            found = clock.estimate(round(settings.epochs * count / batch), cells)
    finally:
        torch.set_num_threads(threads)
    return found


def time_state(request: Request) -> float | None:
    """Seconds of a request to a state, without its files: of shards, the part of training that its
    people touch, and the self-tests around it."""
    if holds_shards(request.state):
        with open_shards(request.state) as ensemble:
            counts = ensemble.count_samples()
            shard, slices = counts.index(max(counts)), ensemble.plan.assignment.slices
            some = Folder(request.state).read_slices(shard, slices)
            training = time_shards(ensemble.plan, some, sum(counts))
            began = time.perf_counter()
            find_behaviour(ensemble.plan, some)
            testing = time.perf_counter() - began
            return ensemble.measure(request.ids) * training + SELF_TESTS * testing
    found = _time_memory(open_memory(request.state))
    return None if found is None else found.request


def _time_memory(memory: Memory) -> Measured | None:
    own = dict(memory.settings)
    kind = "statistics-head" if own.pop("head") == "exact-statistics" else "convex-head"
    own = {"regularisation": own["regularisation"]} if kind == "statistics-head" else own
    return time_head(kind, own, memory.targets, memory.sums.cross.shape[0], memory.sums.rows)


def _take_one(train: Any) -> tuple[Any, Any]:
    """The first example as two tensors of one row."""
    pair = find_tensors(train)
    x, y = train[0] if pair is None else (pair[0][0], pair[1][0])
    return torch.as_tensor(x)[None], torch.as_tensor(y)[None]


def _draw(like: Examples, count: int) -> Examples:
    """Public noise of the shape of examples, with targets of zero."""
    targets = like.targets.new_zeros((count, *like.targets.shape[1:]))
    names = torch.zeros((count, like.names.shape[1]), dtype=torch.uint8)
    return Examples(names, make_probe(like.inputs, count), targets)
