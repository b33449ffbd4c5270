"""Dense networks as plain functions that return a module, and how weights are drawn.

Weights are drawn from the generator given, or from a fresh one seeded with 0; the global random
state of torch is never read or moved. Weights follow flax's defaults, which the paper used:
variance scaling w ~ N(0, s/fan_in) cut off at two standard deviations, s = 1 (LeCun) or 2 (He),
and biases are 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from expunge.errors import InputError

# Standard deviation of a standard normal cut off at ±2: sqrt(1 - 4 φ(2) / (2 Φ(2) - 1)).
CUT_NORMAL_STD = 0.87962566103423978


def digits_net(classes: int = 10, generator: torch.Generator | None = None) -> nn.Sequential:
    """64-16-classes with one ReLU, for scikit-learn's digits.

    >>> count_parameters(digits_net())
    1210
    """
    return dense_net((64, 16, classes), generator)


def dense_net(sizes: Sequence[int], generator: torch.Generator | None = None) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them; inputs are flattened; LeCun start.

    >>> [tuple(p.shape) for p in dense_net((4, 3, 2)).parameters()]
    [(3, 4), (3,), (2, 3), (2,)]
    """
    require_sizes("sizes", sizes, at_least=2)
    layers: list[nn.Module] = [nn.Flatten()]
    for inner, outer in pairwise(sizes):
        layers += [nn.Linear(inner, outer, device="meta"), nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    draw_weights(net, 1.0, generator)
    return net


def count_parameters(module: nn.Module) -> int:
    """How many numbers the module learns."""
    return sum(parameter.numel() for parameter in module.parameters())


def draw_weights(module: nn.Module, scale: float, generator: torch.Generator | None) -> None:
    """Give a module built without memory its weights, layer by layer in order.

    w = std · z with z standard normal cut off at ±2 and std = sqrt(s / fan_in) / CUT_NORMAL_STD,
    so that Var w = s / fan_in.
    """
    source = torch.Generator().manual_seed(0) if generator is None else generator
    module.to_empty(device=source.device)
    for layer in module.modules():
        match layer:
            case nn.Linear() | nn.Conv2d():
                fan_in = layer.weight[0].numel()
                std = math.sqrt(scale / fan_in) / CUT_NORMAL_STD
                nn.init.trunc_normal_(
                    layer.weight, std=std, a=-2 * std, b=2 * std, generator=source
                )
                if layer.bias is not None:
                    nn.init.zeros_(cast(Tensor, layer.bias))
            case nn.BatchNorm2d():
                layer.reset_parameters()
            case _:
                pass


def require_sizes(field: str, sizes: Sequence[Any], at_least: int = 1) -> None:
    """Refuse what no layer can have."""
    if len(sizes) < at_least or not all(type(size) is int and size >= 1 for size in sizes):
        raise InputError.of(field, tuple(sizes), f"at least {at_least} integers >= 1")
