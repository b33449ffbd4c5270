"""Figure 2: the convergence of gradient clipping with γ = 0.01, C0 = 20, C1 = 10, λ = 50, σ = 0.25.

    python experiments/figure_convergence.py                  # CIFAR-10, two epochs, three seeds
    python experiments/figure_convergence.py --budgets 7      # as long as the paper's row
    python experiments/figure_convergence.py --smoke

Thirty noisy steps, as the caption says (the paper's table has the same row with 11), then training
at the constant rate 0.06, which the text says; accuracy on the test images every eighth of an
epoch. Finished runs are in results/runs/convergence_*.jsonl.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from arms import GAUSSIAN, RETRAIN, Arm, certify_radii, find_epsilon, list_arms, measure_noise
from expunge import GradientClipping, SeededNoise, evaluate, retrain, unlearn
from networks import count_parameters
from options import Options, drive
from plots import draw_lines, style_arm
from problems import Problem, load_model, load_problem
from runs import Case, Store, build_start, find_commit
from summary import Difference, Mean, count_epochs, make_table, publish

ARMS = [RETRAIN, GAUSSIAN, *list_arms(("gradient-clipping",))]
ROW = GradientClipping(
    start_clip=20.0, grad_clip=10.0, learning_rate=0.01, weight_decay=50.0, steps=30, noise_std=0.25
)
EIGHTH = 1 / 8
Curves = dict[int, dict[float, float]]
DEFAULT = {"cifar10": (2, 3), "digits": (1, 2)}  # epochs, seeds


def run_one(problem: Problem, arm: Arm, seed: int, epochs: float, folder: Path) -> dict[str, Any]:
    """The curve of one arm with one seed: (epochs spent, test accuracy)."""
    size = count_parameters(problem.build(0))
    recipe = certify_radii(ROW, 1.0, size) if arm.version == "certified" else ROW
    batch = problem.setting.batch_size
    length = math.ceil(problem.retained / batch)
    curve: list[tuple[float, float]] = []

    def measure(net: nn.Module, steps: float) -> None:
        found = evaluate(net, problem.test.pair)
        curve.append((round(steps / length, 4), round(100 * (found.accuracy or 0.0), 3)))

    def train(model: nn.Module, examples: Any, seed: int) -> None:
        """Plain SGD at a constant rate, measured on the way."""
        setting, steps = problem.setting, 0 if arm.method == "retrain" else ROW.steps
        optimizer = torch.optim.SGD(
            model.parameters(), setting.tuned_rate, weight_decay=setting.weight_decay
        )
        generator, due = torch.Generator().manual_seed(seed), steps / length + EIGHTH
        orders = (torch.randperm(len(examples[1]), generator=generator) for _ in itertools.count())
        places = (rows for order in orders for rows in order.split(batch))
        measure(model, steps)
        for step in range(steps + 1, math.ceil(epochs * length - 1e-9) + 1):
            rows = next(places)
            optimizer.zero_grad()
            cross_entropy(model(examples[0][rows]), examples[1][rows]).backward()
            optimizer.step()
            if step / length >= due - 1e-9:
                measure(model, step)
                due += EIGHTH

    shared: dict[str, Any] = {"forget": problem.people.tolist(), "train": train, "seed": seed}
    start = functools.partial(
        build_start, problem, Case(arm, epochs, seed, 0.0, measure_noise(ROW))
    )
    if arm.method == "retrain":
        retrain(start, problem.data, **shared)
    else:
        unlearn(
            load_model(problem, 0, folder / "models"), start, problem.data, recipe=recipe,
            loss=cross_entropy, batch_size=batch, noise=SeededNoise(seed), centre="zero",
            start="centre" if arm.version == "centre" else "model", **shared,
        )  # fmt: skip
    entry: dict[str, Any] = {"key": f"{arm.name} | seed {seed} | {epochs:g} epochs"}
    entry |= {"method": arm.method, "version": arm.version, "seed": seed, "epochs": epochs}
    if arm.method != "retrain":
        entry |= {"recipe": asdict(recipe), "true_epsilon": round(find_epsilon(recipe), 4)}
    return entry | {"curve": curve, "commit": find_commit()}


def run(task: str, options: Options) -> None:
    """Whatever is missing."""
    epochs, seeds = DEFAULT[task]
    epochs = options.budgets[0] if options.budgets else epochs
    store = Store(options.out, f"convergence_{task}")
    problem = load_problem(task)
    wanted = [(arm, s) for s in range(options.seeds or seeds) for arm in ARMS]
    for n, (arm, seed) in enumerate(wanted):
        if f"{arm.name} | seed {seed} | {epochs:g} epochs" not in store.read():
            store.add(run_one(problem, arm, seed, epochs, options.out))
        print(f"convergence: {n + 1} of {len(wanted)} runs", file=sys.stderr, flush=True)


def read_curves(task: str, out: Path) -> dict[Arm, Curves]:
    """Test accuracy by epochs spent, of every arm and seed."""
    entries = Store(out, f"convergence_{task}").read().values()
    return {
        arm: {
            e["seed"]: dict(map(tuple, e["curve"]))
            for e in entries
            if (e["method"], e["version"]) == (arm.method, arm.version)
        }
        for arm in ARMS
    }


def read_at(curves: Curves, x: float) -> dict[int, float]:
    """The first accuracy at or after x: noisy steps shift the grid of the arms that have them."""
    return {
        seed: next((curve[at] for at in sorted(curve) if at >= x - 1e-9), curve[max(curve)])
        for seed, curve in curves.items()
    }


def compare_curves(one: Curves, two: Curves, x: float) -> Difference:
    """Paired by seed."""
    first, second = read_at(one, x), read_at(two, x)
    seeds = sorted(set(first) & set(second))
    return Difference.of([first[s] for s in seeds], [second[s] for s in seeds])


def plot(task: str, options: Options) -> None:
    """The curves, and what is ahead of what after each half epoch."""
    out, by_arm = options.out, read_curves(task, options.out)
    lines, styles = {}, {}
    for arm, curves in by_arm.items():
        shared = sorted(set.intersection(*map(set, curves.values()))) if curves else []
        means = [(x, Mean.of([curve[x] for curve in curves.values()])) for x in shared]
        lines[arm.name] = [(x, m.value, m.spread) for x, m in means]
        styles[arm.name] = style_arm(arm.method, arm.version) | {"markersize": 1.5}
    draw_lines(
        lines, styles, title=f"{task}: 30 noisy steps, then training", horizontal="epochs spent",
        vertical="test accuracy (%)",
        files=[out / f"figure_convergence_{task}.{kind}" for kind in ("png", "svg")],
    )  # fmt: skip
    last = round(max(x for curves in by_arm.values() for c in curves.values() for x in c))
    marks = [last * part for part in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)]
    means = [[a.name, *(Mean.of([*read_at(by_arm[a], x).values()]) for x in marks)] for a in ARMS]
    clipped = ARMS[2]
    gaps = [
        [f"{clipped.name} − {a.name}"]
        + [compare_curves(by_arm[clipped], by_arm[a], x) for x in marks]
        for a in ARMS
        if a != clipped
    ]
    header = ["after about", *(count_epochs(x) for x in marks)]
    text = make_table(header, [*means, *gaps]) + "\n"
    publish(text, out / f"figure_convergence_{task}.md")


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("cifar10",), run, plot, arguments)


if __name__ == "__main__":
    main()
