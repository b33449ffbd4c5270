"""The hyper-parameter search: eight trials for every arm, retraining included, and more at an end.

    python experiments/search.py                  # MNIST and CIFAR-10 at one epoch
    python experiments/search.py --smoke

Chosen on 2,000 validation images that are neither training, nor forget, nor reported test data;
the search has seeds of its own. Every arm gets the same number of trials: retraining from its own
initialisation eight learning rates; retraining from a Gaussian start and the certified methods four
rates times two noise scales (two rows of the paper's tables). Where the best is the largest rate of
its grid, larger ones are tried until it is not. What was chosen is then run with the paired seeds
of the figures and reported on the test images.
"""

from __future__ import annotations

from pathlib import Path

from arms import GAUSSIAN, RETRAIN, Arm
from figure_budget import METHODS
from options import Options, drive
from problems import SETTINGS
from runs import SEARCH_SEED, Case, Store, run_cases
from summary import Difference, Mean, make_table, publish

ARMS = [RETRAIN, GAUSSIAN, *(Arm(method, "certified") for method in METHODS)]
RATES = (0.03, 0.1, 0.3, 1.0)
ALL_RATES = (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 1.0)
LARGER = (2.0, 4.0, 8.0)
ROWS = {"mnist": (1, 6), "cifar10": (1, 10), "digits": (1, 6)}
BUDGET = 1
SEARCH_SEEDS = {  # of trials
    task: range(SEARCH_SEED, SEARCH_SEED + n)
    for task, n in {"mnist": 3, "cifar10": 1, "digits": 1}.items()
}


def list_trials(task: str, arm: Arm, seed: int) -> list[Case]:
    """The eight trials of an arm.

    >>> {len(list_trials("mnist", arm, 0)) for arm in ARMS}
    {8}
    """
    if arm == RETRAIN:
        return [Case(arm, BUDGET, seed, rate) for rate in ALL_RATES]
    return [Case(arm, BUDGET, seed, rate, row=row) for row in ROWS[task] for rate in RATES]


def widen(task: str, arm: Arm, store: Store) -> list[Case]:
    """Trials at the next larger rate, if the best so far is the largest that was tried."""
    rate, row, _ = choose(task, arm, store)
    tried = {key[0] for key in read_scores(task, arm, store)}
    larger = [each for each in LARGER if each > max(tried)]
    if rate < max(tried) or not larger:
        return []
    return [Case(arm, BUDGET, seed, larger[0], row=row) for seed in SEARCH_SEEDS[task]]


def read_scores(task: str, arm: Arm, store: Store) -> dict[tuple[float, float], list[float]]:
    """Validation accuracies by (learning rate, row), of the grid and of what was tried beyond."""
    done = store.read()
    scores: dict[tuple[float, float], list[float]] = {}
    for seed in SEARCH_SEEDS[task]:
        grid = list_trials(task, arm, seed)
        rows = sorted({case.row for case in grid})
        beyond = [Case(arm, BUDGET, seed, rate, row=row) for rate in LARGER for row in rows]
        for case in [*grid, *(case for case in beyond if case.key in done)]:
            found = done[case.key]["validation"]
            scores.setdefault((case.learning_rate, case.row), []).append(found)
    return scores


def choose(task: str, arm: Arm, store: Store) -> tuple[float, float, float]:
    """The (learning rate, row) with the best mean validation accuracy, and that accuracy."""
    scores = read_scores(task, arm, store)
    best = max(scores, key=lambda key: Mean.of(scores[key]).value)
    return *best, Mean.of(scores[best]).value


def run(task: str, options: Options) -> None:
    """All trials, then what was chosen with the paired seeds."""
    store = Store(options.out, task)
    trials = [c for s in SEARCH_SEEDS[task] for arm in ARMS for c in list_trials(task, arm, s)]
    run_cases(task, options, trials)
    while further := [case for arm in ARMS for case in widen(task, arm, store)]:
        run_cases(task, options, further)
    chosen = [c for arm in ARMS for c in list_chosen(task, arm, store, options.seeds)]
    run_cases(task, options, chosen)


def list_chosen(task: str, arm: Arm, store: Store, seeds: int | None = None) -> list[Case]:
    """The chosen trial of an arm with the paired seeds."""
    rate, row, _ = choose(task, arm, store)
    numbers = range(seeds or SETTINGS[task].seeds)
    return [Case(arm, BUDGET, seed, rate, row=row) for seed in numbers]


def compare_tuned(task: str, out: Path, one: Arm, two: Arm) -> Difference:
    """Paired difference of two arms on the test images, each as it was tuned."""
    store = Store(out, task)
    done, chosen = store.read(), (list_chosen(task, arm, store) for arm in (one, two))
    return Difference.of(*([done[case.key]["test"] for case in cases] for cases in chosen))


def write(task: str, options: Options) -> None:
    """What was chosen, how it does on the test images, and against tuned retraining."""
    store = Store(options.out, task)
    done, found, rows = store.read(), dict[Arm, list[float]](), []
    for arm in ARMS:
        rate, _, validation = choose(task, arm, store)
        entries = [done[case.key] for case in list_chosen(task, arm, store, options.seeds)]
        found[arm] = [entry["test"] for entry in entries]
        scale = entries[0].get("scale") or entries[0].get("recipe", {}).get("noise_std")
        noise = "–" if scale is None else f"{scale:.3g}"
        ahead = Difference.of(found[arm], found[RETRAIN])
        shown = "–" if arm == RETRAIN else ahead
        trials = len(read_scores(task, arm, store))
        rows.append(
            [arm.name, trials, rate, noise, f"{validation:.2f}", Mean.of(found[arm]), shown]
        )
    header = ["arm", "trials", "rate", "noise", "validation", "test", "− retrain, own (tuned)"]
    text = f"Budget {BUDGET} epoch; eight trials each, and larger rates until one is worse:\n\n"
    text += make_table(header, rows) + "\n"
    publish(text, options.out / f"search_{task}.md")


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("mnist", "cifar10"), run, write, arguments)


if __name__ == "__main__":
    main()
