"""Heads that forget: a request against learning again, and what its time is made of.

A request is timed from the identifiers to a written and verified certificate: ``forget``,
``certify``, ``write_run`` and ``verify`` without the store, on a state on disk. It is compared with

- learning all again from the integers, by the same exact product, to the same end: a state on disk
  and a written and verified certificate; and, from the stored integers, sums and solution alone;
- 49 epochs of the paper's head (1,280-32-32-10) by the conventional loop of ``throughput``
  (``DataLoader``, SGD, batches of 128, torch on one thread): one epoch is measured and multiplied;
  and the same with batches cut from the tensor, without a ``DataLoader``.

Integers are drawn with the distribution of a rectified normal feature at 8 bits: no time here
depends on what they mean. Rows that a round forgets are learned back, untimed, before the next.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import norm
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import networks
from benchmarks.timing import FEWEST, compare, is_spent, measure
from expunge.certificates import verification
from expunge.certificates.certificate import certify
from expunge.certificates.record import Run
from expunge.forgettable import memory, ridge, statistics, store, sums
from expunge.forgettable.features import Features, run_padded
from expunge.forgettable.integers import Integers
from expunge.forgettable.statistics import StatisticsHead
from expunge.forgettable.tangent import TangentFeatures
from expunge.jobs import directory

ROWS, WIDTH, CLASSES = 50_000, 1_280, 10
MANY, NARROW = 1_000_000, 512
TARGETS = {1: (10.0, 200.0), 50: (10.0, 200.0), 5_000: (4.0, 100.0)}
EPOCHS, BATCH = 49, 128
ROUNDS = 5
Whole = npt.NDArray[np.int8]
Times = dict[str, list[float]]


def run() -> list[dict[str, Any]]:
    """All rows; the state of a million examples takes 0.6 GB of disk while it runs."""
    warnings.simplefilter("ignore", UserWarning)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        print("  requests …", flush=True)
        found = _compare_requests(place)
        print("  a million examples …", flush=True)
        found += _compare_sizes(place)
    print("  products and features …", flush=True)
    return [*found, _compare_products(), *_compare_features()]


def draw_integers(rows: int, width: int, seed: int = 0) -> Whole:
    """max(z, 0) of a normal z at 8 bits, four times the root mean square at the most."""
    levels = np.maximum(norm.ppf((np.arange(256) + 0.5) / 256), 0)
    table = np.clip(np.rint(levels / np.sqrt(0.5) * 127 / 4), 0, 127).astype(np.int8)
    drawn = np.random.default_rng(seed).integers(0, 256, (rows, width), np.uint8)
    return table[drawn]


class Life:
    """A head on disk, with integers learned directly: its features are vectors."""

    def __init__(self, folder: Path, rows: int, width: int) -> None:
        self.folder, self.made = folder, 0
        self.features = draw_integers(rows, width)
        self.labels = np.random.default_rng(1).integers(0, CLASSES, (rows, 1))
        self.ids = [f"user-{i}" for i in range(rows)]
        self.head = StatisticsHead(Features(), classes=CLASSES, state=folder / "state")
        self.learn(0, rows)

    def learn(self, start: int, stop: int) -> None:
        at = slice(start, stop)
        self.head._memory.learn(self.features[at], self.labels[at], self.ids[at])

    def release(self, run: Run) -> None:
        """From what ``forget`` returned to a certificate that was verified."""
        self.made += 1
        certificate = certify(run.record, delta=1e-5)
        out = self.folder / f"release-{self.made}"
        directory.write_run(out, model=run.model, record=run.record, certificate=certificate)
        verification.verify(out / "certificate.json")
        assert certificate.epsilon == 0

    def request(self, count: int) -> tuple[float, dict[str, float]]:
        """Seconds of a request, and of its parts; its rows are learned back afterwards."""
        with clock_parts() as spent:
            start = time.perf_counter()
            self.release(self.head.forget(self.ids[:count]))
            seconds = time.perf_counter() - start
        self.learn(0, count)
        return seconds, spent

    def learn_again(self) -> None:
        """A new state of all integers, and its certificate."""
        head = StatisticsHead(Features(), classes=CLASSES, state=self.folder / f"{self.made}")
        head._memory.learn(self.features, self.labels, self.ids)
        self.release(head.release())

    def add_again(self) -> None:
        """Sums and solution from the stored integers."""
        self.head.solve(self.head.add_up())


def _compare_requests(place: Path) -> list[dict[str, Any]]:
    life = Life(place / "wide", ROWS, WIDTH)
    bases: dict[str, tuple[Callable[[], None], int]] = {
        "learning again": (life.learn_again, 1),
        "sums and solution alone": (life.add_again, 1),
        "49 epochs of the paper's head, DataLoader": (_make_epoch(life, loader=True), EPOCHS),
        "49 epochs of the paper's head, no loader": (_make_epoch(life, loader=False), EPOCHS),
    }
    parts, times = Times(), Times()
    life.request(1)
    for number in range(ROUNDS):
        if number >= FEWEST and is_spent():
            break
        for count in TARGETS:
            seconds, spent = life.request(count)
            _note(times, f"request of {count:,}", seconds)
            if count == 1:
                rest = {"everything else": seconds - sum(spent.values())}
                for name in (*PARTS, *rest):
                    _note(parts, name, (spent | rest).get(name, 0.0))
        for name, (base, often) in bases.items():
            start = time.perf_counter()
            base()
            _note(times, name, often * (time.perf_counter() - start))
    rows: list[dict[str, Any]] = []
    for count, (faster, much) in TARGETS.items():
        targets = dict(zip(bases, (faster, None, much, None), strict=True))
        for base, target in targets.items():
            name = f"{base} / request of {count:,} of {ROWS:,} × {WIDTH:,}"
            case = f"request of {count:,}"
            rows.append(compare(name, times, base, case, target=target, at_least=True))
    one = median(times["request of 1"])
    for name, seconds in parts.items():
        rows.append(_tell(f"of a request of 1: {name}, share", median(seconds) / one))
    return [*rows, _tell("first request in a process / later ones", _time_first(life))]


def _note(times: Times, name: str, seconds: float) -> None:
    times.setdefault(name, []).append(seconds)


def _tell(name: str, ratio: float) -> dict[str, Any]:
    return {"name": name, "ratio": ratio, "target": None, "direction": "at most", "met": None}


PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "Cholesky factorisation": ((ridge.linalg, "cho_factor"),),
    "conversion, substitution and check of the solution": ((statistics, "solve_ridge"),),
    "finding its rows": ((store.Store, "take"),),
    "sums of its rows, taken off": ((memory.Memory, "plan"),),
    "state written and synced": ((store, "write_together"),),
    "bytes and SHA-256 of the sums": ((sums.Sums, "to_bytes"), (sums.Sums, "digest")),
    "record and certificate": ((statistics, "write_record"), (sys.modules[__name__], "certify")),
    "release written and synced": ((directory, "write_run"),),
    "report": ((directory, "write_report"),),
    "verification": ((verification, "verify"),),
}


@contextmanager
def clock_parts() -> Generator[dict[str, float]]:
    """Seconds spent in each part, without what the parts inside it spent."""
    spent: dict[str, float] = {}
    open_parts: list[float] = []
    before = [
        (owner, name, getattr(owner, name)) for places in PARTS.values() for owner, name in places
    ]

    def wrap(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **given: Any) -> Any:
            open_parts.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **given)
            finally:
                seconds = time.perf_counter() - start
                spent[part] = spent.get(part, 0.0) + seconds - open_parts.pop()
                if open_parts:
                    open_parts[-1] += seconds

        return clocked

    try:
        for part, places in PARTS.items():
            for owner, name in places:
                setattr(owner, name, wrap(part, getattr(owner, name)))
        yield spent
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _make_epoch(life: Life, *, loader: bool) -> Callable[[], None]:
    """An epoch of the conventional loop on the same features as float32."""
    model = networks.head_net(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.from_numpy(life.features).float() / 127
    y = torch.from_numpy(life.labels[:, 0])
    batches = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)

    def cut() -> Generator[tuple[torch.Tensor, torch.Tensor]]:
        for chosen in torch.randperm(len(y)).split(BATCH):
            yield x[chosen], y[chosen]

    def epoch() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for a, b in batches if loader else cut():
            optimizer.zero_grad()
            cross_entropy(model(a), b).backward()
            optimizer.step()
        torch.set_num_threads(threads)

    return epoch


FIRST = """
import sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from expunge.certificates.certificate import certify
from expunge.certificates.verification import verify
from expunge.forgettable.loading import load
from expunge.jobs.directory import write_run
seconds = []
head = load(sys.argv[1])
for k in range(6):
    start = time.perf_counter()
    run = head.forget([f"user-{k + 10}"])
    certificate = certify(run.record, delta=1e-5)
    out = Path(sys.argv[2]) / f"first-{k}"
    write_run(out, model=run.model, record=run.record, certificate=certificate)
    verify(out / "certificate.json")
    seconds.append(time.perf_counter() - start)
