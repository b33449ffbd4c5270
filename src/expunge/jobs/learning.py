"""``expunge learn``: models built to forget, and the states they are kept in."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import expunge
from expunge.data.data import Data
from expunge.data.examples import join_rows
from expunge.errors import InputError
from expunge.files import check_free
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.loading import explaining, importing_from
from expunge.jobs.request import load_data, load_training
from expunge.jobs.run import sign_release, write_release
from expunge.jobs.tables import LearnJob, LinearJob, ShardsJob
from expunge.manifests import read_kind
from expunge.states import State

if TYPE_CHECKING:
    from expunge.certificates.release import Release

LOG = logging.getLogger("expunge")
JOB = "job.json"  # a content of the state: by which job it was learned


def learn_job(path: str | Path, *, ray: bool = False) -> tuple[dict[str, Any], Release | None]:
    """Learn a job's examples into its state; again, those that are new. Returns how much is new and
    how much there is, and the release if one was written."""
    made = read_job(path).of(LearnJob)
    job, state = made.job, made.locate(made.job.state.dir)
    if ray and not isinstance(job, ShardsJob):
        raise InputError(f"--ray is given, and {path} is of {job.method.name}; it trains shards")
    there, folder, release = read_kind(state), None, None
    if there is None:
        check_free(state)
    elif there != job.method.name:
        valid = f"a state of {job.method.name}; it is one of {there}"
        raise InputError.of("state.dir", str(state), valid)
    # Where a release was written before, learning more writes none by itself.
    if job.output is not None and (there is None or State.open(state).parent is None):
        folder = check_free(made.locate(job.output.dir))
    with importing_from(made.folder):
        data, learner = load_data(made), make_learner(made, state, ray=ray)
        before = 0 if there is None else count_examples(learner)
        facts = f"{len(data):,} examples of {len(data.people):,} people"
        LOG.info("%s: %s", job.method.name, facts)
        with explaining("learning failed in the model, its data or its training"), reporting():
            if isinstance(job, LinearJob):
                learner.partial_fit(*split_examples(data), ids=data.ids)
            else:
                learner.learn(data)
                keep_job(learner.state, made)
        if job.output is not None and folder is not None:
            release = sign_release(learner.release(), made, job.output.sign)
            write_release(release, folder)
    after, kept = count_examples(learner), len(learner.holds(data.people))
    found = {"state": state, "kind": job.method.name, "folder": folder}
    return found | {"new": after - before, "examples": after, "people": kept}, release


def keep_job(state: State, made: JobFile[LearnJob]) -> None:
    """Without its job no shard can be trained again: the way to it, from the state's folder. It is
    a content like every other, because that job's code is run."""
    assert state.path is not None
    place = os.path.relpath(made.path.absolute(), state.path)
    data = json.dumps({"job": place}).encode()
    with state.writing():
        if JOB not in state or bytes(state.read(JOB)) != data:
            state.commit({JOB: data})


@contextmanager
def reporting() -> Generator[None]:
    """Warnings as lines of the log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        LOG.info("%s", warning.message)


def make_learner(made: JobFile[LearnJob], state: Path | None, ray: bool = False) -> Any:
    """The model of a job that goes on with ``state``. Call inside ``importing_from``."""
    job = made.job
    if isinstance(job, ShardsJob):
        train: Any = load_training(made, job.training)[1]
        return expunge.Shards(
            made.load("model.build"), train, **job.method.options, state=state, ray=ray
        )
    assert isinstance(job, LinearJob)
    network = load_network(made)
    with explaining("[features] cannot be made"):
        given = {} if job.features is None else job.features.options
        features = None if network is None else expunge.Features(network, **given)
    return job.method.kind(**job.method.options, features=features, state=state)


def load_network(made: JobFile[LearnJob]) -> Any:
    """The published network of a linear model in eval mode; None where the job has none. What
    ``build()`` draws it draws under a public seed, as everywhere."""
    if made.job.model.build is None:
        return None
    from expunge.networks.randomness import seeded

    build = made.load("model.build")
    with explaining("model.build failed"), seeded(0):
        network = build()
    return network.eval() if hasattr(network, "eval") else network


def split_examples(data: Data) -> tuple[Any, Any]:
    """Inputs and targets, one column each, as a linear model takes them."""
    if data.stream:
        raise InputError("data.load returned a stream; a linear model needs examples by position")
    columns: Any = getattr(data.examples, "tensors", data.examples)
    if data.kind == "columns" and isinstance(columns, tuple | list) and len(columns) == 2:
        return columns[0], np.asarray(columns[1])
    rows = [data.examples[i] for i in range(len(data))]
    if not all(isinstance(row, tuple | list) and len(row) == 2 for row in rows):
        raise InputError("data.load must return examples (input, target) for a linear model")
    inputs, targets = join_rows([tuple(row) for row in rows])
    return np.asarray(inputs) if isinstance(inputs, list) else inputs, np.asarray(targets)


def count_examples(learner: Any) -> int:
    return len(learner) if hasattr(learner, "__len__") else learner._open().sums.rows


def find_job(state: Path) -> JobFile[LearnJob]:
    """The job that a state was learned by."""
    kept = State.open(state)
    if JOB not in kept:
        raise InputError(
            f"{state} does not say by which job it was learned; run expunge learn with it again, "
            "or use expunge.Shards(build, train, …, state=…) itself"
        )
    path = (state / json.loads(bytes(kept.read(JOB)))["job"]).resolve()
    if not path.is_file():
        raise InputError(
            f"{state} was learned by {path}, which is gone, and its network is built there; put it "
            "back, or run expunge learn with the job where it is now"
        )
    return read_job(path).of(LearnJob)
