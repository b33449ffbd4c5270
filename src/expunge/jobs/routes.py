"""The routes a job could take, and what a request costs on them (THEORY, sections 12 and 13)."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from expunge.accounting.planning import Plan, plan
from expunge.accounting.precision import NoisyRecipe
from expunge.errors import InputError
from expunge.forgettable.memory import Targets
from expunge.jobs.costs import time_head, time_head_job, time_shards_job, time_state
from expunge.jobs.data import open_data
from expunge.jobs.jobfile import HeadJobFile, JobFile, find_method, read_head_job, read_job
from expunge.jobs.loading import explaining, importing_from, load_function
from expunge.jobs.methods import NOISE_KEYS, choose_route, find_public_weights
from expunge.jobs.pilot import Pilot, run_pilot
from expunge.jobs.prepare import Prepared, prepare
from expunge.jobs.shards import SIZES, expect_work
from expunge.jobs.states import read_request
from expunge.jobs.tables import EXACT, HEADS, FinetuneTable, HeadJob, Job, ShardsJob
from expunge.jobs.timing import Times, time_evaluation, time_noise, time_training, warm_up
from expunge.jobs.training import tell_why


@dataclass(frozen=True)
class Route:
    """A way to forget: its guarantee, what it keeps, what a request costs, what it asks for.

    Of a job also what that is here: examples in ``gradient_evaluations``, ``epochs`` of the
    retained data and ``seconds``, measured; ``of_retraining`` is the part of retraining's time.
    """

    name: str
    guarantee: str
    keeps: str
    costs: str
    asks_for: str
    gradient_evaluations: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    of_retraining: float | None = None


@dataclass(frozen=True)
class Cost:
    """The part of the ensemble's own training that forgetting some people costs on average, and
    its seconds here."""

    shards: int
    slices: int
    people: int
    part: float
    seconds: float


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


EIGHT = (8, 4)
RETRAINING = Route(
    "retraining", "(0, 0)", "nothing of the old model", "a full training", "nothing but the data"
)
RESTART = Route(
    "restart",
    "(0, 0)",
    "all that is public",
    "a full training",
    "public weights that never saw the forget data",
)
STATE = Route(
    "state",
    "(0, 0)",
    "all that the retained data say",
    "the training of what the request touches",
    "a model built to forget, as expunge learn made it",
)


@dataclass(frozen=True)
class Setting:
    """What a job has to plan with: its certified ``parameters``, the routes, the next command.

    Without a ``network`` the inputs of heads are vectors. ``route`` is the one that the job takes
    and ``why``; ``plan`` has the recipes of noisy methods, ``assumption`` says what retraining was
    taken to be.
    """

    parameters: int | None
    routes: tuple[Route, ...]
    next: str
    costs: tuple[Cost, ...] = ()
    network: bool = True
    pilot: Pilot | None = None
    route: str | None = None
    why: str | None = None
    assumption: str | None = None
    plan: Plan | None = None


def read_setting(path: str | Path, pilot: bool = False, **target: Any) -> Setting:
    """A head's job has the routes of heads; another has retraining and noisy methods, and those of
    heads if it freezes a public backbone; all are measured.

    With ``pilot`` a job of shards is tried on the examples of its ``data.pilot``. ``target`` are
    options of :func:`expunge.plan` in place of the job's own.
    """
    if find_method(path) in HEADS:
        made = read_head_job(path)
        then = f"expunge learn {shlex.quote(str(path))} --release release-1"
        if isinstance(made.job, ShardsJob):
            return _read_shards(made, made.job, then, pilot)
        _refuse_pilot(pilot, made.job.method.name)
        return _read_head(made, made.job, then)
    made = read_job(path)
    _refuse_pilot(pilot, made.job.method.name)
    return plan_job(made, **target)


def plan_job(made: JobFile, **target: Any) -> Setting:
    """The routes of a job that unlearns, each with what it costs here; ``target`` are options of
    :func:`expunge.plan` in place of the job's own."""
    with importing_from(made.folder):
        ready = prepare(made)
        with explaining("a step cannot be timed"):
            return _measure_routes(made, ready, target)


