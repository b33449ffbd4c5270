"""Small networks, data and recipes that the tests of noisy runs share."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import expunge

GRADIENT = expunge.GradientClipping(
    start_clip=0.5, grad_clip=1.0, learning_rate=0.1, weight_decay=2.0, steps=7, noise_std=0.3
)
SCHEDULED = expunge.GradientClipping(
    start_clip=0.5, grad_clip=0.5, learning_rate=[0.2, 0.1, 0.05, 0.1], weight_decay=1.0, steps=4,
    noise_std=[0.2, 0.3, 0.25, 0.5], start_noise_std=0.4, model_clip=2.0,
)  # fmt: skip
MODEL = expunge.ModelClipping(
    model_clip=1.0, learning_rate=0.1, weight_decay=1.0, noise_std=0.5, steps=6
)
OUTPUT = expunge.OutputPerturbation(start_clip=0.5, noise_std=1.5)
NOISY = {"gradients": GRADIENT, "scheduled": SCHEDULED, "model": MODEL, "output": OUTPUT}


def make_mlp(dropout: float = 0.0, norm: bool = False) -> nn.Module:
    middle = nn.BatchNorm1d(16) if norm else nn.Dropout(dropout)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), middle, nn.Linear(16, 3))


def make_old(seed: int = 7, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_mlp(**options)


def make_rows(count: int = 25) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(count, 6, generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )


def make_data(examples: Any = None, **options: Any) -> expunge.Data:
    """25 rows, the last of which is of "gone"."""
    ids = [*(f"p{i}" for i in range(24)), "gone"]
    return expunge.Data(make_rows() if examples is None else examples, ids=ids, **options)


def run(
    old: Any = None, build: Any = make_mlp, data: expunge.Data | None = None, **options: Any
) -> expunge.Release:
    given = {
        "forget": ["gone"],
        "recipe": GRADIENT,
        "loss": cross_entropy,
        "noise": expunge.SeededNoise(0),
        "batch_size": 8,
        "delta": 0.1,
    } | options
    old = make_old() if old is None else old
    return expunge.unlearn(old, build, make_data() if data is None else data, **given)


def flatten(release: expunge.Release) -> Tensor:
    return torch.cat([t.reshape(-1).double() for t in release.tensors.values()])


def equal(one: expunge.Release, two: expunge.Release) -> bool:
    return all(torch.equal(t, two.tensors[name]) for name, t in one.tensors.items())
