"""From a real vector to whole numbers, by arithmetic that gives the same ones on every machine.

With ``M = 2^(bits-1) - 1`` and a vector z of length d, each example by itself:

    k = round(2^20 z / max|z|)                       whole numbers, each from one component
    q = clip(round(k R / √Σk²), ±M),  R = M √d / 4   Σk² is a sum of whole numbers: exact
    h = min(M, ⌊max(S q + b, 0) / ⌊√d⌋⌋)              the lift: public signs S, public offsets b
    φ = (q, h, M)                                    M is the constant component

No step adds floating-point numbers, so no order of adding can show. S and b are bits of
SHAKE-256 of the public seed; ``q`` is stored, ``h`` is computed again wherever it is needed.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.errors import InputError

Reals = npt.NDArray[np.floating[Any]]
Whole = npt.NDArray[np.integer[Any]]
FEWEST_BITS, MOST_BITS = 4, 12
MOST_COMPONENTS = 2**22
_STEPS = 2.0**20
_ROWS = 256  # as many as stay in a cache
_SPREAD = 4  # components of four times the root mean square still fit


@dataclass(frozen=True)
class Integers:
    """The public map: ``bits`` per component, ``lift`` random features from the string ``seed``.

    >>> integers = Integers(bits=4)
    >>> integers.quantise(np.array([[3.0, -4.0], [30.0, -40.0]]))
    array([[ 1, -2],
           [ 1, -2]], dtype=int8)
    >>> integers.expand(np.array([[1, -2]], np.int8))
    array([[ 1., -2.,  7.]], dtype=float32)
    """

    bits: int = 8
    lift: int = 0
    seed: str = ""

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not FEWEST_BITS <= self.bits <= MOST_BITS:
            raise InputError.of(
                "bits", self.bits, f"a whole number from {FEWEST_BITS} to {MOST_BITS}"
            )
        if type(self.lift) is not int or not 0 <= self.lift < MOST_COMPONENTS:
            raise InputError.of(
                "lift", self.lift, f"a whole number from 0 to {MOST_COMPONENTS - 1}"
            )
        if type(self.seed) is not str:
            raise InputError.of("seed", self.seed, "a public string")

    @property
    def largest(self) -> int:
        """M: no component of φ is beyond it."""
        return 2 ** (self.bits - 1) - 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """What a stored component takes."""
        return np.dtype("i1" if self.bits <= 8 else "<i2")

    def width(self, inputs: int) -> int:
        """p: how many components φ has, the lift and the constant included."""
        return inputs + self.lift + 1

    def unit(self, inputs: int) -> float:
        """U = M √(d + lift + 16) / 4: about the norm of every φ, so that φ/U has norm about 1."""
        return self.largest * math.sqrt(inputs + self.lift + _SPREAD**2) / _SPREAD

    def quantise(self, vectors: Reals) -> Whole:
        """q of every row. A row of zeros is zeros; anything not finite is refused."""
        if vectors.ndim != 2 or not 1 <= vectors.shape[1] <= MOST_COMPONENTS:
            raise InputError.of("features", vectors.shape, "rows of at least one component")
        q = np.empty(vectors.shape, self.dtype)
        for start in range(0, len(q), _ROWS):
            q[start : start + _ROWS] = self._quantise(vectors[start : start + _ROWS], start)
        return q

    def _quantise(self, vectors: Reals, first: int) -> Reals:
        z = vectors.astype(np.float64)
        top = np.abs(z).max(axis=1, keepdims=True)
        if not np.isfinite(top).all():
            row = first + int(np.flatnonzero(~np.isfinite(top[:, 0]))[0])
            raise InputError(f"features of row {row} are not finite; every component must be")
        z /= np.where(top > 0, top, 1.0)
        k = np.rint(np.multiply(z, _STEPS, out=z), out=z)
        whole = k.astype(np.int64)
        square = np.einsum("ij,ij->i", whole, whole)
        R = self.largest * math.sqrt(z.shape[1]) / _SPREAD
        k *= (R / np.sqrt(np.maximum(square, 1).astype(np.float64)))[:, None]
        return np.clip(np.rint(k, out=k), -self.largest, self.largest, out=k)

    def expand(self, stored: Whole) -> npt.NDArray[np.float32]:
        """φ of every row of q, as float32, which holds these whole numbers exactly."""
        rows, d = stored.shape
        phi = np.empty((rows, self.width(d)), np.float32)
        phi[:, :d] = stored
        if self.lift:
            signs, offsets = _draw_layer(self.seed, d, self.lift, self.largest)
            v = phi[:, :d].astype(signs.dtype, copy=False) @ signs
            v += offsets
            np.maximum(v, 0, out=v)
            v /= math.isqrt(d)
            np.minimum(np.floor(v, out=v), self.largest, out=v)
            phi[:, d:-1] = v
        phi[:, -1] = self.largest
        return phi


@functools.lru_cache(maxsize=2)
def _draw_layer(seed: str, d: int, lift: int, largest: int) -> tuple[Reals, Reals]:
    """Signs [d, lift] and offsets in ±R; in the float in which every sum S q + b is exact.

    ⌊v/D⌋ is exact too: v < 2^24 in float32 (2^53 in float64) is whole, so the quotient is either
    whole, and exact, or at least 1/D below the next whole number, further than it is rounded.
    """
    name = b"expunge/lift-1\0" + d.to_bytes(8, "little") + seed.encode("utf-8", "surrogatepass")
    count = -(-d * lift // 8)
    stream = hashlib.shake_256(name).digest(count + 8 * lift)
    bits = np.unpackbits(np.frombuffer(stream, np.uint8, count), count=d * lift)
    reach = int(largest * math.sqrt(d) / _SPREAD)
    words = np.frombuffer(stream, "<u8", lift, count) % np.uint64(2 * reach + 1)
    real = np.float32 if d * largest + reach < 2**24 else np.float64
    signs = (bits.reshape(d, lift).astype(np.int8) * 2 - 1).astype(real)
    return signs, (words.astype(np.int64) - reach).astype(real)
