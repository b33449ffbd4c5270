"""One person of 50,000 leaves a linear model on 1,280 features, against training a head again.

From the request to a written and verified certificate, in a warm process, against 25 epochs of the
tuned head (1280-32-32-10, SGD, one-cycle; five epochs are timed). Features are those of CIFAR-10
where EXPUNGE_DATA has them (experiments/figure_routes.py computes them), else drawn ones of the
same size, ten noisy classes: the note says which. The same request as a command, from a cold
start, against the warm process; and the first call of ``Features`` against plain inference.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import expunge
from benchmarks.timing import Row, compare, measure
from expunge.linear_model import LogisticRegression, RidgeClassifier, load

ROWS, COLUMNS, CLASSES, LIFT = 50_000, 1280, 10, 4096
EPOCHS, TIMED, ROUNDS = 25, 5, 3
LOGISTIC = "LogisticRegression, one person / 25 epochs of the head"
LIFTED = f"RidgeClassifier, lift {LIFT}, one person / 25 epochs of the head"
PLAIN = "RidgeClassifier, one person / 25 epochs of the head"
COMMAND = "expunge forget, LogisticRegression / the same in a warm process"
COLD = "expunge forget, RidgeClassifier / the same in a warm process"
FIRST = "first call of Features / plain inference"
TARGETS = {LOGISTIC: 0.12, LIFTED: 0.15, PLAIN: 0.01, COMMAND: 3.0, FIRST: 1.5}


def run() -> list[Row]:
    x, y, source = load_features()
    with tempfile.TemporaryDirectory() as place:
        rows = [*run_requests(Path(place), x, y), *run_first_call()]
    return [row if row.name == FIRST else replace(row, note=source) for row in rows]


def load_features() -> tuple[torch.Tensor, torch.Tensor, str]:
    """[50000, 1280] features and their classes, and what they are."""
    folder = Path(os.environ.get("EXPUNGE_DATA", "/nowhere"))
    labels = sorted((folder / "cifar-10-batches-bin").glob("data_batch_*.bin"))
    for file in (folder / "features").glob("efficientnet-lite0-96-*.safetensors"):
        x = load_file(file)["features"]
        if len(x) == ROWS and len(labels) == 5:
            records = np.concatenate([np.fromfile(path, np.uint8) for path in labels])
            y = torch.from_numpy(records.reshape(ROWS, -1)[:, 0].astype(np.int64))
            return x, y, "CIFAR-10, EfficientNet-Lite0, 96 px"
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(0, CLASSES, (ROWS,), generator=draw)
    basis = torch.randn(64, COLUMNS, generator=draw)
    hidden = torch.randn(ROWS, 64, generator=draw)
    hidden += 0.55 * torch.randn(CLASSES, 64, generator=draw)[y]
    x = (hidden @ basis / 8 + 0.5 * torch.randn(ROWS, COLUMNS, generator=draw)).relu()
    return x, y, "drawn features of the same size"


def run_requests(place: Path, x: torch.Tensor, y: torch.Tensor) -> list[Row]:
    ids = [f"user-{i}" for i in range(ROWS)]
    network = nn.Sequential(nn.Identity()).eval()

    def features(lift: int = 0) -> expunge.Features:
        return expunge.Features(network, layers="last", lift=lift, batch_size=512)

    models: dict[str, Any] = {
        LOGISTIC: LogisticRegression(0.01, features=features(), state=place / "logistic"),
        PLAIN: RidgeClassifier(100.0, features=features(), state=place / "plain"),
        LIFTED: RidgeClassifier(100.0, features=features(LIFT), state=place / "lifted"),
    }
    for model in models.values():
        model.partial_fit(x, y, ids=ids)
    people = iter(ids)

    def forget(model: Any) -> None:
        person = next(people)
        out = place / f"run-{person}"
        model.forget([person]).save(out)
        if not expunge.verify(out, people=[person]).holds:
            raise SystemExit(f"the certificate about {person} does not hold")

    def command(state: str) -> None:
        person = next(people)
        (place / "list.txt").write_text(f"{person}\n")
        words = ["forget", str(place / state), str(place / "list.txt"), "--out"]
        out = place / f"run-{person}"
        cold = [sys.executable, "-m", "expunge", *words, str(out)]
        subprocess.run(cold, check=True, capture_output=True)

    cases: dict[str, Callable[[], object]] = {
        "head": lambda: train_head(x, y),
        **{name: lambda model=model: forget(model) for name, model in models.items()},
    }
    times = measure(cases, ROUNDS)
    shutil.rmtree(place / "lifted")
    warm = [load(place / state) for state in ("logistic", "plain")]
    again = measure(
        {
            COMMAND: lambda: command("logistic"), "logistic": lambda: forget(warm[0]),
            COLD: lambda: command("plain"), "plain": lambda: forget(warm[1]),
        }, ROUNDS,
    )  # fmt: skip
    return [
        *(compare(name, times, name, "head", scale=TIMED / EPOCHS) for name in models),
        compare(COMMAND, again, COMMAND, "logistic"),
        compare(COLD, again, COLD, "plain"),
    ]


def train_head(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.manual_seed(0)
    sizes = [
        nn.Linear(COLUMNS, 32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    ]
    training = expunge.Training(
        epochs=TIMED, learning_rate=0.1, batch_size=128, weight_decay=5e-4, schedule="one-cycle",
        loss=cross_entropy,
    )  # fmt: skip
    training(nn.Sequential(*sizes), (x, y), 0)


def run_first_call() -> list[Row]:
    draw = torch.Generator().manual_seed(0)
    widths = [3, *[16] * 8]
    layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths)]
    network = nn.Sequential(*layers).eval()
    images = torch.randn(2048, 3, 32, 32, generator=draw)

    def infer() -> None:
        with torch.inference_mode():
            for part in images.split(32):
                network(part)

    first = {FIRST: lambda: expunge.Features(network).compute(images), "plain": infer}
    return [compare(FIRST, measure(first, ROUNDS), FIRST, "plain")]
