"""The accountant against dp_accounting, and how long commands take to answer.

A million scheduled steps, per step, against the Rényi accountant of dp_accounting composing a
thousand Gaussians; ``expunge --help``, ``account`` and ``verify`` as commands, from a cold start,
against ``import torch``, which none of them needs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import dp_accounting
import numpy as np
from dp_accounting import rdp

import expunge
from benchmarks.timing import Row, compare, measure

TARGETS = {
    "guarantee of 10⁶ steps / dp_accounting's RDP of 10³ Gaussians, per step": 0.01,
    "expunge --help / import torch": 0.25,
    "expunge account / import torch": 0.5,
    "expunge verify / import torch": 0.5,
}
STEPS, EVENTS = 1_000_000, 1_000
ACCOUNT = (
    "account gradient-clipping --start-clip 1 --grad-clip 1 --learning-rate 0.1 --weight-decay 1 "
    "--steps 3 --noise-std 5 --delta 1e-5"
)


def run() -> list[Row]:
    return [*run_accountant(), *run_commands()]


def run_accountant() -> list[Row]:
    draw = np.random.default_rng(0)
    rates, noise = draw.uniform(0, 1e-3, STEPS), draw.uniform(0.1, 1.0, STEPS)
    scheduled = expunge.GradientClipping(0.1, 1.0, rates, 10.0, STEPS, noise)
    events = [dp_accounting.GaussianDpEvent(10 * float(x)) for x in noise[:EVENTS]]

    def compose() -> float:
        accountant = rdp.RdpAccountant()
        for event in events:
            accountant.compose(event)
        return accountant.get_epsilon(1e-5)

    times = measure({"million": lambda: expunge.guarantee(scheduled, delta=1e-5), "rdp": compose})
    (name, *_), scale = TARGETS, EVENTS / STEPS
    return [compare(name, times, "million", "rdp", scale=scale)]


def run_commands() -> list[Row]:
    command = str(Path(sys.executable).with_name("expunge"))
    with tempfile.TemporaryDirectory() as folder:
        lines = {
            "import torch": [sys.executable, "-c", "import torch"],
            "--help": [command, "--help"],
            "account": [command, *ACCOUNT.split()],
            "verify": [command, "verify", str(make_release(Path(folder)))],
        }
        cases = {
            name: lambda words=words: subprocess.run(words, check=True, capture_output=True)
            for name, words in lines.items()
        }
        times = measure(cases)
    return [
        compare(f"expunge {name} / import torch", times, name, "import torch")
        for name in ("--help", "account", "verify")
    ]


def make_release(folder: Path) -> Path:
    from expunge.linear_model import Ridge

    x = np.random.default_rng(0).normal(size=(50, 3))
    model = Ridge().fit(x, x[:, 0], ids=[f"user-{i}" for i in range(50)])
    return model.forget(["user-3"]).save(folder / "run")
