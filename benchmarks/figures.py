"""A slice of a figure by the experiments' own code: runs stepping together against one by one.

Fifteen runs (three versions of gradient clipping, five seeds) of the MNIST net at a budget of three
epochs of 10,000 images, from the noise to the verified certificate; one epoch of the CIFAR net,
compiled and not. Pixels are random. Compiling happens in the warm-up and is shown in units of the
plain slice.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.timing import compare, measure


def run() -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [*_measure("mnist", 5, 10_000, 3), *_measure("cifar10", 1, 6_400, 3)]
    finally:
        torch.set_num_threads(threads)


def _measure(task: str, seeds: int, count: int, repeats: int) -> list[dict[str, Any]]:
    from arms import list_arms
    from runs import Case, Store, run_cases

    problem = _make_problem(task, count)
    arms = list_arms(("gradient-clipping",))[: 3 if task == "mnist" else 1]
    cases = [
        Case(arm, 3 if task == "mnist" else 1, seed, 0.06) for seed in range(seeds) for arm in arms
    ]

    old = problem.build(0).state_dict()

    def go(compile: bool | str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder), task)
            (store.folder / "models").mkdir()
            save_file(old, store.folder / "models" / f"{task}-0.safetensors")
            with contextlib.redirect_stderr(io.StringIO()):
                run_cases(problem, cases, store, model_seeds=1, compile=compile)

    started = time.perf_counter()
    go(True)
    first = time.perf_counter() - started
    times = measure(
        {"together": lambda: go(True), "plain": lambda: go("one by one")}, repeats=repeats
    )
    rows = [
        compare(
            f"a slice of figure_budget ({task}), one by one / fast",
            times,
            "plain",
            "together",
            target=3.0 if task == "mnist" else None,
            at_least=True,
        )
    ]
    compiling = first / (sum(times["plain"]) / repeats)
    return [
        *rows,
        {"name": f"compiling for it ({task}), in plain slices", "ratio": compiling, "target": None},
    ]


def _make_problem(task: str, count: int) -> Any:
    import networks
    from expunge.tasks.samples import Samples, normalise, number_ids
    from problems import SETTINGS, Problem

    generator = torch.Generator().manual_seed(0)
    shape = (1, 28, 28) if task == "mnist" else (3, 32, 32)
    build = networks.mnist_net if task == "mnist" else networks.cifar_net
    middle = (0.5,) * shape[0]

    def make(name: str, n: int) -> Samples:
        pixels = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
        targets = torch.randint(0, 10, (n,), generator=generator)
        return Samples(pixels, targets, number_ids(f"{name}/", np.arange(n)))

    return Problem(
        task,
        make("train", count),
        make("validation", 200),
        make("test", 800),
        lambda x: normalise(x, middle, middle),
        lambda seed: build(generator=torch.Generator().manual_seed(seed)),
        SETTINGS[task].__class__(1, 0.06),
    )
