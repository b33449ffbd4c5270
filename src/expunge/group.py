"""DP-SGD and group privacy: what a Poisson-subsampled Gaussian gives a forget set of k examples.

Per-example (ε₁, δ₁) gives k examples ``(k ε₁, δ₁ (e^{kε₁} - 1)/(e^{ε₁} - 1))``, so at a group ε
the per-example ε₁ is ε/k and

    log δ = log δ₁(ε/k) + log (e^ε - 1)/(e^{ε/k} - 1).

δ₁ comes from ``dp_accounting``: the privacy loss distribution or Rényi, whichever is smaller.
Minibatches must really be Poisson sampled and neighbours differ by adding or removing one example.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from expunge.recipes import GroupDPSGD


def log_group_factor(epsilon: float, group_size: int) -> float:
    """log (e^{kε₁} - 1)/(e^{ε₁} - 1) with kε₁ = ε, in log space; log k at ε = 0.

    >>> round(log_group_factor(50.0, 225), 6)
    51.392945
    """
    if epsilon == 0 or group_size == 1:
        return math.log(group_size) if epsilon == 0 else 0.0
    return _log_expm1(epsilon) - _log_expm1(epsilon / group_size)


def group_log_delta(recipe: GroupDPSGD, epsilon: float) -> float:
    """log δ for the whole group at group ε."""
    if recipe.noise_multiplier == 0:
        return 0.0
    one = _log_delta_one(recipe, epsilon / recipe.group_size)
    return min(one + log_group_factor(epsilon, recipe.group_size), 0.0)


def group_epsilon(recipe: GroupDPSGD, delta: float) -> float:
    """The smallest group ε we can show at group δ: the per-example δ₁ is whatever meets it.

    The product δ₁ · factor need not fall with ε, so the scan starts from below.
    """
    if recipe.noise_multiplier == 0:
        return math.inf
    target = math.log(delta)
    low, high = 0.0, 1e-3
    while group_log_delta(recipe, high) > target:
        low, high = high, 1.25 * high
        if high > 1e5:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        if group_log_delta(recipe, middle) <= target:
            high = middle
        else:
            low = middle
        if high - low <= 1e-9 * high:
            break
    return high


def _log_expm1(x: float) -> float:
    return x + math.log(-math.expm1(-x))


def _log_delta_one(recipe: GroupDPSGD, epsilon: float) -> float:
    accountants = _accountants(recipe.noise_multiplier, recipe.sampling_rate, recipe.steps)
    deltas = [float(accountant.get_delta(epsilon)) for accountant in accountants]
    # A PLD that has run out of mass answers 0: only its discretised tail is known then.
    usable = [d for d in deltas if d > 0]
    return math.log(min(usable)) if usable else math.log(5e-324)


@functools.lru_cache(maxsize=32)
def _accountants(noise_multiplier: float, sampling_rate: float, steps: int) -> tuple[Any, ...]:
    import dp_accounting
    from dp_accounting import pld, rdp

    event = dp_accounting.PoissonSampledDpEvent(
        sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    return (
        rdp.RdpAccountant().compose(event, steps),
        pld.PLDAccountant().compose(event, steps),
    )
