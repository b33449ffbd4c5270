"""Batches in memory with batched augmentation against ``DataLoader`` with the same per sample.

Pixels are random: no time here depends on what they show, so no data file is needed. Both sides
shuffle, crop with a frame of four pixels, flip, normalise, and give batches of 128 float32 images.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import networks
from augmentation import Augmentation
from benchmarks.timing import compare, measure
from expunge.tasks.samples import normalise
from expunge.training.batches import Batches

COUNT, BATCH, PADDING = 5_120, 128, 4
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
WORKERS = 2
STEPS = 10


class PerSample(Dataset[tuple[Tensor, Tensor]]):
    """What a data set does in the usual loop: each image drawn, cut, mirrored and scaled alone."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets
        self.mean = torch.tensor(MEAN).view(3, 1, 1)
        self.std = torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        padded = functional.pad(self.inputs[index], (PADDING,) * 4)
        down = int(torch.randint(0, 2 * PADDING + 1, ()))
        right = int(torch.randint(0, 2 * PADDING + 1, ()))
        image = padded[:, down : down + 32, right : right + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image.float().div_(255).sub_(self.mean).div_(self.std), self.targets[index]


def run() -> list[dict[str, Any]]:
    """DataLoader / in memory, and what fresh batches add to the CIFAR net's own time.

    Torch runs on one thread: the loops compared are of many small operations, and waiting for a
    second thread that another process holds would drown both.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure_all()
    finally:
        torch.set_num_threads(threads)


def _measure_all() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (COUNT, 3, 32, 32), generator=generator).to(torch.uint8)
    targets = torch.randint(0, 10, (COUNT,), generator=generator)
    batches = Batches(
        inputs,
        targets,
        batch_size=BATCH,
        generator=generator,
        augment=Augmentation(padding=PADDING, flip=True),
        prepare=lambda pixels: normalise(pixels, MEAN, STD),
    )
    training = _compare_training(batches)
    return [*_compare_loaders(batches), training]


def _compare_loaders(batches: Batches) -> list[dict[str, Any]]:
    data = PerSample(batches.inputs, batches.targets)
    alone = DataLoader(data, batch_size=BATCH, shuffle=True)
    helped = DataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    helpers = f"DataLoader, {WORKERS} workers"
    times = measure(
        {
            "in memory": lambda: _consume(batches),
            "DataLoader": lambda: _consume(alone),
            helpers: lambda: _consume(helped),
        },
        repeats=9,
    )
    return [
        compare(
            f"{base} / in memory, CIFAR-10", times, base, "in memory", target=5.0, at_least=True
        )
        | {"limit": 5.0}
        for base in ("DataLoader", helpers)
    ]


def _compare_training(batches: Batches) -> dict[str, Any]:
    """Forward and backward of the CIFAR net on fresh batches, over the same on one fixed batch."""
    net = networks.cifar_net(generator=torch.Generator().manual_seed(0))
    fixed = next(iter(batches))

    def learn(source: Iterable[tuple[Tensor, Tensor]]) -> None:
        for x, y in source:
            net.zero_grad()
            functional.cross_entropy(net(x), y).backward()

    def learn_fresh() -> None:
        learn(batch for batch, _ in zip(batches, range(STEPS), strict=False))

    times = measure({"fresh": learn_fresh, "fixed": lambda: learn([fixed] * STEPS)}, repeats=7)
    row = compare("CIFAR net, fresh / fixed batches", times, "fresh", "fixed", target=1.15)
    return row | {"limit": 1.15}


def _consume(loader: Iterable[Any]) -> None:
    for _ in loader:
        pass


if __name__ == "__main__":
    for row in run():
        print(f"{row['ratio']:8.3f}  {row['direction']} {row['target']:<5g} {row['name']}")
