"""Two processes of one thread each against one process of two threads; checks; bytes per step.

Both cases run in the same two processes, in turn: while one process works alone with two threads,
the other waits. Bytes are what is handed to the sums of gradients, against four per parameter; a
ring of n processes then sends 2 (n - 1)/n of them from every process.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.timing import compare

ROUNDS, STEPS, BATCH = 4, 8, 64
CHECK_EVERY = 50
TIMEOUT = 120


def run() -> list[dict[str, Any]]:
    found = _measure()
    times = found["times"]
    step, check = statistics.median(times["two"]), statistics.median(found["checks"])
    spread = [check / (CHECK_EVERY * t) for t in times["two"]]
    return [
        compare(
            "CIFAR net, step of 2 processes of 1 thread / 1 process of 2 threads",
            times,
            "two",
            "one",
        ),
        {
            "name": f"CIFAR net, agreement check every {CHECK_EVERY} steps / step",
            "ratio": check / (CHECK_EVERY * step),
            "spread": [min(spread), max(spread)],
            "target": 0.01,
            "direction": "at most",
            "met": check / (CHECK_EVERY * step) <= 0.01,
        },
        {
            "name": "bytes of gradients summed per step / 4 bytes per parameter",
            "ratio": found["bytes"] / (4 * found["parameters"]),
            "target": 1.01,
            "direction": "at most",
            "met": found["bytes"] / (4 * found["parameters"]) <= 1.01,
        },
    ]


def _measure() -> dict[str, Any]:
    """What rank 0 of two real processes over gloo found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.distributed", str(target)],
                env=os.environ | place | {"WORLD_SIZE": "2", "RANK": str(rank)},
            )
            for rank in range(2)
        ]
        try:
            codes = [rank.wait(timeout=TIMEOUT) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"the two processes ended with {codes}")
        return json.loads(target.read_text())


def _work(target: Path) -> None:
    """What each of the two processes does."""
    import torch
    import torch.distributed as dist

    import networks
    from expunge.noisy.team import Team
    from expunge.processes.group import find_processes

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = networks.cifar_net(generator=torch.Generator().manual_seed(0))
    held: list[float] = []
    check = Team.check

    def timed(team: Team, done: int, last: int, *rest: Any) -> None:
        start = time.perf_counter()
        check(team, done, last, *rest)
        if done == last:
            held.append(time.perf_counter() - start)

    mock.patch.object(Team, "check", timed).start()
    times: dict[str, list[float]] = {"two": [], "one": []}
    sent = 0.0
    for number in range(ROUNDS + 1):
        torch.set_num_threads(1)
        dist.barrier()
        together, sent = _time_steps(net, find_processes(True, check_every=10**6))
        alone = 0.0
        if rank == 0:
            torch.set_num_threads(2)
            alone, _ = _time_steps(net, find_processes(False))
        dist.barrier()
        if number > 0:
            times["two"].append(together)
            times["one"].append(alone)
    if rank == 0:
        size = sum(p.numel() for p in net.parameters())
        facts = {"times": times, "checks": held, "bytes": sent, "parameters": size}
        target.write_text(json.dumps(facts))
    dist.destroy_process_group()


def _time_steps(net: Any, processes: Any) -> tuple[float, float]:
    """Seconds and bytes of one step of a run."""
    import torch
    from torch.nn.functional import cross_entropy

    from expunge import Batches, GradientClipping, SeededNoise, unlearn

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * 2, 3, 32, 32, generator=generator)
    y = torch.randint(0, 10, (BATCH * 2,), generator=generator)
    recipe = GradientClipping(
        start_clip=1.0,
        grad_clip=1.0,
        learning_rate=1e-3,
        weight_decay=1.0,
        steps=STEPS,
        noise_std=0.1,
    )
    start = time.perf_counter()
    unlearn(
        net,
        Batches(x, y, batch_size=BATCH),
        recipe,
        loss_fn=cross_entropy,
        noise=SeededNoise(0),
        centre="zero",
        distributed=processes,
    )
    return (time.perf_counter() - start) / STEPS, processes.sent / STEPS


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
