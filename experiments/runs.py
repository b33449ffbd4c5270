"""One run of one arm at one budget with one seed; results are kept as they come.

A budget is counted in epochs of the retained data, noisy steps included. Seeds are paired: run s of
every arm shares its noise and its order of batches, so that differences between arms are
differences within pairs; the forget set is the same throughout. Finished runs are in
experiments/results/runs/<task>.jsonl, one line each, and are never run again. Certified runs are
saved and verified, as a stranger would, before their line is written.
"""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from arms import DELTA, Arm, Noisy, find_epsilon, make_recipe, measure_noise, plan_recipe
from expunge import Release, SeededNoise, evaluate, retrain, unlearn, verify
from networks import count_parameters
from options import RESULTS, Options
from problems import SETTINGS, Problem, load_model, load_problem

Private = Callable[[int], nn.Module]
SEARCH_SEED = 100
CERTIFIED = ("certified", "initialisation")


@dataclass(frozen=True, order=True)
class Case:
    """What identifies a run. ``learning_rate`` is that of the training after the noise."""

    arm: Arm
    budget: float
    seed: int
    learning_rate: float
    noise_scale: float = 0.0  # of a Gaussian start; 0 takes that of gradient clipping
    row: float = 0.0  # the budget whose printed row is used; 0 takes its own

    @property
    def key(self) -> str:
        """One line that names it.

        >>> Case(Arm("retrain", "gaussian"), 4, 0, 0.06).key
        'retrain, gaussian | budget 4 | seed 0 | rate 0.06'
        """
        parts = [self.arm.name, f"budget {self.budget:g}", f"seed {self.seed}"]
        parts.append(f"rate {self.learning_rate:g}")
        parts += [f"scale {self.noise_scale:g}"] if self.noise_scale else []
        parts += [f"row {self.row:g}"] if self.row else []
        parts += [self.arm.table] if self.arm.table else []
        return " | ".join(parts)


class Store:
    """The finished runs of a problem, read and written as JSON lines."""

    def __init__(self, folder: Path, problem: str) -> None:
        self.folder = folder
        self.file = folder / "runs" / f"{problem}.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, dict[str, Any]]:
        """All finished runs by key; a line cut short by a crash is dropped."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.file.read_text("utf-8").splitlines() if self.file.exists() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[entry["key"]] = entry
        return found

    def read_paired(self, learning_rate: float) -> list[dict[str, Any]]:
        """The runs of the figures: the tables' settings, and none of the search's seeds."""
        return [
            entry
            for entry in self.read().values()
            if entry["learning_rate"] == learning_rate
            and entry["seed"] < SEARCH_SEED
            and "augment" not in entry
            and " | row " not in entry["key"]
            and " | scale " not in entry["key"]
        ]

    def add(self, entry: dict[str, Any]) -> None:
        """One more; appended in a single write, so that processes can share the file."""
        line = json.dumps(entry, ensure_ascii=False) + "\n"
        with self.file.open("ab") as file:
            cut = self.file.read_bytes()[-1:] not in (b"", b"\n")
            file.write(("\n" * cut + line).encode())


def run_arms(
    task: str,
    options: Options,
    arms: Sequence[Arm],
    budgets: Iterable[float],
    private: Private | None = None,
) -> None:
    """Every arm at every budget with every seed, at the tables' learning rate."""
    rate, seeds = SETTINGS[task].tuned_rate, range(options.seeds or SETTINGS[task].seeds)
    run_cases(
        task,
        options,
        [Case(arm, b, s, rate) for b in budgets for s in seeds for arm in arms],
        private,
    )


def run_cases(
    task: str, options: Options, cases: Iterable[Case], private: Private | None = None
) -> None:
    """Run what is not finished, cheapest budgets first; ``private(seed)`` is the model that was
    trained with DP-SGD, where an arm needs it."""
    problem, store = load_problem(task), Store(options.out, task)
    done = store.read()
    left = [c for c in dict.fromkeys(cases) if options.wants(c.key) and c.key not in done]
    left.sort(key=lambda case: (case.budget, case.seed, case.arm))
    total, spent, began = sum(case.budget for case in left), 0.0, time.monotonic()
    for case in left:
        store.add(run_case(problem, case, options.out / "models", private))
        spent += case.budget
        minutes = (time.monotonic() - began) / spent * (total - spent) / 60
        left_over = f"{spent:g} of {total:g} epochs, {minutes:.0f} min left"
        print(f"{task}: {left_over} ({case.key})", file=sys.stderr, flush=True)


