"""Small ensembles: networks, trainings and data that worker processes can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge import Data, Release, Shards

SEED = "a public string"
PEOPLE = 16


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)
    )


def train(model: nn.Module, examples: tuple[Tensor, Tensor], seed: int) -> None:
    """A plain loop: shuffles and drops out by the generators that the run seeds."""
    inputs, targets = examples
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(2):
        for batch in torch.randperm(len(inputs)).split(8):
            if len(batch) > 1:
                optimizer.zero_grad()
                cross_entropy(model(inputs[batch]), targets[batch]).backward()
                optimizer.step()


def make_data(people: range | list[int] = range(PEOPLE)) -> Data:
    """Three examples of everybody; their content is their own."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(PEOPLE, 3, 6, generator=draw), torch.arange(3 * PEOPLE) % 3
    chosen = list(people)
    ids = [f"user-{i}" for i in chosen for _ in range(3)]
    return Data((inputs[chosen].flatten(0, 1), targets.reshape(-1, 3)[chosen].flatten()), ids=ids)


def make(state: Path | None = None, **given: Any) -> Shards:
    options: dict[str, Any] = {"seed": SEED, "shards": 3, "slices": 2, "state": state} | given
    return Shards(options.pop("build", build), options.pop("train", train), **options)


def hash_release(release: Release) -> tuple[str, ...]:
    assert release.record.sharding is not None
    return release.record.sharding.hashes


def train_fresh(data: Data, **given: Any) -> tuple[str, ...]:
    """The constituents of a life that saw these examples alone."""
    ensemble = make(**given)
    ensemble.learn(data)
    return hash_release(ensemble.release())
