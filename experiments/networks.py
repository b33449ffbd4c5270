"""The paper's networks and ResNet-18, drawn as those of ``expunge.tasks.networks`` are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from expunge.tasks.networks import (
    CUT_NORMAL_STD,
    count_parameters,
    dense_net,
    digits_net,
    draw_weights,
    require_sizes,
)

__all__ = [
    "CUT_NORMAL_STD",
    "ResNet18",
    "cifar_net",
    "count_parameters",
    "dense_net",
    "digits_net",
    "head_net",
    "mnist_net",
    "resnet18",
]


def mnist_net(classes: int = 10, generator: torch.Generator | None = None) -> nn.Sequential:
    """784-5-classes with one ReLU: the paper's MNIST net.

    >>> count_parameters(mnist_net())
    3985
    """
    return dense_net((784, 5, classes), generator)


def head_net(
    in_features: int = 512, classes: int = 10, generator: torch.Generator | None = None
) -> nn.Sequential:
    """in_features-32-32-classes: the paper's three-layer head on frozen features.

    >>> count_parameters(head_net(512, 100))
    20772
    """
    return dense_net((in_features, 32, 32, classes), generator)


def cifar_net(classes: int = 10, generator: torch.Generator | None = None) -> nn.Sequential:
    """Two 3x3 convolutions (32 and 64, size kept), each with ReLU and 2x2 average pooling; then the
    mean over all places and a linear layer: the paper's CIFAR-10 net, He start.

    >>> count_parameters(cifar_net())
    20042
    """
    require_sizes("classes", (classes,))
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
    draw_weights(net, 2.0, generator)
    return net


def resnet18(classes: int = 1000, generator: torch.Generator | None = None) -> ResNet18:
    """ResNet-18 (He et al. 2016) with torchvision's parameter names, He start.

    >>> count_parameters(resnet18())
    11689512
    """
    require_sizes("classes", (classes,))
    net = ResNet18(classes)
    draw_weights(net, 2.0, generator)
    return net


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
