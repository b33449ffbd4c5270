"""DP-SGD against plain SGD and against Opacus, and a whole epoch.

Pixels are random: no time here depends on what they show. Torch runs on one thread, as in
``benchmarks.data``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import networks
from augmentation import Augmentation
from benchmarks.timing import compare, measure
from expunge import GroupDPSGD, SeededNoise, train, train_dpsgd
from expunge.tasks.samples import normalise
from expunge.training.batches import Batches

BATCH, COUNT = 128, 2_560
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def run() -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        nets = {
            "MNIST net": (networks.mnist_net(generator=generator), (1, 28, 28), 60),
            "CIFAR net": (networks.cifar_net(generator=generator), (3, 32, 32), 6),
        }
        rows = [_compare_epoch()]
        for name, (net, shape, steps) in nets.items():
            x = torch.randn(BATCH, *shape, generator=generator)
            rows += _compare_steps(name, net, x, steps)
        return rows
    finally:
        torch.set_num_threads(threads)


def _compare_epoch() -> dict[str, Any]:
    """``train`` with shuffling, augmentation and one-cycle, over forward and backward alone."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (COUNT, 3, 32, 32), generator=generator).to(torch.uint8)
    targets = torch.randint(0, 10, (COUNT,), generator=generator)
    batches = Batches(
        inputs,
        targets,
        batch_size=BATCH,
        generator=generator,
        augment=Augmentation(padding=4, flip=True),
        prepare=lambda pixels: normalise(pixels, MEAN, STD),
    )
    net = networks.cifar_net(generator=generator)
    x, y = next(iter(batches))

    def bare() -> None:
        for _ in range(COUNT // BATCH):
            net.zero_grad()
            cross_entropy(net(x), y).backward()

    def epoch() -> None:
        train(net, batches, epochs=1, learning_rate=0.1, weight_decay=5e-4, schedule="one-cycle")

    times = measure({"epoch": epoch, "bare": bare}, repeats=5)
    row = compare(
        "CIFAR net, an epoch of train() / forward and backward alone",
        times,
        "epoch",
        "bare",
        target=1.15,
    )
    return row | {"limit": 1.15}


def _compare_steps(name: str, net: nn.Module, x: Tensor, steps: int) -> list[dict[str, Any]]:
    y = torch.arange(BATCH) % 10
    plain_net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain_net.parameters(), 0.1)
    # Rate 1: every example is in every batch, so that both take steps of 128 examples.
    recipe = GroupDPSGD(
        clip=1.0, noise_multiplier=1.0, sampling_rate=1.0, steps=steps, group_size=1
    )
    data = Batches(x, y, batch_size=BATCH)

    def plain() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(plain_net(x), y).backward()
            optimizer.step()

    def private() -> None:
        train_dpsgd(net, data, recipe, learning_rate=0.1, noise=SeededNoise(0))

    cases: dict[str, Callable[[], object]] = {
        "plain": plain,
        "DP-SGD": private,
        "Opacus": _prepare_opacus(net, x, y, steps),
    }
    times = measure(cases, repeats=7)
    return [
        compare(f"{name}, DP-SGD step / plain step", times, "DP-SGD", "plain"),
        compare(f"{name}, DP-SGD step / 128 gradients by Opacus", times, "DP-SGD", "Opacus"),
    ]


def _prepare_opacus(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> Callable[[], object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.grad_sample import GradSampleModule

        sampled: Any = GradSampleModule(copy.deepcopy(net), loss_reduction="sum")

    def go() -> None:
        for _ in range(steps):
            for p in sampled.parameters():
                p.grad = p.grad_sample = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                cross_entropy(sampled(x), y, reduction="sum").backward()

    return go


if __name__ == "__main__":
    for found in run():
        print(f"{found['ratio']:8.3f}  {found['name']}")
