"""Figure 2: the convergence of gradient clipping with γ = 0.01, C0 = 20, C1 = 10, λ = 50, σ = 0.25.

    python experiments/figure_convergence.py                  # CIFAR-10, two epochs, three seeds
    python experiments/figure_convergence.py --budgets 7      # as long as the paper's row
    python experiments/figure_convergence.py --smoke --out DIR

Thirty noisy steps, as the caption says (the paper's table has the same row with 11), then training
at the constant rate 0.06, which the text says; accuracy on the test images every eighth of an
epoch, each eighth a fresh draw of batches. Finished runs are in results/runs/convergence_*.jsonl.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from arms import Arm, certify_radii, find_epsilon, measure_noise
from expunge import Batches, GradientClipping, SeededNoise, evaluate, train, unlearn
from options import Options, drive
from plots import draw_lines, style_arm
from problems import Problem, load_model, load_problem
from runs import Store, find_commit
from summary import Difference, Mean, count_epochs, make_table

ARMS = [
    Arm("retrain", "own"),
    Arm("retrain", "gaussian"),
    Arm("gradient-clipping", "printed"),
    Arm("gradient-clipping", "certified"),
    Arm("gradient-clipping", "centre"),
]
ROW = GradientClipping(
    start_clip=20.0, grad_clip=10.0, learning_rate=0.01, weight_decay=50.0, steps=30, noise_std=0.25
)
EIGHTH = 1 / 8
DEFAULT = {"cifar10": (2, 3), "digits": (1, 2)}  # epochs, seeds


def run_one(
    problem: Problem, arm: Arm, seed: int, epochs: float, folder: Path, compile: Any
) -> dict[str, Any]:
    """The curve of one arm with one seed: (epochs spent, test accuracy)."""
    size = sum(p.numel() for p in problem.build(0).parameters())
    recipe = certify_radii(ROW, 1.0, size) if arm.version == "certified" else ROW
    length = -(-len(problem.parts[0]) // problem.setting.batch_size)
    curve: list[tuple[float, float]] = []

    def measure(net: nn.Module, spent: float) -> None:
        part = problem.test
        found = evaluate(net, part.inputs, part.targets, prepare=problem.prepare)
        curve.append((round(spent, 4), round(100 * found.accuracy, 3)))

    net = make_net(problem, arm, seed, recipe, folder, lambda n, t: measure(n, t / length))
    spent = curve[-1][0] if curve else 0.0
    if not curve:
        measure(net, 0.0)
    generator = torch.Generator().manual_seed(seed)
    while spent < epochs - 1e-9:
        train(
            net,
            problem.parts[0],
            epochs=EIGHTH,
            learning_rate=problem.setting.tuned_rate,
            batch_size=problem.setting.batch_size,
            weight_decay=problem.setting.weight_decay,
            prepare=problem.prepare,
            generator=generator,
            compile=compile,
        )
        spent += EIGHTH
        measure(net, spent)
    told: dict[str, Any] = {"key": f"{arm.name} | seed {seed} | {epochs:g} epochs"}
    told |= {"method": arm.method, "version": arm.version, "seed": seed, "epochs": epochs}
    if arm.method != "retrain":
        told |= {"recipe": vars(recipe), "true_epsilon": round(find_epsilon(recipe), 4)}
    return told | {"curve": curve, "commit": find_commit()}


def make_net(
    problem: Problem, arm: Arm, seed: int, recipe: GradientClipping, folder: Path, report: Any
) -> nn.Module:
    """A fresh net, or the net after the noisy steps, reporting after the first and each tenth."""
    if arm.method == "retrain":
        net = problem.build(1_000 + seed)
        if arm.version == "gaussian":
            generator = torch.Generator().manual_seed(2_000 + seed)
            scale = measure_noise(ROW)
            with torch.no_grad():
                for p in net.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator) * scale)
        return net
    retain, forget = problem.parts
    loader = Batches(
        retain.inputs,
        retain.targets,
        batch_size=problem.setting.batch_size,
        generator=torch.Generator().manual_seed(3_000 + seed),
        prepare=problem.prepare,
        ids=retain.ids,
    )
    old = load_model(problem, 0, folder / "models")
    if arm.version != "centre":
        report(old, 0)
    ended = unlearn(
        old,
        loader,
        recipe,
        loss_fn=nn.functional.cross_entropy,
        noise=SeededNoise(seed),
        centre="zero",
        start="centre" if arm.version == "centre" else "model",
        forget_ids=forget.ids,
        on_step=lambda t, net: report(net, t) if t in (1, 10, 20, recipe.steps) else None,
    )
    return copy.deepcopy(ended.model)


def run(task: str, options: Options) -> None:
    """Whatever is missing."""
    epochs, seeds = DEFAULT[task]
    epochs = options.budgets[0] if options.budgets else epochs
    store = Store(options.out, f"convergence_{task}")
    problem = load_problem(task, options.root)
    compile = False if options.compile else task == "cifar10"
    wanted = [(arm, s) for s in range(options.seeds or seeds) for arm in ARMS]
    for n, (arm, seed) in enumerate(options.take_part(wanted)):
        if f"{arm.name} | seed {seed} | {epochs:g} epochs" not in store.read():
            store.add(run_one(problem, arm, seed, epochs, options.out, compile))
        print(f"convergence: {n + 1} of {len(wanted)} runs", file=sys.stderr, flush=True)


def plot(task: str, options: Options) -> None:
    """The curves, and what is ahead of what after each half epoch."""
    out = options.out
    entries = list(Store(out, f"convergence_{task}").read().values())
    by_arm = {
        arm: {e["seed"]: dict(map(tuple, e["curve"])) for e in entries if _is_of(e, arm)}
        for arm in ARMS
    }
    lines, styles = {}, {}
    for arm, curves in by_arm.items():
        shared = sorted(set.intersection(*(set(c) for c in curves.values()))) if curves else []
        means = [(x, Mean.of([c[x] for c in curves.values()])) for x in shared]
        lines[arm.name] = [(x, m.value, m.spread) for x, m in means]
        styles[arm.name] = style_arm(arm.method, arm.version) | {"markersize": 1.5}
    draw_lines(
        lines,
        styles,
        title=f"{task}: 30 noisy steps, then training",
        horizontal="epochs spent",
        vertical="test accuracy (%)",
        files=[out / f"figure_convergence_{task}.{kind}" for kind in ("png", "svg")],
    )
    last = max((entry["epochs"] for entry in entries), default=0.0)
    marks = [last * part for part in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)]
    rows = [[a.name, *(_at(by_arm[a], x) for x in marks)] for a in ARMS]
    clipped = ARMS[2]
    rows += [
        [f"{clipped.name} − {a.name}", *(_between(by_arm[clipped], by_arm[a], x) for x in marks)]
        for a in ARMS
        if a != clipped
    ]
    text = make_table(["after about", *(count_epochs(x) for x in marks)], rows) + "\n"
    (out / f"figure_convergence_{task}.md").write_text(text, encoding="utf-8")
    print(text)


def _is_of(entry: dict[str, Any], arm: Arm) -> bool:
    return (entry["method"], entry["version"]) == (arm.method, arm.version)


def _nearest(curve: dict[float, float], x: float) -> float:
    """The first accuracy at or after x: noisy steps shift the grid of the arms that have them."""
    return next((curve[at] for at in sorted(curve) if at >= x - 1e-9), curve[max(curve)])


def _at(curves: dict[int, dict[float, float]], x: float) -> Mean:
    return Mean.of([_nearest(curve, x) for curve in curves.values()])


def _between(one: dict[int, Any], two: dict[int, Any], x: float) -> Difference:
    seeds = sorted(set(one) & set(two))
    return Difference.of([_nearest(one[s], x) for s in seeds], [_nearest(two[s], x) for s in seeds])


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("cifar10",), run, plot, arguments)


if __name__ == "__main__":
    main()
