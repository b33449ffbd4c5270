"""The command line that all experiments share."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from expunge import run_many

RESULTS = Path(__file__).parent / "results"
Item = TypeVar("Item")
SHARES = 4


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    tasks: tuple[str, ...]
    budgets: tuple[float, ...]
    seeds: int | None
    full: bool
    plot: bool
    plain: bool
    smoke: bool
    part: tuple[int, int] | None
    arms: str
    root: Path | None
    out: Path
    ray: bool | str = False

    @property
    def compile(self) -> Any:
        """How training runs: nothing, or one by one and uncompiled for comparison."""
        return "one by one" if self.plain or self.smoke else None

    def take_part(self, items: Sequence[Item]) -> list[Item]:
        """This process's share of the work, of those arms that were asked for."""
        wanted = [item for item in items if self.arms in getattr(item, "key", "")]
        if self.part is None:
            return wanted
        place, count = self.part
        return wanted[place::count]


def drive(
    about: str | None,
    tasks: tuple[str, ...],
    run: Callable[[str, Options], None],
    show: Callable[[str, Options], None],
    arguments: list[str] | None = None,
) -> None:
    """Run what is missing, then show what there is (but not from one process's share of it)."""
    options = read_options(about, tasks, arguments)
    if options.ray:
        run_on_ray(options.ray, sys.argv[1:] if arguments is None else arguments)
    for task in options.tasks:
        if not options.plot:
            run(task, options)
        if not options.part:
            show(task, options)


def run_on_ray(ray: bool | str, arguments: list[str]) -> None:
    """Shares of this script's runs as processes on Ray; one whose worker died is taken up again.

    Finished runs are in the results, so whatever a share did before it died is not done twice.
    """
    place = arguments.index("--ray")
    given = arguments[place + 1 : place + 2]
    rest = arguments[:place] + arguments[place + (2 if given == [ray] else 1) :]
    items = {
        f"share-{n}": [sys.executable, sys.argv[0], *rest, "--part", f"{n}/{SHARES}"]
        for n in range(SHARES)
    }
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_many(subprocess.check_call, items, folder, ray=ray, progress=True)
    failed = {name: outcome.error for name, outcome in outcomes.items() if outcome.error}
    if failed:
        raise SystemExit(f"shares that failed: {failed}")


def read_options(
    about: str | None, tasks: tuple[str, ...], arguments: list[str] | None = None
) -> Options:
    """Parse the command line of a script that can run on these tasks."""
    text = (about or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--task", choices=[*tasks, "all"], default="all")
    parser.add_argument("--budgets", type=float, nargs="+", default=[], help="in epochs")
    parser.add_argument("--seeds", type=int, help="number of seeds, paired across arms")
    parser.add_argument("--full", action="store_true", help="the paper's whole grid")
    parser.add_argument("--plot", action="store_true", help="run nothing, draw what is there")
    parser.add_argument("--plain", action="store_true", help="one run at a time, not compiled")
    parser.add_argument("--smoke", action="store_true", help="scikit-learn's digits, tiny")
    parser.add_argument("--part", type=_read_part, help="i/n: this process's share of the runs")
    parser.add_argument("--ray", nargs="?", const=True, default=False, help="[ADDRESS]: run on Ray")
    parser.add_argument("--arms", default="", help="only runs whose name contains this")
    parser.add_argument("--root", type=Path, help="folder of the data; default EXPUNGE_DATA")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    chosen = tasks if given.task == "all" else (given.task,)
    return Options(
        ("digits",) if given.smoke else chosen,
        tuple(given.budgets),
        given.seeds,
        given.full,
        given.plot,
        given.plain,
        given.smoke,
        given.part,
        given.arms,
        given.root,
        given.out,
        given.ray,
    )


def _read_part(text: str) -> tuple[int, int]:
    """i of n.

    >>> _read_part("1/2")
    (1, 2)
    """
    place, _, count = text.partition("/")
    if not (place.isdigit() and count.isdigit() and int(place) < int(count)):
        raise argparse.ArgumentTypeError(f"part is {text!r}; it must be i/n with 0 <= i < n")
    return int(place), int(count)
