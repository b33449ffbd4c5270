"""Every route to forgetting as one arm: what is asked for, what is run, what the answer costs.

=====================  =====================================================================
retraining             from the network's own initialisation, on what stays; "longer": ten times
noisy                  the paper's three methods at a true (1, 1e-5), around zero (its own centre)
                       and around an initialisation under a public seed; a control starts at the
                       centre and never sees the old model
linear                 RidgeClassifier and LogisticRegression on public features, learned with
                       everybody, then asked to forget; "lifted": random features beside them
shards                 8 networks of 4 slices each, learned with everybody, then asked
dp-sgd                 trained so, from the start, that the whole request is covered; results of
                       code before (figure_transfer.py and table_comparison.py run DP-SGD)
=====================  =====================================================================

``seconds`` are the processor's, of one thread, from the list of people to a release that was
written and verified, so that they hardly depend on what else the machine does; ``wall`` is what the
clock said. Gradient evaluations are examples that go through a network.
"""

from __future__ import annotations

import functools
import math
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from arms import Arm
from expunge import Features, Release, SeededNoise, Shards, UnlearningError, retrain, unlearn
from expunge.linear_model import LogisticRegression, RidgeClassifier
from expunge.linear_model import load as load_linear
from problems import Problem, load_model
from runs import check_release, find_recipe, score

Kind = Literal["retraining", "noisy", "linear", "shards", "gone"]
Size = Literal["1", "50", "tenth"]
SIZES: tuple[Size, ...] = ("1", "50", "tenth")
SHARDS, SLICES = 8, 4
LIFTS = {"plain": 0.0, "small lift": 0.25, "lifted": 1.0}
ALPHAS = tuple(10.0**k for k in range(-3, 5))  # cross-validation from the sums chooses
NETWORK = nn.Flatten().eval()  # the features are there already, or pixels
PAPERS = ("gradient-clipping", "model-clipping", "output-perturbation")


@dataclass(frozen=True, order=True)
class Route:
    """One arm. ``centre``: of noise; ``lift``: random features, in those of the task; ``times``:
    passes, in those of the task. ``gone``: results that stay, by code that is no more."""

    name: str
    kind: Kind
    guarantee: str
    price: str
    method: str = ""
    centre: Literal["", "zero", "initialisation"] = ""
    control: bool = False
    lift: float = 0.0
    times: int = 1

    @property
    def tuned(self) -> bool:
        """Whether it has a learning rate, chosen on validation data."""
        return self.kind in ("retraining", "noisy")

    @property
    def tuned_as(self) -> str:
        """The arm for which it is chosen: a control has that of the arm it controls, noise around
        an initialisation that of retraining from there."""
        return "retraining" if self.centre == "initialisation" else self.controls

    @property
    def controls(self) -> str:
        return self.name.removesuffix(", control")

    @property
    def sizes(self) -> tuple[Size, ...]:
        return ("tenth",) if self.control or self.times > 1 else SIZES


