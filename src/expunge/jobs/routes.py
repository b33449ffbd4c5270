"""``expunge plan --job``: the routes that a job can take, what each asks for and what it costs.

Costs are counted in trainings. Nothing is timed or tried, and no code of the job is run but
``build`` and ``load``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import expunge
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.loading import importing_from
from expunge.jobs.request import load_data, read_request_list
from expunge.jobs.tables import NOISY, NoisyTable, ShardsJob, UnlearnJob

EPSILON, DELTA = 1.0, 1e-5  # of the noise, where the job asks for none
SHARDS, SLICES = 8, 4


@dataclass(frozen=True)
class Route:
    """One way to forget: what it keeps of the old model, costs, asks for and promises."""

    name: str
    keeps: str
    costs: str
    asks: str
    guarantee: str = "exact, epsilon = 0"


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
    "all that the others' data say",
    "no training: one solve, whatever the number of people",
    "vectors, or features of a published network; learned this way (expunge init DIR --head)",
)
RETRAINING = Route(
    "retraining",
    "nothing; what build() loads from published files is as good as it was",
    "1 training on the retained data, whatever the request",
    "your train function, or options of expunge.Training",
)


def find_routes(path: str | Path) -> Routes:
    """The routes of the job in a file."""
    made = read_job(path)
    with importing_from(made.folder):
        data = load_data(made)
        found = f"{len(data):,} examples of {len(data.people):,} people"
        setting = f"{made.path}: {'a stream' if data.stream else found}"
        if isinstance(made.job, UnlearnJob):
            return _plan_unlearn(made.of(UnlearnJob), setting)
    job, own = made.job, LINEAR
    if isinstance(job, ShardsJob):
        options = {"shards": SHARDS, "slices": SLICES} | job.method.options
        own = _describe_shards(options["shards"], options["slices"])
    note = "Learning is 1 training, of a linear model 1 pass over the data; no old model is needed."
    then = f"expunge learn {made.path} && expunge forget {job.state.dir} LIST --out release-2"
    return Routes(setting, own.name, (own,), (note,), then)


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


def _plan_unlearn(made: JobFile[UnlearnJob], setting: str) -> Routes:
    from expunge.networks.building import call_build
    from expunge.networks.tensors import list_published, list_trainable
    from expunge.noisy.choice import choose_scale

    module = call_build(made.load("model.build"))
    start, people = list_trainable(module), len(read_request_list(made))
    size = sum(tensor.numel() for tensor in start.values())
    frozen = sum(tensor.numel() for tensor in list_published(module).values())
    method = made.job.method if isinstance(made.job.method, NoisyTable) else None
    epsilon = (method and method.epsilon) or EPSILON
    delta = DELTA if method is None else method.delta
    plan = expunge.plan(epsilon=epsilon, delta=delta, parameters=size, scale=choose_scale(start))
    asked = (method.name,) if method is not None else NOISY
    bound = max(c.survival_bound for c in plan.candidates if c.method in asked)
    noise = Route(
        "noise",
        f"at most {100 * bound:.1f} % of runs can differ in any way from runs that never saw the "
        "old model",
        "a few noisy steps, and then as much training as you give it",
        "the old weights, and nothing else: any model",
        f"epsilon = {epsilon:g}, delta = {delta:g}",
    )
    notes = [plan.advice]
    if frozen > size:
        notes.insert(
            0,
            f"build() freezes {frozen:,} numbers and trains {size:,}: if what is frozen was "
            "published, a linear model on its features forgets without any training",
        )
    return Routes(
        f"{setting}; {size:,} trainable numbers; {people:,} people leave",
        "retraining" if method is None else noise.name,
        (LINEAR, RETRAINING, _describe_shards(SHARDS, SLICES, people), noise),
        tuple(notes),
        f"expunge check {made.path} && expunge unlearn {made.path}",
    )


def _describe_shards(shards: int, slices: int, people: int = 1) -> Route:
    sizes = sorted({1, 10, 100, people})
    costs = [f"{expect_work(shards, slices, k):.2f} for {k:,}" for k in sizes]
    return Route(
        "shards",
        f"every one of {shards} networks that the request does not touch",
        f"trainings on average, with {shards} shards of {slices} slices, by the number of people "
        f"who leave: {', '.join(costs)}",
        "training this way from the beginning; an ensemble answers (expunge init DIR --shards)",
    )
