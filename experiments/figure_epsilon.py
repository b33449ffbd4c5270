"""The appendix's sweep: gradient clipping labelled ε = 0.1, 1 and 10, and what these labels hide.

    python experiments/figure_epsilon.py                     # MNIST whole, CIFAR-10 reduced
    python experiments/figure_epsilon.py --full              # the paper's whole grid
    python experiments/figure_epsilon.py --smoke --out DIR

The rows labelled 0.1, 1 and 10 certify 1.76, 6.57 and 28.4 (docs/errata.md, E1). "certified" rows
have the same noise and radii small enough that the label is true.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arms import RETRAIN, Arm, list_arms
from figure_budget import FULL, MODEL_SEEDS, SEEDS, identify
from options import Options, drive
from plots import DASHES, EPSILON_COLOURS, MARKERS, draw_lines, style_arm
from problems import SETTINGS, load_problem
from runs import Case, Store, run_cases
from summary import average, compare, count_epochs, make_table

EPSILONS = (0.1, 1.0, 10.0)
REDUCED = {"mnist": tuple(range(1, 10)), "cifar10": (1, 4), "digits": (1,)}


def list_sweep(task: str) -> list[Arm]:
    """Three versions of each label."""
    table = f"gradient_clipping_sweep_{'mnist' if task == 'digits' else task}"
    return [arm for e in EPSILONS for arm in list_arms(("gradient-clipping",), e, table)]


def run(task: str, options: Options) -> None:
    """Whatever is missing."""
    budgets = options.budgets or (FULL if options.full else REDUCED)[task]
    seeds, rate = options.seeds or SEEDS[task], SETTINGS[task].tuned_rate
    arms = [RETRAIN, *list_sweep(task)]
    cases = [Case(arm, b, s, rate) for b in budgets for s in range(seeds) for arm in arms]
    run_cases(
        load_problem(task, options.root),
        options.take_part(cases),
        Store(options.out, task),
        model_seeds=MODEL_SEEDS[task],
        compile=options.compile or True,
    )


def read_entries(task: str, out: Path) -> list[dict[str, Any]]:
    """The finished runs of the sweep, and retraining."""
    return [
        entry
        for entry in Store(out, task).read_paired(SETTINGS[task].tuned_rate)
        if "sweep" in entry["key"] or entry["key"].startswith(RETRAIN.name)
    ]


def plot(task: str, options: Options) -> None:
    """The figure, the table, and the paired differences between labels."""
    out = options.out
    entries = read_entries(task, out)
    arms = [RETRAIN, *list_sweep(task)]
    swept = {entry["budget"] for entry in entries if entry["method"] != "retrain"}
    budgets = sorted(swept)
    lines, styles = {}, {}
    for arm in arms:
        points = [(b, average(entries, budget=b, **identify(arm))) for b in budgets]
        if arm.version != "centre":
            lines[_name(arm)] = [(b, m.value, m.spread) for b, m in points if m.count]
            styles[_name(arm)] = (
                style_arm("retrain", "own")
                if arm == RETRAIN
                else {
                    "color": EPSILON_COLOURS[arm.epsilon],
                    "linestyle": DASHES[arm.version],
                    "marker": MARKERS[arm.version],
                }
            )
    draw_lines(
        lines,
        styles,
        title=f"{task}: gradient clipping by labelled ε",
        horizontal="budget (epochs)",
        vertical="test accuracy (%)",
        files=[out / f"figure_epsilon_{task}.{kind}" for kind in ("png", "svg")],
    )
    header = ["arm", "true ε", *(count_epochs(b) for b in budgets)]
    rows = []
    for arm in arms:
        true = sorted(
            {
                e["true_epsilon"]
                for e in entries
                if identify(arm).items() <= e.items() and "true_epsilon" in e
            }
        )
        told = (
            "0"
            if arm == RETRAIN
            else " … ".join(dict.fromkeys(f"{t:.3g}" for t in (true[:1] + true[-1:])))
        )
        means = [average(entries, budget=b, **identify(arm)) for b in budgets]
        rows.append([_name(arm), told, *means])
    pairs = []
    for version in ("printed", "certified", "centre"):
        for a, b in ((1.0, 0.1), (10.0, 1.0)):
            first = {"method": "gradient-clipping", "version": version, "epsilon": a}
            differences = [
                compare(entries, first, first | {"epsilon": b}, budget=n) for n in budgets
            ]
            pairs.append([f"{version}: ε = {a:g} − ε = {b:g}", *differences])
    text = make_table(header, rows) + "\n\n"
    text += make_table(["paired difference, 95 %", *header[2:]], pairs) + "\n"
    (out / f"figure_epsilon_{task}.md").write_text(text, encoding="utf-8")
    print(text)


def _name(arm: Arm) -> str:
    return arm.name if arm == RETRAIN else f"ε = {arm.epsilon:g}, {arm.version}"


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("mnist", "cifar10"), run, plot, arguments)


if __name__ == "__main__":
    main()
