"""The accountants against ``dp_accounting`` doing the nearest equivalent work."""

from __future__ import annotations

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
    ]
