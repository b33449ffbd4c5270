"""Figure 1 and Table 2: accuracy against budget at (1, 1e-5), every method in three versions.

    python experiments/figure_budget.py                      # what results/ was made with
    python experiments/figure_budget.py --full               # the paper's whole grid, days long
    python experiments/figure_budget.py --task mnist --plot  # only draw what is there
    python experiments/figure_budget.py --smoke              # the same code, tiny, to runs/smoke

Runs that are finished are not run again (experiments/results/runs). Table 2 has the epochs to reach
30 to 50 % on CIFAR-10: the smallest budget that was run at which the mean over seeds reaches the
target, "> b" if none up to b does. The learning-rate cycle spans the budget, so a budget is not a
point on the curve of a longer run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arms import GAUSSIAN, RETRAIN, Arm, list_arms
from options import Options, drive
from plots import draw_arms, style_arm
from problems import SETTINGS
from runs import Store, run_arms
from summary import average, list_budgets, make_table, publish, tabulate_arms

METHODS = ("output-perturbation", "gradient-clipping", "model-clipping")
ARMS = [RETRAIN, GAUSSIAN, *list_arms(METHODS)]
FULL = {"mnist": tuple(range(1, 11)), "cifar10": tuple(range(1, 50, 3)), "digits": (1, 2)}
REDUCED = FULL | {"cifar10": (1, 2, 4, 7, 10)}
TARGETS = {"cifar10": (30, 35, 40, 45, 50), "digits": (5, 99)}
THEIRS = {  # method: the paper's epochs to each target
    "retrain": (6, 11, 18, 23, 30),
    "output-perturbation": (5, 7, 12, 17, 25),
    "gradient-clipping": (4, 6, 10, 16, 23),
    "model-clipping": (3, 6, 10, 17, 24),
}
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "digits"}
PAIRS = [
    *(
        (Arm(method, version), RETRAIN)
        for version in ("printed", "certified")
        for method in METHODS
    ),
    *((Arm(method, "printed"), Arm(method, "centre")) for method in METHODS),
    (Arm("gradient-clipping", "certified"), GAUSSIAN),
    (GAUSSIAN, RETRAIN),
]


def run(task: str, options: Options) -> None:
    """Whatever is missing."""
    budgets = options.budgets or (FULL if options.full else REDUCED)[task]
    run_arms(task, options, ARMS, budgets)


def read_entries(task: str, out: Path) -> list[dict[str, Any]]:
    """The finished runs of this figure: the tables' learning rate, no augmentation, ε = 1."""
    names = {arm.name for arm in ARMS}
    return [
        entry
        for entry in Store(out, task).read_paired(SETTINGS[task].tuned_rate)
        if entry["key"].split(" | ")[0] in names and "sweep" not in entry["key"]
    ]


def plot(task: str, options: Options) -> None:
    """One panel with the versions that differ, and the table of all of them."""
    entries, name = read_entries(task, options.out), f"figure_budget_{task}"
    styles = {
        arm: (label(arm, entries), style_arm(arm.method, arm.version))
        for arm in ARMS
        if arm.version not in ("printed", "centre") or arm.method == "gradient-clipping"
    }
    title = f"{TITLES[task]}: accuracy against budget"
    draw_arms(entries, styles, options.out, name, title=title)
    grid = FULL[task] if not options.smoke else ()
    publish(tabulate_arms(entries, ARMS, PAIRS, grid), options.out / f"{name}.md")

    if task in TARGETS:
        table = options.out / f"table_target_accuracy_{task}.md"
        publish(tabulate_targets(entries, TARGETS[task]), table)


def tabulate_targets(entries: list[dict[str, Any]], targets: tuple[int, ...]) -> str:
    """Epochs to reach each target, ours beside the paper's."""
    rows = []
    for arm in ARMS:
        theirs = THEIRS[arm.method] if arm == RETRAIN or arm.version == "printed" else None
        cells = [find_budget(entries, arm, target) for target in targets]
        if theirs and len(targets) == len(theirs):
            cells = [f"{a} (paper {b})" for a, b in zip(cells, theirs, strict=True)]
        rows.append([arm.name, *cells, ", ".join(f"{b:g}" for b in list_ran(entries, arm))])
    header = ["epochs to reach", *(f"{target} %" for target in targets), "budgets run"]
    return make_table(header, rows) + "\n"


def find_budget(entries: list[dict[str, Any]], arm: Arm, target: float) -> str:
    """The smallest budget at which the mean reaches the target."""
    budgets = list_ran(entries, arm)
    for budget in budgets:
        mean = average(entries, budget=budget, **arm.fields)
        if mean.value >= target:
            return f"{budget:g}" + " (1 seed)" * (mean.count == 1)
    return f"> {budgets[-1]:g}" if budgets else "–"


def list_ran(entries: list[dict[str, Any]], *arms: Arm) -> list[float]:
    """The budgets at which all of these arms were run."""
    each = [list_budgets(e for e in entries if arm.fields.items() <= e.items()) for arm in arms]
    return sorted(set.intersection(*map(set, each)))


def label(arm: Arm, entries: list[dict[str, Any]]) -> str:
    """The arm's name in a legend; with the true ε where the label is another."""
    own = [e for e in entries if arm.fields.items() <= e.items() and arm.version == "printed"]
    return arm.name + (f" (ε = {min(e['true_epsilon'] for e in own):.3g})" if own else "")


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("mnist", "cifar10"), run, plot, arguments)


if __name__ == "__main__":
    main()
