"""Peak memory in parameter vectors (4 bytes a parameter), each measurement in its own process.

The noisy update alone, beyond parameters and gradients, needs the vector on its grid in float64:
two units. A whole ``unlearn`` needs its own copy of the model and a gradient besides: four.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

LARGE, HUGE = 11_000_000, 100_000_000
PEAK = """
import json, sys, torch
from pathlib import Path
def peak():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
size = int(sys.argv[1])
torch.set_num_threads(1)
"""
UPDATE = """
from benchmarks.engine import make_update
make_update(100_000)[1]()
parameters = [torch.zeros(size // 100, 100)]
gradients = [torch.full_like(p, 1e-3) for p in parameters]
before = peak()
make_update(size, parameters=parameters, gradients=gradients)[1]()
print(json.dumps((peak() - before) / (4 * size)))
"""
UNLEARN = """
from torch.nn.functional import cross_entropy
from expunge import GradientClipping, SeededNoise, unlearn
recipe = GradientClipping(start_clip=1.0, grad_clip=1.0, learning_rate=0.1, weight_decay=1.0,
                          steps=2, noise_std=0.1)
def forget(size):
    model = torch.nn.Linear(size // 1000, 1000, bias=False)
    batch = torch.ones(1, size // 1000), torch.zeros(1, dtype=torch.long)
    before = peak()
    unlearn(model, [batch], recipe, loss_fn=cross_entropy, noise=SeededNoise(0), centre="zero")
    return (peak() - before) / (4 * size)
forget(10_000)
print(json.dumps(forget(size)))
"""


def run() -> list[dict[str, Any]]:
    rows = [_measure(f"noisy update of {HUGE:,} parameters, beyond them", UPDATE, HUGE, 2.02)]
    for size in (LARGE, HUGE):
        name = f"unlearn on {size:,} parameters, beyond the model given"
        rows.append(_measure(name, UNLEARN, size, None))
    return rows


def _measure(name: str, code: str, size: int, target: float | None) -> dict[str, Any]:
    command = [sys.executable, "-c", PEAK + code, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    vectors = float(json.loads(done.stdout))
    return {
        "name": f"peak memory of {name}, in parameter vectors",
        "ratio": vectors,
        "target": target,
        "direction": "at most",
        "met": None if target is None else vectors <= target,
        "limit": "2 for the update, 4 for unlearn",
    }
