"""The release beside a head that is trained again, in the usual way, without these people."""

from pathlib import Path

import torch
from own import build, load
from torch import nn
from torch.nn.functional import cross_entropy

import expunge


def retrain(network: nn.Module, data: dict, gone: set[str]) -> nn.Module:
    """A softmax head on the frozen network, from nothing, on those who remain."""
    torch.manual_seed(1)
    images, targets = data["train"].tensors
    stays = torch.tensor([person not in gone for person in data["ids"]])
    features, targets, head = network(images[stays]), targets[stays], nn.Linear(768, 10)
    optimizer = torch.optim.Adam(head.parameters(), 0.003)
    for _ in range(40):
        for batch in torch.randperm(len(targets)).split(50):
            optimizer.zero_grad()
            cross_entropy(head(features[batch]), targets[batch]).backward()
            optimizer.step()
    return nn.Sequential(network, head)


if __name__ == "__main__":
    data, network = load(), build().eval()
    images, targets = data["test"].tensors
    again = retrain(network, data, set(Path("forget.txt").read_text().split()))
    released = expunge.load_model("release-2", network=network)
    found, other = (expunge.evaluate(model, images, targets) for model in (released, again))
    low, high = other.interval()
    print(f"released: {found.accuracy:.1%} right of {found.count}")
    print(f"retrained: {other.accuracy:.1%}, with 99 % confidence {low:.1%} to {high:.1%}")
    print("level" if low <= found.accuracy <= high else "not level")