def _measure_routes(made: JobFile, ready: Prepared, target: Mapping[str, Any]) -> Setting:
    job, kept = made.job, len(ready.splits.retain)
    table, assumption = _assume_training(job)
    warm_up(made, ready, table)
    training, evaluation = time_training(made, ready, table), time_evaluation(made, ready)
    given = dict[str, Any](
        epsilon=job.target.epsilon,
        delta=job.target.delta,
        compared_to=job.target.compared_to,
        batch_size=job.method.batch_size,
    )
    own = {k: v for k, v in job.method.parameters.items() if k in NOISE_KEYS}
    given |= (own if job.method.name == "plan" else {}) | dict(target)
    found = plan(parameters=ready.parameters, samples=kept, epochs=table.epochs, **given)
    base = round(table.epochs * kept)
    whole = Times(None, training, evaluation).add_up(False)
    routes = [replace(RETRAINING, gradient_evaluations=base, epochs=table.epochs, seconds=whole)]
    if find_public_weights(job) is not None:
        routes.insert(0, replace(routes[0], **_tell(RESTART)))
    tuning = 0 if job.finetune is None else math.ceil(job.finetune.epochs * kept)
    tuned = None if job.finetune is None else training
    if job.finetune not in (None, table):
        tuned = time_training(made, ready, job.finetune)
    each = time_noise(made, ready, _take(found, "gradient-clipping"))
    for candidate in found.candidates:
        if candidate.method == "retraining":
            continue
        noise = each
        if candidate.method == "output-perturbation":
            noise = time_noise(made, ready, _take(found, candidate.method))
        seen = candidate.steps * min(given["batch_size"], kept) + tuning
        routes.append(
            Route(
                candidate.method,
                f"({found.epsilon:g}, {found.delta:g})",
                f"at most {100 * candidate.kept_norm / candidate.expected_norm:.2g} % of the "
                f"noise's length; {100 * candidate.survival_bound:.1f} % of runs can differ",
                "noisy steps and the fine-tuning",
                "nothing: any model, however it was trained",
                gradient_evaluations=seen,
                epochs=seen / kept,
                seconds=Times(noise, tuned, evaluation).add_up(False),
            )
        )
    if job.model.state is not None:
        routes.insert(0, replace(STATE, seconds=time_state(read_request(made))))
    elif ready.frozen:
        routes += _measure_heads(ready)
    part = expect_work(*EIGHT, ready.splits.forget.count_people())
    routes.append(replace(SHARDS, costs=f"{SHARDS.costs}, of 8 shards in 4 slices",
                          epochs=part * table.epochs, seconds=part * training))  # fmt: skip
    routes = [r if r.seconds is None else replace(r, of_retraining=r.seconds / whole)
              for r in routes]  # fmt: skip
    return Setting(
        ready.parameters,
        tuple(routes),
        _find_next(made, ready),
        route=choose_route(job),
        why=tell_why(made, ready.frozen),
        assumption=assumption,
        plan=found,
    )


def _measure_heads(ready: Prepared) -> list[Route]:
    """Heads in place of the trained layer, on as many examples as are kept."""
    trained = [p for p in ready.model.parameters() if p.requires_grad and p.ndim == 2]
    if not trained:
        return list(ROUTES)
    (outputs, _), width, kept = trained[-1].shape, trained[0].shape[1], len(ready.splits.retain)
    targets = Targets(outputs if outputs > 1 else None, outputs)
    found = [time_head(route.name, {}, targets, width, kept) for route in ROUTES]
    return [replace(route, seconds=None if one is None else one.request)
            for route, one in zip(ROUTES, found, strict=True)]  # fmt: skip


def _tell(route: Route) -> dict[str, str]:
    names = ("name", "guarantee", "keeps", "costs", "asks_for")
    return {name: getattr(route, name) for name in names}


def _take(found: Plan, method: str) -> NoisyRecipe:
    return cast(NoisyRecipe, next(c.recipe for c in found.candidates if c.method == method))


