"""Heads that were built to forget, run as the other arms are: learned, asked to forget, measured.

Every group of runs is one life with one seed, which decides the forget set, the lift and the noise.
The candidates of a penalty (λ, m) share it; one is chosen on validation data. Exact statistics are
compared, bit for bit, with those of a head that has never learned the forget set, in every run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from arms import DELTA
from expunge import Run, SeededNoise
from expunge.errors import UnlearningError
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.statistics import StatisticsHead
from expunge.tasks.samples import Samples
from problems import Problem
from runs import Store, find_commit, keep_certificate

Method = Literal["exact-statistics", "convex-head"]
EPSILON, TOLERANCE = 1.0, 1e-9
KEY = bytes(32)  # a store's order of rows follows its key: fixed, so that a run can be repeated


@dataclass(frozen=True, order=True)
class Life:
    """One seed of one head. ``lift`` counts the public random features beside the given ones."""

    method: Method
    lift: int
    seed: int
    penalties: tuple[float, ...]

    @property
    def version(self) -> str:
        return f"lift {self.lift}" if self.lift else "plain"

    @property
    def key(self) -> str:
        """One line that names it.

        >>> Life("convex-head", 0, 1, (1e-5,)).key
        'convex-head, plain | seed 1'
        """
        return f"{self.method}, {self.version} | seed {self.seed}"

    def name_runs(self) -> list[str]:
        """The keys of its runs.

        >>> Life("convex-head", 0, 1, (1e-5,)).name_runs()[1]
        'convex-head, plain, certified | seed 1 | penalty 1e-05'
        """
        kinds = ("from zero", "certified") if self.method == "convex-head" else ("exact",)
        return [
            f"{self.method}, {self.version}, {kind} | seed {self.seed} | penalty {penalty:g}"
            for penalty in self.penalties
            for kind in kinds
        ]


def run_lives(problem: Problem, lives: list[Life], store: Store) -> None:
    """Whatever is not finished."""
    for life in lives:
        done = store.read()
        left = [p for p in life.penalties if not is_done(replace(life, penalties=(p,)), done)]
        if not left:
            continue
        live = {"exact-statistics": live_exactly, "convex-head": live_convexly}[life.method]
        began = time.monotonic()
        seeded = replace(problem, forget_seed=life.seed)
        for entry in live(seeded, replace(life, penalties=tuple(left)), store):
            store.add(entry)
        told = f"{problem.name}: {life.key}, {time.monotonic() - began:.0f} s"
        print(told, file=sys.stderr, flush=True)


def is_done(life: Life, done: dict[str, Any]) -> bool:
    return all(name in done for name in life.name_runs())


def live_exactly(problem: Problem, life: Life, store: Store) -> Iterator[dict[str, Any]]:
    """Learn what stays, and keep its digest; learn the rest, forget it, and compare all bits."""
    (retain, forget), features = problem.parts, make_features(life)
    head = StatisticsHead(
        features, classes=count_classes(problem), regularisation=life.penalties[0], key=KEY
    )
    head.learn((retain.inputs, retain.targets), ids=retain.ids.tolist())
    never, weights = head.digest(), head.release().model.weight
    head.learn((forget.inputs, forget.targets), ids=forget.ids.tolist())
    run, seconds = clock(lambda: head.forget(np.unique(forget.ids).tolist()))
    if head.digest() != never or not torch.equal(run.model.weight, weights):
        raise UnlearningError("after the request the head is not that of a life without it")
    measure = prepare_measure(problem, features)
    for penalty, name in zip(life.penalties, life.name_runs(), strict=True):
        head.candidates = (penalty,)
        released = run if penalty == life.penalties[0] else head.release()
        entry = describe(problem, life, name, "exact", penalty) | measure(released)
        entry |= {"seconds": round(seconds, 3), "digest": never}
        if life.seed == 0 and penalty == life.penalties[0]:
            entry |= keep_certificate(run, name, store, weights_too=False)
        yield entry


def live_convexly(problem: Problem, life: Life, store: Store) -> Iterator[dict[str, Any]]:
    """From zero on what stays; and from the old weights, with the noise of (1, 1e-5)."""
    (retain, forget), features = problem.parts, make_features(life)
    measure = prepare_measure(problem, features)
    for penalty in life.penalties:
        names = replace(life, penalties=(penalty,)).name_runs()
        options: dict[str, Any] = {"classes": count_classes(problem), "key": KEY}
        options |= {"weight_decay": penalty, "tolerance": TOLERANCE}
        never, head = ConvexHead(features, **options), ConvexHead(features, **options)
        for each in (never, head):
            each.learn((retain.inputs, retain.targets), ids=retain.ids.tolist())
        released, seconds = clock(never.release)
        entry = describe(problem, life, names[0], "from zero", penalty) | measure(released)
        yield entry | {"seconds": round(seconds, 3), "half_passes": never.half_passes}
        head.learn((forget.inputs, forget.targets), ids=forget.ids.tolist())
        head.release()
        gone, noise = np.unique(forget.ids).tolist(), SeededNoise(life.seed)
        run, seconds = clock(
            lambda head=head, gone=gone, noise=noise: head.forget(
                gone, epsilon=EPSILON, delta=DELTA, noise=noise
            )
        )
        entry = describe(problem, life, names[1], "certified", penalty) | measure(run)
        entry |= {"seconds": round(seconds, 3), "half_passes": head.half_passes}
        entry |= {"noise_std": run.record.recipe.noise_std}
        if life.seed == 0:
            entry |= keep_certificate(run, names[1], store, weights_too=False)
        yield entry


def make_features(life: Life) -> Features:
    """The public integers; the lift's public string is another one for every seed."""
    return Features(lift=life.lift, seed=f"expunge/experiments/{life.seed}" if life.lift else "")


def count_classes(problem: Problem) -> int:
    return int(max(part.targets.max() for part in (problem.train, problem.test))) + 1


def prepare_measure(problem: Problem, features: Features) -> Callable[[Run], dict[str, float]]:
    """Accuracies in per cent of a release; the integers of every part are computed once."""
    parts = {"validation": problem.validation, "test": problem.test, "forget": problem.parts[1]}
    stored = {name: features.compute(part.inputs) for name, part in parts.items()}

    def measure_part(weights: torch.Tensor, part: Samples, rows: Any) -> float:
        right = 0
        for at in range(0, len(part), 2_048):
            phi = torch.from_numpy(features.integers.expand(rows[at : at + 2_048])).double()
            right += int(((phi @ weights).argmax(1) == part.targets[at : at + 2_048]).sum())
        return round(100 * right / len(part), 3)

    def measure(run: Run) -> dict[str, float]:
        weights = run.model.weight
        return {name: measure_part(weights, part, stored[name]) for name, part in parts.items()}

    return measure


def describe(problem: Problem, life: Life, name: str, kind: str, penalty: float) -> dict[str, Any]:
    """What ran."""
    told: dict[str, Any] = {"key": name, "task": problem.name, "method": life.method}
    told |= {"version": f"{life.version}, {kind}", "epsilon": EPSILON * (kind == "certified")}
    return told | {"penalty": penalty, "seed": life.seed, "commit": find_commit()}


def clock(work: Callable[[], Run]) -> tuple[Run, float]:
    began = time.monotonic()
    found = work()
    return found, time.monotonic() - began
