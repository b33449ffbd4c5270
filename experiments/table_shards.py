"""Shards: accuracy beside one network trained whole, and what forgetting costs.

    python experiments/table_shards.py                       # MNIST and CIFAR-10, three seeds
    python experiments/table_shards.py --task mnist --seeds 1
    python experiments/table_shards.py --plot                # print what there is
    python experiments/table_shards.py --smoke --out DIR

The paper's networks, in S shards of R slices, and whole, for the same number of passes over the
data. The cost of a request is counted in examples that go through training (so in steps), as a part
of the ensemble's own training: of one example the mean over all examples and the worst, of ten, of
a hundred and of a tenth the mean over requests drawn at random. Forgetting one example of every
slice is also done, and timed beside the ensemble's training in the same process.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from expunge import Shards, evaluate, train
from expunge.forgettable.constituents import measure_work
from expunge.tasks.samples import Samples
from options import Options, drive
from problems import Problem, load_problem
from runs import Store
from summary import Difference, Mean, make_table

SPLITS = ((4, 1), (4, 4), (8, 1), (8, 4))
EPOCHS = {"mnist": 30.0, "cifar10": 6.0, "digits": 2.0}
REQUESTS = 20
SEEDS = 3


@dataclass(frozen=True)
class Case:
    """One ensemble of one seed; ``shards`` 0 is the network trained whole."""

    shards: int
    slices: int
    seed: int

    @property
    def key(self) -> str:
        """One line that names it.

        >>> Case(8, 4, 0).key, Case(0, 0, 1).key
        ('shards 8 x 4 | seed 0', 'whole | seed 1')
        """
        what = f"shards {self.shards} x {self.slices}" if self.shards else "whole"
        return f"{what} | seed {self.seed}"


def list_cases(seeds: int) -> list[Case]:
    """All cases, the seeds of each together."""
    return [Case(s, r, seed) for s, r in ((0, 0), *SPLITS) for seed in range(seeds)]


def run(task: str, options: Options) -> None:
    """Whatever is not finished."""
    problem, store = load_problem(task, options.root), Store(options.out, f"shards_{task}")
    cases = list_cases(options.seeds or (1 if options.smoke else SEEDS))
    for case in options.take_part(cases):
        if case.key not in store.read():
            entry = run_ensemble(problem, case) if case.shards else run_whole(problem, case)
            store.add({"key": case.key, "task": task, "seed": case.seed} | entry)
            print(case.key, {k: v for k, v in entry.items() if k != "costs"}, flush=True)


def list_options(problem: Problem) -> dict[str, Any]:
    """How every network is trained."""
    setting = problem.setting
    return {
        "epochs": EPOCHS[problem.name],
        "learning_rate": setting.learning_rate,
        "batch_size": setting.batch_size,
        "weight_decay": setting.weight_decay,
        "schedule": "one-cycle",
        "prepare": problem.prepare,
    }


def run_whole(problem: Problem, case: Case) -> dict[str, Any]:
    """One network, trained on all data by one thread, as constituents are."""
    model, began = problem.build(case.seed), time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(model, problem.train, seed=case.seed, compile=False, **list_options(problem))
    torch.set_num_threads(threads)
    seconds = time.monotonic() - began
    return {"arm": "whole", "test": score(problem, model), "seconds": seconds}


def run_ensemble(problem: Problem, case: Case) -> dict[str, Any]:
    """Learn, measure, and forget one example of every slice."""
    with tempfile.TemporaryDirectory() as folder:
        ensemble = Shards(
            make_build(problem),
            shards=case.shards,
            slices=case.slices,
            seed=f"expunge/experiments/{case.seed}",
            state=folder,
            **list_options(problem),
        )
        samples, began = problem.train, time.monotonic()
        ensemble.learn((samples.inputs, samples.targets), ids=samples.ids)
        seconds = time.monotonic() - began
        test = score(problem, ensemble.release().model)
        costs = measure_costs(ensemble, samples, case.seed)
        timed = [part / seconds for part in forget_each(ensemble, samples)]
    arm = f"{case.shards} x {case.slices}"
    return {"arm": arm, "test": test, "seconds": seconds, "costs": costs, "timed": timed}


def make_build(problem: Problem) -> Callable[[], nn.Module]:
    """The network under the ambient seed, which the ensemble sets."""
    return lambda: problem.build(int(torch.randint(2**31, (1,))))


def score(problem: Problem, model: nn.Module) -> float:
    """Test accuracy in percent."""
    found = evaluate(model, problem.test.inputs, problem.test.targets, prepare=problem.prepare)
    return round(100 * found.accuracy, 3)


def measure_costs(ensemble: Shards, samples: Samples, seed: int) -> dict[str, float]:
    """Parts of the ensemble's own training, by the size of a request."""
    ids, rng = samples.ids.tolist(), np.random.default_rng(seed)
    sizes, find = ensemble.count_slices(), ensemble.plan.assignment.find_touched
    single = [measure_work(sizes, find([name])) for name in ids]
    found = {"1": float(np.mean(single)), "worst": max(single)}
    for size in (10, 100, len(ids) // 10):
        asked = (rng.choice(ids, size, replace=False).tolist() for _ in range(REQUESTS))
        drawn = [measure_work(sizes, find(names)) for names in asked]
        found[str(size) if size <= 100 else "tenth"] = float(np.mean(drawn))
    return found


def forget_each(ensemble: Shards, samples: Samples) -> Iterator[float]:
    """Seconds of forgetting one example, of each slice in turn."""
    assignment, seen = ensemble.plan.assignment, set[int]()
    for name in samples.ids.tolist():
        part = assignment.find_place(assignment.name(name))[1]
        if part not in seen:
            seen.add(part)
            began = time.monotonic()
            ensemble.forget([name])
            yield time.monotonic() - began


def show(task: str, options: Options) -> None:
    """Print the table, and keep it."""
    entries = list(Store(options.out, f"shards_{task}").read().values())
    if entries:
        text = write_table(task, entries)
        (options.out / f"table_shards_{task}.md").write_text(text)
        print(text)


def write_table(task: str, entries: list[dict[str, Any]]) -> str:
    """The page of a task."""
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for entry in entries:
        by_arm.setdefault(entry["arm"], {})[entry["seed"]] = entry
    whole, rows = by_arm.get("whole", {}), list[list[object]]()
    for arm, runs in by_arm.items():
        both = sorted(runs.keys() & whole.keys())
        apart = Difference.of([runs[s]["test"] for s in both], [whole[s]["test"] for s in both])
        costs = [entry.get("costs") for entry in runs.values()]
        told = [_average(costs, size) for size in ("1", "worst", "10", "100", "tenth")]
        timed = [part for entry in runs.values() for part in entry.get("timed", ())]
        mean = Mean.of([entry["test"] for entry in runs.values()])
        rows.append([arm, len(runs), mean, "" if arm == "whole" else apart, *told,
                     f"{np.mean(timed):.3f}" if timed else ""])  # fmt: skip
    header = ["shards x slices", "seeds", "test %", "minus whole", "one", "worst one", "ten",
              "a hundred", "a tenth", "one, timed"]  # fmt: skip
    return f"{EPOCHS[task]:g} passes over the data.\n\n{make_table(header, rows)}\n"


def _average(costs: list[dict[str, float] | None], size: str) -> str:
    found = [cost[size] for cost in costs if cost is not None and size in cost]
    return f"{np.mean(found):.3f}" if found else ""


main = functools.partial(drive, __doc__, ("mnist", "cifar10"), run, show)

if __name__ == "__main__":
    main()
