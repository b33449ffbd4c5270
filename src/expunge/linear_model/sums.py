"""Sums of whole numbers over rows: exact, in any order, on any machine.

    S(D) = Σ_{i∈D} (1, φ_i φ_iᵀ, φ_i t_iᵀ, t_i t_iᵀ)

φ are the columns and t the targets, both in limbs (``numbers``); products of limbs k and l are
kept in digit k + l. t is one-hot for classes, (1, y) for a regression (1 in the lowest limb).
Products run in floating point on blocks in which every partial sum is a whole number that the float
holds (float32: rows · M² ≤ 2^24), so S(D) - S(F) = S(D \\ F), bit for bit (THEORY, section 10).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.errors import InputError
from expunge.linear_model.numbers import FixedPoint, Numbers

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]
Label = str | int | float | bool
Labels = tuple[Label, ...]
_MAGIC = b"expunge/sums-2\n"
_EXACT = 2**24  # whole numbers up to this are float32's
_SHORT = 256  # float32 blocks shorter than this cost more than float64 ones
_BLOCK = 8192
TARGETS = FixedPoint()


@dataclass(frozen=True)
class Sums:
    """Sums of rows. ``labels`` are the classes that have rows, None for a regression.

    >>> x = FixedPoint().quantise(np.array([[1.0, 2.0], [3.0, -1.0]]), "X")
    >>> whole = add_rows(FixedPoint(), x, encode_labels(["a", "b"]), ("a", "b"))
    >>> first = add_rows(FixedPoint(), x[:1], encode_labels(["a"]), ("a",))
    >>> second = add_rows(FixedPoint(), x[1:], encode_labels(["b"]), ("b",))
    >>> (whole - first).digest() == second.digest()
    True
    """

    rows: int
    labels: Labels | None
    gram: Counts
    cross: Counts
    square: Counts

    def __add__(self, other: Sums) -> Sums:
        return self._combine(other, 1)

    def __sub__(self, other: Sums) -> Sums:
        return self._combine(other, -1)

    def _combine(self, other: Sums, sign: int) -> Sums:
        labels = self.labels
        if labels is not None and other.labels != labels:
            labels = sort_labels({*labels, *(other.labels or ())})
        one, two = self._align(labels), other._align(labels)
        gram = self.gram + other.gram if sign > 0 else self.gram - other.gram
        cross, square = one[0] + sign * two[0], one[1] + sign * two[1]
        if labels is not None:
            left = np.flatnonzero(square[0].diagonal())
            labels = tuple(labels[place] for place in left)
            cross, square = cross[:, :, left], square[:, left][:, :, left]
        return Sums(self.rows + sign * other.rows, labels, gram, cross, square)

    def _align(self, labels: Labels | None) -> tuple[Counts, Counts]:
        """Σ φ tᵀ and Σ t tᵀ with a column for each of ``labels``."""
        if labels is None or self.labels == labels:
            return self.cross, self.square
        cross = np.zeros((*self.cross.shape[:2], len(labels)), np.int64)
        square = np.zeros((1, len(labels), len(labels)), np.int64)
        places = [labels.index(label) for label in self.labels or ()]
        cross[:, :, places] = self.cross
        square[:, places, places] = self.square[0].diagonal()
        return cross, square

    def to_bytes(self) -> bytes:
        """The bytes that are hashed and kept: one triangle by rows, little-endian."""
        shapes = [self.gram.shape, self.cross.shape, self.square.shape]
        # Of one digit the largest entries are squares: they are on the diagonal.
        largest = self.gram if len(self.gram) > 1 else self.gram.diagonal(0, 1, 2)
        kind = "<i4" if np.abs(largest).max(initial=0) < 2**31 else "<i8"
        head = {"rows": self.rows, "labels": self.labels, "shapes": shapes, "kind": kind}
        parts: list[Any] = [_MAGIC + json.dumps(head, sort_keys=True).encode() + b"\n"]
        for digit in self.gram.astype(kind, copy=False):
            parts += [digit[i, i:].data for i in range(len(digit))]
        return b"".join([*parts, *(a.astype("<i8").tobytes() for a in (self.cross, self.square))])

    @classmethod
    def from_bytes(cls, data: bytes) -> Sums:
        """The sums that ``to_bytes`` wrote."""
        head, _, body = data.removeprefix(_MAGIC).partition(b"\n")
        facts = json.loads(head)
        (m, p, _), *others = facts["shapes"]
        size, kind = m * p * (p + 1) // 2, np.dtype(facts["kind"])
        triangle = np.frombuffer(body, kind, size)
        rest = np.frombuffer(body, "<i8", offset=size * kind.itemsize).astype(np.int64)
        gram, at = np.zeros((m, p, p), np.int64), 0
        for digit in gram:
            for i in range(p):
                digit[i, i:] = triangle[at : at + p - i]
                at += p - i
            digit += np.triu(digit, 1).T
        cut = int(np.prod(others[0]))
        cross, square = rest[:cut].reshape(others[0]), rest[cut:].reshape(others[1])
        labels = None if facts["labels"] is None else tuple(facts["labels"])
        return cls(facts["rows"], labels, gram, cross, square)

    def digest(self) -> str:
        """SHA-256 of the bytes: equal on every machine."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def sort_labels(labels: set[Label]) -> Labels:
    """Ascending; labels of kinds that have no order are refused."""
    try:
        return tuple(sorted(labels))  # type: ignore[type-var]
    except TypeError:
        raise InputError(
            "y has labels of several kinds; they must be all text or all numbers"
        ) from None


