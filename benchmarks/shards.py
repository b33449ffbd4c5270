"""An ensemble of 8 shards in 4 slices against one network of as many steps, and what one person's
request costs beside that training.

The paper's CIFAR network on 4,096 drawn images of 1,024 people, a state on disk, one thread. The
people asked for lie in the first and in the last slice of shards of average size, so that theory
says 0.125 and 0.05. Training is cut to seconds, the data are not: what ``learn`` and ``forget`` add
beside the steps (hashes, checkpoints, the release) is put beside a minute of training.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import expunge
from benchmarks.step import cifar_net
from benchmarks.timing import KEPT, Row, compare, set_malloc

ROWS, EACH, BATCH, SHARDS, SLICES, ROUNDS, MINUTE = 4_096, 4, 64, 8, 4, 3, 60.0
OPTIONS: dict[str, Any] = {"seed": "benchmark", "shards": SHARDS, "slices": SLICES}
TARGETS = {
    "8 shards of 4 slices / one network of as many steps": 1.15,
    "one person of the first slice / the training, at a minute": 0.13,
    "one person of the last slice / the training, at a minute": 0.06,
    "learn / its own steps, at a minute of training": 1.05,
}


@dataclass
class Loop:
    """As many steps as there are whole batches; counts them, and the seconds they took."""

    steps: int = 0
    seconds: float = 0.0

    def __call__(self, model: nn.Module, examples: tuple[torch.Tensor, ...], seed: int) -> None:
        self.run(model, examples, seed, len(examples[1]) // BATCH)

    def run(self, model: nn.Module, examples: Any, seed: int, count: int) -> None:
        begun, (inputs, targets) = time.perf_counter(), examples
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(count):
            rows = torch.randint(len(targets), (BATCH,), generator=generator)
            optimizer.zero_grad()
            cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        self.steps += count
        self.seconds += time.perf_counter() - begun


LOOP = Loop()


def train(model: nn.Module, examples: tuple[torch.Tensor, ...], seed: int) -> None:
    LOOP(model, examples, seed)


def time_call(call: Any) -> tuple[float, float]:
    """Seconds of a call, and how many of them were steps."""
    begun, before = time.perf_counter(), LOOP.seconds
    call()
    return time.perf_counter() - begun, LOOP.seconds - before


def answer(shards: expunge.Shards, data: expunge.Data, person: str, out: Path) -> None:
    shards.forget([person], data).save(out)


def find_people(data: expunge.Data) -> tuple[str, str]:
    """Somebody of a first and of a last slice whose cost is nearest to the theory's."""
    empty = expunge.Shards(cifar_net, lambda model, examples: None, **OPTIONS)
    empty.learn(data)
    costs = {name: empty.cost([name]) for name in data.people[:400]}
    first, last = (
        min(costs, key=lambda name: abs(costs[name] - part))
        for part in (1 / SHARDS, 2 / SHARDS / (SLICES + 1))
    )
    return first, last


def warm_up(data: expunge.Data) -> None:
    """Everything once, on the first part of the data."""
    few = expunge.Data(
        tuple(column[: ROWS // 32] for column in data.examples),
        ids=[f"person-{i // EACH}" for i in range(ROWS // 32)],
    )
    with tempfile.TemporaryDirectory() as folder:
        shards = expunge.Shards(cifar_net, train, seed="w", shards=1, slices=1,
                                state=Path(folder) / "state")  # fmt: skip
        shards.learn(few)
        answer(shards, few, "person-0", Path(folder) / "out")


def run() -> list[Row]:
    set_malloc(KEPT)
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    columns = torch.randn(ROWS, 3, 32, 32, generator=draw), torch.arange(ROWS) % 10
    data = expunge.Data(columns, ids=[f"person-{i // EACH}" for i in range(ROWS)])
    people, names = find_people(data), ("first", "last")
    times: dict[str, list[float]] = {name: [] for name in ("learn", "one", "steps", *names)}
    added: dict[str, list[float]] = {name: [] for name in ("learn", *names)}
    warm_up(data)
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            shards = expunge.Shards(cifar_net, train, **OPTIONS, state=Path(folder) / "state")
            LOOP.steps = 0
            whole, steps = time_call(partial(shards.learn, data))
            one, _ = time_call(partial(LOOP.run, cifar_net(), columns, 0, LOOP.steps))
            asked = [time_call(partial(answer, shards, data, p, Path(folder) / p)) for p in people]
        for name, value in {"learn": whole, "one": one, "steps": steps}.items():
            times[name].append(value)
        added["learn"].append((MINUTE + whole - steps) / MINUTE)
        for name, (taken, trained) in zip(names, asked, strict=True):
            times[name].append(taken)
            added[name].append(trained / steps + (taken - trained) / MINUTE)
    minute, person = added | {"base": [1.0] * ROUNDS}, "one person of the {} slice / the training"
    bare, *_, beside = TARGETS
    return [
        compare(bare, times, "learn", "one"),
        *(compare(f"{person.format(n)}, at a minute", minute, n, "base") for n in names),
        *(compare(person.format(n), times, n, "learn") for n in names),
        compare(beside, minute, "learn", "base"),
        compare("learn / its own steps, these seconds", times, "learn", "steps"),
    ]
