"""Full-batch descent computed a second time: step by step in 50-digit decimals.

Nothing here uses ``expunge.theorems`` or ``expunge.iteration``. With the expansion c of one step
and its shift s_t (ηΔ on all data, 0 on retained data, both plus rounding):

    noisy descent      blocks (ΔW_t, ΔV_t) = (s_t c^-t, σ² c^-2t), neighbours merged while their
                       slopes fall;  μ² = Σ (ΔW)²/ΔV over the blocks that remain
    rewind-to-delete   z ← c z + s_t,  μ = z/σ
"""

from __future__ import annotations

import decimal
from decimal import Decimal

from expunge.checking import MAX_MIXING_STEPS
from expunge.errors import InputError
from expunge.recipes import NoisyDescent, RewindToDelete

_CONTEXT = decimal.Context(
    prec=50, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[decimal.InvalidOperation]
)
_INFINITE = Decimal("inf")


def recompute_descent(recipe: NoisyDescent | RewindToDelete, rounding: float) -> Decimal:
    """μ² of one training run and its request.

    >>> recipe = RewindToDelete(learning_rate=1.0, noise_std=2.0, train_steps=3, steps=1,
    ...                         gradient_bound=1.0, smoothness=0.5, strong_convexity=0.5,
    ...                         examples=4, group_size=2)
    >>> recompute_descent(recipe, 0.0)  # z: 1, 3/2, then 3/4;  μ = 3/8
    Decimal('0.140625')
    """
    steps = recipe.train_steps + recipe.steps
    if steps > MAX_MIXING_STEPS:
        raise InputError.of("train_steps + steps", steps, f"at most {MAX_MIXING_STEPS}")
    with decimal.localcontext(_CONTEXT):
        c, shift = _read_step(recipe)
        if shift == 0:
            return Decimal(0)
        variance, extra = Decimal(recipe.noise_std) ** 2, Decimal(rounding)
        early = recipe.train_steps
        if isinstance(recipe, RewindToDelete):
            early -= recipe.steps
            if early == 0:
                return Decimal(0)
        if variance == 0:
            return _INFINITE
        shifts = [shift + extra] * early + [extra] * recipe.steps
        if isinstance(recipe, NoisyDescent):
            return _merge_blocks(c, shifts, variance)
        z = Decimal(0)
        for s in shifts:
            z = c * z + s
        return z * z / variance


def _read_step(recipe: NoisyDescent | RewindToDelete) -> tuple[Decimal, Decimal]:
    """(c, ηΔ) with Δ = 2 k G/n."""
    eta, m = Decimal(recipe.learning_rate), Decimal(recipe.strong_convexity)
    slope = eta * (Decimal(recipe.smoothness) + m)
    c = max(abs(1 - eta * m), abs(1 - slope)) if recipe.convex else 1 + slope
    share = Decimal(2 * recipe.group_size) / Decimal(recipe.examples)
    return c, eta * share * Decimal(recipe.gradient_bound)


def _merge_blocks(c: Decimal, shifts: list[Decimal], variance: Decimal) -> Decimal:
    """The energy of the greatest convex minorant of the points (Σ ΔV, Σ ΔW)."""
    if c == 0:
        return shifts[-1] ** 2 / variance  # the last step forgets all before it
    blocks: list[tuple[Decimal, Decimal]] = []
    unit, inverse = Decimal(1), 1 / c
    for s in shifts:
        W, V = s * unit, variance * unit * unit
        while blocks and W * blocks[-1][1] < blocks[-1][0] * V:
            before = blocks.pop()
            W, V = W + before[0], V + before[1]
        blocks.append((W, V))
        unit *= inverse
    return sum((W * W / V for W, V in blocks), Decimal(0))
