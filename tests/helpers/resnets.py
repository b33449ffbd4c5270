"""Weights of a ResNet-18 in which every entry matters."""

from __future__ import annotations

import torch

import networks


def make_resnet_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights and batch statistics, so that every entry matters."""
    generator = torch.Generator().manual_seed(seed)
    state = networks.resnet18(generator=generator).state_dict()
    for name, value in state.items():
        if ("bn" in name or "downsample.1" in name) and value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return state
