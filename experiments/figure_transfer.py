"""Figure 3: a three-layer head on frozen public features, CIFAR-10 and CIFAR-100, with DP-SGD.

    python experiments/figure_transfer.py                    # budgets 1, 4, 10, 25, 49
    python experiments/figure_transfer.py --full             # 17 budgets, DP-SGD for 100 epochs
    python experiments/figure_transfer.py --smoke --out DIR

The paper's backbone is an ImageNet ResNet-18, whose weights are not at hand here: these features
are those of the public EfficientNet-Lite0 at 96 pixels, projected to the 512 inputs of the paper's
head (problems.py). DP-SGD trains the head so that any 0.5 % of the data can be forgotten at
(50, 1e-5), and the budget then goes to fine-tuning, as in the paper; 5 epochs unless --full, with
the noise that 5 need. The arms "initialisation" are at true (1, 1e-5) around a fresh initialisation
under a public seed, with the radii of expunge.plan; the paper's are around zero. They are paired
with retraining from that very initialisation: at one epoch of CIFAR-100 two dozen draws of it
differ by more than anything that is compared here.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from arms import DELTA, GAUSSIAN, RETRAIN, Arm, list_arms
from expunge import GroupDPSGD, Run, RunRecord, SeededNoise, calibrate, train_dpsgd
from figure_budget import METHODS, identify
from options import Options, drive
from plots import draw_lines, style_arm
from problems import SETTINGS, Problem, load_problem
from runs import Case, Store, run_cases
from summary import average, compare, count_epochs, make_table

PRIVATE = Arm("dp-sgd", "certified", epsilon=50.0)
SAME = Arm("retrain", "initialisation")
FRESH = [Arm(method, "initialisation") for method in METHODS]
ARMS = [RETRAIN, GAUSSIAN, *list_arms(("gradient-clipping",)), SAME, *FRESH, PRIVATE]
FULL = tuple(range(1, 50, 3))
REDUCED = (1, 4, 10, 25, 49)
SEEDS = 3
CLIP, GROUP = 0.5, 0.005


def run(task: str, options: Options) -> None:
    """Whatever is missing."""
    budgets = options.budgets or ((1,) if options.smoke else FULL if options.full else REDUCED)
    problem, rate = load_problem(task, options.root), SETTINGS[task].tuned_rate
    seeds = options.seeds or (2 if options.smoke else SEEDS)
    cases = [Case(arm, b, s, rate) for b in budgets for s in range(seeds) for arm in ARMS]
    epochs = 1 if options.smoke else 100 if options.full else 5
    run_cases(
        problem,
        options.take_part(cases),
        Store(options.out, task),
        model_seeds=min(seeds, SEEDS),
        compile=options.compile or True,
        private=functools.partial(train_privately, problem, epochs, options.out),
    )


@functools.cache
def train_privately(problem: Problem, epochs: int, out: Path, seed: int) -> Run:
    """The head trained by DP-SGD on all data; kept with its record, and trained once."""
    n, batch = len(problem.train), problem.setting.batch_size
    size = max(round(GROUP * n), 1)
    base = out / "models" / f"dpsgd-{problem.name}-{epochs}-{seed}"
    net = problem.build(4_000 + seed)
    weights, told = base.with_suffix(".safetensors"), base.with_suffix(".record.json")
    if weights.exists() and told.exists():
        net.load_state_dict(load_file(weights))
        return Run(net, RunRecord.load(told))
    steps = math.ceil(epochs * n / batch)
    recipe = calibrate(
        lambda s: GroupDPSGD(
            clip=CLIP, noise_multiplier=s, sampling_rate=batch / n, steps=steps, group_size=size
        ),
        epsilon=PRIVATE.epsilon,
        delta=DELTA,
    )
    ended = train_dpsgd(
        net,
        problem.train,
        recipe,
        learning_rate=problem.setting.learning_rate,
        weight_decay=problem.setting.weight_decay,
        schedule="one-cycle",
        prepare=problem.prepare,
        noise=SeededNoise(seed),
        physical_batch=192,
    )
    weights.parent.mkdir(parents=True, exist_ok=True)
    save_file(ended.model.state_dict(), weights)
    ended.record.save(told)
    return ended


def plot(task: str, options: Options) -> None:
    """The figure, the table and the paired differences."""
    out = options.out
    entries = Store(out, task).read_paired(SETTINGS[task].tuned_rate)
    budgets = sorted({entry["budget"] for entry in entries})
    lines, styles = {}, {}
    for arm in ARMS:
        points = [(b, average(entries, budget=b, **identify(arm))) for b in budgets]
        lines[arm.name] = [(b, m.value, m.spread) for b, m in points if m.count]
        styles[arm.name] = style_arm(arm.method, arm.version)
    draw_lines(
        lines,
        styles,
        title=f"{task.replace('_', ' ')}: head on frozen public features",
        horizontal="budget (epochs)",
        vertical="test accuracy (%)",
        files=[out / f"figure_{task}.{kind}" for kind in ("png", "svg")],
        logarithmic=True,
    )
    header = [count_epochs(b) for b in budgets]
    rows = [
        [arm.name, *(average(entries, budget=b, **identify(arm)) for b in budgets)] for arm in ARMS
    ]
    printed, certified, centre = list_arms(("gradient-clipping",))
    pairs = [(printed, RETRAIN), (certified, RETRAIN), (printed, centre), (certified, GAUSSIAN)]
    differences: list[list[Any]] = [
        [
            f"{a.name} − {b.name}",
            *(compare(entries, identify(a), identify(b), budget=n) for n in budgets),
        ]
        for a, b in [*pairs, *((arm, SAME) for arm in FRESH), (PRIVATE, RETRAIN)]
    ]
    text = make_table(["arm", *header], rows) + "\n\n"
    text += make_table(["paired difference, 95 %", *header], differences) + "\n"
    (out / f"figure_{task}.md").write_text(text, encoding="utf-8")
    print(text)


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("transfer_cifar10", "transfer_cifar100"), run, plot, arguments)


if __name__ == "__main__":
    main()
