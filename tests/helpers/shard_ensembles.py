"""A small ensemble and its data, for attempts on shards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expunge import Shards

SEED = "a public string"
OPTIONS = {"seed": SEED, "shards": 3, "slices": 2, "epochs": 2, "learning_rate": 0.1,
           "batch_size": 4}  # fmt: skip


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def make_data(n: int = 45) -> tuple[Tensor, Tensor, list[str]]:
    x = torch.randn(n, 16, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1), [f"user-{i}" for i in range(n)]


def learn(ensemble: Shards, keep=lambda name: True) -> None:
    x, y, ids = make_data()
    at = [i for i, name in enumerate(ids) if keep(name)]
    ensemble.learn((x[at], y[at]), ids=[ids[i] for i in at])


def make(**options) -> Shards:
    return Shards(options.pop("build", build), **OPTIONS | options)
