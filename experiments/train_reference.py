"""The reference models: the paper's MNIST and CIFAR-10 nets trained with its settings.

    python experiments/train_reference.py --task mnist       # 30 epochs
    python experiments/train_reference.py --task cifar10     # 100 epochs
    python experiments/train_reference.py --task mnist --smoke

Batch 128, SGD without momentum, linear one-cycle, weight decay 5e-4, learning rate 0.06 (MNIST) or
0.1 (CIFAR-10), on all of the official training images, as in the paper. Test accuracy after each
tenth of the epochs (it chooses nothing) goes to experiments/results/reference.json as it comes, the
weights to experiments/results/models, where the other experiments find the model that must forget,
and the table of finished runs to docs/comparison.md. A run that is finished is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import cifar
import mnist
import networks
from augmentation import Augmentation
from expunge import evaluate, train
from expunge.tasks import digits
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


def load(name: str, root: Path | None, seed: int, smoke: bool) -> tuple[Task, nn.Module]:
    """The task and a fresh net for it; the smoke run uses scikit-learn's digits."""
    generator = torch.Generator().manual_seed(seed)
    if smoke:
        return digits.load(), networks.digits_net(generator=generator)
    if name == "mnist":
        return mnist.load(root, validation=0), networks.mnist_net(generator=generator)
    return cifar.load("cifar10", root, validation=0), networks.cifar_net(generator=generator)


def run(args: Args, task: Task, net: nn.Module, out: Path) -> dict[str, Any]:
    """Train, writing the accuracies as they come; the last entry is the result."""
    began = time.monotonic()
    curve: list[dict[str, Any]] = []
    every = max(args.epochs // 10, 1)

    def measure(samples: Samples) -> float:
        found = evaluate(net, samples.inputs, samples.targets, prepare=task.normalise)
        return round(100 * found.accuracy, 3)

    def report(epoch: int, loss: float) -> None:
        seconds = round(time.monotonic() - began, 1)
        left = round(seconds / epoch * (args.epochs - epoch))
        print(f"epoch {epoch} of {args.epochs}, loss {loss:.4f}, {left} s left", flush=True)
        if epoch % every == 0:
            curve.append({"epoch": epoch, "test": measure(task.test), "seconds": seconds})
            write(out, asdict(args) | {"examples": len(task.train), "curve": curve})

    log = train(
        net,
        task.train,
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        batch_size=args.batch_size,
        weight_decay=args.weight_decay,
        schedule="one-cycle",
        augment=Augmentation(padding=4, flip=args.task == "cifar10") if args.augment else None,
        prepare=task.normalise,
        seed=args.seed,
        on_pass=report,
    )
    save_weights(net, out / "models" / f"{name_run(asdict(args))}.safetensors")
    entry: dict[str, Any] = asdict(args) | {"examples": len(task.train), "curve": curve}
    entry |= {"train": measure(task.train), "test": measure(task.test), "compiled": log.compiled}
    entry |= {"loss": round(log.losses[-1], 5), "finished": True}
    write(out, entry)
    return entry


def save_weights(net: nn.Module, path: Path) -> None:
    """The state of the net as safetensors; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(net.state_dict(), partial)
    partial.replace(path)


def name_run(entry: dict[str, Any]) -> str:
    """The name of a run among its likes.

    >>> name_run({"task": "mnist", "augment": True, "seed": 2})
    'mnist-augmented-2'
    """
    return entry["task"] + ("-augmented" if entry["augment"] else "") + f"-{entry['seed']}"


def tabulate(entries: dict[str, Any]) -> list[str]:
    """The finished runs as a table."""
    lines = [
        "| net | epochs | augmentation | seed | train | test |",
        "|---|---|---|---|---|---|",
    ]
    for entry in entries.values():
        if entry.get("finished"):
            accuracy = (entry["train"], entry["test"])
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
    entries[name_run(entry)] = entry
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
    file = given.out / "reference.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    if (found := known.get(name_run(asdict(args)), {})).get("finished"):
        print(f"finished: {found['test']} % test accuracy")
        return found
    task, net = load(given.task, given.root, given.seed, given.smoke)
    return run(args, task, net, given.out)


if __name__ == "__main__":
    main()
