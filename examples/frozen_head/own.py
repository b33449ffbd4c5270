"""A published network, frozen, and the digits of people: python own.py makes the network's file."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import expunge

BACKBONE = Path(__file__).with_name("backbone.safetensors")
PUBLIC, TEST = 600, 300  # the first images stand for somebody else's data, the last are the test


def read() -> tuple[torch.Tensor, torch.Tensor]:
    """All images of scikit-learn's digits, their pixels from 0 to 1."""
    images, targets = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return pixels, torch.tensor(targets)


def make_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip


def build() -> nn.Module:
    """The network as it was published. It never saw the people below."""
    network = make_network()
    network.load_state_dict(load_file(BACKBONE))
    return network.requires_grad_(False)


def load() -> expunge.Data:
    """Four digits of each person, and a test set of digits by others."""
    images, targets = (part[PUBLIC:] for part in read())
    people = len(targets) - TEST
    ids = [f"person-{i // 4:03d}" for i in range(people)]
    test = expunge.Data((images[people:], targets[people:]))
    return expunge.Data((images[:people], targets[:people]), ids=ids, test=test)


if __name__ == "__main__":
    torch.manual_seed(0)
    images, targets = (part[:PUBLIC] for part in read())
    network, head = make_network(), nn.Linear(768, 10)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], 0.003)
    for _ in range(15):
        for batch in torch.randperm(PUBLIC).split(50):
            optimizer.zero_grad()
            cross_entropy(head(network(images[batch])), targets[batch]).backward()
            optimizer.step()
    save_file(network.state_dict(), BACKBONE)
    print("backbone.safetensors: what somebody published")
