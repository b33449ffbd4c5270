"""The noise stream: pure in (key, step, position), never repeated, exactly a rounded Gaussian."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import expunge.noisy.noise as module
from expunge.errors import ExpungeError, InputError, UnlearningError
from expunge.noisy.noise import NoiseStream, SeededNoise, SystemNoise

CHUNK = 2 * module._PAIRS
SOURCES = [SystemNoise(), SeededNoise(3)]


def draw(stream: NoiseStream, size: int, *, step: int = 0, position: int = 0, std: float = 1e6):
    out = np.full(size, np.nan)
    stream.draw(out, step=step, position=position, std=std)
    return out


def twin(stream: NoiseStream) -> NoiseStream:
    return NoiseStream(stream.export_key())


# ------------------------------------------------------------------ purity and no repeats
@pytest.mark.parametrize("noise", SOURCES)
@pytest.mark.parametrize("start", [0, 1, 2**40 - 7, 2**48 - 3 * CHUNK])
def test_any_partition_gives_the_same_numbers(noise: Any, start: int) -> None:
    stream, size = noise.begin(), 2 * CHUNK + 4099
    whole = draw(stream, size, step=5, position=start)
    rng = np.random.default_rng(start % 1000)
    for pieces in (1, 2, 7, 40):
        cuts = np.sort(rng.integers(0, size + 1, pieces)).tolist()
        split, at = twin(stream), 0
        for cut in [*cuts, size]:
            part = draw(split, cut - at, step=5, position=start + at)
            assert np.array_equal(part, whole[at:cut])
            at = cut


def test_the_scale_acts_on_one_and_the_same_gaussian() -> None:
    fine = draw(SeededNoise(4).begin(), 1000, std=2.0**30)
    coarse = draw(SeededNoise(4).begin(), 1000, std=2.0**10)
    assert np.max(np.abs(coarse - fine / 2.0**20)) <= 0.5 + 2.0**-20


def test_same_seed_is_bit_equal_and_other_seeds_steps_positions_keys_are_not() -> None:
    one = draw(SeededNoise(9).begin(), 500)
    assert one.tobytes() == draw(SeededNoise(9).begin(), 500).tobytes()
    others = [
        draw(SeededNoise(10).begin(), 500), draw(SeededNoise(9).begin(), 500, step=1),
        draw(SeededNoise(9).begin(), 500, position=500), draw(SystemNoise().begin(), 500),
        draw(SystemNoise().begin(), 500),
    ]  # fmt: skip
    for index, other in enumerate(others):
        for another in [one, *others[:index]]:
            assert np.count_nonzero(other == another) < 5


@pytest.mark.parametrize(
    ("step", "position"), [(3, 9), (3, 10), (3, 19), (2, 20), (2, 1000), (0, 0)]
)
def test_what_was_passed_cannot_be_drawn_again(step: int, position: int) -> None:
    stream = SeededNoise(0).begin()
    draw(stream, 10, step=3, position=10)
    out = np.zeros(4)
    with pytest.raises(UnlearningError, match=f"step {step}, position {position} was already"):
        stream.draw(out, step=step, position=position, std=1.0)
    assert not out.any()


# ------------------------------------------------------------------ the key stays in memory
@pytest.mark.parametrize("noise", SOURCES)
def test_the_key_is_in_no_representation(noise: Any) -> None:
    stream = noise.begin()
    key = stream.export_key()
    draw(stream, 10)
    shown = " ".join([repr(stream), str(stream), f"{stream}", repr(noise)])
    assert repr(key)[2:-1] not in shown
    assert key.hex() not in shown.lower()
    with pytest.raises(TypeError):
        vars(stream)


@pytest.mark.parametrize(
    "leak", [pickle.dumps, copy.copy, copy.deepcopy, lambda s: pickle.dumps({"stream": s}, 2)]
)
def test_a_stream_cannot_be_pickled_or_copied(leak: Callable[[Any], Any]) -> None:
    with pytest.raises(UnlearningError, match="cannot be copied, pickled or saved"):
        leak(SystemNoise().begin())


def test_a_key_of_the_wrong_length_is_not_shown() -> None:
    with pytest.raises(InputError, match="must be 32 bytes") as caught:
        NoiseStream(b"secret!")
    assert "secret" not in str(caught.value)


def test_global_random_states_are_untouched() -> None:
    before = copy.deepcopy(np.random.get_bit_generator().state), random.getstate()
    for noise in SOURCES:
        draw(noise.begin(), 1000)
    after = np.random.get_bit_generator().state, random.getstate()
    assert np.array_equal(before[0]["state"]["key"], after[0]["state"]["key"])
    assert before[0]["state"]["pos"] == after[0]["state"]["pos"]
    assert before[1] == after[1]


# ------------------------------------------------------------------ bad input


GOOD = {"step": 0, "position": 0, "std": 1.0}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"step": -1}, "step is -1; it must be a whole number from 0 to 4611686018427387903"),
        ({"step": 2**62}, "step is 4611686018427387904"),
        ({"step": 1.0}, "step is 1.0"),
        ({"step": True}, "step is True"),
        ({"position": -1}, "position is -1; it must be a whole number from 0 to 281474976710652"),
        ({"position": 2**48 - 3}, "position is 281474976710653"),
        ({"position": "0"}, "position is '0'"),
        ({"std": -1.0}, r"std is -1.0; it must be a number from 0 to 2\*\*40"),
        ({"std": float("nan")}, "std is nan"),
        ({"std": float("inf")}, "std is inf"),
        ({"std": 2.0**41}, "std is 2199023255552.0"),
    ],
)
def test_bad_arguments_get_a_sentence(change: dict[str, Any], sentence: str) -> None:
    stream, out = SeededNoise(0).begin(), np.full(4, 7.0)
    with pytest.raises(InputError, match=f"^{sentence}"):
        stream.draw(out, **{**GOOD, **change})
    assert out.tolist() == [7.0] * 4
    draw(stream, 4)


@pytest.mark.parametrize("seed", [-1, 2**53, 0.5, "0", None, True])
def test_bad_seeds_get_a_sentence(seed: Any) -> None:
    with pytest.raises(ExpungeError, match=r"^seed is .*; it must be a whole number from 0"):
        SeededNoise(seed)
