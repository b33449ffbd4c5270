"""The reference models: the paper's MNIST and CIFAR-10 nets trained with its settings.

    python experiments/train_reference.py --task mnist       # 30 epochs
    python experiments/train_reference.py --task cifar10     # 100 epochs
    python experiments/train_reference.py --task mnist --smoke

Batch 128, SGD without momentum, linear one-cycle, weight decay 5e-4, learning rate 0.06 (MNIST) or
0.1 (CIFAR-10); 5,000 of the official training images are validation, which chooses nothing here.
Accuracy after each tenth of the epochs goes to experiments/results/reference.json as it comes, and
the table of finished runs to docs/comparison.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expunge import Batches, evaluate, train
from expunge.tasks import Augmentation, cifar, digits, mnist, networks
from expunge.tasks.samples import Samples, Task

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "comparison.md"
NETS = {"mnist": "MNIST, 784-5-10", "cifar10": "CIFAR-10, 20,042 parameters"}


@dataclass(frozen=True)
class Args:
    """One run. ``augment`` crops with a frame of four pixels, and flips CIFAR-10."""

    task: str
    epochs: int
    learning_rate: float
    batch_size: int = 128
    weight_decay: float = 5e-4
    augment: bool = False
    seed: int = 0


SETTINGS = {
    "mnist": Args("mnist", epochs=30, learning_rate=0.06),
    "cifar10": Args("cifar10", epochs=100, learning_rate=0.1),
}


class Watched:
    """Batches that report after every pass: ``after(pass number)``."""

    def __init__(self, batches: Batches, after: Callable[[int], None]) -> None:
        self.batches, self.after, self.passes = batches, after, 0
        self.batch_size, self.generator = batches.batch_size, batches.generator

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        if self.passes > 0:
            self.after(self.passes)
        self.passes += 1
        return iter(self.batches)


def load(name: str, root: Path | None, seed: int, smoke: bool) -> tuple[Task, nn.Module]:
    """The task and a fresh net for it; the smoke run uses scikit-learn's digits."""
    generator = torch.Generator().manual_seed(seed)
    if smoke:
        return digits.load(), networks.digits_net(generator=generator)
    if name == "mnist":
        return mnist.load(root), networks.mnist_net(generator=generator)
    return cifar.load("cifar10", root), networks.cifar_net(generator=generator)


def run(args: Args, task: Task, net: nn.Module, out: Path) -> dict[str, Any]:
    """Train, writing the accuracies as they come; the last entry is the result."""
    began = time.monotonic()
    curve: list[dict[str, Any]] = []
    every = max(args.epochs // 10, 1)

    def measure(samples: Samples) -> float:
        found = evaluate(net, samples.inputs, samples.targets, prepare=task.normalise)
        return round(100 * found.accuracy, 3)

    def report(epoch: int, losses: tuple[float, ...] = ()) -> dict[str, Any]:
        curve.append(
            {
                "epoch": epoch,
                "validation": measure(task.validation),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        entry: dict[str, Any] = asdict(args) | {"examples": len(task.train), "curve": curve}
        if losses:
            entry |= {"train": measure(task.train), "test": measure(task.test)}
            entry |= {"loss": round(losses[-1], 5), "finished": True}
        write(out, entry)
        print(json.dumps(curve[-1]), flush=True)
        return entry

    augment = Augmentation(padding=4, flip=args.task == "cifar10") if args.augment else None
    batches = Batches(
        task.train.inputs,
        task.train.targets,
        batch_size=args.batch_size,
        generator=torch.Generator().manual_seed(args.seed),
        augment=augment,
        prepare=task.normalise,
    )
    log = train(
        net,
        Watched(batches, lambda epoch: report(epoch) if epoch % every == 0 else None),
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        schedule="one-cycle",
        seed=args.seed,
    )
    return report(args.epochs, log.losses)


def tabulate(entries: dict[str, Any]) -> list[str]:
    """The finished runs as a table."""
    lines = [
        "| net | epochs | augmentation | seed | train | validation | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries.values():
        if entry.get("finished"):
            accuracy = (entry["train"], entry["curve"][-1]["validation"], entry["test"])
            settings = (NETS[entry["task"]], entry["epochs"], "yes" if entry["augment"] else "none")
            cells = [*map(str, (*settings, entry["seed"])), *(f"{a:.2f}" for a in accuracy)]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def replace_table(text: str, lines: list[str]) -> str:
    """The page with the table between its markers replaced."""
    begin, end = "<!-- reference -->", "<!-- end of reference -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}"


def write(out: Path, entry: dict[str, Any]) -> None:
    """Replace the entry of this run; finished ones of the repository also go on the page."""
    file = out / "reference.json"
    out.mkdir(parents=True, exist_ok=True)
    entries = json.loads(file.read_text()) if file.exists() else {}
    name = entry["task"] + (" augmented" if entry["augment"] else "")
    entries[f"{name}, seed {entry['seed']}"] = entry
    entries = dict(sorted(entries.items()))
    file.write_text(json.dumps(entries, indent=1) + "\n")
    if entry.get("finished") and out.resolve() == (HERE / "results").resolve():
        page = DOCS.read_text(encoding="utf-8")
        DOCS.write_text(replace_table(page, tabulate(entries)), encoding="utf-8")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(SETTINGS), required=True)
    parser.add_argument("--root", type=Path, help="folder of the data; default EXPUNGE_DATA")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="scikit-learn's digits, three epochs")
    given = parser.parse_args(arguments)
    args = replace(SETTINGS[given.task], seed=given.seed, augment=given.augment)
    if given.smoke:
        args = replace(args, epochs=3)
    task, net = load(given.task, given.root, given.seed, given.smoke)
    return run(args, task, net, given.out)


if __name__ == "__main__":
    main()
