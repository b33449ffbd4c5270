"""Every noise value is exactly a rounded Gaussian: no truncated tail, no discretisation error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from mpmath import MPContext
from scipy import stats

import expunge.noisy.noise as module
from expunge.noisy.noise import SeededNoise, SystemNoise
from tests.noisy.test_noise import SOURCES, draw, twin

mp = MPContext()
mp.prec = 260


# ------------------------------------------------------------------ an oracle with 260 bits
def keystream(key: bytes, domain: int, step: int, block: int, size: int) -> bytes:
    counter = (domain << 126) + (step << 64) + block
    cipher = Cipher(algorithms.AES(key), modes.CTR(counter.to_bytes(16, "big")))
    return cipher.encryptor().update(bytes(size))


def gaussian_of(v: Any, turn: Any, part: int) -> Any:
    """√(-2 ln V) · cos or sin of π·turn, for real V and turn."""
    r = mp.sqrt(-2 * mp.log(v))
    return r * (mp.sin(mp.pi * turn) if part else mp.cos(mp.pi * turn))


def oracle(key: bytes, step: int, position: int, std: float) -> int:
    """round(std · ξ) from the layout in the module's docstring, with 128 further digits."""
    block, part = divmod(position, 2)
    word = keystream(key, 0, step, block, 16)
    tail = keystream(key, 1, step, block << 16, 32)
    first = int.from_bytes(word[:8], "little", signed=True)
    second = int.from_bytes(word[8:], "little", signed=True)
    v, w = (first if first >= 0 else -1 - first), second
    for at in (0, 16):
        v = v * 2**64 + int.from_bytes(tail[at : at + 8], "big")
        w = w * 2**64 + int.from_bytes(tail[at + 8 : at + 16], "big")
    value = gaussian_of((v + mp.mpf(1) / 2) / mp.mpf(2) ** 191, w / mp.mpf(2) ** 191, part)
    return int(mp.nint(std * value))


@pytest.mark.parametrize("std", [0.3, 1.0, 1e3, 2.0**25 / 3, 2.0**34, 2.0**40])
@pytest.mark.parametrize("noise", SOURCES)
def test_every_value_is_the_rounding_of_the_ideal_one(noise: Any, std: float) -> None:
    stream = noise.begin()
    got = draw(stream, 120, step=11, position=10**9 + 1, std=std)
    key = stream.export_key()
    assert got.tolist() == [oracle(key, 11, 10**9 + 1 + i, std) for i in range(120)]


# ------------------------------------------------------------------ error bound and decision
def hard_words(count: int, seed: int) -> Any:
    """Random words; a quarter each with V near 0, V near 1 and Θ near a multiple of π/4."""
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**63), 2**63, (count, 2), dtype=np.int64)
    q = count // 4
    shift = rng.integers(0, 63, (3, q))
    words[:q, 0] >>= shift[0]
    words[q : 2 * q, 0] = (2**63 - 1) - (words[q : 2 * q, 0] & (2**63 - 1) >> shift[1])
    eighths = rng.integers(-4, 4, q) << 61
    words[2 * q : 3 * q, 1] = eighths ^ (rng.integers(0, 2**61, q) >> shift[2])
    return words


@pytest.mark.parametrize("real", [np.float64, np.longdouble])
def test_the_error_bound_holds_over_the_whole_cell(real: Any) -> None:
    words = hard_words(2400, seed=1)
    work = module._Workspace(len(words), real)
    std = 0.1  # its square is no float, in either precision
    module._scale_pairs(work, words, std)
    a = np.abs(words[:, 0].astype(real) + real(0.5))
    with np.errstate(divide="ignore"):
        bound = std * module._bound_error(a, work)
    largest = 0.0
    for index, (first, second) in enumerate(words.tolist()):
        n = first if first >= 0 else ~first
        for corner in (mp.mpf(2) ** -40, 1 - mp.mpf(2) ** -40):
            v, turn = (n + corner) / mp.mpf(2) ** 63, (second + corner) / mp.mpf(2) ** 63
            for part in (0, 1):
                high = float(work.y[2 * index + part])
                low = float(work.y[2 * index + part] - real(high))
                error = abs(mp.mpf(high) + mp.mpf(low) - std * gaussian_of(v, turn, part))
                if n > 0:
                    assert error <= mp.mpf(float(bound[index]))
                if n > 2**60:
                    largest = max(largest, float(error / mp.mpf(float(bound[index]))))
    # The bound is neither violated nor idle: rounding errors reach a fair part of it.
    assert 0.02 < largest < 0.7


def test_the_bound_at_both_ends_covers_everything_between() -> None:
    work = module._Workspace(0)
    with np.errstate(divide="ignore"):
        for low, high in [(1.5, 2.0**63), (2.0**40, 2.0**62), (2.0**61, 2.0**63 - 2.0**12)]:
            between = np.geomspace(low, high, 20_001).clip(low, high)
            ends = module._bound_error(low, work) + module._bound_error(high, work)
            assert np.all(module._bound_error(between, work) <= ends)
        assert module._bound_error(np.float64(0.5), work) == np.inf


