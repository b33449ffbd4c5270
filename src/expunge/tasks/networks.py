"""The paper's networks and ResNet-18, as plain functions that return a module.

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
from torch.nn import functional

from expunge.errors import InputError

# Standard deviation of a standard normal cut off at ±2: sqrt(1 - 4 φ(2) / (2 Φ(2) - 1)).
CUT_NORMAL_STD = 0.87962566103423978


def mnist_net(classes: int = 10, generator: torch.Generator | None = None) -> nn.Sequential:
    """784-5-classes with one ReLU: the paper's MNIST net.

    >>> count_parameters(mnist_net())
    3985
    """
    return dense_net((784, 5, classes), generator)


def digits_net(classes: int = 10, generator: torch.Generator | None = None) -> nn.Sequential:
    """64-16-classes with one ReLU, for scikit-learn's digits.

    >>> count_parameters(digits_net())
    1210
    """
    return dense_net((64, 16, classes), generator)


def head_net(
    in_features: int = 512, classes: int = 10, generator: torch.Generator | None = None
) -> nn.Sequential:
    """in_features-32-32-classes: the paper's three-layer head on frozen features.

    >>> count_parameters(head_net(512, 100))
    20772
    """
    return dense_net((in_features, 32, 32, classes), generator)


def dense_net(sizes: Sequence[int], generator: torch.Generator | None = None) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them; inputs are flattened; LeCun start.

    >>> [tuple(p.shape) for p in dense_net((4, 3, 2)).parameters()]
    [(3, 4), (3,), (2, 3), (2,)]
    """
    _require_sizes("sizes", sizes, at_least=2)
    layers: list[nn.Module] = [nn.Flatten()]
    for inner, outer in pairwise(sizes):
        layers += [nn.Linear(inner, outer, device="meta"), nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    _draw_weights(net, 1.0, generator)
    return net


def cifar_net(classes: int = 10, generator: torch.Generator | None = None) -> nn.Sequential:
    """Two 3x3 convolutions (32 and 64, size kept), each with ReLU and 2x2 average pooling; then the
    mean over all places and a linear layer: the paper's CIFAR-10 net, He start.

    >>> count_parameters(cifar_net())
    20042
    """
    _require_sizes("classes", (classes,))
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, device="meta"),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, device="meta"),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes, device="meta"),
    )
    _draw_weights(net, 2.0, generator)
    return net


def resnet18(classes: int = 1000, generator: torch.Generator | None = None) -> ResNet18:
    """ResNet-18 (He et al. 2016) with torchvision's parameter names, He start.

    >>> count_parameters(resnet18())
    11689512
    """
    _require_sizes("classes", (classes,))
    net = ResNet18(classes)
    _draw_weights(net, 2.0, generator)
    return net


def count_parameters(module: nn.Module) -> int:
    """How many numbers the module learns."""
    return sum(parameter.numel() for parameter in module.parameters())


class ResNet18(nn.Module):
    """The network of ``resnet18``: a stem, four stages of two blocks, the mean, a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False, device="meta")
        self.bn1 = nn.BatchNorm2d(64, device="meta")
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(_Block(64, 64, 1), _Block(64, 64, 1))
        self.layer2 = nn.Sequential(_Block(64, 128, 2), _Block(128, 128, 1))
        self.layer3 = nn.Sequential(_Block(128, 256, 2), _Block(256, 256, 1))
        self.layer4 = nn.Sequential(_Block(256, 512, 2), _Block(512, 512, 1))
        self.fc: nn.Module = nn.Linear(512, classes, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


class _Block(nn.Module):
    """relu(shortcut(x) + bn2(conv2(relu(bn1(conv1(x)))))); the shortcut is a 1x1 convolution where
    the shape changes, else x itself."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False, device="meta")
        self.bn1 = nn.BatchNorm2d(outer, device="meta")
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False, device="meta")
        self.bn2 = nn.BatchNorm2d(outer, device="meta")
        self.downsample: nn.Module | None = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride=stride, bias=False, device="meta"),
                nn.BatchNorm2d(outer, device="meta"),
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(shortcut + self.bn2(self.conv2(x)))


def _draw_weights(module: nn.Module, scale: float, generator: torch.Generator | None) -> None:
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


def _require_sizes(field: str, sizes: Sequence[Any], at_least: int = 1) -> None:
    if len(sizes) < at_least or not all(type(size) is int and size >= 1 for size in sizes):
        raise InputError.of(field, tuple(sizes), f"at least {at_least} integers >= 1")
