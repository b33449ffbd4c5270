"""Memory, communication and time of one noisy step for models that do not fit here, on paper.

``python -m benchmarks.scale`` prints the tables of docs/scale.md from the costs per parameter that
were measured here (benchmarks/results/scale.json) and the volumes of the engine's collectives;
``python -m benchmarks.scale --measure`` measures those costs again and writes them and the page.

With N parameters on P devices, a process and a core of its host for each:

    replicated  memory 2 N + 2 N + 8 N, network 2 (P - 1)/P · 4 N, noise and update N u
    sharded     all of it divided by P, but the network 3 (P - 1)/P · 2 N, and two blocks gathered

u is the time of one core for one coordinate: its norm, its descent, its noise and its rounding.
Weights and gradients are bfloat16, the vector counts its cells in float64; gradients are summed in
float32 where replicated and in bfloat16 where torch sums the shards. Activations are the model's
own affair and are left out, and so is the time of the forward and backward pass.

A head on n examples of d features, p = d + 1 with the constant:

    rows n (d + 24) bytes, sums 4 p² bytes, product n p² operations, factorisation p³/3

The time of the public network is its own affair too; features are rounded, stored and added.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

COSTS = Path(__file__).parent / "results" / "scale.json"
PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
MODELS = {"1B": 1e9, "8B": 8e9, "70B": 70e9}
DEVICES = (8, 64, 256, 1024)
NETWORK = 50e9
CORES = 16
DISK = 2e9
BLOCKS = 32
CHECK_EVERY = 50
MEASURED = 1 << 21
HEADS = ((50_000, 1_280), (1_000_000, 4_096), (1_000_000_000, 4_096))
MACHINES = 64
TASK_ROWS = 8_192
BUCKETS = 256


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of one core: noise and whole update per coordinate, hash per byte; exact product
    and factorisation per operation, rounding per component."""

    noise: float
    update: float
    hash: float
    product: float
    factor: float
    rounding: float


@dataclass(frozen=True)
class Step:
    """One noisy step on each device: bytes held, bytes sent, seconds of network and of a core."""

    memory: float
    sent: float
    network: float
    core: float


@dataclass(frozen=True)
class Head:
    """Learning on one core and one disk: bytes of rows and sums, operations, seconds of each; and
    of a request the seconds of its factorisation and the bytes of its bucket and sums."""

    rows: float
    sums: float
    operations: float
    product: float
    rounding: float
    writing: float
    factor: float
    bucket: float


def measure_costs() -> Costs:
    """The best of several goes, in one thread."""
    import numpy as np
    import torch
    from scipy import linalg
    from threadpoolctl import threadpool_limits

    from benchmarks.engine import make_update
    from expunge.forgettable.integers import Integers
    from expunge.forgettable.sums import add_rows
    from expunge.noisy.noise import SeededNoise

    torch.set_num_threads(1)
    z = np.random.default_rng(0).normal(size=(8_320, 1_280))
    integers = Integers()
    phi, t = integers.expand(integers.quantise(z)), np.ones((len(z), 1), np.int64)
    p = phi.shape[1]
    G = (phi.T @ phi + 1e6 * np.eye(p)).astype(np.float64)
    _, update = make_update(MEASURED, SeededNoise(0))
    stream, out, steps = SeededNoise(1).begin(), np.empty(MEASURED), iter(range(1000))
    data = bytes(1 << 26)
    with threadpool_limits(1):
        product = _time(lambda: add_rows(phi, t, integers.largest)) / (len(z) * p**2)
        factor = _time(lambda: linalg.cho_factor(G.T, lower=True, check_finite=False)) / (p**3 / 3)
    return Costs(
        product=product,
        factor=factor,
        rounding=_time(lambda: integers.quantise(z), 5) / z.size,
        noise=_time(lambda: stream.draw(out, step=next(steps), position=0, std=1e7)) / MEASURED,
        update=_time(update) / MEASURED,
        hash=_time(lambda: hashlib.sha256(data).digest()) / len(data),
    )


def _time(case: Callable[[], object], repeats: int = 15) -> float:
    """Nanoseconds that the processor spent on it, so that a busy machine counts for little."""
    found: list[int] = []
    for _ in range(repeats):
        start = time.process_time_ns()
        case()
        found.append(time.process_time_ns() - start)
    return min(found)


def plan_replicated(parameters: float, devices: int, costs: Costs) -> Step:
    """Every device holds, clips and noises the whole vector."""
    sent = 2 * (devices - 1) / devices * 4 * parameters
    return Step(12 * parameters, sent, sent / NETWORK, parameters * costs.update * 1e-9)


def plan_sharded(parameters: float, devices: int, costs: Costs) -> Step:
    """Every device holds its rows; two blocks are gathered at a time, one in use and one coming."""
    sent = 3 * (devices - 1) / devices * 2 * parameters
    memory = 12 * parameters / devices + 2 * 2 * parameters / BLOCKS
    return Step(memory, sent, sent / NETWORK, parameters / devices * costs.update * 1e-9)


