"""Convex heads: half-passes and seconds to the tolerance from three starts, and what noise costs.

A half-pass is a product of all rows with the features or their transpose. Softmax regression with
m = 1e-5 and τ = 1e-9 on CIFAR-10 by EfficientNet-Lite0 at 96 pixels where ``experiments`` has
extracted it (``EXPUNGE_DATA``), else on drawn features of the same shape, whose rows name no target
of the prototype (THEORY, section 11). The start from zero is solved once, without one
example. Half-passes are counted, and the same in every run.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

import cifar
import features
from benchmarks.timing import compare
from expunge.accounting.calibration import calibrate
from expunge.errors import ExpungeError
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.ridge import one_thread
from expunge.forgettable.solver import Objective, Recycled, _search
from expunge.noisy.noise import SeededNoise
from expunge.noisy.solutions import release_solution

Array = npt.NDArray[np.float64]
ROWS, WIDTH, CLASSES = 50_000, 1_280, 10
PROTOTYPE = {0: 377, 1: 72, 50: 146, 5_000: 204}
SEEDS = 1
EPSILON, DELTA, MOST_POINTS = 1.0, 1e-5, 0.05
PIXELS = 96
MOST_HALF_PASSES = 1.5  # of Newton's: then L-BFGS has lost, and the bench is not kept waiting


def run() -> list[dict[str, Any]]:
    (x, y), (test_x, test_y), real = load_data()
    ids = [f"user-{i}" for i in range(len(x))]
    head = ConvexHead(Features(), classes=CLASSES)
    head.learn((x, y), ids)
    before = head.release().model.weight.numpy()
    zero = head.half_passes
    rows = _compare_starts(head, ids, before, real)
    rows += _compare_solvers(head, zero)
    rows += _compare_accuracy(head, ids, before, test_x, test_y)
    return [*rows, _start_from_released(head, ids, zero)]


def load_data() -> tuple[tuple[Array, Any], tuple[Array, Any], bool]:
    """(training, test, whether they are CIFAR-10's)."""
    try:
        task = cifar.load("cifar10", validation=0)
        backbone = features.load_efficientnet_lite0(size=PIXELS)
        if features.cache_path(task.train, backbone).exists():
            parts = [features.extract(part, backbone) for part in (task.train, task.test)]
            train, test = ((part.inputs.numpy(), part.targets.numpy()) for part in parts)
            return train, test, True
    except (ExpungeError, OSError):
        pass
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, ROWS + 10_000)
    hidden = rng.normal(size=(CLASSES, 64))[y] * 0.5 + rng.normal(size=(len(y), 64))
    x = np.maximum(hidden @ rng.normal(size=(64, WIDTH)) + 4 * rng.normal(size=(len(y), WIDTH)), 0)
    return (x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:]), False


def _compare_starts(
    head: ConvexHead, ids: list[str], before: Array, real: bool
) -> list[dict[str, Any]]:
    """From before, for requests of three sizes; from zero once, without one example."""
    rows, zero = list[dict[str, Any]](), 0
    times: dict[str, list[float]] = {}
    for count in (1, 50, 5_000):
        request = head._memory.plan(ids[:count])
        passes: dict[str, int] = {}
        for name, start in (("zero", None), ("before", before)):
            if name == "zero" and zero:
                continue
            started = time.perf_counter()
            found = head._solve(request.changes, request.sums, start)
            times[name] = [time.perf_counter() - started]
            passes[name] = found.half_passes
            assert found.reached
        zero = passes.get("zero", zero)
        what = f"{count:,} of {len(ids):,} forgotten"
        named = ((f"from before ({passes['before']})", passes["before"], count),)
        if count == 1:
            named += ((f"from zero ({zero})", zero, 0),)
        for words, found, at in named:
            title = f"half-passes {words} / prototype ({PROTOTYPE[at]}), {what}"
            rows.append(state(title, found / PROTOTYPE[at], 1.0 if real else None))
        share = passes["before"] / zero
        rows.append(state(f"half-passes from before / from zero ({zero}), {what}", share))
        title = f"seconds from before / from zero, {what}"
        rows.append(compare(title, times, "before", "zero"))
    return rows


