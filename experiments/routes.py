"""The routes of a request, each run as a user would: answered, certified, written and verified.

=======================  =========================================================================
route                    what a request is
=======================  =========================================================================
retraining               the network trained again on what remains, at the best of some rates, from
                         the initialisation that the noisy runs of its seed are pulled towards
retraining, longer       the same with ten times the passes, for a tenth only: where the others have
                         one pass, what a user who can wait would have
noisy, zero              the paper's three methods with radii for which (1, 1e-5) is true, then
                         fine-tuning: at the best of the same rates
noisy, initialisation    the same around a fresh initialisation under a public seed, with the radii
                         of expunge.plan: a tenth of the smallest layer is left as noise; then
                         fine-tuning at retraining's rate
… control                both started at their centre, at the same rate: they never see the old
                         model, and are run for a tenth only
statistics, convex       heads on public features, learned before; statistics plain, or with a
                         quarter or all of 4,096 public random features beside them; convex from
                         zero (exact) and from before with the noise of (1, 1e-5)
shards                   eight shards of four slices of the network, trained before
dp-sgd                   trained before so that a request of this size is covered: nothing to do
=======================  =========================================================================

Seconds are the processor's, of one process on one thread, from the list of identifiers to a
certificate that was written and verified (retraining: to the trained network); they do not depend
on what else the machine does. ``wall`` is what the clock said. Gradient evaluations are examples
that go through a network, or through half of a product with the features. Nothing is compiled.
"""

from __future__ import annotations

import functools
import math
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from arms import DELTA, Arm, Noisy, make_recipe, plan_recipe
from expunge import (
    Batches,
    GroupDPSGD,
    Run,
    SeededNoise,
    Shards,
    calibrate,
    certify,
    evaluate,
    fine_tune,
    train,
    train_dpsgd,
    unlearn,
    verify,
    write_run,
)
from expunge.errors import ExpungeError, UnlearningError
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.statistics import StatisticsHead
from heads import count_classes, prepare_measure
from problems import Problem, load_model
from runs import build_public, measure_start, name_start
from table_shards import make_build

Kind = Literal["retraining", "noisy", "statistics", "convex", "shards", "dp-sgd"]
Size = Literal["1", "50", "tenth"]
SIZES: tuple[Size, ...] = ("1", "50", "tenth")
EPSILON = 1.0
DECAY = 1e-5
SHARDS, SLICES = 8, 4
PRIVATE_EPOCHS, CLIP, MOST_NOISE = 5, 0.5, 1e4
LIFTS = {"plain": 0.0, "small lift": 0.25, "lifted": 1.0}
PAPERS = ("gradient-clipping", "model-clipping", "output-perturbation")


@dataclass(frozen=True, order=True)
class Route:
    """One arm. ``tuned``: it has a learning rate, chosen on validation data: ``tuned_as`` names the
    arm for which. A control has that of the arm it controls, noise around an initialisation that of
    retraining from there. ``sizes``: the requests it answers. ``lift``: random features, in
    those of the task; ``times``: passes, in those of the task."""

    name: str
    kind: Kind
    guarantee: str
    price: str
    method: str = ""
    centre: Literal["", "zero", "initialisation"] = ""
    control: bool = False
    lift: float = 0.0
    exact: bool = True
    times: int = 1

    @property
    def tuned(self) -> bool:
        return self.kind in ("retraining", "noisy")

    @property
    def tuned_as(self) -> str:
        if self.centre == "initialisation":
            return "retraining"
        return self.name.removesuffix(", control")

    @property
    def controls(self) -> str:
        return self.name.removesuffix(", control")

    @property
    def sizes(self) -> tuple[Size, ...]:
        return ("tenth",) if self.control or self.times > 1 else SIZES


def list_routes() -> list[Route]:
    """All arms; retraining first, the controls last.

    >>> [route.name for route in list_routes()][:3]
    ['retraining', 'retraining, longer', 'gradient-clipping, zero']
    """
    true, none = "(1, 1e-5)", "(0, 0): it never sees the old model"
    found = [
        Route("retraining", "retraining", "(0, 0)", "a whole training"),
        Route("retraining, longer", "retraining", "(0, 0)", "ten times the training", times=10),
    ]
    noisy = [
        Route(
            f"{method}, {centre}", "noisy", true, "noise, and a training after it", method, centre
        )
        for method in PAPERS
        for centre in ("zero", "initialisation")
    ]
    found += noisy
    features = "public features, learned so from the start"
    for name, lift in LIFTS.items():
        found.append(
            Route(f"exact statistics, {name}", "statistics", "(0, 0), bits", features, lift=lift)
        )
    found += [
        Route("convex head, from zero", "convex", "(0, 0)", features),
        Route("convex head, certified", "convex", true, features, exact=False),
        Route("shards", "shards", "(0, 0), bits", "an ensemble, trained so from the start"),
        Route("dp-sgd", "dp-sgd", true, "trained so, for this size, from the start"),
    ]
    return found + [
        replace(r, name=f"{r.name}, control", guarantee=none, control=True) for r in noisy
    ]