def encode_labels(labels: Sequence[Label]) -> Counts:
    """The whole number by which a row keeps its label, whatever other labels there are."""

    def encode(label: Label) -> int:
        data = json.dumps(label).encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)

    codes = {label: encode(label) for label in set(labels)}
    return np.array([[codes[label]] for label in labels], np.int64).reshape(-1, 1)


def empty_sums(
    numbers: Numbers, width: int, outputs: int | None, labels: Labels | None = None
) -> Sums:
    """S(∅) with room for ``outputs`` targets of a regression; None: for classes ``labels``."""
    if outputs is None:
        labels = labels or ()
    L, K = numbers.limbs, 1 if outputs is None else TARGETS.limbs
    q = len(labels or ()) if outputs is None else outputs + 1
    shapes = (2 * L - 1, width, width), (L + K - 1, width, q), (2 * K - 1, q, q)
    return Sums(0, labels, *(np.zeros(shape, np.int64) for shape in shapes))


def add_rows(
    numbers: Numbers, features: Array, targets: Array, labels: Labels | None, block: int = _BLOCK
) -> Sums:
    """S of stored rows: codes of ``labels``, or targets of a regression where they are None."""
    check_room(len(features), numbers.largest)
    codes = None if labels is None else encode_labels(labels)[:, 0]
    width, outputs = numbers.width(features.shape[1]), targets.shape[1] if codes is None else None
    total = empty_sums(numbers, width, outputs, labels)
    gram = total.gram
    for at in range(0, len(features), block):
        limbs = numbers.split(features[at : at + block])
        found = _multiply_limbs(limbs, numbers.largest)
        gram = found if at == 0 else gram + found
        given = targets[at : at + block]
        if codes is not None:
            parts = [(given == codes).astype(np.float64)]
        else:
            unit = np.full((len(given), 1), 2.0**TARGETS.exponent)  # 1 in the lowest limb
            parts = TARGETS.split(np.concatenate([unit, given], axis=1))
        for m, t in enumerate(parts):
            if t.any():
                for k, x in enumerate(limbs):
                    total.cross[k + m] += _multiply(x, t)
                for k, other in enumerate(parts):
                    total.square[k + m] += (other.T @ t).astype(np.int64)
    return Sums(len(features), labels, gram, total.cross, total.square)


def _multiply(x: Array, t: Array) -> Counts:
    if x.dtype == np.float32 and np.abs(t).max(initial=0) <= 1 and len(x) * 2**11 <= _EXACT:
        return (x.T @ t.astype(np.float32)).astype(np.int64)
    return (x.T.astype(np.float64) @ t).astype(np.int64)


def _multiply_limbs(limbs: list[Array], largest: int) -> Counts:
    """Σ φ φᵀ by digit, x_kᵀ x_m in k + m, over the columns in which the limbs are not zero."""
    if len(limbs) == 1:
        return _multiply_squares(limbs[0], largest)[None]
    width, used = limbs[0].shape[1], [np.flatnonzero(x.any(axis=0)) for x in limbs]
    grams = np.zeros((2 * len(limbs) - 1, width, width))
    for k, x in enumerate(limbs):
        for m in range(k, len(limbs)):
            if len(used[k]) and len(used[m]):
                product = x[:, used[k]].T @ limbs[m][:, used[m]]
                grams[k + m][np.ix_(used[k], used[m])] += product
                if k != m:
                    grams[k + m][np.ix_(used[m], used[k])] += product.T
    return grams.astype(np.int64)


def _multiply_squares(x: Array, largest: int) -> Counts:
    """Σ φ φᵀ of one limb."""
    length = _EXACT // largest**2
    if length < _SHORT:
        x, length = x.astype(np.float64), _BLOCK
    parts = [x[at : at + length] for at in range(0, len(x), length)]
    total = parts[0].T @ parts[0]
    if len(parts) > 1:
        total = total.astype(np.float64)
    for part in parts[1:]:
        total += part.T @ part
    return total.astype(np.int64)


def check_room(rows: int, largest: int) -> None:
    """Refuse before a sum could be rounded."""
    most = 2**53 // max(largest, 2**12) ** 2
    if rows > most:
        raise InputError.of("rows", rows, f"at most {most:,} at once")
