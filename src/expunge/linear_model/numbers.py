"""From real numbers to whole ones, the same on every machine.

A **table** is fixed-point: a value is rounded to a multiple of 2^-44, is at most 2^26 in size, and
is cut into five limbs of 14 bits,

    x = 2^-44 Σ_k 2^(14 k) x_k,   |x_k| ≤ 2^13  (the highest 2^14)

so no scale has to be chosen. **Features of a network** are scaled row by row, each layer by itself,
with M = 2^(bits-1) - 1 and d the width of the layer:

    k = round(2^20 z / max|z|)                       whole numbers, each from one component
    q = clip(round(k R / √Σk²), ±M),  R = M √d / 4   Σk² is a sum of whole numbers: exact
    h = min(M, ⌊max(S q + b, 0) / ⌊√D⌋⌋)              the lift: public signs S and offsets b, D all
                                                     columns; from SHAKE-256 of the public seed
    x = 2^(3-bits) (q, h)                            components of a row are about 1 in size

``q`` is stored, ``h`` computed wherever it is needed. No step adds floating-point numbers.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.errors import InputError

Array = npt.NDArray[Any]
RADIX = 14
FEWEST_BITS, MOST_BITS = 4, 12
MOST_COMPONENTS = 2**22
_STEPS = 2.0**20
_ROWS = 256  # as many as stay in a cache
_SPREAD = 4  # components of four times the root mean square still fit


@dataclass(frozen=True)
class FixedPoint:
    """Columns of a table, or targets of a regression: multiples of 2^-44, at most 2^26.

    >>> FixedPoint().quantise(np.array([[0.1, -3.0]]), "X")
    array([[ 0.1, -3. ]])
    >>> [limb.astype(int).tolist() for limb in FixedPoint().split(np.array([[1.0, -0.75]]))[2:]]
    [[[0, 0]], [[4, -3]], [[0, 0]]]
    >>> FixedPoint().quantise(np.array([[1.0, 7e9]]), "X", ["age", "salary"])
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: X, column 'salary', is 7000000000.0; it must be at most 2^26 ...
    """

    exponent = -44  # what a unit of the lowest limb is, as a power of two
    limbs = 5
    largest = 2**RADIX  # no limb is beyond it
    dtype = np.dtype("<f8")  # of a stored component

    def width(self, inputs: int) -> int:
        """How many columns there are for so many stored components."""
        return inputs

    def describe(self) -> dict[str, Any]:
        """The map as data."""
        return {"kind": "fixed-point", "lowest": self.exponent, "limbs": self.limbs}

    def quantise(self, values: Array, field: str, columns: Sequence[str] | None = None) -> Array:
        """Values on the grid, as float64; one outside the range is refused with its column."""
        x = np.asarray(values, np.float64)
        reach = self.exponent + RADIX * self.limbs
        bad = ~(np.abs(x) < 2.0**reach)
        if bad.any():
            row, column = (int(place) for place in np.argwhere(bad)[0])
            named = repr(columns[column]) if columns is not None else str(column)
            valid = f"at most 2^{reach} in size: divide that column by a public constant"
            if not np.isfinite(x[row, column]):
                valid = (
                    "a number, not NaN or infinity: where one is missing put a constant that is "
                )
                valid += "fixed in advance, and say so in a column of its own"
            raise InputError.of(f"{field}, column {named},", float(x[row, column]), valid)
        return np.rint(x * 2.0**-self.exponent) * 2.0**self.exponent + 0.0  # no -0.0

    def split(self, stored: Array) -> list[Array]:
        """The limbs, lowest first, as float64, which holds them exactly."""
        rest, found = stored * 2.0**-self.exponent, list[Array]()
        for k in reversed(range(self.limbs)):
            limb = np.rint(rest * 2.0 ** (-RADIX * k))
            rest = rest - limb * 2.0 ** (RADIX * k)
            found.append(limb)
        return found[::-1]


@dataclass(frozen=True)
class RowScaled:
    """Features of a public network: ``bits`` a component, ``widths`` of its layers, ``lift``.

    >>> numbers = RowScaled(widths=(2,), bits=4)
    >>> numbers.quantise(np.array([[3.0, -4.0], [30.0, -40.0]]), "X")
    array([[ 1, -2],
           [ 1, -2]], dtype=int8)
    """

    widths: tuple[int, ...]
    bits: int = 8
    lift: int = 0
    seed: str = ""

    limbs = 1

    def __post_init__(self) -> None:
        valid = f"a whole number from {FEWEST_BITS} to {MOST_BITS}"
        if type(self.bits) is not int or not FEWEST_BITS <= self.bits <= MOST_BITS:
            raise InputError.of("bits", self.bits, valid)
        if type(self.lift) is not int or not 0 <= self.lift < MOST_COMPONENTS:
            valid = f"a whole number from 0 to {MOST_COMPONENTS - 1}"
            raise InputError.of("lift", self.lift, valid)
        if type(self.seed) is not str:
            raise InputError.of("seed", self.seed, "a public string")

    @property
    def exponent(self) -> int:
        return 3 - self.bits

    @property
    def largest(self) -> int:
        """M: no component is beyond it."""
        return 2 ** (self.bits - 1) - 1

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("i1" if self.bits <= 8 else "<i2")

    def width(self, inputs: int) -> int:
        return inputs + self.lift

    def describe(self) -> dict[str, Any]:
        return {"kind": "row-scaled", **asdict(self), "widths": list(self.widths)}

    def quantise(self, values: Array, field: str) -> Array:
        """q of every row, layer by layer. Zeros are zeros; anything not finite is refused."""
        q = np.empty(values.shape, self.dtype)
        for start in range(0, len(q), _ROWS):
            rows, at = values[start : start + _ROWS].astype(np.float64), 0
            for width in self.widths:
                z = rows[:, at : at + width]
                q[start : start + _ROWS, at : at + width] = self._scale(z, field, start)
                at += width
        return q

    def _scale(self, z: Array, field: str, first: int) -> Array:
        top = np.abs(z).max(axis=1, keepdims=True)
        if not np.isfinite(top).all():
            row = first + int(np.flatnonzero(~np.isfinite(top[:, 0]))[0])
            raise InputError(f"{field} gives features in row {row} that are not finite")
        k = np.rint(z / np.where(top > 0, top, 1.0) * _STEPS)
        whole = k.astype(np.int64)
        square = np.einsum("ij,ij->i", whole, whole)
        R = self.largest * math.sqrt(z.shape[1]) / _SPREAD
        k *= (R / np.sqrt(np.maximum(square, 1).astype(np.float64)))[:, None]
        return np.clip(np.rint(k), -self.largest, self.largest)

    def split(self, stored: Array) -> list[Array]:
        """(q, h) as float32, which holds these whole numbers exactly."""
        return [self.lift_rows(stored).astype(np.float32)]

    def expand(self, stored: Array) -> Array:
        """The columns as float32: exact."""
        return self.split(stored)[0] * np.float32(2.0**self.exponent)

    def lift_rows(self, stored: Array) -> Array:
        """(q, h), of the dtype of q."""
        if not self.lift:
            return np.asarray(stored)
        rows, d = stored.shape
        found = np.empty((rows, d + self.lift), self.dtype)
        found[:, :d] = stored
        signs, offsets = _draw_layer(self.seed, d, self.lift, self.largest)
        for at in range(0, rows, 4096):
            v = stored[at : at + 4096].astype(signs.dtype) @ signs
            v += offsets
            np.maximum(v, 0, out=v)
            v /= math.isqrt(d)
            found[at : at + 4096, d:] = np.minimum(np.floor(v, out=v), self.largest, out=v)
        return found


Numbers = FixedPoint | RowScaled


def read_numbers(description: dict[str, Any]) -> Numbers:
    """The map that ``describe`` described.

    >>> read_numbers(FixedPoint().describe()) == FixedPoint()
    True
    """
    if description["kind"] == "fixed-point":
        return FixedPoint()
    rest = {name: description[name] for name in ("bits", "lift", "seed")}
    return RowScaled(tuple(description["widths"]), **rest)


@functools.lru_cache(maxsize=2)
def _draw_layer(seed: str, d: int, lift: int, largest: int) -> tuple[Array, Array]:
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
