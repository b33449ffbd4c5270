"""The routes a job could take, and what a request costs on them (THEORY, sections 12 and 13)."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from expunge.jobs.data import open_data
from expunge.jobs.jobfile import HeadJobFile, find_method, read_head_job, read_job
from expunge.jobs.loading import build_model, explaining, importing_from, load_function
from expunge.jobs.shards import SIZES, expect_work
from expunge.jobs.tables import HEADS, ShardsJob


@dataclass(frozen=True)
class Route:
    """A way to forget: its guarantee, what it keeps, what a request costs, what it asks for."""

    name: str
    guarantee: str
    keeps: str
    costs: str
    asks_for: str


@dataclass(frozen=True)
class Cost:
    """The part of the ensemble's own training that forgetting some people costs on average."""

    shards: int
    slices: int
    people: int
    part: float


ROUTES = (
    Route(
        "statistics-head",
        "(0, 0)",
        "all that the retained data say",
        "one product of the forgotten rows, one factorisation",
        "a ridge regression learned this way from the beginning",
    ),
    Route(
        "convex-head",
        "(0, 0) solved from zero; any, with tiny noise, from before",
        "all that the retained data say",
        "passes over the stored features until the residual is small",
        "a softmax, logistic, hinge or Poisson regression learned this way",
    ),
)


SHARDS = Route(
    "shards",
    "(0, 0)",
    "all constituents that the request does not touch",
    "the training of what it touches",
    "an ensemble trained this way from the beginning; any network",
)


@dataclass(frozen=True)
class Setting:
    """What a job has to plan with: its certified ``parameters``, the routes, the next command.

    Without a ``network`` the inputs of heads are vectors.
    """

    parameters: int | None
    routes: tuple[Route, ...]
    next: str
    costs: tuple[Cost, ...] = ()
    network: bool = True


def read_setting(path: str | Path) -> Setting:
    """A head's job has the routes of heads; another has them if it freezes a public backbone."""
    if find_method(path) in HEADS:
        made = read_head_job(path)
        then = f"expunge learn {shlex.quote(str(path))} --release release-1"
        if isinstance(made.job, ShardsJob):
            return Setting(None, (SHARDS,), then, _list_costs(made, made.job))
        return Setting(None, ROUTES, then, network=made.job.model.build is not None)
    made = read_job(path)
    with importing_from(made.folder):
        model = build_model(load_function("model.build", made.job.model.build, made.folder))
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    public = made.job.model.public is not None and sizes[False] > 0
    then = (
        "expunge init DIR --head"
        if public
        else f"expunge unlearn {shlex.quote(str(path))} --dry-run"
    )
    return Setting(sizes[True], ROUTES if public else (), then)


def _list_costs(made: HeadJobFile, job: ShardsJob) -> tuple[Cost, ...]:
    """One, ten and a hundred people and a tenth of all, for a few sizes and the job's own."""
    with importing_from(made.folder), explaining("data.load failed"):
        people = len(set(open_data(load_function("data.load", job.data.load, made.folder)())[1]))
    own = job.method.shards, job.method.slices
    asked = [count for count in (1, 10, 100) if count < people] + [max(people // 10, 1)]
    return tuple(
        Cost(S, R, count, expect_work(S, R, count))
        for S, R in dict.fromkeys([own, *SIZES])
        for count in sorted(set(asked))
    )