@dataclass(frozen=True)
class Case:
    """One answer: a route, how many are forgotten, a seed, and its learning rate if it has one."""

    route: Route
    size: Size
    seed: int
    rate: float = 0.0

    @property
    def key(self) -> str:
        """One line that names it.

        >>> Case(list_routes()[0], "50", 1, 0.1).key
        'retraining | forget 50 | seed 1 | rate 0.1'
        """
        rate = f" | rate {self.rate:g}" if self.route.tuned else ""
        return f"{self.route.name} | forget {self.size} | seed {self.seed}{rate}"


@dataclass(frozen=True)
class Ground:
    """What a task's routes run on: the network's problem, the heads', passes, the width, λ of
    plain and lifted statistics, and the models that must forget: run s has model s modulo their
    number."""

    network: Problem
    heads: Problem
    epochs: float
    lift: int
    ridge: tuple[float, float]
    models: Path
    model_seeds: int

    def cut(self, case: Case) -> tuple[Problem, Problem]:
        """Both problems with this case's people to forget."""
        people = len(np.unique(self.network.train.ids))
        count = max(people // 10, 1) if case.size == "tenth" else int(case.size)
        chosen = {"forget_seed": case.seed, "forget_count": count}
        return replace(self.network, **chosen), replace(self.heads, **chosen)


def answer(ground: Ground, cases: list[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The entries of cases of one route and one seed, which share what was learned before."""
    route = cases[0].route
    match route.kind:
        case "retraining":
            run = _retrain
        case "noisy":
            run = _unlearn
        case "dp-sgd":
            run = _train_privately
        case "statistics" | "convex" | "shards":
            yield from _answer_from_state(ground, cases)
            return
    for case in cases:
        try:
            yield case, run(ground, case)
        except UnlearningError as error:  # a rate at which the weights are no numbers any more
            yield case, {"note": str(error).splitlines()[0]}


def _list_options(ground: Ground, case: Case, epochs: float) -> dict[str, Any]:
    setting = ground.network.setting
    return {
        "epochs": epochs,
        "learning_rate": case.rate or setting.learning_rate,
        "batch_size": setting.batch_size,
        "weight_decay": setting.weight_decay,
        "schedule": "one-cycle",
        "prepare": ground.network.prepare,
        "compile": False,
        "seed": case.seed,
    }


def _score(problem: Problem, model: nn.Module) -> dict[str, float]:
    parts = {"validation": problem.validation, "test": problem.test, "forget": problem.parts[1]}
    found = {
        name: evaluate(model, part.inputs, part.targets, prepare=problem.prepare)
        for name, part in parts.items()
    }
    return {name: round(100 * each.accuracy, 3) for name, each in found.items()}


def _retrain(ground: Ground, case: Case) -> dict[str, Any]:
    problem, _ = ground.cut(case)
    model, began = build_public(problem, case.seed), Moment.now()
    epochs = case.route.times * ground.epochs
    train(model, problem.parts[0], **_list_options(ground, case, epochs))
    told = began.tell(epochs * len(problem.parts[0]))
    return _score(problem, model) | told


def _unlearn(ground: Ground, case: Case) -> dict[str, Any]:
    problem, _ = ground.cut(case)
    old = load_model(problem, case.seed % ground.model_seeds, ground.models)
    retain, forget = problem.parts
    recipe = fit_recipe(case.route, ground.network, ground.epochs)
    steps = getattr(recipe, "steps", 0)
    began = Moment.now()
    loader = Batches(
        retain.inputs,
        retain.targets,
        batch_size=problem.setting.batch_size,
        generator=torch.Generator().manual_seed(3_000 + case.seed),
        prepare=problem.prepare,
        ids=retain.ids,
    )
    run = unlearn(
        old,
        loader,
        recipe,
        loss_fn=nn.functional.cross_entropy,
        noise=SeededNoise(case.seed),
        centre=_make_centre(case, problem),
        start="centre" if case.route.control else "model",
        forget_ids=forget.ids,
    )
    passes = max(ground.epochs - steps / len(loader), 0.0)
    run = fine_tune(run, retain, **_list_options(ground, case, passes))
    epsilon = _finish(run)
    told = began.tell(ground.epochs * len(retain))
    return _score(problem, run.model) | told | {"epsilon": epsilon}


def _make_centre(case: Case, problem: Problem) -> Any:
    """A point that everybody knows: zero, or the network under a seed that is written here."""
    if case.route.centre == "zero":
        return "zero"
    return name_start(problem, case.seed)


@functools.cache
def fit_recipe(route: Route, problem: Problem, epochs: float) -> Noisy:
    """Around zero the paper's row with radii for which (1, 1e-5) is true; around an initialisation
    what ``expunge.plan`` says."""
    size = sum(p.numel() for p in problem.build(0).parameters())
    arm: Any = Arm(route.method, "certified")  # pyright: ignore[reportArgumentType]
    if route.centre == "initialisation":
        return plan_recipe(arm, size, measure_start(problem))
    table = problem.name if problem.name in ("mnist", "cifar10") else "mnist"
    return make_recipe(arm, table, epochs, size)


def _train_privately(ground: Ground, case: Case) -> dict[str, Any]:
    """Covered from the start: a request costs nothing, if any noise covers so many."""
    problem, _ = ground.cut(case)
    n, batch = len(problem.train), problem.setting.batch_size
    epochs = min(PRIVATE_EPOCHS, ground.epochs)
    try:
        recipe = calibrate(
            lambda s: GroupDPSGD(
                clip=CLIP,
                noise_multiplier=s,
                sampling_rate=batch / n,
                steps=math.ceil(epochs * n / batch),
                group_size=len(problem.parts[1]),
            ),
            epsilon=EPSILON,
            delta=DELTA,
        )
    except ExpungeError as error:
        return {"note": str(error).splitlines()[0]}
    if recipe.noise_multiplier > MOST_NOISE:
        return {
            "note": f"a noise of {recipe.noise_multiplier:.3g} clips covers it: nothing is left"
        }
    ended = train_dpsgd(
        problem.build(4_000 + case.seed),
        problem.train,
        recipe,
        learning_rate=problem.setting.learning_rate,
        weight_decay=problem.setting.weight_decay,
        schedule="one-cycle",
        prepare=problem.prepare,
        noise=SeededNoise(case.seed),
        physical_batch=192,
    )
    found = _score(problem, ended.model) | {"seconds": 0.0, "gradient_evaluations": 0}
    return found | {"epsilon": EPSILON, "noise_multiplier": recipe.noise_multiplier}


def _answer_from_state(ground: Ground, cases: list[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Learned once on all data; every request is answered on a copy of the state."""
    route, seed = cases[0].route, cases[0].seed
    problem = ground.network if route.kind == "shards" else ground.heads
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        opened = _open(ground, route, seed, place / "learned")
        opened.learn((problem.train.inputs, problem.train.targets), ids=problem.train.ids.tolist())
        opened.release()
        for case in cases:
            shutil.copytree(place / "learned", place / case.size)
            learner = _open(ground, route, seed, place / case.size)
            yield case, _request(ground, case, learner)
            shutil.rmtree(place / case.size)


def _open(ground: Ground, route: Route, seed: int, state: Path) -> Any:
    features = functools.partial(
        Features,
        lift=round(ground.lift * route.lift),
        seed=f"expunge/experiments/{seed}" if route.lift else "",
    )
    classes = count_classes(ground.heads)
    match route.kind:
        case "statistics":
            ridge = ground.ridge[route.lift > 0]
            return StatisticsHead(features(), classes=classes, regularisation=ridge, state=state)
        case "convex":
            return ConvexHead(features(), classes=classes, weight_decay=DECAY, state=state)
        case _:
            case = Case(route, "1", seed)
            options = _list_options(ground, case, ground.epochs)
            del options["compile"], options["seed"]
            return Shards(
                make_build(ground.network),
                shards=SHARDS,
                slices=SLICES,
                seed=f"expunge/experiments/{seed}",
                state=state,
                **options,
            )


def _request(ground: Ground, case: Case, learner: Any) -> dict[str, Any]:
    network, heads = ground.cut(case)
    problem = network if case.route.kind == "shards" else heads
    gone = np.unique(problem.parts[1].ids).tolist()
    options: dict[str, Any] = {}
    if case.route.kind == "convex" and not case.route.exact:
        options = {"epsilon": EPSILON, "delta": DELTA, "noise": SeededNoise(case.seed)}
    began = Moment.now()
    run: Run = learner.forget(gone, **options)
    epsilon = _finish(run)
    spent = Moment.now()
    match case.route.kind:
        case "statistics":
            cost = float(len(problem.parts[1]))
        case "convex":
            cost = learner.half_passes * len(problem.parts[0]) / 2
        case _:
            passes = 2 * ground.epochs / (SLICES + 1)
            cost = passes * sum(seen for _, seen in learner.trained.values())
    if case.route.kind == "shards":
        scored = _score(problem, run.model)
    else:
        scored = prepare_measure(problem, learner.features)(run)
    return scored | began.tell(cost, spent) | {"epsilon": epsilon}


def _finish(run: Run) -> float:
    """Certify, write and verify, as a user does."""
    certificate = certify(run.record, delta=DELTA)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "release"
        write_run(place, model=run.model, record=run.record, certificate=certificate)
        verify(place / "certificate.json")
    return certificate.epsilon


@dataclass(frozen=True)
class Moment:
    """What the processor has worked for this process and its children, and what the clock says."""

    worked: float
    clock: float

    @classmethod
    def now(cls) -> Moment:
        others = resource.getrusage(resource.RUSAGE_CHILDREN)
        worked = time.process_time() + others.ru_utime + others.ru_stime
        return cls(worked, time.monotonic())

    def tell(self, cost: float, until: Moment | None = None) -> dict[str, float]:
        end = until or Moment.now()
        told = {"seconds": end.worked - self.worked, "wall": end.clock - self.clock}
        rounded = {name: round(value, 4) for name, value in told.items()}
        return rounded | {"gradient_evaluations": round(cost)}
