"""DP-SGD that lets any k examples be forgotten, by Opacus and dp_accounting; for comparison.

In one Poisson-sampled step the number of the k examples in the batch is Binomial(k, q), and each
moves the sum of clipped gradients by at most ``clip``: the step is no easier to tell from one
without them than the mixture of Gaussians Σ_c Binomial(k, q)(c) N(c/σ, 1) from N(0, 1), in both
directions, and T steps than T copies (Choquette-Choo et al. 2023, Corollary 4.7; Ganesh 2024).
dp_accounting composes them. Unlike our certificates this is the account of exact arithmetic, and
torch's generator draws the noise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from dp_accounting.pld.privacy_loss_distribution import from_mixture_gaussian_mechanism
from opacus import PrivacyEngine
from scipy import optimize, stats
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from expunge import CalibrationError
from expunge.accounting import gaussian

TAIL = 1e-18  # counts of the k in a batch that are rarer than this go to δ


@dataclass(frozen=True)
class GroupDPSGD:
    """clip C, σ in clips, q, T, and k: how many examples can be forgotten."""

    clip: float
    noise_multiplier: float
    sampling_rate: float
    steps: int
    group_size: int


def find_delta(recipe: GroupDPSGD, epsilon: float) -> float:
    """δ(ε) of all steps for all k examples, never too small.

    >>> one = GroupDPSGD(1.0, noise_multiplier=3.7304, sampling_rate=1.0, steps=1, group_size=1)
    >>> round(find_delta(one, epsilon=1.0) / 1e-5, 2)  # the Gaussian mechanism's own
    1.0
    """
    if recipe.sampling_rate == 1:  # the Gaussian mechanism itself
        mu = recipe.group_size * math.sqrt(recipe.steps) / recipe.noise_multiplier
        return float(gaussian.delta(epsilon, mu))
    counts = np.arange(recipe.group_size + 1)
    probs = stats.binom.pmf(counts, recipe.group_size, recipe.sampling_rate)
    kept = probs > TAIL
    rest = float(stats.binom.sf(counts[kept][-1], recipe.group_size, recipe.sampling_rate))
    rest += float(stats.binom.cdf(counts[kept][0] - 1, recipe.group_size, recipe.sampling_rate))
    coarsest = 10.0 if recipe.steps <= 1_000 else 3.0  # rounding adds up over the steps
    step = from_mixture_gaussian_mechanism(
        recipe.noise_multiplier, counts[kept].tolist(), (probs[kept] / probs[kept].sum()).tolist(),
        value_discretization_interval=1e-3 * min(epsilon, coarsest),
    )  # fmt: skip
    whole = step.self_compose(recipe.steps) if recipe.steps > 1 else step
    return float(whole.get_delta_for_epsilon(epsilon)) + recipe.steps * rest


def calibrate_noise(
    make: Callable[[float], GroupDPSGD], *, epsilon: float, delta: float, most: float = 1e4
) -> GroupDPSGD:
    """``make(z)`` with the least noise multiplier that meets (ε, δ), to four digits, rounded up.

    >>> found = calibrate_noise(lambda z: GroupDPSGD(1.0, z, 1.0, 1, 2), epsilon=1.0, delta=1e-5)
    >>> round(found.noise_multiplier, 2)
    7.46
    """

    def excess(log_z: float) -> float:
        found = find_delta(make(math.exp(log_z)), epsilon)
        return math.log(max(found, 1e-300)) - math.log(delta)

    rough = make(1.0)  # as if the k moved every step by kq
    reach = rough.group_size * rough.sampling_rate * math.sqrt(rough.steps)
    high = max(math.log(reach / float(gaussian.mu(epsilon, delta))), 0.0)
    while excess(high) > 0:
        high += 0.2
        if high > math.log(most):
            raise CalibrationError(f"no noise below {most:g} clips covers so many examples")
    low = high - 0.2
    while excess(low) <= 0:
        low, high = low - 0.2, low
    found = float(optimize.bisect(excess, low, high, xtol=1e-4))
    return make(math.exp(found + 1e-4))


def train_privately(
    model: nn.Module,
    examples: tuple[Tensor, Tensor],
    recipe: GroupDPSGD,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    one_cycle: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Train ``model``, a start that saw no data, in place; on request nothing is done."""
    # Opacus samples each example with probability 1/⌈n/batch⌉: at most the recipe's q.
    batch = math.floor(len(examples[0]) / math.ceil(1 / recipe.sampling_rate - 1e-9))
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, weight_decay=weight_decay)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus' own: hooks, the random generator
        torch.manual_seed(seed)
        made: Any = PrivacyEngine(accountant="prv").make_private(
            module=model, optimizer=optimizer, max_grad_norm=recipe.clip,
            noise_multiplier=recipe.noise_multiplier,
            data_loader=DataLoader(TensorDataset(*examples), batch_size=batch),
        )  # fmt: skip
        private, stepping, batches = made
        passes = chain.from_iterable(repeat(batches))
        for t, (x, y) in enumerate(islice(passes, recipe.steps)):
            for group in stepping.param_groups:
                group["lr"] = learning_rate * (_climb(t / recipe.steps) if one_cycle else 1.0)
            stepping.zero_grad(set_to_none=True)
            cross_entropy(private(x), y).backward()
            stepping.step()
    private.to_standard_module()  # hooks and per-example gradients go
    return model


def _climb(u: float) -> float:
    """Linear one-cycle, as ``expunge.Training`` has it."""
    return float(np.interp(u, (0.0, 0.3, 0.85, 1.0), (1 / 25, 1.0, 1 / 25, 1 / 25e4)))
