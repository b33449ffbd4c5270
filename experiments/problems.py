"""What the experiments run on: real data, the paper's networks, and the models that must forget.

Training uses all of the official training images, a tenth of which must be forgotten, as in the
paper (so its budgets in epochs are ours in steps). Hyper-parameters are chosen on 2,000 of the
official *test* images, set apart by a fixed seed; accuracies are reported on the other 8,000.
(The text set has no official parts: see debian.py.) "transfer_" problems have the 512 inputs of the
paper's head, "features_" problems everything that the public network gives.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cifar
import debian
import features
import mnist
import networks
from expunge import train
from expunge.tasks import digits
from expunge.tasks.samples import Samples, Task, split_validation

MODELS = Path(__file__).parent / "results" / "models"
FEATURE_SIZE = 96
FORGET_FRACTION = 0.1


@dataclass(frozen=True)
class Setting:
    """How a model that must forget was trained, and how models are trained afterwards."""

    epochs: int
    learning_rate: float
    tuned_rate: float = 0.06
    batch_size: int = 128
    weight_decay: float = 5e-4


SETTINGS = {
    "mnist": Setting(30, 0.06),
    "cifar10": Setting(100, 0.1),
    "cifar100": Setting(5, 0.1),
    "crossed_cifar10": Setting(100, 0.1),
    "transfer_cifar10": Setting(100, 0.1),
    "transfer_cifar100": Setting(100, 0.1),
    "features_mnist": Setting(100, 0.1),
    "features_cifar10": Setting(100, 0.1),
    "features_cifar100": Setting(100, 0.1),
    "debian": Setting(30, 0.1),
    "digits": Setting(3, 0.1),
}


@dataclass(frozen=True, eq=False)
class Problem:
    """Data in its parts, how to build a fresh network, and the settings."""

    name: str
    train: Samples
    validation: Samples
    test: Samples
    prepare: Callable[[Tensor], Tensor] | None
    build: Callable[[int], nn.Module]
    setting: Setting
    forget_seed: int = 0
    forget_count: int | None = None

    @functools.cached_property
    def parts(self) -> tuple[Samples, Samples]:
        """(retain, forget): ``forget_count`` random identifiers or a tenth, with their samples."""
        order = debian.order_names(self.train.ids, self.forget_seed)
        gone = order[: self.forget_count or round(FORGET_FRACTION * len(order))]
        return tuple(debian.take_names(self.train, part) for part in (order[len(gone) :], gone))


@functools.cache
def load_problem(name: str, root: Path | None = None) -> Problem:
    """A problem by its name; "digits" is the small one that the smoke runs use."""
    match name:
        case "mnist":
            return _make(name, mnist.load(root, validation=0), networks.mnist_net)
        case "cifar10":
            return _make(name, cifar.load("cifar10", root, validation=0), networks.cifar_net)
        case "cifar100":
            net = functools.partial(networks.cifar_net, 100)
            return _make(name, cifar.load("cifar100", root, validation=0), net)
        case "crossed_cifar10":
            return _cross(load_problem("cifar100", root), load_problem("cifar10", root))
        case "digits":
            return _make(name, digits.load(), networks.digits_net, held=50)
        case "features_mnist":
            head = functools.partial(networks.head_net, 784, 10)
            return _make(name, mnist.load(root, validation=0), head)
        case "debian":
            task, encoder = debian.load(root), features.load_minilm()
            parts = [
                features.extract(part, encoder, batch_size=8_192)
                for part in (task.train, task.validation, task.test)
            ]
            head = functools.partial(networks.head_net, 384, len(task.classes))
            parts = [_rescale(part) for part in parts]
            return Problem(name, *parts, None, _seeded(head), SETTINGS[name])
        case _:
            kind, _, data = name.partition("_")
            task = cifar.load(data, root, validation=0)
            backbone = features.load_efficientnet_lite0(size=FEATURE_SIZE)
            change = _project if kind == "transfer" else _rescale
            extracted = [
                change(features.extract(part, backbone, batch_size=125))
                for part in (task.train, task.test)
            ]
            width = extracted[0].inputs.shape[1]
            head = functools.partial(networks.head_net, width, len(task.classes))
            held, test = split_validation(extracted[1], 8_000)
            return Problem(name, extracted[0], held, test, None, _seeded(head), SETTINGS[name])


def _make(name: str, task: Task, net: Callable[..., nn.Module], held: int = 2_000) -> Problem:
    validation, test = split_validation(task.test, len(task.test) - held)
    return Problem(name, task.train, validation, test, task.normalise, _seeded(net), SETTINGS[name])


def _cross(public: Problem, private: Problem) -> Problem:
    """CIFAR-10 by what the paper's network learned on CIFAR-100: 64 channels at 2 x 2 places."""
    backbone = nn.Sequential(
        *list(load_model(public, 0).children())[:6], nn.AdaptiveAvgPool2d(2), nn.Flatten()
    ).eval()
    assert public.prepare is not None
    prepare = public.prepare

    def extract(samples: Samples) -> Samples:
        with torch.no_grad():
            found = [backbone(prepare(part)) for part in samples.inputs.split(500)]
        return _rescale(Samples(torch.cat(found), samples.targets, samples.ids))

    parts = [extract(part) for part in (private.train, private.validation, private.test)]
    head = functools.partial(networks.head_net, 256, 10)
    return Problem("crossed_cifar10", *parts, None, _seeded(head), SETTINGS["crossed_cifar10"])


def _seeded(net: Callable[..., nn.Module]) -> Callable[[int], nn.Module]:
    return lambda seed: net(generator=torch.Generator().manual_seed(seed))


def _project(samples: Samples) -> Samples:
    """1,280 features to the 512 that the paper's head takes, by a fixed random projection."""
    generator = torch.Generator().manual_seed(512)
    directions = torch.randn(samples.inputs.shape[1], 512, generator=generator)
    x = samples.inputs @ (directions / samples.inputs.shape[1] ** 0.5)
    return _rescale(Samples(x, samples.targets, samples.ids))


def _rescale(samples: Samples) -> Samples:
    """d features scaled to length √d, each sample alone: no constant is computed from the data."""
    x = samples.inputs
    x = x / x.norm(dim=1, keepdim=True) * x.shape[1] ** 0.5
    return Samples(x.contiguous(), samples.targets, samples.ids)


def load_model(problem: Problem, seed: int, folder: Path = MODELS) -> nn.Module:
    """The model that must forget; trained here, and kept, if it is not there."""
    path = folder / f"{problem.name}-{seed}.safetensors"
    net = problem.build(seed)
    if path.exists():
        net.load_state_dict(load_file(path))
        return net
    setting = problem.setting
    train(
        net,
        problem.train,
        epochs=setting.epochs,
        learning_rate=setting.learning_rate,
        batch_size=setting.batch_size,
        weight_decay=setting.weight_decay,
        schedule="one-cycle",
        prepare=problem.prepare,
        seed=seed,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    save_file(net.state_dict(), partial)
    partial.replace(path)
    return net