@functools.cache
def list_routes() -> tuple[Route, ...]:
    """All arms; retraining first, then what people take, the paper's, and the controls last.

    >>> [route.name for route in list_routes()][:3]
    ['retraining', 'retraining, longer', 'ridge, plain']
    """
    true, none = "(1, 1e-5)", "(0, 0): it never sees the old model"
    features, noise = "public features, learned so from the start", "noise, and a training after it"
    before = "features as now; measured with the code before, which is gone"
    found = [
        Route("retraining", "retraining", "(0, 0)", "a whole training"),
        Route("retraining, longer", "retraining", "(0, 0)", "ten times the training", times=10),
        *(
            Route(f"ridge, {name}", "linear", "(0, 0), bits", features, "ridge", lift=lift)
            for name, lift in LIFTS.items()
        ),
        Route("logistic regression", "linear", "(0, 0), bits", features, "logistic"),
        *(
            Route(f"exact statistics, {name}", "gone", "(0, 0), bits", before, lift=lift)
            for name, lift in LIFTS.items()
        ),
        Route("convex head, from zero", "gone", "(0, 0)", before),
        Route("shards", "shards", "(0, 0), bits", "an ensemble, trained so from the start"),
        Route("dp-sgd", "gone", true, "trained so, for this size, from the start", "dp-sgd"),
    ]
    noisy = [
        Route(f"{method}, {centre}", "noisy", true, noise, method, centre)
        for method in PAPERS
        for centre in ("zero", "initialisation")
    ]
    controls = [replace(r, name=f"{r.name}, control", guarantee=none, control=True) for r in noisy]
    return (*found, *noisy, *controls)


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
    """What a task's routes run on: the network's problem, the linear models', passes, columns of a
    lift, C of logistic regression, and the folder of the models that must forget."""

    network: Problem
    linear: Problem
    epochs: float
    lift: int
    C: float
    models: Path

    def cut(self, case: Case) -> tuple[Problem, Problem]:
        """Both problems with this case's people to forget."""
        people = len(np.unique(self.network.train.ids))
        count = max(people // 10, 1) if case.size == "tenth" else int(case.size)
        chosen = {"forget_seed": case.seed, "forget_count": count}
        return replace(self.network, **chosen), replace(self.linear, **chosen)


def answer(ground: Ground, cases: list[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The entries of cases of one route and one seed, which share what was learned before."""
    match cases[0].route.kind:
        case "retraining":
            run = _retrain
        case "noisy":
            run = _unlearn
        case "linear" | "shards" as kind:
            with tempfile.TemporaryDirectory() as folder:
                prepare = _prepare_linear if kind == "linear" else _prepare_shards
                yield from _answer_on_copies(Path(folder), cases, prepare(ground, cases[0]))
            return
        case "gone":
            return
    for case in cases:
        try:
            yield case, run(ground, case)
        except UnlearningError as error:  # a rate at which the weights are no numbers any more
            yield case, {"note": str(error).splitlines()[0]}


def record(
    make: Callable[[], Release], cost: float, measure: Callable[[nn.Module], dict[str, float]]
) -> dict[str, Any]:
    """A release made, written and verified: its accuracies, seconds, ε and gradient evaluations."""
    worked, clock = _read_clocks()
    release = make()
    epsilon = check_release(release)
    spent = [end - start for end, start in zip(_read_clocks(), (worked, clock), strict=True)]
    entry = {"seconds": round(spent[0], 4), "wall": round(spent[1], 4), "epsilon": epsilon}
    return measure(release.model) | entry | {"gradient_evaluations": round(cost)}


def _read_clocks() -> tuple[float, float]:
    """What the processor has worked for this process and its children, and what the clock says."""
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + others.ru_utime + others.ru_stime, time.monotonic()


def _retrain(ground: Ground, case: Case) -> dict[str, Any]:
    problem, _ = ground.cut(case)
    epochs = case.route.times * ground.epochs
    make = functools.partial(
        retrain, _start(problem, case), problem.data, forget=problem.people.tolist(),
        train=problem.setting.train(epochs, case.rate), seed=case.seed,
    )  # fmt: skip
    return record(make, epochs * problem.retained, functools.partial(score, problem))


def _unlearn(ground: Ground, case: Case) -> dict[str, Any]:
    problem, _ = ground.cut(case)
    old = load_model(problem, case.seed % problem.setting.models, ground.models)
    version = "certified" if case.route.centre == "zero" else "initialisation"
    arm: Any = Arm(case.route.method, version)  # pyright: ignore[reportArgumentType]
    recipe = find_recipe(ground.network, arm, ground.epochs)  # true at (1, 1e-5)
    length = math.ceil(problem.retained / problem.setting.batch_size)
    passes = max(ground.epochs - getattr(recipe, "steps", 0) / length, 0.0)
    make = functools.partial(
        unlearn, old, _start(problem, case), problem.data, forget=problem.people.tolist(),
        recipe=recipe, train=problem.setting.train(passes, case.rate), loss=cross_entropy,
        batch_size=problem.setting.batch_size, noise=SeededNoise(case.seed), seed=case.seed,
        centre="zero" if case.route.centre == "zero" else "build",
        start="centre" if case.route.control else "model",
    )  # fmt: skip
    return record(make, ground.epochs * problem.retained, functools.partial(score, problem))


def _start(problem: Problem, case: Case) -> Callable[[], nn.Module]:
    """The network under a seed that is written here: one for all routes of a seed."""
    return functools.partial(problem.build, 5_000 + case.seed)


Prepared = tuple[Callable[[Path], object], Callable[[Path, Case], dict[str, Any]]]


def _answer_on_copies(
    place: Path, cases: list[Case], prepared: Prepared
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Learned once with everybody; every request is answered on a copy of the state."""
    learn, forget = prepared
    learn(place / "learned")
    for case in cases:
        shutil.copytree(place / "learned", place / case.size)
        yield case, forget(place / case.size, case)
        shutil.rmtree(place / case.size)


def _prepare_linear(ground: Ground, first: Case) -> Prepared:
    """On what the public network gave."""
    route, train = first.route, ground.linear.train
    lift = round(ground.lift * route.lift)
    public = f"expunge/experiments/{first.seed}" if lift else ""

    def learn(state: Path) -> None:
        features = Features(NETWORK, layers="last", lift=lift, seed=public, batch_size=512)
        if route.method == "logistic":
            model: Any = LogisticRegression(C=ground.C, features=features, state=state)
        else:
            model = RidgeClassifier(alpha=ALPHAS, features=features, state=state)
        model.fit(train.inputs.float(), train.targets.numpy(), ids=train.ids.tolist())

    def forget(state: Path, case: Case) -> dict[str, Any]:
        problem, model = ground.cut(case)[1], load_linear(state, NETWORK)

        def predict(_: nn.Module) -> dict[str, float]:
            """Accuracies in per cent."""
            return {
                name: round(100 * float(model.score(part.inputs.float(), part.targets.numpy())), 3)
                for name, part in problem.parts.items()
            }

        people = problem.people.tolist()
        return record(lambda: model.forget(people), len(problem.forgotten), predict)

    return learn, forget


def _prepare_shards(ground: Ground, first: Case) -> Prepared:
    """Over all stages as many steps as one training."""
    problem, passes = ground.network, 2 * ground.epochs / (SLICES + 1)
    train = problem.setting.train(passes, problem.setting.learning_rate)

    def build() -> nn.Module:
        return problem.build(int(torch.randint(2**31, ())))

    def make(state: Path) -> Shards:
        public = f"expunge/experiments/{first.seed}"
        return Shards(build, train, seed=public, shards=SHARDS, slices=SLICES, state=state)

    def forget(state: Path, case: Case) -> dict[str, Any]:
        asked, shards = ground.cut(case)[0], make(state)
        people = asked.people.tolist()
        cost = shards.cost(people) * ground.epochs * len(problem.train)
        make_release = functools.partial(shards.forget, people, problem.data)
        return record(make_release, cost, functools.partial(score, asked))

    return lambda state: make(state).learn(problem.data), forget
