"""Newton's method with conjugate gradients for F(W) = (1/n) Σ ℓ(φ_i W/U, t_i) + (m/2)‖W‖².

Gradients are float64 over whole-number features; directions need not be exact and use float32.
The preconditioner takes the curvature C_i of the outputs and the features φ_i of a row as if they
were independent over the rows, which they are at zero:

    ∇²F = (1/n) Σ C_i ⊗ φ_i φ_iᵀ/U² + m  ≈  A ⊗ G/(n U²) + m,  A = (1/n) Σ C_i,  G = Σ φ_i φ_iᵀ

and is inverted through the eigenvectors of both. G is the exact Gram matrix of the *retained* rows,
from the store's sums: nothing of it saw a forgotten row. Directions that one Newton step has tried
improve it for the next (:class:`Recycled`); nothing outlives a call. It stops when ‖∇F‖ plus its
rounding error is at most the tolerance.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from scipy import linalg

from expunge.accounting.precision import norm_margin
from expunge.forgettable.losses import Loss, Sizes, add_curvature, bend, bound_error, evaluate

Array = npt.NDArray[np.float64]
Block = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
Map = Callable[[Array], Array]
_ROWS = 1024  # as many as stay in a cache between a product and its transpose
_UNDER_WAY = 64
_FORCING = 0.1
_MOST_NEWTON, _MOST_CONJUGATE = 100, 500
_MOST_KEPT, _KEPT_NUMBERS = 200, 2**24  # directions, and numbers in all of them


@dataclass
class Objective:
    """F on some rows. ``half_passes`` counts products with the features or their transpose."""

    loss: Loss
    weight_decay: float
    unit: float
    blocks: Sequence[Block]
    gram: Array
    half_passes: int = 0
    rows: int = field(init=False)
    reach: float = field(init=False)
    _eigen: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.blocks = [
            (phi[at : at + _ROWS], t[at : at + _ROWS])
            for phi, t in self.blocks
            for at in range(0, len(phi), _ROWS)
        ]
        self.rows = sum(len(phi) for phi, _ in self.blocks)
        squares = [
            float(np.square(phi, dtype=np.float64).sum(axis=1).max()) for phi, _ in self.blocks
        ]
        self.reach = math.sqrt(max(squares)) / self.unit * (1 + 2.0**-40)

    def evaluate(self, W: Array) -> tuple[float, Array, float, list[Any]]:
        """(F, ∇F, an upper bound of the exact ‖∇F‖, curvature states)."""
        V, gradient = W / self.unit, np.zeros_like(W)
        value = residual = rate = 0.0
        states: list[Any] = []

        def work(block: Block) -> tuple[float, Array, Any, Any]:
            x = block[0].astype(np.float64)
            part, r, state = evaluate(self.loss, x @ V, block[1].astype(np.float64))
            return part, x.T @ r, r, state

        for part, product, r, state in _map(work, self.blocks):
            value += part
            residual += float(np.sqrt(np.square(r).sum(axis=1)).sum())
            rate += float(np.sqrt(np.square(state).sum(axis=1)).sum())
            gradient += product
            states.append(state.astype(np.float32))
        self.half_passes += 2
        n, m = self.rows, self.weight_decay
        gradient = gradient / (self.unit * n) + m * W
        length = float(np.linalg.norm(W))
        longest = max(len(t) for _, t in self.blocks)
        sizes = Sizes(
            *cast(tuple[int, int], W.shape),
            depth=longest + len(self.blocks),
            reach=self.reach,
            length=length,
            residual=residual / n,
            rate=rate / n,
        )
        norm = float(np.linalg.norm(gradient)) * (1 + norm_margin(W.size))
        bound = norm + bound_error(self.loss, sizes, m)
        return value / n + m / 2 * length**2, gradient, bound, states

    def curve(self, states: Sequence[Any], D: Array) -> Array:
        """∇²F D, in float32 but for the ridge."""
        V, out = (D / self.unit).astype(np.float32), np.zeros_like(D)

        def work(block: tuple[Block, Any]) -> Any:
            (phi, _), state = block
            return phi.T @ bend(self.loss, state, phi @ V)

        for product in _map(work, list(zip(self.blocks, states, strict=True))):
            out += product
        self.half_passes += 2
        return out / (self.unit * self.rows) + self.weight_decay * D

    def precondition(self, states: Sequence[Any]) -> Map:
        """R ↦ M⁻¹ R = Q ((Qᵀ R V) / (λ dᵀ + m)) Vᵀ, where G/(n U²) = Q λ Qᵀ and A = V d Vᵀ."""
        if self._eigen is None:
            scaled = (self.gram / (self.rows * self.unit**2)).astype(np.float32)
            self._eigen = linalg.eigh(scaled, driver="evd", overwrite_a=True, check_finite=False)
        values, Q = self._eigen
        A = sum(add_curvature(self.loss, state.astype(np.float64)) for state in states)
        d, V = np.linalg.eigh(np.asarray(A) / self.rows)
        scale = np.maximum(values, 0)[:, None] * np.maximum(d, 0) + self.weight_decay

        def apply(R: Array) -> Array:
            return _multiply(Q, _multiply(Q.T, R @ V) / scale) @ V.T

        return apply


def _map(work: Callable[[Any], Any], blocks: Sequence[Any]) -> Iterator[Any]:
    """What ``work`` makes of each block, in order, on all cores: the same bits on any number.

    BLAS is on one thread here (``one_thread``); a few blocks are under way at a time.
    """

    def quietly(block: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            return work(block)

    if len(blocks) == 1:
        yield quietly(blocks[0])
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for at in range(0, len(blocks), _UNDER_WAY):
            yield from pool.map(quietly, blocks[at : at + _UNDER_WAY])


def _multiply(Q: npt.NDArray[np.float32], R: Array) -> Array:
    """Q R in float32, whatever the size of R."""
    size = float(np.abs(R).max()) or 1.0
    return (Q @ (R / size).astype(np.float32)).astype(np.float64) * size


@dataclass(frozen=True)
class Solution:
    """W, whether the tolerance was reached, the bound on ‖∇F(W)‖ and what it took."""

    weights: Array
    reached: bool
    bound: float
    half_passes: int


def solve(objective: Objective, start: Array, tolerance: float) -> Solution:
    """Newton steps by preconditioned conjugate gradients, until ‖∇F‖ ≤ τ for certain."""
    W = start.copy()
    kept = Recycled(deque(maxlen=min(_MOST_KEPT, _KEPT_NUMBERS // start.size)))
    value, g, bound, states = objective.evaluate(W)
    best = Solution(W, bound <= tolerance, bound, objective.half_passes)
    for _ in range(_MOST_NEWTON):
        if best.reached or not math.isfinite(bound):
            break
        norm = float(np.linalg.norm(g))
        aim = max(min(_FORCING, 3 * math.sqrt(norm)) * norm, tolerance / 2)
        D = _solve_direction(objective, states, g, aim, kept)
        W, (value, g, bound, states) = _search(objective, W, D, value, g)
        if bound >= best.bound and norm <= 4 * tolerance:
            break
        best = Solution(W, bound <= tolerance, bound, objective.half_passes)
    return Solution(best.weights, best.reached, best.bound, objective.half_passes)


@dataclass
class Recycled:
    """Directions s with their ∇²F s from earlier steps of this call, the newest last.

    ``improve`` is the inverse update of quasi-Newton methods: positive definite whatever the pairs,
    and exact on their span where the curvature has not changed since.
    """

    pairs: deque[tuple[Array, Array]]

    def add(self, s: Array, y: Array, bent: float) -> None:
        """Keep a direction, scaled to sᵀ ∇²F s = 1; the oldest goes where there is no room."""
        self.pairs.append((s / math.sqrt(bent), y / math.sqrt(bent)))

    def improve(self, inverse: Map) -> Map:
        """(I - s yᵀ) M⁻¹ (I - y sᵀ) + s sᵀ, pair after pair."""
        pairs = tuple(self.pairs)

        def apply(R: Array) -> Array:
            q, along = R.copy(), list[float]()
            for s, y in reversed(pairs):
                along.append(float(np.vdot(s, q)))
                q -= along[-1] * y
            z = inverse(q)
            for (s, y), a in zip(pairs, reversed(along), strict=True):
                z += (a - float(np.vdot(y, z))) * s
            return z

        return apply


def _solve_direction(
    objective: Objective, states: Sequence[Any], g: Array, aim: float, kept: Recycled
) -> Array:
    """D with ‖∇²F D + ∇F‖ ≤ aim."""
    apply = kept.improve(objective.precondition(states))
    D, r = np.zeros_like(g), -g
    z = apply(r)
    p, rz = z, float(np.vdot(r, z))
    for _ in range(_MOST_CONJUGATE):
        Hp = objective.curve(states, p)
        bent = float(np.vdot(p, Hp))
        if not bent > 0:  # less than float32 can tell
            break
        kept.add(p, Hp, bent)
        alpha = rz / bent
        D, r = D + alpha * p, r - alpha * Hp
        if float(np.linalg.norm(r)) <= aim:
            break
        z = apply(r)
        rz, before = float(np.vdot(r, z)), rz
        p = z + rz / before * p
    return D if D.any() else p


def _search(objective: Objective, W: Array, D: Array, value: float, g: Array) -> tuple[Array, Any]:
    """The longest of the steps 1, 1/2, 1/4, … that lowers F enough, or the gradient."""
    slope, size, norm = float(np.vdot(g, D)), 1.0, float(np.linalg.norm(g))
    while True:
        found = objective.evaluate(W + size * D)
        lower = found[0] <= value + 1e-4 * size * slope
        if lower or float(np.linalg.norm(found[1])) <= 0.5 * norm or size < 1e-6:
            return W + size * D, found
        size /= 2
