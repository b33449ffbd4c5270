"""The ledger: a request from its filing to its answer, against the bare ``forget``.

A ridge regression of 50,000 rows of 64 numbers, on disk. The bare ``forget`` opens an equal state,
forgets one person and writes the release. The ledger files the request, finds the person, writes
down whom it is going to forget, forgets, verifies certificate, record and weights, opens the
commitment, looks for the person once more and answers. A hundred at once are filed one by one and
answered by one release.

A ledger of 10,000 requests is grown by the ledger's own calls: requests of strangers are filed in
one transaction, and one round of ``work`` answers them all. Its next requests are compared with
those of a ledger that has ten. On SQLite, and on PostgreSQL where it is installed.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import expunge
from benchmarks.timing import Row, compare, measure, skip
from expunge.linear_model import Ridge
from expunge_ledger import Ledger
from ledger.tests import postgres

ROWS, WIDTH, MANY, GROWN, ROUNDS = 50_000, 64, 100, 10_000, 5
KINDS = ("SQLite", "PostgreSQL")
TARGETS = {
    **{f"a request filed and answered, {kind} / bare forget": 3.0 for kind in KINDS},
    **{f"a request of {MANY} at once, {kind} / bare forget": 0.15 for kind in KINDS},
    **{f"the {GROWN:,}th request, {kind} / the 10th": 1.2 for kind in KINDS},
}


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place, cases = Path(folder), dict[str, Callable[[], object]]()
        make_state(place / "bare")
        releases, names = itertools.count(), make_names()
        cases["bare"] = lambda: expunge.open_state(place / "bare").forget([next(names)]).save(
            place / "releases" / str(next(releases))
        )  # fmt: skip
        urls = find_urls(stack, place)
        for kind, address in urls.items():
            small = stack.enter_context(make_ledger(address("small"), place / kind / "small"))
            grown = stack.enter_context(make_ledger(address("grown"), place / kind / "grown"))
            fill(small, 10)
            fill(grown, GROWN)
            cases |= {
                f"{kind} small": make_case(small, 1),
                f"{kind} grown": make_case(grown, 1),
                f"{kind} many": make_case(small, MANY),
            }
        times = measure(cases, rounds=ROUNDS)
        rows = [row for kind in urls for row in compare_kind(kind, times)]
    why = "PostgreSQL is not installed here"
    return rows + [skip(name, why) for name in TARGETS if name not in {row.name for row in rows}]


def compare_kind(kind: str, times: dict[str, list[float]]) -> list[Row]:
    one, many, grown = (f"{kind} {name}" for name in ("small", "many", "grown"))
    filed = f"a request filed and answered, {kind} / bare forget"
    at_once = f"a request of {MANY} at once, {kind} / bare forget"
    return [
        compare(filed, times, one, "bare"),
        compare(at_once, times, many, "bare", scale=1 / MANY),
        compare(f"the {GROWN:,}th request, {kind} / the 10th", times, grown, one),
    ]


def make_state(folder: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = (x[:, :4].sum(1) + draw.normal(size=ROWS)).astype(np.float32)
    Ridge().fit(x, y, ids=[f"user-{i}" for i in range(ROWS)]).save(folder)


def make_names() -> Iterator[str]:
    return (f"user-{i}" for i in range(ROWS))


def make_ledger(url: str, folder: Path) -> Ledger:
    """A ledger of one model, an equal state."""
    shutil.copytree(folder.parents[1] / "bare", folder / "state")
    made = Ledger.create(url, key=folder / "ledger.key")
    made.register("shop", folder / "state")
    return made


def fill(ledger: Ledger, count: int) -> None:
    """Requests of strangers, all answered."""
    with ledger.writing() as tables:
        for i in range(count):
            tables.file_request(f"stranger-{i}")
    (done,) = ledger.work()
    assert (done.failed, done.not_held) == (None, count), done


def make_case(ledger: Ledger, count: int) -> Callable[[], None]:
    names = make_names()

    def answer() -> None:
        for name in itertools.islice(names, count):
            ledger.request(name)
        (done,) = ledger.work()
        assert (done.failed, done.forgotten) == (None, count), done

    if count > 1:  # the same ledger answers single requests too
        names = (f"user-{i}" for i in range(ROWS - 1, 0, -1))
    return answer


def find_urls(stack: ExitStack, place: Path) -> dict[str, Callable[[str], str]]:
    """Where each kind of ledger lies, by its name."""
    found: dict[str, Callable[[str], str]] = {
        "SQLite": lambda name: f"sqlite:///{place}/SQLite/{name}/ledger.db"
    }
    programs = postgres.find_programs()
    if programs is not None:
        socket = stack.enter_context(postgres.start_cluster(programs))
        found["PostgreSQL"] = lambda name: postgres.make_database(socket, name)
    return found
