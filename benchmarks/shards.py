"""Shards: training them all against one network with as many steps, and a request against both.

The network is the paper's 784-5-10 on drawn pixels, for the 30 passes of its table, torch on one
thread. An ensemble's time has its self-tests, the files of its examples and its checkpoints in it,
which do not grow with the passes: beside it stands a third of them. A request is one example of the
first slice, the worst, and of the last, to a certificate that is not written.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import compare, measure
from expunge import Shards, certify, train
from expunge.forgettable.slices import Examples

ROWS, EPOCHS = 8_000, 30
OPTIONS: dict[str, Any] = {"epochs": EPOCHS, "learning_rate": 0.1, "batch_size": 64}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 5), nn.ReLU(), nn.Linear(5, 10))


def draw() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 784, generator=generator)
    return inputs, torch.randint(10, (ROWS,), generator=generator)


def run() -> list[dict[str, Any]]:
    inputs, targets = draw()
    ids = [f"p{i}" for i in range(ROWS)]
    data = Examples(torch.empty(ROWS, 0), inputs, targets)

    def train_one(**other: Any) -> None:
        train(build(), data, seed=0, compile=False, **OPTIONS | other)

    def make(slices: int, folder: str, **other: Any) -> Shards:
        given = OPTIONS | other
        return Shards(build, shards=8, slices=slices, seed="bench", state=folder, **given)

    def learn(slices: int, **other: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            make(slices, folder, **other).learn((inputs, targets), ids=ids)

    few = {"epochs": EPOCHS // 3}

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = measure(
            {
                "one network": train_one,
                "8 shards": lambda: learn(1),
                "8 x 4": lambda: learn(4),
                "one network, fewer passes": lambda: train_one(**few),
                "8 shards, fewer passes": lambda: learn(1, **few),
            },
            repeats=3,
        )
        with tempfile.TemporaryDirectory() as folder:
            ensemble = make(4, folder)
            ensemble.learn((inputs, targets), ids=ids)
            times |= _forget(ensemble, ids)
    finally:
        torch.set_num_threads(threads)
    return [
        compare("8 shards / one network, as many steps", times, "8 shards", "one network",
                target=1.3),
        compare("8 shards / one network, a third of the passes", times, "8 shards, fewer passes",
                "one network, fewer passes"),
        compare("8 shards of 4 slices / one network, as many passes", times, "8 x 4",
                "one network"),
        compare("forget one of the first slice / training 8 x 4", times, "first", "8 x 4",
                target=0.13),
        compare("forget one of the last slice / training 8 x 4", times, "last", "8 x 4"),
    ]  # fmt: skip


def _forget(ensemble: Shards, ids: list[str]) -> dict[str, list[float]]:
    """Three requests each for one example of the first and of the last slice."""
    place = ensemble.plan.assignment
    wanted = {"first": 0, "last": place.slices - 1}
    people = {
        name: iter([i for i in ids if place.find_place(place.name(i))[1] == part])
        for name, part in wanted.items()
    }

    def answer(name: str) -> None:
        certify(ensemble.forget([next(people[name])]).record, delta=1e-5)

    return measure({name: lambda name=name: answer(name) for name in wanted}, repeats=3)


if __name__ == "__main__":
    print(Path(__file__).stem, *run(), sep="\n")
