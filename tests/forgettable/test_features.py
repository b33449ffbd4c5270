"""Whole numbers of an example: the same on every machine, whatever stands beside it."""

import hashlib
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from expunge.errors import InputError, UnlearningError
from expunge.forgettable import tangent
from expunge.forgettable.features import Features, is_invariant
from expunge.forgettable.integers import Integers
from expunge.forgettable.tangent import TangentFeatures


class ByPlace(nn.Module):
    """Adds a little that depends on the place in the batch: what some matrix products do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) + 1e-3 * torch.arange(len(x))[:, None]


class ByMates(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) - x.flatten(1).mean(0)


class Counting(nn.Module):
    """A network that remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x.flatten(1)


@pytest.mark.parametrize("bits", [4, 8, 12])
def test_components_stay_in_range_and_rows_do_not_see_each_other(bits: int) -> None:
    z = np.random.default_rng(0).standard_cauchy((40, 30))
    z[3] = 0
    q = Integers(bits).quantise(z)
    assert np.abs(q).max() == 2 ** (bits - 1) - 1
    assert not q[3].any()
    alone = np.concatenate([Integers(bits).quantise(row[None]) for row in z])
    assert np.array_equal(q, alone)


def test_scaling_is_per_example() -> None:
    z = np.random.default_rng(0).normal(size=(5, 30))
    factors = np.array([[1e-30], [1e-3], [1.0], [7.0], [1e30]])
    assert np.array_equal(Integers(8).quantise(z * factors), Integers(8).quantise(z))


def test_the_norm_is_the_public_one() -> None:
    q = Integers(12).quantise(np.random.default_rng(1).normal(size=(50, 400)))
    norms = np.linalg.norm(q.astype(float), axis=1)
    assert np.allclose(norms, 2047 * math.sqrt(400) / 4, rtol=2e-3)


