"""The noise stream: pure in (key, step, position), never repeated, exactly a rounded Gaussian."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    return NoiseStream.from_key(stream.export_key())


GOLDEN_START = [321542835, 1940720136, 748101317, -387479866, 176767533]
GOLDEN_END = [2013641380035, -1146945659393, 752107082077]


def test_seeded_numbers_are_these_on_every_machine() -> None:
    stream = SeededNoise(0).begin()
    assert draw(stream, 5, std=1e9).tolist() == GOLDEN_START
    assert draw(stream, 3, step=2**62 - 1, position=2**48 - 3, std=2.0**40).tolist() == GOLDEN_END


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


@settings(max_examples=40, deadline=None)
@given(
    step=st.integers(0, 2**62 - 1),
    position=st.integers(0, 2**48 - 40),
    skip=st.integers(0, 20),
    size=st.integers(0, 20),
    std=st.floats(0.0, 2.0**40),
)
def test_a_range_is_a_slice_of_any_longer_range(
    step: int, position: int, skip: int, size: int, std: float
) -> None:
    whole = draw(SeededNoise(1).begin(), 40, step=step, position=position, std=std)
    part = draw(SeededNoise(1).begin(), size, step=step, position=position + skip, std=std)
    assert np.array_equal(part, whole[skip : skip + size])


def test_shards_in_separate_streams_make_up_the_whole() -> None:
    stream = SystemNoise().begin()
    whole = [draw(stream, 1001, step=t) for t in range(3)]
    ranks = [twin(stream) for _ in range(4)]
    for t in range(3):
        shards = [
            draw(rank, high - low, step=t, position=low)
            for rank, low, high in zip(
                ranks, (0, 250, 503, 777), (250, 503, 777, 1001), strict=True
            )
        ]
        assert np.array_equal(np.concatenate(shards), whole[t])


def test_the_scale_acts_on_one_and_the_same_gaussian() -> None:
    fine = draw(SeededNoise(4).begin(), 1000, std=2.0**30)
    coarse = draw(SeededNoise(4).begin(), 1000, std=2.0**10)
    assert np.max(np.abs(coarse - fine / 2.0**20)) <= 0.5 + 2.0**-20


def test_same_seed_is_bit_equal_and_other_seeds_steps_positions_keys_are_not() -> None:
    one = draw(SeededNoise(9).begin(), 500)
    assert one.tobytes() == draw(SeededNoise(9).begin(), 500).tobytes()
    others = [
        draw(SeededNoise(10).begin(), 500),
        draw(SeededNoise(9).begin(), 500, step=1),
        draw(SeededNoise(9).begin(), 500, position=500),
        draw(SystemNoise().begin(), 500),
        draw(SystemNoise().begin(), 500),
    ]
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


def test_a_refusal_leaves_the_stream_usable_and_forward_is_allowed() -> None:
    stream, fresh = SeededNoise(0).begin(), SeededNoise(0).begin()
    draw(stream, 10, step=3, position=10)
    with pytest.raises(UnlearningError):
        draw(stream, 1, step=3, position=10)
    assert np.array_equal(draw(stream, 5, step=3, position=20), draw(fresh, 5, step=3, position=20))
    assert np.array_equal(draw(stream, 5, step=7), draw(fresh, 5, step=7))


def test_noise_of_no_scale_is_zero_and_counts_as_drawn() -> None:
    stream = SystemNoise().begin()
    assert draw(stream, 7, std=0.0).tolist() == [0.0] * 7
    with pytest.raises(UnlearningError):
        draw(stream, 7, std=1.0)


def test_another_process_needs_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SystemNoise().begin()
    monkeypatch.setattr(module.os, "getpid", lambda: os.getppid())
    with pytest.raises(UnlearningError, match="another process"):
        draw(stream, 3)
    draw(twin(stream), 3)


def test_threads_that_share_a_stream_still_get_each_value_once() -> None:
    stream = SeededNoise(2).begin()
    got: dict[int, Any] = {}

    def work(step: int) -> None:
        with contextlib.suppress(UnlearningError):  # a later step was faster: refused, not repeated
            got[step] = draw(stream, 3 * CHUNK, step=step)

    threads = [threading.Thread(target=work, args=(step,)) for step in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 5 in got
    alone = SeededNoise(2).begin()
    for step in sorted(got):
        assert np.array_equal(got[step], draw(alone, 3 * CHUNK, step=step))


# ------------------------------------------------------------------ the key stays in memory


@pytest.mark.parametrize("noise", SOURCES)
def test_the_key_is_in_no_representation(noise: Any) -> None:
    stream = noise.begin()
    key = stream.export_key()
    draw(stream, 10)
    shown = " ".join([repr(stream), str(stream), f"{stream}", repr(noise), repr(noise.describe())])
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


def test_sources_travel_but_carry_no_key() -> None:
    for noise in SOURCES:
        assert pickle.loads(pickle.dumps(noise)) == noise
    assert SystemNoise().begin().export_key() != SystemNoise().begin().export_key()
    assert len({SystemNoise().begin().export_key() for _ in range(50)}) == 50


def test_a_key_of_the_wrong_length_is_not_shown() -> None:
    with pytest.raises(InputError, match="must be 32 bytes") as caught:
        NoiseStream.from_key(b"secret!")
    assert "secret" not in str(caught.value)


def test_the_record_says_what_may_be_released() -> None:
    assert SystemNoise().describe() == {
        "source": "system",
        "generator": module.GENERATOR,
        "releasable": True,
        "seed": None,
    }
    assert SeededNoise(np.int64(5)).describe() == {
        "source": "seeded",
        "generator": module.GENERATOR,
        "releasable": False,
        "seed": 5,
    }
    assert type(SeededNoise(np.int64(5)).seed) is int


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
        ({"std": "1"}, "std is '1'"),
        ({"std": None}, "std is None"),
    ],
)
def test_bad_arguments_get_a_sentence(change: dict[str, Any], sentence: str) -> None:
    stream, out = SeededNoise(0).begin(), np.full(4, 7.0)
    with pytest.raises(InputError, match=f"^{sentence}"):
        stream.draw(out, **{**GOOD, **change})
    assert out.tolist() == [7.0] * 4
    draw(stream, 4)


def read_only() -> Any:
    out = np.zeros(3)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    "out",
    [
        [0.0],
        np.zeros(3, np.float32),
        np.zeros((1, 2, 2)),
        np.zeros(6)[::2],
        np.zeros(3, ">f8"),
        read_only(),
    ],
)
def test_bad_arrays_get_a_sentence(out: Any) -> None:
    with pytest.raises(InputError, match=r"^out is .*; it must be a"):
        SeededNoise(0).begin().draw(out, **GOOD)


@pytest.mark.parametrize("seed", [-1, 2**53, 0.5, "0", None, True])
def test_bad_seeds_get_a_sentence(seed: Any) -> None:
    with pytest.raises(ExpungeError, match=r"^seed is .*; it must be a whole number from 0"):
        SeededNoise(seed)
