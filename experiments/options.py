"""The command line that all experiments share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
SMOKE = Path(__file__).parents[1] / "runs" / "smoke"


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    tasks: tuple[str, ...]
    budgets: tuple[float, ...]
    seeds: int | None
    full: bool
    plot: bool
    smoke: bool
    arms: tuple[str, ...]
    out: Path

    def wants(self, key: str) -> bool:
        """Whether the run of this name was asked for."""
        return not self.arms or any(arm in key for arm in self.arms)


def drive(
    about: str | None,
    tasks: tuple[str, ...],
    run: Callable[[str, Options], None] | None,
    show: Callable[[str, Options], None],
    arguments: list[str] | None = None,
) -> None:
    """Run what is missing, then show what there is."""
    options = read_options(about, tasks, arguments)
    torch.set_num_threads(1)
    for task in options.tasks:
        if run is not None and not options.plot:
            run(task, options)
        show(task, options)


def read_options(
    about: str | None, tasks: tuple[str, ...], arguments: list[str] | None = None
) -> Options:
    """Parse the command line of a script that can run on these tasks."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--task", choices=[*tasks, "all"], default="all")
    parser.add_argument("--budgets", type=float, nargs="+", default=[], help="in epochs")
    parser.add_argument("--seeds", type=int, help="number of seeds, paired across arms")
    parser.add_argument("--full", action="store_true", help="the paper's whole grid")
    parser.add_argument("--plot", action="store_true", help="run nothing, draw what is there")
    parser.add_argument("--smoke", action="store_true", help="scikit-learn's digits, tiny")
    parser.add_argument("--arms", nargs="+", default=[], help="only runs with this in their name")
    parser.add_argument("--out", type=Path, help="default: results, of smoke runs runs/smoke")
    given = parser.parse_args(arguments)
    out = given.out or (SMOKE if given.smoke else RESULTS)
    if given.smoke and out.resolve() == RESULTS.resolve():
        raise SystemExit(f"--out is {out}, where the real results are; a smoke run needs another")
    out.mkdir(parents=True, exist_ok=True)
    chosen = ("digits",) if given.smoke else tasks if given.task == "all" else (given.task,)
    flags = {name: getattr(given, name) for name in ("seeds", "full", "plot", "smoke")}
    lists = {"tasks": chosen, "budgets": tuple(given.budgets), "arms": tuple(given.arms)}
    return Options(**flags, **lists, out=out)