def _assume_training(job: Job) -> tuple[FinetuneTable, str]:
    """What retraining is taken to be, and where that stands."""
    epochs = job.evaluation.retraining_epochs
    if choose_route(job) in EXACT and job.finetune is not None:
        return job.finetune, f"Retraining is that of [finetune]: {job.finetune.epochs:g} epochs."
    table = job.finetune or FinetuneTable(epochs=10.0, learning_rate=0.01)
    if epochs is not None:
        told = "evaluation.retraining_epochs"
    elif job.finetune is not None:
        epochs, told = table.epochs, "[finetune]; say evaluation.retraining_epochs if it is another"
    else:
        epochs, told = table.epochs, "no key: it is assumed; say evaluation.retraining_epochs"
    table = table.model_copy(update={"epochs": epochs})
    return table, f"Retraining is taken to be {epochs:g} epochs, from {told}."


def _find_next(made: JobFile, ready: Prepared) -> str:
    """The next command; the route of a job that names a noisy method is its own."""
    then = f"expunge unlearn {shlex.quote(str(made.path))}"
    if ready.frozen and made.job.model.state is None:
        return f"{then} (or, for a head built to forget: expunge init DIR --head)"
    return then


def _refuse_pilot(pilot: bool, method: str) -> None:
    if pilot:
        raise InputError(f"--pilot measures shards, and this is a job of {method}; leave it out")


def _load(made: HeadJobFile) -> tuple[Any, list[str]]:
    with explaining("data.load failed"):
        loaded = load_function("data.load", made.job.data.load, made.folder)()
    return open_data(loaded)[:2]


def _read_head(made: HeadJobFile, job: HeadJob, then: str) -> Setting:
    """The routes of heads; the job's own is measured, beside learning everything anew."""
    with importing_from(made.folder):
        train, ids = _load(made)
        with explaining("a request cannot be timed"):
            found = time_head_job(made, job, train, len(ids))
    routes, told = ROUTES, None
    if found is not None:
        share = {"seconds": found.request, "of_retraining": found.request / found.anew}
        routes = tuple(replace(r, **share) if r.name == job.method.name else r for r in ROUTES)
        told = (
            "Measured here: the network on a few random rows, and a head of that width, which "
            f"forgets one. Learning all {len(ids):,} examples anew takes about {found.anew:,.2f} s."
        )
        if job.method.name == "convex-head":
            told += " Real features can take several times as many passes as random ones."
    network = job.model.build is not None
    return Setting(None, routes, then, network=network, route=job.method.name, assumption=told)


def _read_shards(made: HeadJobFile, job: ShardsJob, then: str, pilot: bool) -> Setting:
    """What requests cost, for a few sizes and the job's own; with ``pilot``, in accuracy too."""
    own = (job.method.shards, job.method.slices)
    sizes = tuple(dict.fromkeys([own, *SIZES]))
    with importing_from(made.folder):
        train, ids = _load(made)
        with explaining("a step cannot be timed"):
            whole = time_shards_job(made, job, train, ids)
        tried = run_pilot(made, job, ids, sizes, progress=True) if pilot else None
    part = expect_work(*own, 1)
    route = replace(SHARDS, seconds=part * whole, of_retraining=part)
    told = (
        f"All training takes about {whole:,.1f} s here, measured with the job's own steps on "
        "random rows and one thread; one network trained again on all examples takes as many steps."
    )
    costs = list_costs(sizes, len(set(ids)), whole)
    return Setting(None, (route,), then, costs, pilot=tried, route="shards", assumption=told)


def list_costs(sizes: Iterable[tuple[int, int]], people: int, whole: float) -> tuple[Cost, ...]:
    """One, ten and a hundred people and a tenth of all; all training takes ``whole`` seconds.

    >>> [(cost.people, round(cost.part, 3), cost.seconds) for cost in list_costs([(4, 1)], 30, 8.0)]
    [(1, 0.25, 2.0), (3, 0.578, 4.625), (10, 0.944, 7.549491882324219)]
    """
    asked = [count for count in (1, 10, 100) if count < people] + [max(people // 10, 1)]
    parts = [(S, R, count, expect_work(S, R, count)) for S, R in sizes
             for count in sorted(set(asked))]  # fmt: skip
    return tuple(Cost(S, R, count, part, part * whole) for S, R, count, part in parts)
