"""A job whose plan is a state: the model that was built to forget answers the request, exactly."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.certificates.certificate import Certificate
from expunge.errors import InputError
from expunge.forgettable.folders import holds_shards
from expunge.forgettable.memory import open_memory
from expunge.jobs.jobfile import JobFile
from expunge.jobs.lists import read_ids
from expunge.jobs.methods import explain_route
from expunge.jobs.releases import Counts, release_state
from expunge.jobs.shards import Slices, open_shards


@dataclass(frozen=True)
class Finished:
    """A complete run directory, its certificate and what was measured."""

    directory: Path
    certificate: Certificate
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The people of a job's request, and the examples that its state holds of them."""

    state: Path
    ids: tuple[str, ...]
    examples: int


def read_request(made: JobFile) -> Request:
    """The request as the state knows it; refused where somebody was never learned, and where
    somebody of an earlier request is still held."""
    job = made.job
    assert job.model.state is not None
    state, ids = (
        made.locate(job.model.state),
        read_ids(made.locate(job.data.forget), job.data.column),
    )
    if job.model.parent is not None:
        valid = "left out with model.state: a state keeps the chain of its own certificates"
        raise InputError.of("model.parent", job.model.parent, valid)
    with _opened(state) as held:
        rows = sum(held.count_rows(ids).values())
        for name in job.data.forgotten:
            column = None if Path(name).suffix == ".txt" else job.data.column
            left = _find_held(held, set(read_ids(made.locate(name), column)) - set(ids))
            if left is not None:
                raise InputError(
                    f"the state {job.model.state} still holds {left!r} of the earlier request "
                    f"{name}; forget that list first: expunge forget {job.model.state} {name}"
                )
    return Request(state, tuple(ids), rows)


def forget_in_state(made: JobFile, target: Path) -> Finished:
    """Answer the job's request by its state; the same command again goes on after a crash."""
    request, job = read_request(made), made.job
    metrics: dict[str, Any] = {
        "title": job.output.title,
        "task": f"{job.model.state} on {job.data.load}",
        "route": "state",
        "why": explain_route(job),
        "cost": {"examples forgotten": request.examples},
    }
    done = release_state(
        request.state, target, request.ids, delta=job.target.delta, metrics=metrics
    )
    return Finished(target, done.certificate, metrics | {"stages": []})


@contextmanager
def _opened(state: Path) -> Generator[Counts]:
    if holds_shards(state):
        with open_shards(state) as ensemble:
            yield Slices(ensemble.plan, state)
    else:
        yield open_memory(state)


def _find_held(held: Counts, names: Iterable[str]) -> str | None:
    """One of the names whose examples the state holds."""
    for name in sorted(names):
        try:
            if sum(held.count_rows([name]).values()) > 0:
                return name
        except InputError:  # never learned
            continue
    return None
