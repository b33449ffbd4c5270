"""How the model is trained: python -m shop.train makes the model in use, on all customers."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import expunge
from shop.data import load
from shop.model import build


def train(model: nn.Module, examples: tuple[torch.Tensor, torch.Tensor], seed: int) -> None:
    """A loop of one's own, in place: expunge calls the same one, without those who leave."""
    inputs, targets = examples
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    for _ in range(30):
        for batch in torch.randperm(len(inputs)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()


if __name__ == "__main__":
    torch.manual_seed(1)
    model, data = build(), load()
    train(model, data.examples, seed=1)
    save_file(model.state_dict(), Path("weights.safetensors"))
    right = expunge.evaluate(model, data.test)
    print(f"weights.safetensors: {right.accuracy:.1%} right on {right.count} test customers")
