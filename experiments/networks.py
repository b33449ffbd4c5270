"""The paper's networks. A network takes what the files have, and scales it by public constants.

Weights follow flax's defaults, which the paper used: w ~ N(0, s/fan_in) cut off at two standard
deviations, s = 1 (LeCun) or 2 (He), and biases are 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

# Standard deviation of a standard normal cut off at ±2: sqrt(1 - 4 φ(2) / (2 Φ(2) - 1)).
CUT_NORMAL_STD = 0.87962566103423978


class Network(nn.Sequential):
    """Layers after (p/255 - mean_c) / std_c for bytes p of channel c; floats pass as they are."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            shape = (-1,) + (1,) * (x.ndim - 2)
            scale = torch.tensor([1 / (255 * s) for s in self.std], device=x.device).view(shape)
            shift = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)])
            x = x.to(torch.float32).mul_(scale).add_(shift.to(x.device).view(shape))
        return super().forward(x)


def dense_net(sizes: Sequence[int], seed: int = 0) -> Network:
    """Linear layers of these sizes with ReLU between them; inputs are flattened; LeCun start.

    784-5-10 is the paper's MNIST net, 512-32-32-c its head on frozen features.

    >>> count_parameters(dense_net((784, 5, 10))), count_parameters(dense_net((512, 32, 32, 100)))
    (3985, 20772)
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inner, outer in pairwise(sizes):
        layers += [nn.Linear(inner, outer, device="meta"), nn.ReLU()]
    return draw_weights(Network(*layers[:-1]), 1.0, seed)


def cifar_net(classes: int = 10, seed: int = 0) -> Network:
    """Two 3x3 convolutions (32 and 64, size kept), each with ReLU and 2x2 average pooling; then the
    mean over all places and a linear layer: the paper's CIFAR-10 net, He start.

    >>> count_parameters(cifar_net())
    20042
    """
    net = Network(
        nn.Conv2d(3, 32, 3, padding=1, device="meta"), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, device="meta"), nn.ReLU(), nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes, device="meta"),
    )  # fmt: skip
    return draw_weights(net, 2.0, seed)


def count_parameters(module: nn.Module) -> int:
    """How many numbers the module learns."""
    return sum(parameter.numel() for parameter in module.parameters())


def draw_weights(net: Network, scale: float, seed: int) -> Network:
    """std · z with z standard normal cut off at ±2: Var w = scale / fan_in."""
    source = torch.Generator().manual_seed(seed)
    net.to_empty(device="cpu")
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            std = math.sqrt(scale / layer.weight[0].numel()) / CUT_NORMAL_STD
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std, generator=source)
            nn.init.zeros_(cast(Tensor, layer.bias))
    return net
