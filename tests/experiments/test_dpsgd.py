"""DP-SGD with group privacy: the account against closed forms, Opacus against the recipe."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpsgd import GroupDPSGD, calibrate_noise, find_delta, train_privately
from expunge.accounting import gaussian


@pytest.mark.parametrize(("steps", "k"), [(1, 1), (1, 3), (4, 2)])
def test_without_sampling_it_is_the_gaussian_mechanism(steps: int, k: int) -> None:
    """q = 1: k examples move every step by k clips, T steps compose to μ = k √T/σ."""
    recipe = GroupDPSGD(1.0, 5.0 * k * math.sqrt(steps), 1.0, steps, k)
    true = float(gaussian.delta(0.5, 0.2))
    assert true * (1 - 1e-9) <= find_delta(recipe, 0.5) <= true * 1.01


def test_one_sampled_step_is_the_mixture_by_quadrature() -> None:
    """δ(ε) = ∫ (P - e^ε Q)_+ with P = Σ Binomial(k, q)(c) N(c/σ, 1), Q = N(0, 1)."""
    q, k, sigma, epsilon = 0.3, 4, 2.0, 0.5
    x = np.linspace(-12, 16, 400_001)
    weights = stats.binom.pmf(np.arange(k + 1), k, q)
    P = sum(w * stats.norm.pdf(x, c / sigma) for c, w in enumerate(weights))
    Q, step = stats.norm.pdf(x), float(x[1] - x[0])
    forward = float(np.clip(P - math.exp(epsilon) * Q, 0, None).sum()) * step
    backward = float(np.clip(Q - math.exp(epsilon) * P, 0, None).sum()) * step
    true = max(forward, backward)
    found = find_delta(GroupDPSGD(1.0, sigma, q, 1, k), epsilon)
    assert true * (1 - 1e-6) <= found <= true * 1.01


@pytest.mark.slow
def test_noise_is_enough_and_grows_with_the_group() -> None:
    found = [
        calibrate_noise(lambda z, k=k: GroupDPSGD(1.0, z, 0.1, 20, k), epsilon=1.0, delta=1e-5)
        for k in (1, 4)
    ]
    assert all(find_delta(recipe, 1.0) <= 1e-5 for recipe in found)
    assert 3 < found[1].noise_multiplier / found[0].noise_multiplier < 5


def test_training_is_opacus_and_repeatable() -> None:
    torch.manual_seed(3)
    x = torch.randn(64, 4)
    y = (x[:, 0] > 0).long()
    recipe = GroupDPSGD(1.0, 0.3, 0.25, 60, 1)

    def train(seed: int) -> torch.nn.Module:
        net = torch.nn.Linear(4, 2)
        torch.nn.init.zeros_(net.weight)
        torch.nn.init.zeros_(net.bias)
        return train_privately(net, (x, y), recipe, learning_rate=0.5, one_cycle=True, seed=seed)

    one, same, other = train(0), train(0), train(1)
    accuracy = (one(x).argmax(1) == y).float().mean()
    assert accuracy > 0.85
    assert torch.equal(one.weight, same.weight)
    assert not torch.equal(one.weight, other.weight)
    assert not hasattr(one.weight, "grad_sample") or one.weight.grad_sample is None