print(seconds[0] / sorted(seconds[1:])[2])
"""


def _time_first(life: Life) -> float:
    """What the first request pays beside a later one, its modules imported and its head loaded."""
    command = [sys.executable, "-c", FIRST, str(life.folder / "state"), str(life.folder)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _compare_sizes(place: Path) -> list[dict[str, Any]]:
    shutil.rmtree(place / "wide")
    lives = {rows: Life(place / str(rows), rows, NARROW) for rows in (ROWS, MANY)}
    times = Times()
    for turn in range(1 + 2 * ROUNDS):
        if turn > FEWEST and is_spent():
            break
        for rows, life in lives.items():
            seconds, _ = life.request(1)
            if turn:
                _note(times, f"{rows:,}", seconds)
    name = f"a request of 1 of {MANY:,} / of {ROWS:,} × {NARROW}"
    return [compare(name, times, f"{MANY:,}", f"{ROWS:,}", target=1.5)]


def _compare_products() -> dict[str, Any]:
    integers = Integers()
    phi = integers.expand(draw_integers(ROWS, WIDTH))
    t = np.eye(CLASSES, dtype=np.int64)[np.arange(ROWS) % CLASSES]
    real = t.astype(np.float32)
    cases: dict[str, Callable[[], object]] = {
        "plain": lambda: (phi.T @ phi, phi.T @ real),
        "exact": lambda: sums.add_rows(phi, t, integers.largest),
    }
    name = f"plain float32 products / exact sums of {ROWS:,} × {WIDTH + 1:,}"
    return compare(
        name, measure(cases, repeats=ROUNDS), "plain", "exact", target=0.8, at_least=True
    )


def _evaluate(net: nn.Module, x: torch.Tensor, size: int) -> None:
    for part in x.split(size):
        run_padded(net, part, size)


def _compare_features() -> list[dict[str, Any]]:
    """Single examples, what every machine can do, against the fixed batch where it is tested."""
    generator = torch.Generator().manual_seed(0)
    nets: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "CIFAR net": (networks.cifar_net(generator=generator), (3, 32, 32)),
        "512-32-32-10": (networks.head_net(generator=generator), (512,)),
    }
    rows: list[dict[str, Any]] = []
    for name, (net, shape) in nets.items():
        x = torch.randn(256, *shape, generator=generator)
        wide = copy.deepcopy(net.eval()).double()
        tangent = TangentFeatures(net, 64, seed="public").network
        assert tangent is not None
        cases: dict[str, Callable[[], object]] = {
            "batches": lambda net=net, x=x: _evaluate(net, x, 32),
            "single": lambda net=net, x=x: _evaluate(net, x, 1),
            "single, float64": lambda wide=wide, x=x: _evaluate(wide, x.double(), 1),
            "tangent": lambda tangent=tangent, x=x: _evaluate(tangent, x, 32),
        }
        times = measure(cases, repeats=ROUNDS)
        evaluation = Features(net).choose_evaluation(x)
        for case, base in (
            ("single", "batches"),
            ("single, float64", "single"),
            ("tangent", "batches"),
        ):
            title = f"features of the {name} (here {evaluation}): {case} / {base}"
            rows.append(compare(title, times, case, base))
    return rows


if __name__ == "__main__":
    for found in run():
        print(f"{found['ratio']:10.3f}  {found['name']}")
