"""Attempts to find a forgotten person in a head built to forget, its store or its files."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from expunge import ConvexHead, Features, InputError, StatisticsHead, UnlearningError

KEY = bytes(32)


def make_data(rows: int = 60):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 6)).astype(np.float32), np.arange(rows) % 3
    return x, y, [f"user-{i}" for i in range(rows)]


def read_bytes(folder: Path) -> bytes:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return b"".join(path.read_bytes() for path in paths)


class ByPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-2 * torch.arange(len(x))[:, None]


class Averaging(nn.Module):
    """A backbone whose plain attribute remembers the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.mean(0)
        return x - self.mean


def test_a_batch_mate_in_somebody_elses_integers() -> None:
    """The forgotten person sat in front of all others; a place in the batch would tell."""
    x, y, ids = make_data()
    with_, without = (
        StatisticsHead(Features(ByPlace().eval()), classes=3, key=KEY) for _ in range(2)
    )
    with_.learn((x, y), ids)
    with_.forget(ids[:1])
    without.learn((x[1:], y[1:]), ids[1:])
    assert with_.digest() == without.digest()


def test_the_size_of_a_batch() -> None:
    """Learned with company or alone: the integers are the same."""
    x, y, ids = make_data(40)
    features = Features(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8)).eval())
    together, alone = (StatisticsHead(features, classes=3, key=KEY) for _ in range(2))
    together.learn((x, y), ids)
    for i in range(40):
        alone.learn((x[i : i + 1], y[i : i + 1]), ids[i : i + 1])
    assert together.digest() == alone.digest()


def test_a_backbone_that_remembers_a_batch() -> None:
    x, y, ids = make_data()
    head = StatisticsHead(Features(Averaging().eval(), batch_size=1), classes=3)
    with pytest.raises(UnlearningError, match="depend on the rows before it"):
        head.learn((x, y), ids)
    assert len(head) == 0


def test_a_backbone_exchanged_between_learning_and_learning(tmp_path: Path) -> None:
    x, y, ids = make_data()
    network = nn.Linear(6, 4).eval()
    head = StatisticsHead(Features(network), classes=3, state=tmp_path / "a")
    head.learn((x, y), ids)
    with torch.no_grad():
        network.weight.mul_(2)
    with pytest.raises(InputError, match="other weights"):
        head.learn((x, y), ids)
    with pytest.raises(InputError, match=r"features\.network"):
        StatisticsHead(Features(network), classes=3, state=tmp_path / "a")


def test_other_thread_counts_and_recomputed_features() -> None:
    """What is subtracted is what was stored, never what a machine computes today."""
    x, y, ids = make_data()
    network = nn.Sequential(nn.Linear(6, 64), nn.Tanh()).eval()
    head, never = (StatisticsHead(Features(network), classes=3, key=KEY) for _ in range(2))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        head.learn((x, y), ids)
        never.learn((x[5:], y[5:]), ids[5:])
        torch.set_num_threads(1)
        head.forget(ids[:5])
    finally:
        torch.set_num_threads(threads)
    assert head.digest() == never.digest()


def test_an_identifier_learned_twice_is_forgotten_once_and_for_all(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head, never = (
        StatisticsHead(Features(), classes=3, key=KEY, state=tmp_path / name) for name in "ab"
    )
    head.learn((x, y), ids)
    head.learn((x, y), ids)
    head.learn((x[:5] + 1, y[:5]), ["user-9"] * 5)
    head.forget(["user-9"])
    keep = [i for i in range(60) if i != 9]
    never.learn((x[keep], y[keep]), [ids[i] for i in keep])
    assert head.digest() == never.digest()
    assert len(head) == 59


def test_an_adaptive_requester_learns_nothing_that_stays() -> None:
    """Whoever is most influential is asked to go, release after release: the retained set alone."""
    x, y, ids = make_data()
    head = StatisticsHead(Features(), classes=3, key=KEY)
    head.learn((x, y), ids)
    left = list(range(60))
    for _ in range(6):
        scores = head.release().model(torch.from_numpy(x[left])).numpy()
        worst = left[int(np.argmin(scores[np.arange(len(left)), y[left]]))]
        head.forget([ids[worst]])
        left.remove(worst)
    never = StatisticsHead(Features(), classes=3, key=KEY)
    never.learn((x[left], y[left]), [ids[i] for i in left])
    assert torch.equal(head.release().model.weight, never.release().model.weight)


def test_a_class_that_vanished_leaves_no_column() -> None:
    x, y, ids = make_data()
    head = StatisticsHead(Features(), classes=3, key=KEY)
    head.learn((x, y), ids)
    run = head.forget([name for name, label in zip(ids, y, strict=True) if label == 1])
    assert not run.model.weight[:, 1].any()


def test_no_byte_of_a_forgotten_row_is_left(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head = StatisticsHead(Features(bits=12), classes=3, state=tmp_path / "a")
    head.learn((x, y), ids)
    row = head.features.compute(x[:1]).tobytes()
    assert row in read_bytes(tmp_path / "a")
    head.forget(ids[:1])
    assert row not in read_bytes(tmp_path / "a")
    assert b"user-0" not in read_bytes(tmp_path / "a")


def test_who_is_in_the_list_of_the_forgotten_cannot_be_guessed_without_the_key(
    tmp_path: Path,
) -> None:
    import hashlib

    x, y, ids = make_data()
    head = StatisticsHead(Features(), classes=3, state=tmp_path / "a")
    head.learn((x, y), ids)
    head.forget(ids[:1])
    marks = (tmp_path / "a/forgotten").read_bytes()
    guesses = [hashlib.blake2b(ids[0].encode(), digest_size=16).digest()]
    guesses.append(hashlib.sha256(ids[0].encode()).digest()[:16])
    assert len(marks) == 16
    assert not any(guess in marks for guess in guesses)


def test_unnoised_weights_after_a_noisy_request(tmp_path: Path) -> None:
    """Neither the object, nor its release, nor its files hold the solution without noise."""
    x, y, ids = make_data()
    head = ConvexHead(Features(), classes=3, weight_decay=1e-2, state=tmp_path / "a", key=KEY)
    head.learn((x, y), ids)
    old = head.release().model.weight.numpy()
    run = head.forget(ids[:3], epsilon=1.0, delta=1e-5)
    fresh = ConvexHead(Features(), classes=3, weight_decay=1e-2, key=KEY)
    fresh.learn((x[3:], y[3:]), ids[3:])
    solution = fresh.release().model.weight.numpy()
    files = read_bytes(tmp_path / "a")
    assert old.tobytes() not in files
    assert solution.tobytes() not in files
    assert torch.equal(head.release().model.weight, run.model.weight)
    noise = np.linalg.norm(run.model.weight.numpy() - solution) / run.record.recipe.noise_std
    assert noise > 1


def test_asking_again_draws_no_second_noise(tmp_path: Path) -> None:
    """Repeating an answered request must not give noisy releases of one solution to average."""
    x, y, ids = make_data()
    head = ConvexHead(Features(), classes=3, weight_decay=1e-2, state=tmp_path / "a")
    head.learn((x, y), ids)
    head.release()
    first = head.forget(ids[:3], epsilon=1.0, delta=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = head.forget(ids[:3], epsilon=1.0, delta=1e-5)
    assert torch.equal(first.model.weight, again.model.weight)