def plan_head(examples: float, features: float, costs: Costs) -> Head:
    """Learning n examples, and one request."""
    rows, p = examples * (features + 24), features + 1
    return Head(
        rows=rows,
        sums=4 * p**2,
        operations=examples * p**2,
        product=examples * p**2 * costs.product * 1e-9,
        rounding=examples * features * costs.rounding * 1e-9,
        writing=rows / DISK,
        factor=p**3 / 3 * costs.factor * 1e-9,
        bucket=rows / BUCKETS,
    )


def write_tables(costs: Costs) -> str:
    """What docs/scale.md holds between its marks."""
    lines = [
        f"Measured here, one core: {costs.update:.0f} ns per parameter for the norm, the update "
        f"and the noise ({costs.noise:.0f} ns of it the noise), {costs.hash:.2f} ns per byte for "
        f"the hash. Assumed: {NETWORK / 1e9:.0f} GB/s of network for each device, {BLOCKS} blocks "
        f"in the model, {DISK / 1e9:.0f} GB/s of disk.",
        "",
        "| parameters | devices | layout | memory | sent per step | network "
        f"| noise and update, 1 core | on {CORES} cores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, parameters in MODELS.items():
        rows = [("replicated", DEVICES[0], plan_replicated(parameters, DEVICES[0], costs))]
        rows += [("sharded", p, plan_sharded(parameters, p, costs)) for p in DEVICES]
        for layout, devices, step in rows:
            lines.append(
                f"| {name} | {devices:,} | {layout} | {_bytes(step.memory)} | {_bytes(step.sent)} "
                f"| {_seconds(step.network)} | {_seconds(step.core)} "
                f"| {_seconds(step.core / CORES)} |"
            )
    lines += [
        "",
        "| parameters | checkpoint | check, replicated | hash, 8 devices | save by rank 0 "
        "| rounding, in σ |",
        "|---|---|---|---|---|---|",
    ]
    for name, parameters in MODELS.items():
        check = 12 * parameters * costs.hash * 1e-9
        whole = 2 * parameters * costs.hash * 1e-9 / DEVICES[0]
        cells = 2 * 2.0**-34 * math.sqrt(parameters)
        lines.append(
            f"| {name} | {_bytes(8 * parameters)} | {_seconds(check)} | {_seconds(whole)} "
            f"| {_seconds(2 * parameters / DISK)} | {cells:.1e} |"
        )
    return "\n".join(lines)


def write_heads(costs: Costs) -> str:
    """The second set of tables."""
    cores = MACHINES * CORES
    lines = [
        f"Measured here, one core: {1 / costs.product:.0f} billion operations per second of the "
        f"exact product, {1 / costs.factor:.0f} of the factorisation, {costs.rounding:.1f} ns per "
        f"component for the rounding. Assumed: {MACHINES} machines of {CORES} cores, "
        f"{NETWORK / 1e9:.0f} GB/s of network for each, {DISK / 1e9:.0f} GB/s of disk.",
        "",
        "| examples × features | rows | operations | product and rounding, 1 core "
        f"| {cores:,} cores | partial sums sent | rows written by one process |",
        "|---|---|---|---|---|---|---|",
    ]
    plans = {f"{n:,} × {d:,}": (n, plan_head(n, d, costs)) for n, d in HEADS}
    for name, (n, head) in plans.items():
        work = head.product + head.rounding
        lines.append(
            f"| {name} | {_bytes(head.rows)} | {head.operations:.1e} | {_minutes(work)} "
            f"| {_minutes(work / cores)} | {_bytes(head.sums * max(1, n / TASK_ROWS))} "
            f"| {_minutes(head.writing)} |"
        )
    lines += [
        "",
        f"| a request | sums | factorisation | sums hashed and written | bucket of {BUCKETS} |",
        "|---|---|---|---|---|",
    ]
    for name, (_, head) in plans.items():
        kept = head.sums * (costs.hash * 1e-9 + 1 / DISK)
        lines.append(
            f"| {name} | {_bytes(head.sums)} | {_seconds(head.factor)} | {_seconds(kept)} "
            f"| {_bytes(head.bucket)}, {_seconds(2 * head.bucket / DISK)} |"
        )
    return "\n".join(lines)


def read_costs() -> Costs:
    """What was measured last."""
    return Costs(**json.loads(COSTS.read_text()))


def _bytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def _minutes(value: float) -> str:
    return f"{value / 60:,.1f} min" if value >= 60 else _seconds(value)


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{1e3 * value:,.3g} ms"


def write_page(page: Path, costs: Costs) -> None:
    """Both sets of tables, each between its marks."""
    text = page.read_text(encoding="utf-8")
    for mark, tables in (("tables", write_tables(costs)), ("heads", write_heads(costs))):
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        after = rest.partition(f"\n<!-- end of {mark} -->")[2]
        text = f"{before}<!-- {mark} -->\n{tables}\n<!-- end of {mark} -->{after}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        COSTS.write_text(json.dumps(asdict(measure_costs()), indent=1) + "\n")
        write_page(PAGE, read_costs())
    print(write_tables(read_costs()), write_heads(read_costs()), sep="\n\n")
