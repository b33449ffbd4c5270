"""A tiny job in a folder of its own, and the real command: for tests of jobs and commands."""

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from expunge.cli.main import main

OWN = """
import os
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import expunge


class Slow(nn.Linear):
    def forward(self, x):
        if torch.is_grad_enabled():
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return super().forward(x)


def build():
    return Slow(4, 3)


def load():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(7))
    y = x[:, :3].argmax(1)
    test = expunge.Data((x[50:], y[50:]))
    return expunge.Data((x[:50], y[:50]), ids=[f"p{i}" for i in range(50)], test=test)


def load_pairs():
    x, y = load().examples
    return expunge.Data(list(zip(x, y)), ids=[f"p{i}" for i in range(50)])


def load_regression():
    x, y = load().examples
    return expunge.Data((x, 2 * x[:, :3]), ids=[f"p{i}" for i in range(50)])


def train(model, examples, seed):
    x, y = examples
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(int(os.environ.get("EPOCHS", "5"))):
        for batch in torch.randperm(len(x)).split(10):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def train_torn(model, examples, seed):
    raise ValueError("row 40 is torn")


def fail():
    raise RuntimeError("the disk of the shop is on fire")


def nothing():
    return 3
"""

EXACT: dict[str, dict[str, Any]] = {
    "model": {"build": "own.py:build", "old": "weights.safetensors"},
    "data": {"load": "own.py:load", "forget": "forget.txt"},
    "training": {"function": "own.py:train"},
    "output": {"dir": "run"},
}
NOISE: dict[str, dict[str, Any]] = EXACT | {
    "training": {"epochs": 2, "learning_rate": 0.1, "batch_size": 10},
    "method": {
        "name": "gradient-clipping", "epsilon": 1.0, "start_clip": 0.05, "grad_clip": 1.0,
        "learning_rate": 0.1, "weight_decay": 1.0, "steps": 4, "batch_size": 10,
    },
}  # fmt: skip
LINEAR: dict[str, dict[str, Any]] = {
    "data": {"load": "own.py:load"},
    "method": {"name": "linear-model"},
    "output": {"dir": "release-1"},
}
SHARDS: dict[str, dict[str, Any]] = {
    "model": {"build": "own.py:build"},
    "data": {"load": "own.py:load"},
    "training": {"function": "own.py:train"},
    "method": {"name": "shards", "seed": "a public text", "shards": 3, "slices": 2},
    "output": {"dir": "release-1"},
}


def write_job(
    folder: Path, job: dict[str, dict[str, Any]] = EXACT, name: str = "job.toml", **changes: Any
) -> Path:
    """A job with some keys changed (None: left out), its code, its old model and its list."""
    tables = {table: dict(keys) for table, keys in job.items()}
    for table, keys in changes.items():
        tables[table] = {**tables.get(table, {}), **keys} if keys is not None else {}
    lines = list[str]()
    for table, keys in tables.items():
        if keys or changes.get(table, ()) is not None:
            lines.append(f"[{table}]")
        lines += [f"{key} = {json.dumps(v)}" for key, v in keys.items() if v is not None]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n")
    if not (folder / "own.py").exists():
        (folder / "own.py").write_text(OWN)
    if not (folder / "forget.txt").exists():
        (folder / "forget.txt").write_text("p3\np7\np31\n")
    if not (folder / "weights.safetensors").exists():
        torch.manual_seed(11)
        save_file(dict(torch.nn.Linear(4, 3).state_dict()), folder / "weights.safetensors")
    return folder / name


def command(*arguments: str | Path) -> list[str]:
    """The real command line, as arguments of a process."""
    return [sys.executable, "-m", "expunge", *map(str, arguments)]


def make_environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | more


def run(
    *arguments: str | Path, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, cwd=cwd,
        env=make_environment(**more),
    )  # fmt: skip


def call(
    *arguments: str | Path, program: str = "expunge", main: Callable[[], Any] = main
) -> subprocess.CompletedProcess[str]:
    """What the command does, in this process: torch is imported already."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def succeed(*arguments: str | Path) -> str:
    """What a command that must work prints."""
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refuse(*arguments: str | Path, code: int = 2) -> str:
    """What a command says that must not work."""
    done = call(*arguments)
    assert done.returncode == code, done.stderr
    return done.stderr


def list_files(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash; byte code aside."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
