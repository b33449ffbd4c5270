"""Table 2: epochs to reach 30, 35, 40, 45 and 50 % on CIFAR-10, every budget a run of its own.

    python experiments/table_target_accuracy.py                       # budgets 1, 2, 4 and 10
    python experiments/table_target_accuracy.py --full                # every epoch up to 50
    python experiments/table_target_accuracy.py --smoke --out DIR

The learning-rate cycle spans the budget, so a budget is not a point on the curve of a longer run.
An entry is the smallest budget of the grid at which the mean over seeds reaches the target; "> b"
means that none up to b does. The runs are those of figure_budget.py, which finds them here too.
"""

from __future__ import annotations

from typing import Any

from arms import GAUSSIAN, RETRAIN, Arm
from figure_budget import METHODS, MODEL_SEEDS, SEEDS, identify, read_entries
from options import Options, drive
from problems import SETTINGS, load_problem
from runs import Case, Store, run_cases
from summary import average, make_table

TARGETS = {"cifar10": (30, 35, 40, 45, 50), "digits": (5, 99)}
LADDER = {"cifar10": (1, 2, 4, 10), "digits": (1, 2)}
FULL = {"cifar10": tuple(range(1, 51)), "digits": (1, 2)}
ARMS = [
    RETRAIN,
    GAUSSIAN,
    *[Arm(method, version) for method in METHODS for version in ("printed", "certified")],
    Arm("gradient-clipping", "centre"),
]
PRINTED = {  # target: epochs of retraining, output perturbation, gradient and model clipping
    30: (6, 5, 4, 3),
    35: (11, 7, 6, 6),
    40: (18, 12, 10, 10),
    45: (23, 17, 16, 17),
    50: (30, 25, 23, 24),
}


def run(task: str, options: Options) -> None:
    """Climb the ladder, arm by arm, until the highest target is reached."""
    problem, store = load_problem(task, options.root), Store(options.out, task)
    seeds, rate = options.seeds or SEEDS[task], SETTINGS[task].tuned_rate
    budgets = options.budgets or (FULL if options.full else LADDER)[task]
    reached: set[Arm] = set()
    for budget in budgets:
        cases = [Case(arm, budget, s, rate) for s in range(seeds) for arm in ARMS]
        run_cases(
            problem,
            options.take_part([case for case in cases if case.arm not in reached]),
            store,
            model_seeds=MODEL_SEEDS[task],
            compile=options.compile or True,
        )
        entries = read_entries(task, options.out)
        for arm in ARMS:
            mean = average(entries, budget=budget, **identify(arm))
            if mean.count >= seeds and mean.value >= max(TARGETS[task]):
                reached.add(arm)


def find_budget(entries: list[dict[str, Any]], arm: Arm, target: float) -> str:
    """The smallest budget at which the mean reaches the target."""
    budgets = sorted(
        {entry["budget"] for entry in entries if identify(arm).items() <= entry.items()}
    )
    for budget in budgets:
        if average(entries, budget=budget, **identify(arm)).value >= target:
            return f"{budget:g}"
    return f"> {budgets[-1]:g}" if budgets else "–"


def list_common_budgets(entries: list[dict[str, Any]], arms: list[Arm]) -> list[float]:
    """The budgets at which all of these arms were run."""
    each = [
        {entry["budget"] for entry in entries if identify(arm).items() <= entry.items()}
        for arm in arms
    ]
    return sorted(set.intersection(*each))


def write(task: str, options: Options) -> None:
    """Ours beside the paper's."""
    out = options.out
    entries = read_entries(task, out)
    rows = []
    for arm in ARMS:
        printed = _find_printed(arm)
        cells = [find_budget(entries, arm, target) for target in TARGETS[task]]
        if printed is not None and task == "cifar10":
            cells = [
                f"{cell} (paper {PRINTED[target][printed]})"
                for cell, target in zip(cells, TARGETS[task], strict=True)
            ]
        count = len({entry["seed"] for entry in entries if identify(arm).items() <= entry.items()})
        budgets = ", ".join(f"{b:g}" for b in list_common_budgets(entries, [arm]))
        rows.append([arm.name, count, *cells, budgets])
    header = ["epochs to reach", "seeds", *(f"{t} %" for t in TARGETS[task]), "budgets run"]
    text = make_table(header, rows) + "\n"
    (out / f"table_target_accuracy_{task}.md").write_text(text, encoding="utf-8")
    print(text)


def _find_printed(arm: Arm) -> int | None:
    """The column of the paper's table, for the arms that it has."""
    if arm == RETRAIN:
        return 0
    return 1 + METHODS.index(arm.method) if arm.version == "printed" else None


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("cifar10",), run, write, arguments)


if __name__ == "__main__":
    main()
