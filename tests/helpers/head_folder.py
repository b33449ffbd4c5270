"""A tiny job of a head built to forget, in a folder of its own."""

import json
from pathlib import Path

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class Stubborn(nn.Linear):
    def train(self, mode=True):
        return super().train(True)


class Moody(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(1)


class Torn(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        if i == 40:
            raise ValueError("row 40 is torn")
        return torch.ones(4), 0


def make_public(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh())


def build():
    return make_public(0)


def build_other():
    return make_public(1)


def build_stubborn():
    return Stubborn(4, 6)


def build_moody():
    return Moody(4, 6)


def build_frozen():
    head = nn.Linear(6, 3)
    return nn.Sequential(make_public(0).requires_grad_(False), head)


def build_wide():
    return nn.Linear(5, 6)


def nothing():
    return 3


def load():
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    test = TensorDataset(x[60:], y[60:])
    ids = [f"p{i // 2}" for i in range(60)]
    return {"train": TensorDataset(x[:60], y[:60]), "ids": ids, "test": test}


def change(place, x=None, y=None, **more):
    inputs, targets = (t.clone() for t in load()["train"].tensors)
    if x is not None:
        inputs[place] = x
    if y is not None:
        targets = targets.double() if isinstance(y, float) else targets
        targets[place] = y
    return load() | {"train": (inputs, targets)} | more


def load_few():
    found = load()
    x, y = found["train"].tensors
    return found | {"train": (x[:40], y[:40]), "ids": found["ids"][:40]}


def load_label():
    return change(7, y=3)


def load_half():
    return change(7, y=0.5)


def load_nan():
    return change(7, x=float("nan"))


def load_short():
    return load() | {"ids": ["p0"]}


def load_unseen():
    return load() | {"ids": ["p0\\u200b"] * 60}


def load_more():
    return load() | {"validation": None}


def load_collated():
    return load() | {"collate": list}


def load_torn():
    return load() | {"train": Torn()}


def load_broad():
    return {"train": (torch.ones(3, 5), torch.arange(3)), "ids": ["a", "b", "c"]}
"""

JOB: dict = {
    "model": {"build": "own.py:build"},
    "data": {"load": "own.py:load"},
    "features": {"lift": 5, "seed": "public"},
    "method": {"name": "statistics-head", "classes": 3},
}


def write_head_job(folder: Path, name: str = "job.toml", **changes: dict | None) -> Path:
    """The job with some keys changed (None: left out), and its code."""
    lines = []
    for table in [*JOB, *(changes.keys() - JOB.keys())]:
        given = changes.get(table, {})
        if given is None:
            continue
        lines.append(f"[{table}]")
        keys = JOB.get(table, {}) | given
        lines += [f"{k} = {json.dumps(v)}" for k, v in keys.items() if v is not None]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n")
    (folder / "own.py").write_text(OWN)
    return folder / name
