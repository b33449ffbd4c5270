"""``expunge learn``: a job becomes a state, all of its examples that are new or none."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from expunge.errors import ExpungeError, InputError
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.loading import Head
from expunge.forgettable.statistics import Compute, StatisticsHead
from expunge.forgettable.tangent import TangentFeatures
from expunge.jobs.checkpoints import read_weights
from expunge.jobs.data import find_tensors, open_data
from expunge.jobs.directory import FULL, check_free
from expunge.jobs.jobfile import HeadJobFile, read_head_job
from expunge.jobs.loading import (
    build_model,
    explaining,
    importing_from,
    load_function,
    put_weights,
)
from expunge.jobs.releases import (
    Learner,
    Released,
    find_counts,
    listening,
    release_state,
    working,
)
from expunge.jobs.shards import make_shards, remember_job, train_on_ray
from expunge.jobs.tables import HeadJob, ShardsJob, StatisticsTable

if TYPE_CHECKING:
    from expunge.jobs.many import Pool


@dataclass(frozen=True)
class Learned:
    """``new`` examples were added; the state holds ``examples`` of ``people``."""

    state: Path
    method: str
    new: int
    examples: int
    people: int
    digest: str
    said: tuple[str, ...] = ()
    release: Released | None = None


def learn_job(
    path: str | Path,
    *,
    out: str | Path | None = None,
    release: str | Path | None = None,
    pool: Pool | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> Learned:
    """Learn a job's examples into its state: all of those that are not held yet, or none.

    With ``release`` the head of everything that is held is written there, with its certificate.
    With ``pool`` features, or shards, are computed on Ray; ``workers`` processes train shards.

    >>> learn_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    made = read_head_job(path)
    state, said = made.find_state(out), list[str]()
    if release is not None and not state.exists():
        check_free(release)
    with importing_from(made.folder), working(state), _leaving_nothing(state):
        learner, network = _make_learner(made, state, pool, workers, progress)
        with explaining("data.load failed"):
            loaded = load_function("data.load", made.job.data.load, made.folder)()
        train, ids, test, collate = open_data(loaded)
        if collate is not None:
            raise InputError("data.load returned 'collate'; samples are taken one by one here")
        with listening(said), explaining("the network cannot be run on the data", FULL):
            new = _learn(learner, find_tensors(train) or train, ids, pool)
        if isinstance(made.job, ShardsJob):
            remember_job(state, made.path)
        people, name = find_counts(learner, state).count_people(), made.job.method.name
        digest, held = learner.digest(), len(learner)
    learned = Learned(state, name, new, held, people, digest, tuple(said))
    if release is None:
        return learned
    with importing_from(made.folder):
        return replace(learned, release=release_state(state, release, network=network, test=test))


@contextmanager
def _leaving_nothing(state: Path) -> Generator[None]:
    """Where nothing could be learned, a state that was not there is not there."""
    fresh = not state.exists()
    try:
        yield
    except ExpungeError:
        if fresh and state.is_dir() and {path.name for path in state.iterdir()} <= {"lock"}:
            shutil.rmtree(state)
        raise


def _make_learner(
    made: HeadJobFile, state: Path, pool: Pool | None, workers: int | None, progress: bool
) -> tuple[Learner, nn.Module | None]:
    if isinstance(made.job, ShardsJob):
        there = (workers or 1) if pool is None else partial(train_on_ray, pool=pool)
        return make_shards(made, made.job, state, there, progress), None
    if workers is not None:
        raise InputError.of("--workers", workers, "left out without --ray")
    network = build_network(made, made.job)
    return make_head(made, made.job, network, state, progress), network


def _learn(learner: Learner, train: Any, ids: list[str], pool: Pool | None) -> int:
    if isinstance(learner, StatisticsHead | ConvexHead):
        return learner.learn(train, ids, None if pool is None else _spread(pool, len(ids)))
    return learner.learn(train, ids)


def build_network(made: HeadJobFile, job: HeadJob) -> nn.Module | None:
    """The public network with its weights, on its device, in eval mode."""
    model = job.model
    if model.build is None:
        return None
    network = build_model(load_function("model.build", model.build, made.folder))
    if model.weights is not None:
        tensors = read_weights(made.locate(model.weights), "model.weights")
        put_weights(network, tensors, "model.weights")
    if model.device is not None:
        with explaining(f"model.device is {model.device!r}, which cannot be used"):
            network.to(model.device)
    return network.eval()


def make_head(
    made: HeadJobFile, job: HeadJob, network: nn.Module | None, state: Path, progress: bool
) -> Head:
    given: dict[str, Any] = job.features.model_dump(exclude={"tangent", "parameters"})
    given |= {"progress": progress}
    own: dict[str, Any] = job.method.model_dump(exclude={"name"}) | {"state": state}
    try:
        if network is not None and job.features.tangent is not None:
            names = job.features.parameters
            features = TangentFeatures(network, job.features.tangent, parameters=names, **given)
        else:
            features = Features(network, **given)
        kind = StatisticsHead if isinstance(job.method, StatisticsTable) else ConvexHead
        return kind(features, **own)
    except InputError as error:
        raise InputError(f"{made.path}: {error}") from None


def _spread(pool: Pool, count: int) -> Compute:
    from expunge.jobs.spread import compute_on_ray

    return partial(compute_on_ray, pool=pool, count=count)
