"""A tiny job in a folder of its own, and the real command, that the tests of jobs share."""

import hashlib
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from expunge.cli.main import main

OWN = """
import os
import time

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class Slow(nn.Linear):
    def forward(self, x):
        if torch.is_grad_enabled():
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return super().forward(x)


class Rows(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def build():
    return Slow(4, 3)


def build_norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def make(n=60):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, 4, generator=g)
    return x, x[:, :3].argmax(1)


def load():
    x, y = make()
    test = TensorDataset(x[50:], y[50:])
    ids = [f"p{i}" for i in range(50)]
    return {"train": TensorDataset(x[:50], y[:50]), "ids": ids, "test": test}


def load_pair():
    x, y = make()
    return load() | {"train": (x[:50], y[:50])}


def load_rows():
    x, y = make()
    return load() | {"train": Rows(x[:50], y[:50])}


def load_regression():
    x, _ = make()
    return {"train": (x, x[:, :3] * 2)}


def load_dicts():
    x, y = make()
    return load() | {"train": [{"x": a, "labels": b} for a, b in zip(x[:50], y[:50])], "test": None}


class Torn(Rows):
    def __getitem__(self, i):
        if i == 40:
            raise ValueError("row 40 is torn")
        return super().__getitem__(i)


def load_torn():
    x, y = make()
    return load() | {"train": Torn(x[:50], y[:50])}


class Lost(Rows):
    def __getitem__(self, i):
        if i == 40:
            raise OSError(5, "Input/output error", "/data/40")
        return super().__getitem__(i)


def load_lost():
    x, y = make()
    return load() | {"train": Lost(x[:50], y[:50])}


def fail():
    raise RuntimeError("the disk of the shop is on fire")


def nothing():
    return 3


seen = []


def track(event):
    seen.append(event)
    with open(os.environ["TRACKED"], "a") as file:
        file.write(event["event"] + "\\n")
"""

JOB: dict = {
    "model": {"build": "own.py:build", "weights": "weights.safetensors"},
    "data": {"load": "own.py:load", "forget": "forget.txt"},
    "target": {"epsilon": 1.0, "delta": 1e-5},
    "method": {
        "name": "gradient-clipping",
        "start_clip": 0.05,
        "grad_clip": 1.0,
        "learning_rate": 0.1,
        "weight_decay": 1.0,
        "steps": 4,
        "batch_size": 10,
    },
    "finetune": {"epochs": 2, "learning_rate": 0.1, "batch_size": 10},
    "output": {"dir": "run"},
}


def write_job(folder: Path, **changes: dict) -> Path:
    """The job with some keys changed, its model and its list."""
    job = {name: dict(table) for name, table in JOB.items()}
    for table, keys in changes.items():
        job[table] = {**job.get(table, {}), **keys}
    lines = []
    for table, keys in job.items():
        lines.append(f"[{table}]")
        lines += [
            f"{key} = {json.dumps(value)}" for key, value in keys.items() if value is not None
        ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.toml").write_text("\n".join(lines) + "\n")
    (folder / "own.py").write_text(OWN)
    if not (folder / "forget.txt").exists():
        (folder / "forget.txt").write_text("p3\np7\np31\n")
    if not (folder / "weights.safetensors").exists():
        torch.manual_seed(0)
        linear = torch.nn.Linear(4, 3)
        save_file(dict(linear.state_dict()), folder / "weights.safetensors")
    return folder / "job.toml"


def command(*arguments: str | Path) -> list[str]:
    """The real command line, as arguments of a process."""
    return [sys.executable, "-m", "expunge", *map(str, arguments)]


def make_environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | more


def run(
    *arguments: str | Path, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=make_environment(**more),
    )


def call(*arguments: str | Path, together: bool = False) -> subprocess.CompletedProcess[str]:
    """What the command does, in this process: torch is imported already."""
    out = io.StringIO()
    err = out if together else io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["expunge", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def list_files(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash; byte code aside."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
