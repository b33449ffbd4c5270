"""Figure 1: accuracy against compute budget at (1, 1e-5), every method in its three versions.

    python experiments/figure_budget.py                      # what results/ was made with
    python experiments/figure_budget.py --full               # the paper's whole grid, a day long
    python experiments/figure_budget.py --task mnist --plot  # only draw what is there
    python experiments/figure_budget.py --smoke --out DIR    # the same code, tiny

Runs that are finished are not run again (experiments/results/runs). ``--part 0/2`` and ``1/2``
share the work of two processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arms import GAUSSIAN, RETRAIN, Arm, list_arms
from options import Options, drive
from plots import draw_lines, style_arm
from problems import SETTINGS, load_problem
from runs import Case, Store, run_cases
from summary import average, compare, count_epochs, make_table

METHODS = ("output-perturbation", "gradient-clipping", "model-clipping")
ARMS = [RETRAIN, GAUSSIAN, *list_arms(METHODS)]
FULL = {"mnist": tuple(range(1, 11)), "cifar10": tuple(range(1, 50, 3)), "digits": (1, 2)}
REDUCED = FULL | {"cifar10": (1, 4, 10)}
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "digits"}
SEEDS = {"mnist": 5, "cifar10": 3, "digits": 2}
MODEL_SEEDS = {"mnist": 5, "cifar10": 1, "digits": 2}


def list_cases(task: str, budgets: tuple[float, ...], seeds: int) -> list[Case]:
    """Every arm at every budget with every seed, at the tables' learning rate."""
    rate = SETTINGS[task].tuned_rate
    return [Case(arm, b, s, rate) for b in budgets for s in range(seeds) for arm in ARMS]


def run(task: str, options: Options) -> None:
    """Whatever is missing."""
    budgets = options.budgets or (FULL if options.full else REDUCED)[task]
    cases = list_cases(task, budgets, options.seeds or SEEDS[task])
    problem = load_problem(task, options.root)
    store = Store(options.out, task)
    run_cases(
        problem,
        options.take_part(cases),
        store,
        model_seeds=MODEL_SEEDS[task],
        compile=options.compile or True,
    )


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
    out = options.out
    entries = read_entries(task, out)
    budgets = sorted({entry["budget"] for entry in entries})
    shown = [arm for arm in ARMS if arm.version != "printed" or arm.method == "gradient-clipping"]
    shown = [arm for arm in shown if arm.version != "centre" or arm.method == "gradient-clipping"]
    lines, styles = {}, {}
    for arm in shown:
        name = label(arm, entries)
        points = [(b, average(entries, budget=b, **identify(arm))) for b in budgets]
        lines[name] = [(b, m.value, m.spread) for b, m in points if m.count]
        styles[name] = style_arm(arm.method, arm.version)
    draw_lines(
        lines,
        styles,
        title=f"{TITLES[task]}: accuracy against budget",
        horizontal="budget (epochs)",
        vertical="test accuracy (%)",
        files=[out / f"figure_budget_{task}.{kind}" for kind in ("png", "svg")],
    )
    rows = [
        [arm.name, *(average(entries, budget=b, **identify(arm)) for b in budgets)] for arm in ARMS
    ]
    header = ["arm", *(count_epochs(b) for b in budgets)]
    text = make_table(header, rows) + "\n\n" + tabulate_differences(entries, budgets) + "\n"
    (out / f"figure_budget_{task}.md").write_text(text, encoding="utf-8")
    print(text)


def label(arm: Arm, entries: list[dict[str, Any]]) -> str:
    """The arm's name in a legend; with the true ε where the label is another."""
    true = {e["true_epsilon"] for e in select_arm(entries, arm) if arm.version == "printed"}
    return arm.name + (f" (ε = {min(true):.3g})" if true else "")


def select_arm(entries: list[dict[str, Any]], arm: Arm) -> list[dict[str, Any]]:
    """The entries of an arm."""
    return [entry for entry in entries if identify(arm).items() <= entry.items()]


def tabulate_differences(entries: list[dict[str, Any]], budgets: list[float]) -> str:
    """What the controls say: paired differences in points of accuracy."""
    clipped = Arm("gradient-clipping", "certified")
    pairs = [(Arm(method, "printed"), RETRAIN) for method in METHODS] + [
        (Arm(method, "certified"), RETRAIN) for method in METHODS
    ]
    pairs += [(Arm(method, "printed"), Arm(method, "centre")) for method in METHODS]
    pairs += [(clipped, GAUSSIAN), (GAUSSIAN, RETRAIN)]
    rows = [
        [
            f"{a.name} − {b.name}",
            *(compare(entries, identify(a), identify(b), budget=n) for n in budgets),
        ]
        for a, b in pairs
    ]
    return make_table(["paired difference, 95 %", *(count_epochs(b) for b in budgets)], rows)


def identify(arm: Arm) -> dict[str, Any]:
    """The fields by which the entries of an arm are found."""
    return {"method": arm.method, "version": arm.version, "epsilon": arm.epsilon}


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("mnist", "cifar10"), run, plot, arguments)


if __name__ == "__main__":
    main()
