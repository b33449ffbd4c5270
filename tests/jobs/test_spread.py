"""Features and sums on Ray: integers and digest are those of one process, whoever computes them."""

import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from expunge.errors import InputError, RunError
from expunge.forgettable.features import Features
from expunge.forgettable.memory import Targets
from expunge.forgettable.sums import Sums, add_rows
from expunge.jobs.many import Pool
from expunge.jobs.spread import add_pair, compute_on_ray, compute_piece

CLASSES = Targets(classes=3)


class Dying(nn.Module):
    """Kills the process that runs it, as often as ``deaths`` says; never the one that made it."""

    def __init__(self, log: Path, deaths: int) -> None:
        super().__init__()
        self.log, self.deaths, self.home = str(log), deaths, os.getpid()
        self.linear = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log = Path(self.log)
        if os.getpid() != self.home and len(log.read_bytes()) < self.deaths:
            with log.open("ab") as file:
                file.write(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x).tanh()


def make_pieces() -> list[tuple[torch.Tensor, np.ndarray]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(61, 6, generator=generator), np.arange(61) % 3
    return [(x[:40], y[:40]), (x[40:], y[40:])]


def make_features(tmp_path: Path, deaths: int = 0) -> Features:
    (tmp_path / "log").touch()
    torch.manual_seed(1)
    return Features(Dying(tmp_path / "log", deaths).eval(), bits=8, lift=5, seed="s", batch_size=4)


def compute_here(features: Features, only_single: bool) -> tuple[np.ndarray, Sums]:
    pieces = make_pieces()
    stored = np.concatenate([features.compute(x, only_single=only_single) for x, _ in pieces])
    t = CLASSES.expand(np.concatenate([CLASSES.encode(y) for _, y in pieces]))
    return stored, add_rows(features.integers.expand(stored), t, 127)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "deaths", "single"), [(1, 0, True), (2, 1, True), (3, 2, False)]
)
def test_the_digest_is_that_of_one_process(
    tmp_path: Path, workers: int, deaths: int, single: bool
) -> None:
    features = make_features(tmp_path, deaths)
    stored, encoded, sums = compute_on_ray(
        features, CLASSES, make_pieces(), only_single=single, pool=Pool(workers=workers), rows=7
    )
    here, expected = compute_here(features, single)
    assert len((tmp_path / "log").read_bytes()) == deaths
    assert np.array_equal(stored, here)
    assert encoded[:, 0].tolist() == [i % 3 for i in (*range(40), *range(40, 61))]
    assert sums.digest() == expected.digest()
    assert sums.rows == 61


@pytest.mark.slow
def test_what_cannot_be_computed_is_one_sentence(tmp_path: Path) -> None:
    pool = Pool(workers=1, retries=0)
    with pytest.raises(RunError, match="the worker died 1 times"):
        compute_on_ray(
            make_features(tmp_path, 9), CLASSES, make_pieces(), only_single=True, pool=pool
        )
    bad = [(torch.full((2, 3), torch.nan), [0, 1])]
    with pytest.raises(InputError, match="not finite"):
        compute_on_ray(Features(), CLASSES, bad, only_single=True, pool=pool)
    with pytest.raises(InputError, match="data is empty"):
        compute_on_ray(Features(), CLASSES, [], only_single=True, pool=pool)


def test_pieces_add_up_without_a_cluster(tmp_path: Path) -> None:
    features = make_features(tmp_path)
    packed = pickle.dumps((features, CLASSES, True, torch.get_num_threads()))
    parts = [compute_piece([], packed, x, CLASSES.encode(y)) for x, y in make_pieces()]
    here, expected = compute_here(features, True)
    assert np.array_equal(np.concatenate([stored for stored, _ in parts]), here)
    assert add_pair(*(part for _, part in parts)) == expected.to_bytes()
