"""The ledger: a request from its filing to its answer, against the bare ``forget``.

A statistics head of 50,000 examples (128 integers each) on disk. The bare ``forget`` writes a
release of the same people from an equal state, as ``expunge forget`` does. The ledger files the
requests, finds the people, writes down whom it is going to forget, forgets them, verifies the
certificate with record and weights, opens its commitment, looks for them once more and answers. A
hundred requests are one run; the bare hundred are a list of a hundred. Filing is a hundred requests
by one client. On SQLite, and on PostgreSQL where it is installed.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import expunge
from benchmarks.heads import draw_integers
from benchmarks.timing import compare, measure
from expunge.jobs.releases import release_state

ROWS, WIDTH, CLASSES, MANY, ROUNDS = 50_000, 128, 10, 100, 5
TARGETS = {1: 5.0, MANY: None}


def run() -> list[dict[str, Any]]:
    warnings.simplefilter("ignore", UserWarning)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        cases = dict[str, Callable[[], object]]()
        bare = make_state(place / "bare")
        names, made = (f"user-{i}" for i in range(ROWS)), iter(range(ROWS))
        for count in TARGETS:
            cases[f"bare {count}"] = lambda count=count: release_state(
                bare, place / "releases" / str(next(made)), take(names, count)
            )
        found = {"SQLite": f"sqlite:///{place}/ledger.db"}
        if (server := start_server(stack)) is not None:
            found["PostgreSQL"] = server
        for kind, url in found.items():
            cases |= make_cases(stack, kind, url, place)
        times = measure(cases, repeats=ROUNDS)
        rows = [
            compare(
                f"{count} request{'s' if count > 1 else ''} filed and answered, {kind} / forget",
                times, f"{kind} {count}", f"bare {count}", target=target,
            )
            for kind in found
            for count, target in TARGETS.items()
        ]  # fmt: skip
        rows += [
            compare(
                f"a request of {MANY} at once, {kind} / a forget of its own",
                times, f"{kind} {MANY}", "bare 1", scale=1 / MANY, target=0.5,
            )
            for kind in found
        ]  # fmt: skip
        return rows + [
            compare(
                f"filing {MANY} requests, {kind} / forget of 1",
                times,
                f"{kind} file",
                "bare 1",
            )
            for kind in found
        ]


def make_state(folder: Path) -> Path:
    head = expunge.StatisticsHead(expunge.Features(None), classes=CLASSES, state=folder)
    labels = np.random.default_rng(1).integers(0, CLASSES, (ROWS, 1))
    ids = [f"user-{i}" for i in range(ROWS)]
    head._memory.learn(draw_integers(ROWS, WIDTH), labels, ids)
    return folder


def make_cases(
    stack: ExitStack, kind: str, url: str, place: Path
) -> dict[str, Callable[[], object]]:
    key = place / f"{kind}.key"
    ledger = stack.enter_context(expunge.Ledger.create(url, key=key))
    ledger.register("shop", make_state(place / kind))
    ledger.register("idle", place / "bare", releases=place / f"{kind}-idle")
    names = iter([f"user-{i}" for i in range(ROWS)])
    waiting = iter([f"stranger-{i}" for i in range(ROWS)])

    def answer(count: int) -> None:
        for name in take(names, count):
            ledger.request(name, model="shop")
        (done,) = ledger.work("shop")
        assert done.forgotten == count, done

    def file() -> None:
        for name in take(waiting, MANY):
            ledger.request(name, model="idle")

    cases: dict[str, Callable[[], object]] = {f"{kind} file": file}
    return cases | {f"{kind} {count}": lambda count=count: answer(count) for count in TARGETS}


def take(names: Iterator[str], count: int) -> list[str]:
    return [next(names) for _ in range(count)]


def start_server(stack: ExitStack) -> str | None:
    """The address of a database in a cluster of its own, as the tests start it."""
    path = Path(__file__).parents[1] / "tests" / "helpers" / "postgres.py"
    spec = importlib.util.spec_from_file_location("postgres", path)
    assert spec is not None
    assert spec.loader is not None
    postgres: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(postgres)
    programs = postgres.find_programs()
    if programs is None:
        return None
    return postgres.make_database(stack.enter_context(postgres.start_cluster(programs)))
