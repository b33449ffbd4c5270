"""Small models, data and recipes that the engine's tests share."""

import copy
import math
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from expunge import GradientClipping, ModelClipping, OutputPerturbation
from expunge.noisy.model import list_uncertified

GRADIENT = GradientClipping(
    start_clip=0.5, grad_clip=1.0, learning_rate=0.1, weight_decay=2.0, steps=7, noise_std=0.3
)
SCHEDULED = GradientClipping(
    start_clip=0.5,
    grad_clip=0.5,
    learning_rate=[0.2, 0.1, 0.05, 0.1],
    weight_decay=1.0,
    steps=4,
    noise_std=[0.2, 0.3, 0.25, 0.5],
    start_noise_std=0.4,
    model_clip=2.0,
)
MODEL = ModelClipping(model_clip=1.0, learning_rate=0.1, weight_decay=1.0, noise_std=0.5, steps=6)
MODEL_STARTED = ModelClipping(
    model_clip=1.0,
    learning_rate=[0.1, 0.2],
    weight_decay=0.0,
    noise_std=[0.5, 0.7],
    steps=2,
    start_clip=0.5,
    start_noise_std=0.6,
)
OUTPUT = OutputPerturbation(start_clip=0.5, noise_std=1.5)
NOISY = {
    "gradient-clipping": GRADIENT,
    "scheduled": SCHEDULED,
    "model-clipping": MODEL,
    "model-clipping-started": MODEL_STARTED,
    "output-perturbation": OUTPUT,
}


def plain(steps: int, learning_rate=0.1, weight_decay=0.0) -> dict:
    """The methods with no clip and no noise, which are then plain SGD."""
    free = GradientClipping(
        start_clip=math.inf,
        grad_clip=math.inf,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        steps=steps,
        noise_std=0.0,
    )
    return {
        "gradient-clipping": free,
        "model-clipping": ModelClipping(
            model_clip=math.inf,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            noise_std=0.0,
            steps=steps,
        ),
    }


def make_mlp(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def make_batches(count: int = 3, size: int = 8, features: int = 6, seed: int = 1) -> list:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, features, generator=g), torch.randint(0, 3, (size,), generator=g))
        for _ in range(count)
    ]


def train_by_hand(model, batches, steps, lr, weight_decay=0.0, centre=None):
    """torch.optim.SGD over the same batches; a centre is an explicit pull."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)
    for t in range(steps):
        x, y = batches[t % len(batches)]
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def flatten(model) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def equal(first, second) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def without_onednn():
    """Some virtual machines announce bfloat16 instructions that they do not have."""
    torch.backends.mkldnn.set_flags(False, None, None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(True, None, None)


def public_part(model):
    """The tensors of a model that are not certified, as somebody else holds them."""
    return {name: t.detach().clone() for name, t in list_uncertified(model).items()}
