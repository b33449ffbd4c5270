"""What ordinary programs share: four people, forty small rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import expunge

NAMES = [f"user-{i % 8}" for i in range(40)]
FORGET = ["user-3"]
RECIPE = expunge.GradientClipping(
    start_clip=1.0, grad_clip=1.0, learning_rate=0.1, weight_decay=1.0, steps=2, noise_std=5.0
)


def check_same(one: nn.Module, two: nn.Module) -> None:
    """The same weights, bit for bit. Of products the last bit may depend on where weights lie."""
    tensors = two.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in one.state_dict().items())


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=generator)
    return x, (x[:, 0] > 0).long()


@pytest.fixture
def data(rows) -> expunge.Data:
    return expunge.Data(rows, ids=NAMES)
