"""The appendix's sweep: gradient clipping labelled ε = 0.1, 1 and 10, and what these labels hide.

    python experiments/figure_epsilon.py                     # MNIST whole, CIFAR-10 reduced
    python experiments/figure_epsilon.py --full              # the paper's whole grid
    python experiments/figure_epsilon.py --smoke

The rows labelled 0.1, 1 and 10 certify 1.76, 6.57 and 28.4 (docs/errata.md, E1). "certified" rows
have the same noise and radii small enough that the label is true.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arms import RETRAIN, Arm, list_arms
from figure_budget import FULL
from options import Options, drive
from plots import EPSILON_COLOURS, draw_arms, style_arm
from problems import SETTINGS
from runs import Store, run_arms
from summary import average, compare, count_epochs, list_budgets, make_table, publish

EPSILONS = (0.1, 1.0, 10.0)
REDUCED = {"mnist": tuple(range(1, 10)), "cifar10": (1, 4), "digits": (1,)}


def list_sweep(task: str) -> list[Arm]:
    """Three versions of each label."""
    table = f"gradient_clipping_sweep_{'mnist' if task == 'digits' else task}"
    return [arm for e in EPSILONS for arm in list_arms(("gradient-clipping",), e, table)]


def run(task: str, options: Options) -> None:
    """Whatever is missing."""
    budgets = options.budgets or (FULL if options.full else REDUCED)[task]
    run_arms(task, options, [RETRAIN, *list_sweep(task)], budgets)


def read_entries(task: str, out: Path) -> list[dict[str, Any]]:
    """The finished runs of the sweep, and retraining at its budgets."""
    entries = Store(out, task).read_paired(SETTINGS[task].tuned_rate)
    swept = [entry for entry in entries if "sweep" in entry["key"]]
    budgets = list_budgets(swept)
    retrained = (entry for entry in entries if entry["key"].startswith(RETRAIN.name))
    return swept + [entry for entry in retrained if entry["budget"] in budgets]


def plot(task: str, options: Options) -> None:
    """The figure, the table, and the paired differences between labels."""
    entries, name = read_entries(task, options.out), f"figure_epsilon_{task}"
    arms, budgets = [RETRAIN, *list_sweep(task)], list_budgets(entries)
    styles = {arm: (_name(arm), _style(arm)) for arm in arms if arm.version != "centre"}
    title = f"{task}: gradient clipping by labelled ε"
    draw_arms(entries, styles, options.out, name, title=title)
    rows, pairs = [], []
    for arm in arms:
        own = [e for e in entries if arm.fields.items() <= e.items()]
        true = sorted(e.get("true_epsilon", 0.0) for e in own)
        shown = " … ".join(dict.fromkeys(f"{t:.3g}" for t in true[:1] + true[-1:]))
        rows.append([_name(arm), shown, *(average(own, budget=b) for b in budgets)])
    for arm in list_arms(("gradient-clipping",)):
        for a, b in ((1.0, 0.1), (10.0, 1.0)):
            one, two = (arm.fields | {"epsilon": label} for label in (a, b))
            found = [compare(entries, one, two, budget=n) for n in budgets]
            pairs.append([f"{arm.version}: ε = {a:g} − ε = {b:g}", *found])
    header = [count_epochs(b) for b in budgets]
    text = make_table(["arm", "true ε", *header], rows) + "\n\n"
    text += make_table(["paired difference, 95 %", *header], pairs) + "\n"
    publish(text, options.out / f"{name}.md")


def _style(arm: Arm) -> dict[str, Any]:
    plain = style_arm(arm.method, arm.version)
    return plain if arm == RETRAIN else plain | {"color": EPSILON_COLOURS[arm.epsilon]}


def _name(arm: Arm) -> str:
    return arm.name if arm == RETRAIN else f"ε = {arm.epsilon:g}, {arm.version}"


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("mnist", "cifar10"), run, plot, arguments)


if __name__ == "__main__":
    main()
