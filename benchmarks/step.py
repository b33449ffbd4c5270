"""A certified step against the loop one would write: clip the gradient, add ``randn``.

One thread; the paper's MNIST network (3,985 parameters), its CIFAR network (20,042) and a GPT-2 of
40 million. A step is the time from one forward pass to the next, the median of a run; what else a
run of ``unlearn`` takes is before and after the steps, the first one's second gradient included.
Memory is the peak of a process of its own, against AdamW on the same network.
"""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import expunge
from benchmarks.timing import HELD, KEPT, Row, compare, set_malloc

BATCH, TOKENS = 128, 64
TARGETS = {
    "certified step / plain, MNIST network": 2.0,
    "certified step / plain, CIFAR network": 1.1,
    "certified step / plain, GPT-2 of 40M": 1.25,
    "before and after the steps / plain step, GPT-2 of 40M": 2.0,
    "peak memory, GPT-2 of 40M: certified / AdamW": 1.3,
}


def run() -> list[Row]:
    set_malloc(KEPT)
    torch.set_num_threads(1)
    images = torch.Generator().manual_seed(0)
    mnist = torch.randn(BATCH, 1, 28, 28, generator=images)
    cifar = torch.randn(BATCH, 3, 32, 32, generator=images)
    targets = torch.randint(0, 10, (BATCH,), generator=images)
    rows = [
        *_compare("MNIST network", mnist_net, (mnist, targets), cross_entropy, 200),
        *_compare("CIFAR network", cifar_net, (cifar, targets), cross_entropy, 9),
    ]
    tokens = torch.randint(0, 1000, (4, TOKENS), generator=images)
    batch = {"input_ids": tokens, "labels": tokens}
    rows += _compare("GPT-2 of 40M", gpt, batch, None, 4, rounds=3)
    return [*rows, _compare_memory()]


def mnist_net() -> nn.Module:
    """The paper's MNIST network: 784-5-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 5), nn.ReLU(), nn.Linear(5, 10))


def cifar_net() -> nn.Module:
    """The paper's CIFAR-10 network: two convolutions, means over places, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def gpt() -> nn.Module:
    """A GPT-2 of 40 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=20_000, n_positions=TOKENS, n_embd=512, n_layer=9, n_head=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_recipe(steps: int) -> expunge.GradientClipping:
    return expunge.GradientClipping(
        start_clip=0.01, grad_clip=1.0, learning_rate=1e-3, weight_decay=10.0,
        steps=steps, noise_std=0.01,
    )  # fmt: skip


def make_data(batch: Any) -> expunge.Data:
    first = batch["labels"] if isinstance(batch, dict) else batch[1]
    columns = {n: torch.cat([t, t[:1]]) for n, t in batch.items()} if isinstance(
        batch, dict
    ) else tuple(torch.cat([t, t[:1]]) for t in batch)  # fmt: skip
    return expunge.Data(columns, ids=[*("stays" for _ in first), "goes"])


def certified(
    build: Callable[[], nn.Module], old: Any, batch: Any, loss: Any, steps: int
) -> tuple[float, float]:
    """Seconds of a step, and of everything else."""
    data, count = make_data(batch), len(batch["labels"] if isinstance(batch, dict) else batch[1])
    module, passes = build(), list[float]()
    module.register_forward_pre_hook(lambda *given: passes.append(time.perf_counter()))
    begun = time.perf_counter()
    expunge.unlearn(
        old, lambda: module, data, forget=["goes"], recipe=make_recipe(steps), loss=loss,
        batch_size=count,
    )  # fmt: skip
    taken = time.perf_counter() - begun
    step = _find_step(passes[1:])  # the first batch is run twice
    return step, taken - steps * step


def plain(model: nn.Module, batch: Any, loss: Any, steps: int) -> float:
    """Gradient, one clip by its norm, weight decay, noise: seconds of a step as one would write
    it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    passes = list[float]()
    for _ in range(steps):
        passes.append(time.perf_counter())
        model.zero_grad()
        value = model(**batch).loss if loss is None else loss(model(batch[0]), batch[1])
        value.backward()
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = math.sqrt(sum(float(g.norm()) ** 2 for g in grads))
        factor = min(1.0, 1.0 / norm)
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                p.sub_(g, alpha=1e-3 * factor).mul_(0.99).add_(torch.randn_like(p), alpha=0.01)
    return _find_step([*passes, time.perf_counter()])


def _find_step(passes: list[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(passes))


def _compare(
    name: str, build: Callable[[], nn.Module], batch: Any, loss: Any, steps: int, rounds: int = 5
) -> list[Row]:
    old, model = build(), build()
    times: dict[str, list[float]] = {"step": [], "plain": [], "before": []}
    for place in range(rounds + 1):
        count = steps if place else 2  # the first round warms up
        step, before = certified(build, old, batch, loss, count)
        taken = {"step": step, "plain": plain(model, batch, loss, count), "before": before}
        for kind, seconds in taken.items() if place else ():
            times[kind].append(seconds)
    return [
        compare(f"certified step / plain, {name}", times, "step", "plain"),
        compare(f"before and after the steps / plain step, {name}", times, "before", "plain"),
    ]


def _compare_memory() -> Row:
    peaks = []
    for kind in ("certified", "adamw"):
        command = [sys.executable, "-m", "benchmarks.step", kind]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(float(done.stdout.split()[-1]))
    ratio = peaks[0] / peaks[1]
    return Row("peak memory, GPT-2 of 40M: certified / AdamW", ratio, ratio, ratio)


def _peak(kind: str) -> None:
    """Peak memory of this process, with its own model, beyond what imports took."""
    set_malloc(HELD)
    torch.set_num_threads(1)
    gpt()
    tokens: Tensor = torch.randint(0, 1000, (4, TOKENS))
    batch = {"input_ids": tokens, "labels": tokens}
    base = _read_memory("VmRSS")
    if kind == "certified":
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save(gpt().state_dict(), file.name)
            certified(gpt, file.name, batch, None, 3)
    else:
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    print(_read_memory("VmHWM") - base)


def _read_memory(name: str) -> float:
    """Of this process, in KiB; what imports took is not counted."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1])


if __name__ == "__main__":
    _peak(sys.argv[1])
