"""A small ResNet with BatchNorm forgets around zero and around a fresh initialisation.

    python experiments/table_centre.py
    python experiments/table_centre.py --smoke --out DIR

scikit-learn's digits, a tenth forgotten, everything at true (1, 1e-5). Each arm has the same
epochs of the retained data: retraining from the network's own initialisation, and gradient and
model clipping as ``expunge.plan`` chooses them, around zero (the paper's centre) and around a fresh
initialisation under a public seed, where the plan leaves a tenth of the smallest layer as noise.
Run s of every arm has the old model s and the same order of batches.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arms import DELTA
from expunge import (
    Batches,
    Initialisation,
    Run,
    SeededNoise,
    evaluate,
    find_scale,
    fine_tune,
    plan,
    retrain,
    train,
    unlearn,
)
from expunge.tasks import digits
from expunge.tasks.samples import Samples, split_forget
from options import Options, drive
from runs import Store, find_commit, keep_certificate
from summary import average, compare, count_epochs, make_table

EPSILON, BUDGETS, SEEDS, WIDTH = 1.0, (4, 12), 3, 16
RETRAIN = "retrain, own"
ARMS = [
    f"{method}, {centre}"
    for method in ("gradient-clipping", "model-clipping")
    for centre in ("zero", "initialisation")
]
TUNING: dict[str, Any] = {
    "learning_rate": 0.1, "batch_size": 32, "momentum": 0.9, "schedule": "one-cycle",
}  # fmt: skip


class SmallResNet(nn.Module):
    """Two residual blocks with BatchNorm on 8 × 8 pixels; drawn from the global random state."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList(self._make_block(width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _make_block(width: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for last in (False, True):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
            layers += [] if last else [nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            x = (x + block(x)).relu()
        return self.head(x.mean(dim=(2, 3)))


def build(seed: int) -> SmallResNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallResNet()


@functools.cache
def load() -> tuple[Any, Samples, Samples]:
    task = digits.load()
    return (task, *split_forget(task.train, fraction=0.1, seed=0))


@functools.cache
def train_old(seed: int) -> nn.Module:
    task, _, _ = load()
    net = build(seed)
    train(net, task.train, epochs=20, prepare=task.normalise, seed=seed, **TUNING)
    return net


def run_arm(arm: str, budget: float, seed: int) -> Run:
    """One run: noise, if any, and training for the rest of the budget."""
    task, retain, forget = load()
    old, given = train_old(seed), {"prepare": task.normalise, "seed": seed, **TUNING}
    if arm == RETRAIN:
        return retrain(
            old, retain, forget_ids=forget.ids, loss_fn=cross_entropy, epochs=budget, **given
        )
    method, centre = arm.split(", ")
    start: Any = Initialisation(f"run {seed}") if centre == "initialisation" else "zero"
    size = sum(p.numel() for p in old.parameters())
    made = plan(epsilon=EPSILON, delta=DELTA, parameters=size, scale=find_scale(old, start))
    recipe = next(c.recipe for c in made.candidates if c.method == method)
    batches = Batches(
        retain.inputs,
        retain.targets,
        batch_size=TUNING["batch_size"],
        generator=torch.Generator().manual_seed(seed),
        prepare=task.normalise,
        ids=retain.ids,
    )
    run = unlearn(
        old,
        batches,
        cast(Any, recipe),
        loss_fn=cross_entropy,
        centre=start,
        noise=SeededNoise(seed),
        buffers="reset",
        forget_ids=forget.ids,
    )
    return fine_tune(run, retain, epochs=budget - cast(Any, recipe).steps / len(batches), **given)


def run(task: str, options: Options) -> None:
    """Whatever is missing."""
    torch.set_num_threads(1)
    store, seeds = Store(options.out, "centre_digits"), options.seeds or SEEDS
    budgets = options.budgets or ((1,) if options.smoke else BUDGETS)
    done = store.read()
    for budget, seed, arm in itertools.product(budgets, range(seeds), [RETRAIN, *ARMS]):
        key = f"{arm} | budget {budget:g} | seed {seed}"
        if key in done or options.arms not in key:
            continue
        ended, entry = run_arm(arm, budget, seed), {"key": key, "arm": arm, "budget": budget}
        entry |= {"seed": seed, "recipe": repr(ended.record.recipe), "commit": find_commit()}
        parts = load()
        for name, part in (("test", parts[0].test), ("forget", parts[2])):
            found = evaluate(ended.model, part.inputs, part.targets, prepare=parts[0].normalise)
            entry[name] = round(100 * found.accuracy, 3)
        if arm != RETRAIN:
            entry |= keep_certificate(ended, key, store, weights_too=False)
        store.add(entry)


def plot(task: str, options: Options) -> None:
    """Accuracies, and the paired differences to retraining."""
    entries = list(Store(options.out, "centre_digits").read().values())
    budgets = sorted({entry["budget"] for entry in entries})
    header = [count_epochs(b) for b in budgets]
    rows = [
        [arm, *(average(entries, budget=b, arm=arm) for b in budgets)] for arm in [RETRAIN, *ARMS]
    ]
    paired = [
        [
            f"{arm} − retrain",
            *(compare(entries, {"arm": arm}, {"arm": RETRAIN}, budget=b) for b in budgets),
        ]
        for arm in ARMS
    ]
    text = make_table(["test accuracy (%)", *header], rows) + "\n\n"
    text += make_table(["paired difference, 95 %", *header], paired) + "\n"
    (options.out / "table_centre_digits.md").write_text(text, encoding="utf-8")
    print(text)


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("digits",), run, plot, arguments)


if __name__ == "__main__":
    main()
