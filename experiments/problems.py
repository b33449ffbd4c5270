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

import debian
import features
import images
from expunge import Data, Training
from networks import Network, cifar_net, dense_net
from samples import Ids, Samples, order_names, split_validation, take_names

MODELS = Path(__file__).parent / "results" / "models"
FEATURE_SIZE = 96
FORGET_FRACTION = 0.1
CIFAR = ("cifar10", "cifar100")


@dataclass(frozen=True)
class Setting:
    """How a model that must forget was trained, how models are trained afterwards; how many seeds
    a figure has, and of how many such models: run s starts from model s modulo that number."""

    epochs: int
    learning_rate: float
    seeds: int = 3
    models: int = 3
    tuned_rate: float = 0.06
    batch_size: int = 128
    weight_decay: float = 5e-4

    def train(self, epochs: float, rate: float) -> Training:
        """The paper's training: SGD without momentum, linear one-cycle."""
        return Training(
            epochs=epochs, learning_rate=rate, batch_size=self.batch_size,
            weight_decay=self.weight_decay, schedule="one-cycle",
        )  # fmt: skip


SETTINGS = {
    "mnist": Setting(30, 0.06, 5, 5),
    "cifar10": Setting(100, 0.1, models=1),
    "cifar100": Setting(5, 0.1),
    "crossed_cifar10": Setting(100, 0.1),
    **{f"{kind}_{data}": Setting(100, 0.1) for kind in ("transfer", "features") for data in CIFAR},
    "debian": Setting(30, 0.1),
    "digits": Setting(3, 0.1, 2, 2),
}


@dataclass(frozen=True, eq=False)
class Problem:
    """Data in its parts, the public seeded network, and the settings."""

    name: str
    train: Samples
    validation: Samples
    test: Samples
    build: Callable[[int], nn.Module]
    forget_seed: int = 0
    forget_count: int | None = None

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.name]

    @functools.cached_property
    def data(self) -> Data:
        return self.train.data

    @functools.cached_property
    def people(self) -> Ids:
        """``forget_count`` random identifiers, or a tenth: those who go."""
        order = order_names(self.train.ids, self.forget_seed)
        return order[: self.forget_count or round(FORGET_FRACTION * len(order))]

    @functools.cached_property
    def forgotten(self) -> Samples:
        return take_names(self.train, self.people)

    @property
    def parts(self) -> dict[str, Samples]:
        """What accuracies are measured on."""
        return {"validation": self.validation, "test": self.test, "forget": self.forgotten}

    @property
    def retained(self) -> int:
        """How many examples stay."""
        return len(self.train) - len(self.forgotten)


@functools.cache
def load_problem(name: str) -> Problem:
    """A problem by its name; "digits" is the small one that the smoke runs use."""
    kind, _, data = name.partition("_")
    match name:
        case "mnist":
            return _make(name, images.load_mnist(), _dense(784, 5, 10))
        case "cifar10" | "cifar100":
            found = images.load_cifar(name)
            return _make(name, found, functools.partial(cifar_net, found.classes))
        case "digits":
            return _make(name, images.load_digits(), _dense(64, 16, 10), held=50)
        case "crossed_cifar10":
            return _cross(load_problem("cifar100"), load_problem("cifar10"))
        case "debian":
            extract = functools.partial(
                features.extract, name="minilm", load=features.load_minilm, batch_size=8_192
            )
            parts = [_rescale(extract(part)) for part in debian.load()]
            return Problem(name, *parts, _dense(384, 32, 32, int(parts[0].targets.max()) + 1))
        case _:
            task = images.load_cifar(data)
            load = functools.partial(features.ImageBackbone, FEATURE_SIZE)
            change = _project if kind == "transfer" else _rescale
            train, test = (
                change(features.extract(part, f"efficientnet-lite0-{FEATURE_SIZE}", load))
                for part in (task.train, task.test)
            )
            held, test = split_validation(test, 8_000)
            return Problem(
                name, train, held, test, _dense(train.inputs.shape[1], 32, 32, task.classes)
            )


def _dense(*sizes: int) -> Callable[[int], Network]:
    return functools.partial(dense_net, sizes)


def _make(
    name: str, found: images.Images, net: Callable[..., Network], held: int = 2_000
) -> Problem:
    def build(seed: int) -> Network:
        made = net(seed=seed)
        made.mean, made.std = found.mean, found.std
        return made

    validation, test = split_validation(found.test, len(found.test) - held)
    return Problem(name, found.train, validation, test, build)


def _cross(public: Problem, private: Problem) -> Problem:
    """CIFAR-10 by what the paper's network learned on CIFAR-100: 64 channels at 2 x 2 places."""
    learned = load_model(public, 0)
    assert isinstance(learned, Network)
    backbone = Network(*list(learned.children())[:6], nn.AdaptiveAvgPool2d(2), nn.Flatten()).eval()
    backbone.mean, backbone.std = learned.mean, learned.std

    def extract(samples: Samples) -> Samples:
        with torch.no_grad():
            found = [backbone(part) for part in samples.inputs.split(500)]
        return _rescale(Samples(torch.cat(found), samples.targets, samples.ids))

    parts = [extract(part) for part in (private.train, private.validation, private.test)]
    return Problem("crossed_cifar10", *parts, _dense(256, 32, 32, 10))


def _project(samples: Samples) -> Samples:
    """1,280 features to the 512 that the paper's head takes, by a fixed random projection."""
    generator = torch.Generator().manual_seed(512)
    directions = torch.randn(samples.inputs.shape[1], 512, generator=generator)
    x = samples.inputs @ (directions / samples.inputs.shape[1] ** 0.5)
    return _rescale(Samples(x, samples.targets, samples.ids))


def _rescale(samples: Samples) -> Samples:
    """d features scaled to length √d, each sample alone: no constant is computed from the data."""
    x: Tensor = samples.inputs
    x = x / x.norm(dim=1, keepdim=True) * x.shape[1] ** 0.5
    return Samples(x.contiguous(), samples.targets, samples.ids)


def load_model(problem: Problem, seed: int, folder: Path = MODELS) -> nn.Module:
    """The model that must forget; trained here, and kept, if it is not there."""
    path = folder / f"{problem.name}-{seed}.safetensors"
    net = problem.build(seed)
    if not path.exists():
        setting = problem.setting
        train = setting.train(setting.epochs, setting.learning_rate)
        train(net, problem.train.pair, seed=seed)
        save_model(net, path)
    net.load_state_dict(load_file(path))
    return net


def save_model(net: nn.Module, path: Path) -> None:
    """The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    save_file(net.state_dict(), partial)
    partial.replace(path)