def run_case(
    problem: Problem, case: Case, models: Path, private: Private | None = None
) -> dict[str, Any]:
    """One run, from the list of people to the accuracies of what is released."""
    number = case.seed % problem.setting.models
    recipe = find_recipe(problem, case.arm, case.row or case.budget)
    began = time.monotonic()
    length = math.ceil(problem.retained / problem.setting.batch_size)
    epochs = case.budget - getattr(recipe, "steps", 0) / length
    train = problem.setting.train(epochs, case.learning_rate)
    entry: dict[str, Any] = {"key": case.key, "task": problem.name, **case.arm.fields}
    entry |= {"budget": case.budget, "seed": case.seed, "learning_rate": case.learning_rate}
    start, people = functools.partial(build_start, problem, case), problem.people.tolist()
    shared: dict[str, Any] = {"forget": people, "train": train, "seed": case.seed}
    match case.arm.method:
        case "dp-sgd":
            assert private is not None
            model = private(number)
            train(model, problem.data.without(people).examples, seed=case.seed)
        case "retrain":
            model = retrain(start, problem.data, **shared).model
            if case.arm.version == "gaussian":
                entry["scale"] = find_scale(problem, case)
        case _:
            version = case.arm.version
            release = unlearn(
                load_model(problem, number, models), start, problem.data, recipe=recipe,
                delta=DELTA, loss=cross_entropy, batch_size=problem.setting.batch_size,
                centre="build" if version == "initialisation" else "zero",
                start="centre" if version == "centre" else "model", noise=SeededNoise(case.seed),
                **shared,
            )  # fmt: skip
            model, ran = release.model, release.record.recipe
            entry["recipe"] = {k: v for k, v in asdict(ran).items() if v is not None}
            entry["true_epsilon"] = round(find_epsilon(ran), 4)
            if case.arm.version in CERTIFIED:
                entry |= {"certified_epsilon": check_release(release), "certificate": "verified"}
    entry |= {"tuned_epochs": round(epochs, 6), "seconds": round(time.monotonic() - began, 2)}
    return entry | score(problem, model) | {"commit": find_commit()}


def build_start(problem: Problem, case: Case) -> nn.Module:
    """The public start of a run: its own initialisation, one for all arms around it, or noise."""
    match case.arm.version:
        case "initialisation":
            return problem.build(5_000 + case.seed)
        case "gaussian":  # all weights N(0, scale²)
            net, scale = problem.build(0), find_scale(problem, case)
            generator = torch.Generator().manual_seed(2_000 + case.seed)
            with torch.no_grad():
                for p in net.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator) * scale)
            return net
        case _:
            return problem.build(1_000 + case.seed)


def find_recipe(problem: Problem, arm: Arm, budget: float) -> Noisy | None:
    """The row of the paper that an arm follows; a plan, around an initialisation, that leaves a
    tenth of the smallest layer's √(Σ x_i² / n) as noise; None where there is none."""
    if arm.method in ("retrain", "dp-sgd"):
        return None
    start = problem.build(0)
    if arm.version == "initialisation":
        norms = (float(p.detach().square().mean().sqrt()) for p in start.parameters())
        return plan_recipe(arm, count_parameters(start), 0.1 * min(n for n in norms if n > 0))
    return make_recipe(arm, name_table(problem), budget, count_parameters(start))


def find_scale(problem: Problem, case: Case) -> float:
    """The standard deviation of a Gaussian start: what gradient clipping leaves."""
    if case.noise_scale:
        return case.noise_scale
    arm = Arm("gradient-clipping", "printed", case.arm.epsilon, case.arm.table)
    return measure_noise(make_recipe(arm, name_table(problem), case.row or case.budget, 1))


def name_table(problem: Problem) -> str:
    """Whose rows of the paper are followed, where it has none for the problem."""
    named = problem.name.removeprefix("transfer_") in ("mnist", "cifar10", "cifar100")
    return problem.name if named else "mnist"


def check_release(release: Release) -> float:
    """Saved, and verified as a stranger would; the certified ε."""
    with tempfile.TemporaryDirectory() as folder:
        verify(release.save(Path(folder) / "run"))
    return release.certificate.epsilon


def score(problem: Problem, model: nn.Module) -> dict[str, float]:
    """Accuracies in per cent."""
    found = {name: evaluate(model, part.pair).accuracy for name, part in problem.parts.items()}
    return {name: round(100 * (value or 0.0), 3) for name, value in found.items()}


@functools.cache
def find_commit() -> str:
    """The commit of the code that ran."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return done.stdout.strip() or "unknown"
