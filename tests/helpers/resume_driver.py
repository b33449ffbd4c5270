"""Starts an unlearning run again and again, kills it with SIGKILL at random moments, lets it end.

Run as ``python resume_driver.py FOLDER KILLS``; prints one JSON object. Children are forked, so
that torch is imported once; each one is killed wherever it happens to be.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from engine import equal, make_batches, make_mlp
from expunge import GradientClipping, certify
from expunge.certificates.record import RunRecord
from expunge.noisy.checkpoint import Checkpoint
from expunge.noisy.noise import SeededNoise, SystemNoise
from expunge.noisy.run import unlearn
from expunge.training.batches import Batches

RECIPE = GradientClipping(
    start_clip=0.5,
    grad_clip=1.0,
    learning_rate=0.05,
    weight_decay=1.0,
    steps=400,
    noise_std=0.2,
    start_noise_std=0.3,
)


def run(noise, checkpoint: Path | None, log: Path | None):
    x, y = (torch.cat(t) for t in zip(*make_batches(count=5), strict=True))
    loader = Batches(x, y, batch_size=9, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(11)

    def on_step(done, model):
        if log is not None:
            with log.open("a") as file:
                file.write(f"{os.getpid()} {done}\n")

    return unlearn(
        make_mlp(dropout=0.2),
        loader,
        RECIPE,
        loss_fn=cross_entropy,
        noise=noise,
        centre="zero",
        checkpoint=None if checkpoint is None else Checkpoint(checkpoint, 0.0, resume=True),
        on_step=on_step,
    )


def child(noise, folder: Path) -> None:
    try:
        result = run(noise, folder / "checkpoint", folder / "log")
        result.record.save(folder / "record.json")
        torch.save(result.model.state_dict(), folder / "model.pt")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def wait_a_while(log: Path, rng: random.Random) -> None:
    """Any moment: from before the first step of this start to many steps after it."""
    if rng.random() > 0.2:
        wanted = count_lines(log) + rng.randrange(1, 16)
        patience = time.monotonic() + 20
        while count_lines(log) < wanted and time.monotonic() < patience:
            time.sleep(0.0005)
    time.sleep(rng.uniform(0.0, 0.01))


def count_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def survive(noise, folder: Path, kills: int, rng: random.Random) -> int:
    """Kill ``kills`` children, then let one finish; returns how many were really killed."""
    folder.mkdir()
    killed = 0
    for attempt in range(kills + 1):
        pid = os.fork()
        if pid == 0:
            child(noise, folder)
        if attempt < kills:
            wait_a_while(folder / "log", rng)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        elif os.WEXITSTATUS(status) != 0:
            raise SystemExit(f"a child failed with {status}")
    return killed


def main() -> None:
    torch.set_num_threads(1)
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(0)
    seeded, system = folder / "seeded", folder / "system"
    report = {"seeded": survive(SeededNoise(1), seeded, kills, rng)}
    whole = run(SeededNoise(1), None, None)
    model = make_mlp()
    model.load_state_dict(torch.load(seeded / "model.pt"))
    resumed = RunRecord.load(seeded / "record.json")
    report["same_model"] = equal(model, whole.model)
    report["same_trace"] = resumed.trace == whole.record.trace
    report["evaluations"] = resumed.gradient_evaluations == whole.record.gradient_evaluations
    report["system"] = survive(SystemNoise(), system, kills, rng)
    record = RunRecord.load(system / "record.json")
    report["resumed"], report["keys"] = record.resumed, record.noise_keys
    report["distinct"] = len(set(record.trace.noise_norm))
    report["epsilon"] = certify(record, delta=1e-5).epsilon
    report["leftovers"] = [p.name for p in folder.rglob("*.tmp")]
    steps = [[int(n) for n in line.split()] for line in (system / "log").read_text().splitlines()]
    report["jumps"] = sum(b[1] > a[1] + 1 for a, b in itertools.pairwise(steps))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
