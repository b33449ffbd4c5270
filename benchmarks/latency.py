"""Whole processes of the command line against one that only starts Python; none imports torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.timing import compare, measure
from expunge import OutputPerturbation, SeededNoise, certify, unlearn, write_run

ACCOUNT = (
    "account gradient-clipping --start-clip 0.01 --grad-clip 100 --learning-rate 1e-4 "
    "--weight-decay 10 --steps 1 --noise-std 0.02827 --delta 1e-5"
)
WATCHED = """
import runpy, sys
sys.argv = ["expunge", *{arguments!r}]
try:
    runpy.run_module("expunge", run_name="__main__")
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "--help": ["--help"],
            "account": ACCOUNT.split(),
            "verify": ["verify", str(_make_run(Path(folder) / "run"))],
        }
        return [*_compare_starts(commands), _count_torch(commands)]


def _make_run(directory: Path) -> Path:
    model = nn.Linear(784, 5)
    recipe = OutputPerturbation(start_clip=0.01, noise_std=0.08)
    done = unlearn(
        model, [(torch.zeros(1, 784), torch.zeros(1))], recipe, noise=SeededNoise(0), centre="zero"
    )
    certificate = certify(done.record, delta=1e-5)
    return write_run(directory, model=done.model, record=done.record, certificate=certificate)


def _compare_starts(commands: dict[str, list[str]]) -> list[dict[str, Any]]:
    def start(arguments: list[str]) -> Callable[[], object]:
        line = [sys.executable, *arguments]
        return lambda: subprocess.run(line, check=True, capture_output=True)

    cases = {
        "bare Python": start(["-c", "pass"]),
        "import scipy.special": start(["-c", "import scipy.special"]),
        "import torch": start(["-c", "import torch"]),
    }
    cases |= {name: start(["-m", "expunge", *line]) for name, line in commands.items()}
    times = measure(cases, repeats=5)
    pairs = [
        ("--help", "bare Python", None),
        ("account", "bare Python", None),
        ("verify", "bare Python", None),
        ("--help", "import torch", 0.25),
        ("account", "import torch", 0.5),
        ("account", "import scipy.special", 2.5),
        ("verify", "import torch", 0.5),
    ]
    return [
        compare(f"cold start of expunge {case} / {base}", times, case, base, target=target)
        for case, base, target in pairs
    ]


def _count_torch(commands: dict[str, list[str]]) -> dict[str, Any]:
    found = 0
    for arguments in commands.values():
        code = WATCHED.format(arguments=arguments)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        found += done.stderr.splitlines()[-1] == "True"
    name = f"commands that import torch, of {', '.join(commands)}"
    return {"name": name, "ratio": found, "target": 0, "direction": "at most", "met": found == 0}