def test_lift_is_the_integer_formula() -> None:
    integers = Integers(6, lift=11, seed="seed")
    q = integers.quantise(np.random.default_rng(0).normal(size=(20, 10)))
    phi = integers.expand(q)
    name = b"expunge/lift-1\0" + (10).to_bytes(8, "little") + b"seed"
    stream = hashlib.shake_256(name).digest(14 + 88)
    bits = [stream[i // 8] >> (7 - i % 8) & 1 for i in range(110)]
    reach = int(31 * math.sqrt(10) / 4)
    for row, found in zip(q.tolist(), phi.tolist(), strict=True):
        for j in range(11):
            word = int.from_bytes(stream[14 + 8 * j : 22 + 8 * j], "little")
            v = sum((2 * bits[i * 11 + j] - 1) * row[i] for i in range(10))
            v += word % (2 * reach + 1) - reach
            assert found[10 + j] == min(31, max(v, 0) // math.isqrt(10))
        assert found[:10] == row
        assert found[-1] == 31


def test_lift_is_exact_in_both_floats() -> None:
    """At 12 bits and many inputs sums pass 2^24: float64 takes over and nothing is rounded."""
    integers = Integers(12, lift=3, seed="wide")
    q = np.full((1, 9000), 2047, np.int16)
    narrow = integers.expand(q[:, :64])
    assert narrow.shape == (1, 68)
    assert integers.expand(q).max() <= 2047


def test_golden_integers() -> None:
    """The map is part of the format: it may not change."""
    z = (np.arange(60.0) * 37 % 101 - 50).reshape(4, 15)
    integers = Integers(8, lift=5, seed="golden")
    digest = hashlib.sha256(integers.expand(integers.quantise(z)).tobytes()).hexdigest()
    assert digest == "1248aa87afbe192ebf8bb001607aca1110f9d293867dca721ecd3391d98b25d5"


@pytest.mark.parametrize("network", [ByPlace(), ByMates()])
def test_batch_mates_never_show(network: nn.Module) -> None:
    features = Features(network.eval(), batch_size=8)
    x = torch.randn(20, 6)
    assert features.choose_evaluation(x) == "by construction"
    whole = features.compute(x)
    assert np.array_equal(whole, np.concatenate([features.compute(row[None]) for row in x]))
    assert np.array_equal(whole[5:9], features.compute(x[5:9]))


def test_the_self_test_sees_what_it_must() -> None:
    x = torch.zeros(1, 6)
    assert is_invariant(nn.Flatten(), x, 8)
    assert not is_invariant(ByPlace(), x, 8)
    assert not is_invariant(ByMates(), x, 8)


def test_tested_batches_give_what_single_ones_give_where_bits_agree() -> None:
    features = Features(nn.Flatten().eval(), batch_size=4)
    x = torch.randn(10, 3)
    assert features.choose_evaluation(x) == "tested"
    assert np.array_equal(features.compute(x), features.compute(x, only_single=True))


def test_a_network_that_remembers_is_refused() -> None:
    with pytest.raises(UnlearningError, match="changed while features were computed"):
        Features(Counting().eval(), batch_size=1).compute(torch.randn(3, 2))


def test_a_network_that_draws_is_refused() -> None:
    network = nn.Sequential(nn.Flatten(), _Drawing()).eval()
    with pytest.raises(InputError, match="must be a function"):
        Features(network).compute(torch.randn(3, 2))


class _Drawing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def test_signs_that_are_not_held_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, network = torch.randn(9, 4), nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2))
    features = TangentFeatures(network.eval(), 16, seed="signs")
    held = features.compute(x)
    monkeypatch.setattr(tangent, "_HELD", 0)
    assert np.array_equal(features.compute(x), held)
    monkeypatch.setattr(tangent, "_PIECE", 50)
    other = TangentFeatures(network, 16, seed="signs")
    assert not np.array_equal(other.compute(x), held), "a piece is part of the public map"


def test_the_bar_shows_how_far_features_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    Features(nn.Flatten().eval(), batch_size=2, progress=True).compute(torch.randn(8, 3))
    assert "features" in capfd.readouterr().err
    Features(nn.Flatten().eval(), batch_size=2).compute(torch.randn(8, 3))
    assert capfd.readouterr().err == ""


def test_another_network_is_another_description() -> None:
    a, b = nn.Linear(3, 2).eval(), nn.Linear(3, 2).eval()
    assert Features(a).describe() != Features(b).describe()
    assert Features(a).describe() == Features(a, batch_size=7).describe()
    features = Features(a)
    with torch.no_grad():
        a.weight.add_(1)
    with pytest.raises(InputError, match="other weights"):
        features.compute(torch.randn(2, 3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Features(bits=3), "bits is 3; it must be a whole number from 4 to 12"),
        (lambda: Features(lift=-1), "lift is -1"),
        (lambda: Features(seed=7), "seed is 7"),
        (lambda: Features(batch_size=0), "batch_size is 0"),
        (lambda: Features().compute(torch.tensor([[1.0, math.nan]])), "row 0 are not finite"),
        (lambda: Features().compute(torch.zeros(3)), "one row per example"),
        (
            lambda: Features().compute(np.array([["a"]])),
            "inputs is a <U1 array; it must be a dense",
        ),
        (lambda: Features().compute(np.array([[None]])), "inputs is a object array"),
        (lambda: Features().compute(None), "inputs is a NoneType; it must be"),
        (lambda: Features().compute(x for x in [[1.0]]), "inputs is a generator"),
        (lambda: Features().compute(torch.eye(2).to_sparse()), "inputs is a Tensor; .* dense"),
        (lambda: Features().compute(torch.ones(2, 2) * 1j), "inputs is a Tensor; .* real"),
        (lambda: Features().compute(np.ma.masked_equal(np.eye(2), 0)), "nothing masked"),
        (lambda: Features(nn.Linear(2, 2)).compute(torch.zeros(1, 2)), "train mode"),
        (lambda: Features(_Pair().eval()).compute(torch.zeros(1, 2)), "one floating-point tensor"),
    ],
)
def test_bad_input_is_one_sentence(make, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


class _Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x
