"""``expunge plan --job``: the routes that a job can take, what each asks for and what it costs.

Costs are counted in trainings. Nothing is timed or tried, and no code of the job is run but
``build`` and ``load``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import expunge
from expunge.data.data import Data
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.loading import importing_from, load_function
from expunge.jobs.request import load_data, read_request_list
from expunge.jobs.tables import NOISY, LearnJob, NoisyTable, ShardsJob, UnlearnJob

if TYPE_CHECKING:
    from torch import nn

EPSILON, DELTA = 1.0, 1e-5  # of the noise, where the job asks for none
SHARDS, SLICES = 8, 4
EXACT = "exact, epsilon = 0"


@dataclass(frozen=True)
class Route:
    """One way to forget: what it promises, keeps of the old model, costs and asks for."""

    name: str
    guarantee: str
    keeps: str
    costs: str
    asks: str


@dataclass(frozen=True)
class Routes:
    """The routes of a job, the best first; ``taken`` is the job's own."""

    setting: str
    taken: str
    routes: tuple[Route, ...]
    notes: tuple[str, ...]
    next: str


LINEAR = Route(
    "linear-model",
    EXACT,
    "all that the others' data say",
    "no training: one solve, whatever the number of people",
    "vectors, or features of a published network; learned this way (expunge init DIR --head)",
)
RETRAINING = Route(
    "retraining",
    EXACT,
    "nothing; what build() loads from published files is as good as it was",
    "1 training on the retained data, whatever the request",
    "your train function, or options of expunge.Training",
)


def find_routes(path: str | Path) -> Routes:
    """The routes of the job in a file."""
    made = read_job(path)
    with importing_from(made.folder):
        if isinstance(made.job, UnlearnJob):
            return _plan_unlearn(JobFile(made.path, made.job))
        return _plan_learned(JobFile(made.path, made.job))


def expect_work(shards: int, slices: int, people: int) -> float:
    """The part of the ensemble's training that forgetting random ``people`` costs on average.

    A shard is trained again from the first slice j (from 0) that has one of them, which costs
    c_j = Σ_{i≥j} (i+1) / Σ_i (i+1) of its training; with p_j = (1 - j/SR)^k the chance that nobody
    of k is in the slices before j:  E = Σ_j (p_j - p_{j+1}) c_j, and (2R+1)/(3RS) for one.

    >>> [round(expect_work(8, 4, k), 3) for k in (1, 10, 100)]
    [0.094, 0.605, 0.995]
    """
    cells, whole = shards * slices, slices * (slices + 1) / 2
    chance = [(1 - j / cells) ** people for j in range(slices + 1)]
    cost = [sum(range(j + 1, slices + 1)) / whole for j in range(slices)]
    return sum((chance[j] - chance[j + 1]) * cost[j] for j in range(slices))


def _plan_unlearn(made: JobFile[UnlearnJob]) -> Routes:
    from expunge.networks.building import call_build
    from expunge.networks.tensors import list_published, list_trainable

    job = made.job
    module = call_build(load_function("model.build", job.model.build, made.folder))
    size, frozen = (
        sum(tensor.numel() for tensor in listed.values())
        for listed in (list_trainable(module), list_published(module))
    )
    data, people = load_data(made), read_request_list(made)
    noise, advice = _describe_noise(job, module)
    taken = "noise" if isinstance(job.method, NoisyTable) else job.method.name
    routes = [LINEAR, RETRAINING, _describe_shards(SHARDS, SLICES, len(people)), noise]
    notes = [advice]
    if frozen > size:
        notes.insert(
            0,
            f"build() freezes {frozen:,} numbers and trains {size:,}: if what is frozen was "
            "published, a linear model on its features forgets without any training",
        )
    return Routes(
        f"{made.path}: {size:,} trainable numbers; {_describe_data(data)}; {len(people):,} people "
        "leave",
        taken,
        tuple(routes),
        tuple(notes),
        f"expunge check {made.path} && expunge unlearn {made.path}",
    )


def _plan_learned(made: JobFile[LearnJob]) -> Routes:
    job, data, own = made.job, load_data(made), LINEAR
    notes = ["Learning all of it is one pass over the data, once; no old model is needed."]
    if isinstance(job, ShardsJob):
        notes = ["Learning all of it costs 1 training, once; no old model is needed."]
        given = job.method.options
        sizes = given.get("shards", SHARDS), given.get("slices", SLICES)
        own = _describe_shards(*sizes, 1)
        many = [k for k in (1, 10, 100) if k <= max(1, len(data.people))]
        parts = ", ".join(f"{k:,}: {expect_work(*sizes, k):.2f}" for k in many)
        notes.append(f"Trainings that a request of so many people costs on average: {parts}.")
    then = f"expunge forget {job.state.dir} LIST --out release-2"
    return Routes(
        f"{made.path}: {_describe_data(data)}",
        own.name,
        (own,),
        tuple(notes),
        f"expunge learn {made.path} && {then}",
    )


def _describe_data(data: Data) -> str:
    return "a stream" if data.stream else f"{len(data):,} examples of {len(data.people):,} people"


def _describe_shards(shards: int, slices: int, people: int) -> Route:
    who = "1 person" if people == 1 else f"{people:,} people"
    return Route(
        "shards",
        EXACT,
        f"every one of {shards} networks that the request does not touch",
        f"{expect_work(shards, slices, people):.2f} trainings on average for {who}, with {shards} "
        f"shards of {slices} slices",
        "training this way from the beginning; an ensemble answers (expunge init DIR --shards)",
    )


def _describe_noise(job: UnlearnJob, module: nn.Module) -> tuple[Route, str]:
    """The paper's methods at the job's target, and how little they can keep."""
    from expunge.networks.tensors import list_trainable
    from expunge.noisy.choice import choose_scale

    method = job.method if isinstance(job.method, NoisyTable) else None
    epsilon = EPSILON if method is None or method.epsilon is None else method.epsilon
    delta = DELTA if method is None else method.delta
    start = list_trainable(module)
    size = sum(tensor.numel() for tensor in start.values())
    found = expunge.plan(epsilon=epsilon, delta=delta, parameters=size, scale=choose_scale(start))
    asked = [c for c in found.candidates if c.method in NOISY]
    own = [c for c in asked if method is not None and c.method == method.name] or asked
    bound = max(c.survival_bound for c in own)
    route = Route(
        "noise",
        f"epsilon = {epsilon:g}, delta = {delta:g}",
        f"at most {100 * bound:.1f} % of runs can differ in any way from runs that never saw the "
        "old model",
        "a few noisy steps, and then as much training as you give it",
        "the old weights, and nothing else: any model",
    )
    return route, found.advice