def _compare_solvers(head: ConvexHead, newton: int) -> list[dict[str, Any]]:
    """L-BFGS without a preconditioner, on all rows from zero."""
    memory, recipe = head._memory, head.recipe
    blocks, gram = list(memory.read_blocks()), memory.sums.gram.astype(np.float64)
    objective = Objective("softmax", recipe.weight_decay, memory.unit, blocks, gram)
    with one_thread():
        most = MOST_HALF_PASSES * newton
        reached = solve_by_lbfgs(objective, memory.sums.cross.shape, recipe.tolerance, most)
    told = f"{'' if reached else 'not within '}{objective.half_passes}"
    title = f"half-passes, Newton-CG ({newton}) / L-BFGS ({told}), from zero"
    return [state(title, newton / objective.half_passes, 1.0)]


def solve_by_lbfgs(
    objective: Objective, shape: tuple[int, ...], tolerance: float, most: float
) -> bool:
    """Whether L-BFGS, with twenty pairs, reaches the tolerance from zero; the objective counts."""
    W, kept, scale = np.zeros(shape), Recycled(deque(maxlen=20)), 1.0
    value, g, bound, _ = objective.evaluate(W)
    while bound > tolerance and objective.half_passes < most:
        D = -kept.improve(lambda R, scale=scale: scale * R)(g)
        after, (value, gradient, bound, _) = _search(objective, W, D, value, g)
        s, y = after - W, gradient - g
        bent = float(np.vdot(s, y))
        if bent > 0:
            kept.add(s, y, bent)
            scale = bent / float(np.vdot(y, y))
        W, g = after, gradient
    return bound <= tolerance


def _compare_accuracy(
    head: ConvexHead, ids: list[str], before: Array, x: Array, y: Any
) -> list[dict[str, Any]]:
    """Test accuracy with noise minus without, a tenth forgotten."""
    recipe = calibrate(
        lambda s: replace(head.recipe, noise_std=s),
        epsilon=EPSILON,
        delta=DELTA,
        parameters=before.size,
    )
    phi = head.features.integers.expand(head.features.compute(x)).astype(np.float64)
    phi /= head._memory.unit
    changes: list[float] = []
    plain: list[float] = []
    for seed in range(SEEDS):
        gone = np.random.default_rng(seed).choice(len(ids), len(ids) // 10, replace=False)
        request = head._memory.plan([ids[i] for i in gone])
        weights = head._solve(request.changes, request.sums, before).weights
        noisy = release_solution(weights, recipe, SeededNoise(seed)).weights
        found = [100 * float(np.mean((phi @ w).argmax(axis=1) == y)) for w in (weights, noisy)]
        plain.append(found[0])
        changes.append(found[1] - found[0])
    worst = max(map(abs, changes))
    told = ", ".join(f"{c:+.2f}" for c in changes)
    title = (
        f"points that the noise of ({EPSILON:g}, {DELTA:g}) moves {np.mean(plain):.2f} % ({told})"
    )
    return [state(title, worst, MOST_POINTS)]


def _start_from_released(head: ConvexHead, ids: list[str], zero: int) -> dict[str, Any]:
    """The second noisy request starts from what the first released, noise and all."""
    head.forget(ids[:1], epsilon=EPSILON, delta=DELTA, noise=SeededNoise(0))
    head.forget(ids[1:2], epsilon=EPSILON, delta=DELTA, noise=SeededNoise(1))
    passes = head.half_passes
    title = f"half-passes from released ({passes}) / from zero, a second request of one"
    return state(title, passes / zero)


def state(name: str, ratio: float, target: float | None = None) -> dict[str, Any]:
    """A row that was counted, not timed."""
    met = None if target is None else ratio <= target
    return {"name": name, "ratio": ratio, "target": target, "direction": "at most", "met": met}
