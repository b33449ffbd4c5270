"""The routes a job could take if its network is public and frozen (THEORY, section 13)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expunge.jobs.jobfile import find_method, read_head_job, read_job
from expunge.jobs.loading import build_model, importing_from, load_function
from expunge.jobs.tables import HEADS


@dataclass(frozen=True)
class Route:
    """A way to forget: its guarantee, what it keeps, what a request costs, what it asks for."""

    name: str
    guarantee: str
    keeps: str
    costs: str
    asks_for: str


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


@dataclass(frozen=True)
class Setting:
    """What a job has to plan with: its certified ``parameters``, the routes, the next command."""

    parameters: int | None
    routes: tuple[Route, ...]
    next: str


def read_setting(path: str | Path) -> Setting:
    """A head's job has the routes of heads; another has them if it freezes a public backbone."""
    if find_method(path) in HEADS:
        read_head_job(path)
        return Setting(None, ROUTES, f"expunge learn {path} --release release-1")
    made = read_job(path)
    with importing_from(made.folder):
        model = build_model(load_function("model.build", made.job.model.build, made.folder))
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    public = made.job.model.public is not None and sizes[False] > 0
    then = "expunge init DIR --head" if public else f"expunge unlearn {path} --dry-run"
    return Setting(sizes[True], ROUTES if public else (), then)