@pytest.mark.parametrize("std", [0.04, 1.0, 7.5, 2.0**24, 2.0**40])
def test_the_three_ways_to_decide_agree(monkeypatch: pytest.MonkeyPatch, std: float) -> None:
    stream = SystemNoise().begin()
    expected = draw(stream, 151, step=2, position=33, std=std)
    true_bound, exactly = module._bound_error, module._round_exactly
    tails: list[bytes] = []

    def spy(first: int, second: int, part: int, scale: float, digits: Any) -> int:
        tails.append(digits(2))
        return exactly(first, second, part, scale, digits)

    def distrust_float64(a: Any, work: Any) -> Any:
        return np.inf * a if work.a.dtype == np.float64 else true_bound(a, work)

    monkeypatch.setattr(module, "_round_exactly", spy)
    monkeypatch.setattr(module, "_bound_error", distrust_float64)
    assert np.array_equal(draw(twin(stream), 151, step=2, position=33, std=std), expected)
    tails.clear()
    monkeypatch.setattr(module, "_bound_error", lambda a, work: np.inf * a)
    assert np.array_equal(draw(twin(stream), 151, step=2, position=33, std=std), expected)
    # Both values of all 76 pairs were decided with the digits of their own block.
    own = [keystream(stream.export_key(), 1, 2, (16 + i) << 16, 32) for i in range(76)]
    assert tails == [tail for tail in own for _ in range(2)]


def digits_of(v: int, w: int, count: int) -> Callable[[int], bytes]:
    """A stream of digits that begins with 64·count binary digits v and w and goes on with zeros."""

    def draw_digits(blocks: int) -> bytes:
        shift = 64 * (max(blocks, count) - count)
        size = 8 * max(blocks, count)
        left, right = (v << shift).to_bytes(size, "big"), (w << shift).to_bytes(size, "big")
        pairs = range(0, 8 * blocks, 8)
        return b"".join(left[at : at + 8] + right[at : at + 8] for at in pairs)

    return draw_digits


@pytest.mark.parametrize("first", [5, ~5, 0, -1, 1000])
@pytest.mark.parametrize("part", [0, 1])
def test_digits_beyond_the_word_decide_at_a_boundary(first: int, part: int) -> None:
    """The scale puts a boundary inside the word's cell; the injected digits choose the side."""
    n = first if first >= 0 else ~first
    second = 2**61 + 12345
    middle = gaussian_of((n + 0.5) / mp.mpf(2) ** 63, (second + 0.5) / mp.mpf(2) ** 63, part)
    std = float(2.5 / middle)
    zeros, ones = digits_of(0, 0, 1), digits_of(2**64 - 1, 0, 1)
    if n > 0:  # with n = 0 and zeros for ever, V is 0 and no digit ever decides
        assert module._round_exactly(first, second, part, std, zeros) == 3
    assert module._round_exactly(first, second, part, std, ones) == 2
    assert module._round_exactly(first, second ^ -(2**63), part, std, ones) == -2


def test_the_tail_goes_on_beyond_the_word() -> None:
    """V below 2⁻⁶³ · 2⁻²⁰⁰: a value beyond 19 standard deviations, out of a word of zeros."""
    digits = digits_of(1 << 64 * 4 - 201, 0, 4)
    value = gaussian_of(mp.mpf(2) ** -264, mp.mpf(0), 0)
    assert float(value) > 19
    assert module._round_exactly(0, 0, 0, 1000.0, digits) == int(mp.nint(1000 * value))


@pytest.mark.parametrize(("nudge", "expected"), [(-1, 8), (1, 7)])
def test_it_draws_on_until_the_digits_decide(nudge: int, expected: int) -> None:
    """V agrees with the boundary in its first 63 + 448 digits; only later ones decide."""
    exact = MPContext()
    exact.prec = 1200
    std, bits = 3.7, 512
    boundary = exact.exp(-((exact.mpf(7.5) / exact.mpf(std)) ** 2) / 2) * exact.mpf(2) ** (
        63 + bits
    )
    v = int(exact.nint(boundary)) + nudge
    asked: list[int] = []
    digits = digits_of(v & (2**bits - 1), 0, bits // 64)

    def count(blocks: int) -> bytes:
        asked.append(blocks)
        return digits(blocks)

    assert module._round_exactly(v >> bits, 0, 0, std, count) == expected
    assert asked[:3] == [2, 4, 8]


def cells(std: float, reach: int) -> Any:
    """Exact P[round(std · ξ) = k] for |k| < reach, and both tails beyond."""
    edges = np.arange(-reach + 0.5, reach) / std
    return np.diff(np.concatenate([[0.0], stats.norm.cdf(edges), [1.0]]))


@pytest.mark.parametrize("noise", [SystemNoise(), SeededNoise(12)])
@pytest.mark.parametrize(("std", "reach"), [(0.3, 2), (1.0, 4), (3.0, 10)])
def test_small_scales_have_the_exact_cell_probabilities(noise: Any, std: float, reach: int) -> None:
    out = draw(noise.begin(), 400_000, std=std)
    assert np.array_equal(out, np.rint(out))
    seen = np.bincount((out.clip(-reach, reach) + reach).astype(int), minlength=2 * reach + 1)

    def p_value(scale: float) -> float:
        return float(stats.chisquare(seen, out.size * cells(scale, reach)).pvalue)

    # A right sampler fails once in 1e9 runs; a scale 2 % off is seen.
    assert p_value(std) > 1e-9
    assert p_value(1.02 * std) < 1e-12
    assert p_value(std / 1.02) < 1e-12


def test_zeros_are_positive() -> None:
    out = draw(SeededNoise(0).begin(), 5000, std=0.3)
    zeros = out[out == 0]
    assert zeros.size > 3000
    assert not np.signbit(zeros).any()


@pytest.mark.parametrize("std", [5e-324, 1e-200, 1e-9])
def test_a_scale_far_below_a_cell_rounds_to_nothing(std: float) -> None:
    assert not draw(SeededNoise(0).begin(), 1000, std=std).any()
