"""``expunge.retrain`` with the user's own loop against that loop alone, at seconds of training.

The paper's MNIST network, one thread. Data, certificate and release are all counted; what
``retrain`` adds is the same at a minute of training, so the ratio there is nearer to 1: the last
row says what would be left of it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import expunge
from benchmarks.step import mnist_net
from benchmarks.timing import Row, compare, measure

ROWS, EPOCHS, MINUTE = 20_000, 6, 60.0
TARGETS = {"the same at a minute of training": 1.05}


def train(model: nn.Module, examples: tuple[torch.Tensor, torch.Tensor], seed: int) -> None:
    inputs, targets = examples
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for places in torch.randperm(len(inputs), generator=generator).split(128):
            optimizer.zero_grad()
            cross_entropy(model(inputs[places]), targets[places]).backward()
            optimizer.step()


def run() -> list[Row]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 1, 28, 28, generator=draw)
    targets = torch.randint(0, 10, (ROWS,), generator=draw)
    data = expunge.Data((inputs, targets), ids=[i // 10 for i in range(ROWS)])
    left = data.without([7]).examples
    with tempfile.TemporaryDirectory() as folder:
        numbers = iter(range(100))

        def certified() -> None:
            release = expunge.retrain(mnist_net, data, forget=[7], train=train)
            release.save(Path(folder) / str(next(numbers)))

        times = measure({"retrain": certified, "loop": lambda: train(mnist_net(), left, 0)}, 3)
    added = [a - b for a, b in zip(times["retrain"], times["loop"], strict=True)]
    minute = {"a": [MINUTE + t for t in added], "b": [MINUTE for _ in added]}
    return [
        compare("retrain, saved / the loop alone, these seconds", times, "retrain", "loop"),
        compare("the same at a minute of training", minute, "a", "b"),
    ]
