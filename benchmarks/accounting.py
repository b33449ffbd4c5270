"""The accountants against ``dp_accounting`` doing the nearest equivalent work, and cold starts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

from benchmarks.timing import compare, measure
from expunge import GradientClipping, calibrate, guarantee

STEPS = 1_000_000


def run() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rates, noise = rng.uniform(0, 1e-3, STEPS), rng.uniform(0.1, 1.0, STEPS)

    def make(scale: float) -> GradientClipping:
        return GradientClipping(0.1, 1.0, rates, 10.0, STEPS, scale * noise)

    recipe = make(1.0)
    events = [dp_accounting.GaussianDpEvent(10 * float(x)) for x in noise[:1000]]

    def account_rdp() -> float:
        accountant = rdp.RdpAccountant()
        for event in events:
            accountant.compose(event)
        return accountant.get_epsilon(1e-5)

    def account_pld() -> float:
        accountant = pld.PLDAccountant()
        for event in events[:20]:
            accountant.compose(event)
        return accountant.get_epsilon(1e-5)

    times = measure(
        {
            "account a million steps": lambda: guarantee(recipe, delta=1e-5),
            "dp_accounting RDP, a thousand steps": account_rdp,
            "dp_accounting PLD, twenty steps": account_pld,
        },
        repeats=5,
    )
    times |= measure(
        {"calibrate a million steps": lambda: calibrate(make, epsilon=1.0, delta=1e-5)}, repeats=5
    )
    return [
        compare(
            "account 10⁶ scheduled steps / RDP of 10³ Gaussians, per step",
            times,
            "account a million steps",
            "dp_accounting RDP, a thousand steps",
            scale=1e-3,
            target=1.0,
        ),
        compare(
            "account 10⁶ scheduled steps / PLD of 20 Gaussians, per step",
            times,
            "account a million steps",
            "dp_accounting PLD, twenty steps",
            scale=20 / STEPS,
            target=1.0,
        ),
        compare(
            "calibrate 10⁶ scheduled steps / RDP of 10³ Gaussians, per step",
            times,
            "calibrate a million steps",
            "dp_accounting RDP, a thousand steps",
            scale=1e-3,
            target=1.0,
        ),
        *cold_starts(),
    ]


def cold_starts() -> list[dict[str, Any]]:
    """Whole processes, against one that only starts Python and against one that imports torch."""

    def process(code: str) -> Any:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

    def command(line: str) -> Any:
        return lambda: subprocess.run(
            [sys.executable, "-m", "expunge", *line.split()], check=True, capture_output=True
        )

    times = measure(
        {
            "bare Python": process("pass"),
            "import scipy.special": process("import scipy.special"),
            "import torch": process("import torch"),
            "expunge --help": command("--help"),
            "expunge account": command(
                "account gradient-clipping --start-clip 0.01 --grad-clip 100 --learning-rate 1e-4 "
                "--weight-decay 10 --steps 1 --noise-std 0.02827 --delta 1e-5"
            ),
        },
        repeats=5,
    )
    return [
        compare(f"cold start of {case} / {base}", times, case, base, target=target)
        for case, base, target in (
            ("expunge --help", "import torch", 0.25),
            ("expunge account", "import torch", 0.5),
            ("expunge account", "import scipy.special", 2.5),
        )
    ]
