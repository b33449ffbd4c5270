"""A head trained behind a frozen network, its features computed once against in every epoch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from benchmarks.timing import compare, measure
from expunge import Batches, train

EPOCHS = 10


def run() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    x, y = torch.randn(512, 3, 32, 32), torch.randint(10, (512,))
    body = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(),
    )  # fmt: skip
    model = nn.Sequential(body.requires_grad_(False).eval(), nn.Linear(1024, 10))

    def once(features: str | None) -> None:
        train(
            copy.deepcopy(model),
            Batches(x, y, batch_size=128),
            epochs=EPOCHS,
            learning_rate=0.1,
            compile=False,
            features=features,
        )

    times = measure({"once per sample": lambda: once("0"), "every epoch": lambda: once(None)})
    name = f"{EPOCHS} epochs of a head, the frozen network run: once a sample / in every epoch"
    return [compare(name, times, "once per sample", "every epoch", target=0.5)]
