"""Heads that forget exactly, beside retraining and noisy fine-tuning: what accuracy is left.

    python experiments/table_heads.py                     # all tasks, three seeds
    python experiments/table_heads.py --task mnist --arms exact-statistics
    python experiments/table_heads.py --plot              # print what there is
    python experiments/table_heads.py --smoke --out DIR

A tenth of the identifiers is forgotten, another tenth with every seed. Exact statistics are ridge
regression on public integers, plain or with 4,096 public random features beside them; the convex
head is softmax regression, from zero or with the noise of (1, 1e-5). Retraining and noisy
fine-tuning (gradient clipping, truly (1, 1e-5)) take 49 epochs of the paper's network: 784-5-10
on MNIST, 512-32-32 on projected features, 384-32-32 on sentences. Because the heads see all
features and the paper's network does not, a wider one, d-32-32 on all d of them, is retrained too.
On the projected features retraining and fine-tuning are those of figure_transfer.py, rate 0.06,
which forget the same tenth with every seed. Every other arm chooses one number (λ, m, or a learning
rate) on validation data, none on test data; a learning rate with the first seed, for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arms import RETRAIN, Arm
from figure_budget import identify
from heads import Life, run_lives
from options import Options, drive
from problems import SETTINGS, load_problem
from runs import Case, Store, run_cases
from summary import Difference, Mean, make_table

# task: (problem of the paper's network, problem of the heads and of the wider network, lift)
TASKS = {
    "cifar10": ("transfer_cifar10", "features_cifar10", 4_096),
    "cifar100": ("transfer_cifar100", "features_cifar100", 4_096),
    "mnist": ("mnist", "features_mnist", 4_096),
    "debian": ("debian", "debian", 4_096),
    "digits": ("digits", "digits", 256),
}
NAMES = {
    "cifar10": "CIFAR-10 on EfficientNet-Lite0 features",
    "cifar100": "CIFAR-100 on EfficientNet-Lite0 features",
    "mnist": "MNIST pixels",
    "debian": "Debian descriptions on MiniLM embeddings",
    "digits": "digits",
}
CLIPPED = Arm("gradient-clipping", "certified")
RIDGE = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
CONVEX = (1e-5,)
RATES = (0.01, 0.03, 0.1, 0.3)
BUDGET, SEEDS = 49, 3


@dataclass(frozen=True)
class Row:
    """One line of the table: where its runs are, and the number it was free to choose."""

    told: str
    guarantee: str
    store: str
    wanted: dict[str, Any]
    chosen: str


def list_rows(task: str) -> list[Row]:
    """Retraining first; every other arm is compared with it."""
    paper, wide, lift = TASKS[task]
    old = paper.startswith("transfer")
    paper = paper if old else f"heads_{paper}"
    own, clipped = identify(RETRAIN), identify(CLIPPED)
    if old:
        own |= {"budget": BUDGET, "learning_rate": SETTINGS[paper].tuned_rate}
        clipped |= {"budget": BUDGET, "learning_rate": SETTINGS[paper].tuned_rate}
    rows = [Row("retraining, the paper's network", "(0, 0)", paper, own, "rate")]
    wide = f"heads_{wide}"
    if wide != paper:
        rows.append(Row("retraining, all features", "(0, 0)", wide, identify(RETRAIN), "rate"))
    rows.append(Row("gradient clipping", "(1, 1e-5)", paper, clipped, "rate"))
    for version in ("plain", f"lift {lift}"):
        wanted = {"method": "exact-statistics", "version": f"{version}, exact"}
        rows.append(Row(f"exact statistics, {version}", "(0, 0), bits", wide, wanted, "λ"))
    for version in ("plain", f"lift {lift}"):
        for kind, pair in (("from zero", "(0, 0)"), ("certified", "(1, 1e-5)")):
            wanted = {"method": "convex-head", "version": f"{version}, {kind}"}
            rows.append(Row(f"convex head, {version}, {kind}", pair, wide, wanted, "m"))
    return rows


def list_lives(task: str, seeds: int) -> list[Life]:
    """Cheapest first. On pixels a linear head is of little use, and the lifted one is solved."""
    lift, rows = TASKS[task][2], range(seeds)
    lives = [Life("exact-statistics", width, s, RIDGE) for width in (0, lift) for s in rows]
    lives += [Life("convex-head", 0, s, CONVEX) for s in rows]
    if task in ("mnist", "digits"):
        lives += [Life("convex-head", lift, s, CONVEX) for s in rows]
    return lives


def run(task: str, options: Options) -> None:
    """Whatever is missing: heads, then retraining and noisy fine-tuning, seed by seed."""
    paper, wide, _ = TASKS[task]
    seeds = options.seeds or (2 if options.smoke else SEEDS)
    budget = options.budgets[0] if options.budgets else 1 if options.smoke else BUDGET
    lives = options.take_part(list_lives(task, seeds))
    run_lives(load_problem(wide, options.root), lives, Store(options.out, f"heads_{wide}"))
    others = {} if paper.startswith("transfer") else {paper: [RETRAIN, CLIPPED]}
    for name, arms in ({wide: [RETRAIN]} | others).items():
        store = Store(options.out, f"heads_{name}")
        for seed in range(seeds):
            cases = [c for arm in arms for c in list_cases(arm, budget, seed, store)]
            run_cases(
                replace(load_problem(name, options.root), forget_seed=seed),
                options.take_part(cases),
                store,
                model_seeds=seeds,
                compile=options.compile or True,
            )


def list_cases(arm: Arm, budget: float, seed: int, store: Store) -> list[Case]:
    """All rates with seed 0; the other seeds take the one that was best on validation data."""
    trials = [Case(arm, budget, 0, rate) for rate in RATES]
    if seed == 0:
        return trials
    done = store.read()
    tried = {
        case.learning_rate: done[case.key]["validation"] for case in trials if case.key in done
    }
    rates = RATES if len(tried) < len(RATES) else [max(RATES, key=lambda rate: tried[rate])]
    return [Case(arm, budget, seed, rate) for rate in rates]


@dataclass(frozen=True)
class Found:
    """The runs of a row with the number that is best on validation data, by seed."""

    chosen: float
    entries: dict[int, dict[str, Any]]

    def get(self, measure: str) -> dict[int, float]:
        return {seed: entry[measure] for seed, entry in self.entries.items()}


def choose(row: Row, out: Path) -> Found | None:
    """The candidate with the best mean validation accuracy among those with all seeds."""
    field = "learning_rate" if row.chosen == "rate" else "penalty"
    groups: dict[float, dict[int, dict[str, Any]]] = {}
    for entry in Store(out, row.store).read().values():
        if all(entry.get(name) == value for name, value in row.wanted.items()):
            groups.setdefault(entry[field], {})[entry["seed"]] = entry
    if not groups:
        return None
    most = max(map(len, groups.values()))
    whole = {value: found for value, found in groups.items() if len(found) == most}
    scores = {
        value: Mean.of([entry["validation"] for entry in found.values()]).value
        for value, found in whole.items()
    }
    best = max(scores, key=lambda value: scores[value])
    return Found(best, whole[best])


def differ(one: Found, two: Found) -> Difference:
    """Test accuracy, paired by seed."""
    a, b = one.get("test"), two.get("test")
    seeds = sorted(set(a) & set(b))
    return Difference.of([a[s] for s in seeds], [b[s] for s in seeds])


def read_rows(task: str, out: Path) -> dict[str, Found]:
    """What there is of every row, by its name."""
    found = {row.told: choose(row, out) for row in list_rows(task)}
    return {told: runs for told, runs in found.items() if runs is not None}


def choose_best(found: dict[str, Found], kind: str) -> str | None:
    """The row of this kind that is best on validation data."""
    scores = {
        told: Mean.of(list(runs.get("validation").values())).value
        for told, runs in found.items()
        if kind in told
    }
    return max(scores, key=lambda told: scores[told]) if scores else None


def tabulate(task: str, out: Path) -> str:
    """Accuracies, paired differences to retraining, and the cost of the certified noise."""
    found = read_rows(task, out)
    bases = [told for told in found if told.startswith("retraining")]
    lines = []
    for row in list_rows(task):
        if row.told not in found:
            continue
        runs = found[row.told]
        against = ["–" if told == row.told else differ(runs, found[told]) for told in bases]
        lines.append(
            [
                row.told,
                row.guarantee,
                f"{row.chosen} {runs.chosen:g}",
                Mean.of(list(runs.get("test").values())),
                *against,
                tell_seconds(runs),
            ]
        )
    header = ["arm", "(ε, δ)", "chosen", "test", *(f"− {told}" for told in bases), "seconds"]
    return make_table(header, lines) + "\n"


def tell_seconds(runs: Found) -> str:
    """Their mean; older runs have none."""
    known = [entry["seconds"] for entry in runs.entries.values() if "seconds" in entry]
    return f"{Mean.of(known).value:.3g}" if known else "–"


def summarise(out: Path) -> str:
    """All tasks side by side: accuracies, then differences to the better retraining."""
    tasks = [task for task in NAMES if task != "digits"]
    found = {task: read_rows(task, out) for task in tasks}
    bases = {task: choose_best(found[task], "retraining") for task in tasks}
    told = list(dict.fromkeys(row.told for task in tasks for row in list_rows(task)))
    means = [
        [arm, *(Mean.of(list(found[t][arm].get("test").values())) if arm in found[t] else "–"
                for t in tasks)]
        for arm in told
    ]  # fmt: skip
    differences: list[list[object]] = [
        [arm, *(differ(found[t][arm], found[t][base]) if arm in found[t] and base else "–"
                for t, base in bases.items())]
        for arm in told
        if "retraining" not in arm
    ]  # fmt: skip
    names = [NAMES[task] for task in tasks]
    text = make_table(["test accuracy", *names], means) + "\n\n"
    return text + make_table(["− the better retraining, 95 %", *names], differences) + "\n"


def tabulate_claims(out: Path) -> str:
    """What the heads must show, one line each."""
    rows: list[list[object]] = []
    for task in (task for task in NAMES if task != "digits"):
        found, name = read_rows(task, out), NAMES[task]
        for base in (told for told in found if told.startswith("retraining")):
            for kind in ("exact statistics", "convex head"):
                best = choose_best(found, kind)
                if best is not None:
                    gain = differ(found[best], found[base])
                    verdict = judge(gain.low >= -0.3, gain.high < 0)
                    told = f"{name}: {best} is not below {base}"
                    rows.append([told, "interval not below −0.3", gain, verdict])
        lives = [runs for told, runs in found.items() if told.startswith("exact statistics")]
        told = f"{name}: statistics and weights after a request are those of never having learned"
        count = sum(len(runs.entries) for runs in lives)
        rows.append([told, "all bits", f"{count} of {count} lives", judge(count > 0, False)])
        for version in ("plain", f"lift {TASKS[task][2]}"):
            pair = [f"convex head, {version}, {kind}" for kind in ("certified", "from zero")]
            if all(arm in found for arm in pair):
                cost = differ(*(found[arm] for arm in pair))
                told = f"{name}: the certified noise of the convex head, {version}, costs nothing"
                verdict = judge(cost.low >= -0.05, cost.high < -0.05)
                rows.append([told, "within 0.05 points", cost, verdict])
    return make_table(["claim", "target", "paired difference, 95 %", "verdict"], rows)


def judge(holds: bool, fails: bool) -> str:
    return "holds" if holds else "**fails**" if fails else "not shown by these seeds"


def write(task: str, options: Options) -> None:
    """The table of a task."""
    text = tabulate(task, options.out)
    (options.out / f"table_heads_{task}.md").write_text(text, encoding="utf-8")
    print(f"{NAMES[task]}\n\n{text}")


def main(arguments: list[str] | None = None) -> None:
    tasks = tuple(task for task in TASKS if task != "digits")
    drive(__doc__, tasks, run, write, arguments)


if __name__ == "__main__":
    main()
