"""A small ResNet with BatchNorm, trained from scratch on people's digits: python own.py."""

from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

TEST = 360


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def build() -> nn.Module:
    """The network, with weights that know nothing yet."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Block(8),
        nn.MaxPool2d(2), nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Block(16),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def load() -> dict:
    """scikit-learn's digits, ten by each person; the last images are the test set."""
    images, targets = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    targets, people = torch.tensor(targets), len(images) - TEST
    return {
        "train": TensorDataset(images[:people], targets[:people]),
        "ids": [f"person-{i // 10:03d}" for i in range(people)],
        "test": TensorDataset(images[people:], targets[people:]),
    }


def train(seed: int, without: Collection[str] = ()) -> nn.Module:
    """The usual training, on all people but some."""
    torch.manual_seed(seed)
    model, data = build(), load()
    stays = torch.tensor([person not in without for person in data["ids"]])
    inputs, targets = (part[stays] for part in data["train"].tensors)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    steps = 12 * -(-len(targets) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    for _ in range(12):
        for batch in torch.randperm(len(targets)).split(64):
            optimizer.zero_grad()
            cross_entropy(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


if __name__ == "__main__":
    save_file(train(seed=0).state_dict(), Path("weights.safetensors"))
    print("weights.safetensors: the model in use")
