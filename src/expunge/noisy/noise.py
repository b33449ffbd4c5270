"""Gaussian noise in whole cells, exactly rounded, from one counter-based stream.

A run adds ``k_i = round(std · ξ_i)`` with ξ_i ~ N(0, 1) to a vector that counts cells of a grid, so
that adding the noise *is* rounding the ideal Gaussian mechanism. That argument needs k_i to be
exactly a rounded Gaussian, and it is: the sampler below has no truncated tail and no
discretisation error.

**Stream.** Block b of step t is ``AES-256(key, domain ‖ t ‖ b)``, 2 + 62 + 64 bits: random access,
so that the noise is the same however the vector is split. Its two 64-bit words are the pair of
positions (2b, 2b + 1).

**Sampler** (Box & Muller 1958). A real V, uniform on (0, 1), and a real Θ, uniform on (-π, π), give

    (ξ_2b, ξ_2b+1) = r (cos Θ, sin Θ) = (h - r, h τ)
    r = √(-2 ln V),  τ = tan(Θ/2),  h = 2r/(1 + τ²).

The words hold the first 63 binary digits of V and 64 of Θ/π; all later digits are a stream of their
own (another domain), of which digits are drawn only when needed. Float64 decides the rounding of
``std · ξ`` unless a cell boundary lies within its error bound; then the wider float of the machine
decides; and if that cannot, interval arithmetic on more and more digits does. Hence k depends on
the digits alone, not on the machine, its vector instructions or its mathematics library.

**Error bound.** With ``u`` the unit roundoff and ``a = n + 1/2`` the middle of V's cell in units of
2⁻⁶³, the computed ξ is within ``(40 u + 2⁻⁶¹) r + (10 u + 1/(a - 1/2))/r`` of every ξ its digits
allow. Rounding analysis to first order, with elementary functions good to 4 units in the last
place, gives 31 and 8 instead of 40 and 10; 2⁻⁶¹ r covers the cell of Θ; and the cell of V moves
``ln V`` by at most (1/2)/(a - 1/2), hence r² by twice that.

AES is a permutation, so blocks never repeat: over q blocks it differs from a random function by
at most q²/2¹²⁹ (3e-18 for 2³⁵ blocks), beside the assumption that AES-256 is a pseudorandom one.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from expunge.errors import InputError, UnlearningError

Array = npt.NDArray[np.float64]
Words = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]
Floats = npt.NDArray[np.floating[Any]]

GENERATOR = "AES-256-CTR, Box-Muller, exactly rounded"
LARGEST_STD = 2.0**40
STEPS = 2**62
POSITIONS = 2**48
SEEDS = 2**53  # canonical JSON holds no larger whole number

_PAIRS = 2**14
_NOISE, _MORE_DIGITS = 0, 1
_BLOCK = 16
_LEVELS = 2**16
_NOWHERE = np.empty(0, np.intp)
# The 80-bit or 128-bit float where the machine has one, else float64 again.
_WIDE = np.longdouble if np.finfo(np.longdouble).nmant in (63, 112) else np.float64
_PI = np.longdouble("3.14159265358979323846264338327950288419716939937510582097494459")


@dataclass(frozen=True)
class SystemNoise:
    """Noise for release: every run takes a fresh 256-bit key from the operating system.

    The key stays in the memory of the process. It is in no representation, file or record.

    >>> SystemNoise().begin()
    NoiseStream(step=0, position=0)
    """

    source: ClassVar[Literal["system"]] = "system"

    def begin(self) -> NoiseStream:
        """A new stream with a key of its own: a second or resumed run repeats no draw."""
        return NoiseStream(os.urandom(32))


@dataclass(frozen=True)
class SeededNoise:
    """Noise for experiments: a pure function of the seed, which anyone can guess. Not for release.

    >>> SeededNoise(7)
    SeededNoise(seed=7)
    >>> out = np.empty(4)
    >>> SeededNoise(7).begin().draw(out, step=0, position=0, std=100.0)
    >>> out.tolist()
    [68.0, -59.0, 16.0, 58.0]
    """

    seed: int

    source: ClassVar[Literal["seeded"]] = "seeded"

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", _check_whole("seed", self.seed, SEEDS))

    def begin(self) -> NoiseStream:
        """The stream of this seed, from its start: the same numbers every time."""
        digest = hashlib.sha256(b"expunge.SeededNoise" + self.seed.to_bytes(8, "big"))
        return NoiseStream(digest.digest())


Noise = SystemNoise | SeededNoise


def check_noise(noise: object) -> Noise:
    """One of the two classes itself: nobody has proved anything about another source.

    >>> check_noise(None)
    SystemNoise()
    """
    if noise is None:
        return SystemNoise()
    if type(noise) is SystemNoise or type(noise) is SeededNoise:
        return noise
    raise InputError.of("noise", noise, "SystemNoise() or SeededNoise(seed), and no other class")


class NoiseStream:
    """The noise of one run: a pure function of (key, step, position), each value given out once.

    Formal guarantee: over a uniform key the values are independent and each is exactly
    ``round(std · N(0, 1))``, up to the pseudorandomness of AES-256.

    >>> stream = SeededNoise(0).begin()
    >>> whole, left, right = np.empty(5), np.empty(3), np.empty(2)
    >>> stream.draw(whole, step=0, position=0, std=1e6)
    >>> again = SeededNoise(0).begin()
    >>> again.draw(left, step=0, position=0, std=1e6)
    >>> again.draw(right, step=0, position=3, std=1e6)
    >>> bool(np.all(whole == np.concatenate([left, right])))
    True
    """

    __slots__ = ("_cipher", "_end", "_key", "_step", "_work")

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, bytes) or len(key) != 32:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("the key of a noise stream must be 32 bytes")
        self._key = key
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(_BLOCK))).encryptor()
        self._step, self._end = 0, 0
        self._work = _Workspace(0)

    def export_key(self) -> bytes:
        """The key, only to be sent to the other processes of the same run. Never write it."""
        return self._key

    def derive_seed(self, purpose: str) -> int:
        """56 bits for whatever else a run draws at random (dropout), one per ``purpose``.

        Formal guarantee: over a uniform key it depends on nothing that happened before the run.

        >>> stream = SeededNoise(0).begin()
        >>> stream.derive_seed("step 1") == stream.derive_seed("step 2")
        False
        """
        digest = hashlib.sha256(b"expunge/randomness\0" + self._key + purpose.encode())
        return int.from_bytes(digest.digest()[:7], "big")

    def draw(self, out: Array, *, step: int, position: int, std: float) -> None:
        """Fill ``out`` with round(std · ξ) for positions ``position`` … of this step; zeros are +0.

        Steps and, within a step, positions only move forward: no value is ever drawn twice.
        """
        if not 0 <= std <= LARGEST_STD:
            valid = "a number from 0 to 2**40 (noise_std in cells of the grid)"
            raise InputError.of("std", std, valid)
        step = _check_whole("step", step, STEPS)
        position = _check_whole("position", position, POSITIONS - out.size + 1)
        with np.errstate(divide="ignore", under="ignore"):
            self._advance(step, position, out.size)
            if std == 0 or out.size == 0:
                out.fill(0.0)
            else:
                self._fill(out, step, position, float(std))

    def _fill(self, out: Array, step: int, position: int, std: float) -> None:
        """Whole pairs are written where they belong; others are cut from whole ones."""
        block, odd = divmod(position, 2)
        if odd or out.size % 2:
            whole = np.empty(2 * ((odd + out.size + 1) // 2))
            self._fill(whole, step, position - odd, std)
            out[:] = whole[odd : odd + out.size]
            return
        for start in range(0, out.size, 2 * _PAIRS):
            k = out[start : start + 2 * _PAIRS]
            self._round_blocks(k, step, block + start // 2, std)
            np.add(k, 0.0, out=k)  # -0 + 0 is +0: a -0 would carry its sign through an addition

    def _round_blocks(self, k: Array, step: int, block: int, std: float) -> None:
        """Fill ``k`` with the rounded pairs of the blocks from this one on."""
        count = k.size // 2
        if count > self._work.pairs:
            self._work = _Workspace(count)
        work, words = self._work, self._work.words[:count]
        self._cipher.reset_nonce(_counter(_NOISE, step, block))
        self._cipher.update_into(work.zeros[: _BLOCK * count], work.keystream)
        undecided = _round_pairs(work, words, std, k)
        if undecided.size:
            _decide(k, undecided, words, std, functools.partial(self._draw_digits, step, block))

    def _draw_digits(self, step: int, block: int, index: int, count: int) -> bytes:
        """``count`` blocks of further digits of pair ``index``, always the same ones."""
        start = _counter(_MORE_DIGITS, step, (block + index) * _LEVELS)
        cipher = Cipher(algorithms.AES(self._key), modes.CTR(start))
        return cipher.encryptor().update(bytes(_BLOCK * count))

    def _advance(self, step: int, position: int, size: int) -> None:
        if (step, position) < (self._step, self._end if step == self._step else 0):
            raise UnlearningError(
                f"noise for step {step}, position {position} was already passed: this stream is at "
                f"step {self._step}, position {self._end}, and no value may be drawn twice"
            )
        self._step, self._end = step, position + size

    def __repr__(self) -> str:
        return f"NoiseStream(step={self._step}, position={self._end})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnlearningError(
            "a noise stream cannot be copied, pickled or saved: its key must not leave memory and "
            "no value may be drawn twice"
        )


class _Workspace:
    """Scratch memory for up to ``pairs`` pairs, in float64 or a wider float."""

    def __init__(self, pairs: int, real: type[np.floating[Any]] = np.float64) -> None:
        self.pairs = pairs
        self.unit = float(np.finfo(real).eps) / 2
        # The factor below 1 keeps V below 1, hence r above 0, whatever the last rounding does.
        self.scale = np.ldexp(np.nextafter(real(1), real(0)), -63)
        self.half_turn = np.ldexp(real(_PI), -64)
        self.a, self.t, self.c = np.empty((3, pairs), real)
        self.y = np.empty(2 * pairs, real)
        self.zeros = memoryview(bytes(_BLOCK * pairs))
        buffer = np.empty(_BLOCK * (pairs + 1), np.uint8)
        self.keystream = buffer.data
        self.words: Words = buffer[: _BLOCK * pairs].view("<i8").reshape(pairs, 2)


def _scale_pairs(work: _Workspace, words: Words, std: float) -> tuple[Any, Any]:
    """``work.y`` = std (h - r, h τ) with h = 2r/(1 + τ²); returns the smallest and largest a."""
    count = len(words)
    a, t, c = work.a[:count], work.t[:count], work.c[:count]
    y = work.y[: 2 * count].reshape(count, 2)
    a[:] = words[:, 0]
    np.abs(np.add(a, 0.5, out=a), out=a)
    ends = np.minimum.reduce(a), np.maximum.reduce(a)
    np.log(np.multiply(a, work.scale, out=a), out=a)
    wide = a.dtype.type(std)  # squared in the float of the workspace, not in float64
    np.sqrt(np.multiply(a, -2 * wide * wide, out=a), out=a)
    t[:] = words[:, 1]
    np.tan(np.multiply(t, work.half_turn, out=t), out=t)
    np.add(np.multiply(t, t, out=c), 1.0, out=c)
    h = np.divide(a, c, out=c)
    np.add(h, h, out=h)
    np.subtract(h, a, out=y[:, 0])
    np.multiply(h, t, out=y[:, 1])
    return ends


def _round_pairs(work: _Workspace, words: Words, std: float, k: Floats) -> Places:
    """Writes the rounded values to ``k``; returns where this float cannot decide the rounding.

    Each term of the error bound is largest at one end of the range of a, so that the sum of the
    bounds at both ends holds for every pair.
    """
    low, high = _scale_pairs(work, words, std)
    y = work.y[: 2 * len(words)]
    np.rint(y, out=k)
    distance = np.abs(np.subtract(y, k, out=y), out=y)
    reach = std * (_bound_error(low, work) + _bound_error(high, work))
    if np.maximum.reduce(distance) + reach <= 0.5:
        return _NOWHERE
    near = np.flatnonzero(distance + reach > 0.5)
    a = np.abs(words[near // 2, 0].astype(y.dtype) + 0.5)
    return near[distance[near] + std * _bound_error(a, work) > 0.5]


def _bound_error(a: Any, work: _Workspace) -> Any:
    """|ξ - ξ*| ≤ (40 u + 2⁻⁶¹) r + (10 u + 1/(a - 1/2))/r; infinite where V can be any small."""
    u, r = work.unit, np.sqrt(-2 * np.log(a * work.scale))
    return (40 * u + 2.0**-61) * r + (10 * u + 1 / (a - 0.5)) / r


def _decide(
    k: Floats, undecided: Places, words: Words, std: float, digits: Callable[[int, int], bytes]
) -> None:
    """Write the exact values to ``k[undecided]``: by the wider float, else by intervals."""
    pairs, place = np.unique(undecided // 2, return_inverse=True)
    wide = _Workspace(len(pairs), _WIDE)
    values = np.empty(2 * len(pairs), _WIDE)
    open_ = _round_pairs(wide, words[pairs], std, values)
    k[undecided] = values[2 * place + undecided % 2]
    for index in np.intersect1d(2 * place + undecided % 2, open_).tolist():
        pair = int(pairs[index // 2])
        first, second = words[pair].tolist()
        own = functools.partial(digits, pair)
        k[2 * pair + index % 2] = _round_exactly(first, second, index % 2, std, own)


def _round_exactly(
    first: int, second: int, part: int, std: float, digits: Callable[[int], bytes]
) -> int:
    """round(std · ξ) for one word pair; ``part`` 0 is the cosine, 1 the sine.

    Encloses std · ξ in an interval over all V and Θ that begin with the digits drawn so far, and
    draws more until the interval lies inside one rounding cell.
    """
    iv = _make_intervals()
    head = first if first >= 0 else ~first
    count = 2
    while True:
        v, w, width = head, second, 63
        tail = digits(count)
        for at in range(0, len(tail), _BLOCK):
            v = (v << 64) | int.from_bytes(tail[at : at + 8], "big")
            w = (w << 64) | int.from_bytes(tail[at + 8 : at + 16], "big")
            width += 64
        iv.prec = width + 64
        angle = iv.pi * iv.mpf([w, w + 1]) / 2**width
        r = iv.sqrt(-2 * iv.log(iv.mpf([v, v + 1]) / 2**width))
        y = std * r * (iv.sin(angle) if part else iv.cos(angle))
        middle = float(y.mid)
        if math.isfinite(middle):
            for k in (math.floor(middle), math.floor(middle) + 1):
                if y > k - 0.5 and y < k + 0.5:
                    return k
        count *= 2


@functools.cache
def _make_intervals() -> Any:
    """A private context: its precision is nobody else's, and its intervals are sound at any."""
    from mpmath.ctx_iv import MPIntervalContext  # rarely needed, and slow to load

    return MPIntervalContext()


def _counter(domain: int, step: int, block: int) -> bytes:
    return ((domain << 62 | step) << 64 | block).to_bytes(_BLOCK, "big")


def _check_whole(field: str, value: object, end: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < end:
        raise InputError.of(field, value, f"a whole number from 0 to {end - 1}")
    return int(value)
