"""Three cells of Figure 1 on MNIST, run again by today's code beside what is committed.

    python experiments/table_repeated.py            # results/table_repeated_mnist.md, two minutes
    python experiments/table_repeated.py --smoke    # digits, run twice: the same numbers

Orders of batches are others than they were, noise and starts the same. A repeated mean must lie in
the 95 % interval of the committed seeds, and the paired difference of printed and centre too.
"""

from __future__ import annotations

from typing import Any

from arms import RETRAIN, Arm
from figure_budget import read_entries
from options import RESULTS, Options, drive
from problems import SETTINGS, load_problem
from runs import Case, run_arms, run_case
from summary import Difference, Mean, make_table, publish, select

ARMS = (RETRAIN, Arm("gradient-clipping", "printed"), Arm("gradient-clipping", "centre"))


def show(task: str, options: Options) -> None:
    """(cell, committed, its 95 % interval, again, whether it lies inside)."""
    if options.smoke:
        run_arms(task, options, ARMS, [1])
    folder = options.out if options.smoke else RESULTS
    problem, committed = load_problem(task), read_entries(task, folder)
    values = dict[Arm, list[list[float]]]()
    for arm in ARMS:
        before = [e["test"] for e in select(committed, budget=1, **arm.fields).values()]
        seeds = range(options.seeds or SETTINGS[task].seeds)
        cases = (Case(arm, 1, seed, SETTINGS[task].tuned_rate) for seed in seeds)
        values[arm] = [before, [run_case(problem, c, folder / "models")["test"] for c in cases]]
    rows = [[f"{arm.name}, 1 epoch", *judge(*values[arm])] for arm in ARMS]
    (first, now), (second, then) = values[ARMS[1]], values[ARMS[2]]
    gaps = [[a - b for a, b in zip(*pair, strict=True)] for pair in ((first, second), (now, then))]
    header = ["cell", "committed", "95 % interval", "again", ""]
    text = make_table(header, [*rows, ["printed − centre", *judge(*gaps)]])
    publish(text + "\n", options.out / f"table_repeated_{task}.md")


def judge(before: list[float], again: list[float]) -> list[Any]:
    """What was, its interval, what is, and whether it lies inside."""
    interval, mean = Difference.of(before, [0.0] * len(before)), Mean.of(again)
    inside = interval.low <= mean.value <= interval.high
    shown = f"[{interval.low:.2f}, {interval.high:.2f}]"
    return [Mean.of(before), shown, mean, "inside" if inside else "**outside**"]


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("mnist",), None, show, arguments)


if __name__ == "__main__":
    main()
